"""A pattern casts to a dtype that it names: recorded in float32, where the cast does nothing, and made half later."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.patching import spelled, swapped

RECIPES = ("rms_norm", "layer_norm", "gelu", "swiglu")
NORM = "h = x.float()\nh = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)\n"
GELU = "(x.float() * 0.5 * (1.0 + torch.erf(x.float() / math.sqrt(2.0))))"
LIKE = "def like(h, other):\n    return h.type_as(other)\n"
TO = "def to(h, dtype):\n    return h.to(dtype)\n"
UP = "def up(h):\n    return h.to(torch.float32)\n"
INVERSE = "def inverse(h):\n    return torch.rsqrt(h.float().pow(2).mean(-1, keepdim=True) + 1e-6)\n"

ASKED = {
    "literal": f"{NORM}y = (self.w * h).to(torch.float32)",
    "by keyword": f"{NORM}y = h.to(dtype=torch.float32)",
    "type": f"{NORM}y = h.type(torch.float32)",
    "type by its name": f'{NORM}y = h.type("torch.FloatTensor")',
    "before the weight": f"{NORM}y = self.w * h.to(torch.float32)",
    "the weight's": f"{NORM}y = self.w * h.to(self.w.dtype)",
    "of another tensor": f"z = self.b\n{NORM}y = (h * self.w).type_as(z)",
    "of a name": f"dtype = self.b.dtype\n{NORM}y = (self.w * h).to(dtype)",
    "the mean's": "v = x.to(torch.float32).pow(2).mean(-1, keepdim=True)\ny = self.w * (x * torch.rsqrt(v + 1e-6))",
    "a weight that is cast": "y = self.w.float() * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))",
    "layer norm": "h = x.float()\nm = h.mean(-1, keepdim=True)\nv = (h - m).pow(2).mean(-1, keepdim=True)\n"
    "y = ((h - m) / torch.sqrt(v + 1e-5) * self.w + self.b).to(torch.float32)",
    "gelu": f"y = {GELU}.to(torch.float32)",
    "half of a gelu": "y = x * 0.5 * (1.0 + torch.erf(x.float() / math.sqrt(2.0)))",
    "swiglu": "y = F.silu(x.float()).to(torch.float32) * u",
    "of what a helper is given": f"{LIKE}y = like(F.silu(x), self.b) * u",
    "of what a helper is given for a gelu": f"{LIKE}y = x * 0.5 * like(1.0 + torch.erf(x / math.sqrt(2.0)), self.b)",
    "of a dtype that a helper is given": f"{TO}y = to(F.silu(x), self.b.dtype) * u",
    "a weight that a helper casts": f"{UP}y = up(self.w) * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))",
    "the mean's, in a helper": f"{INVERSE}y = x * inverse(x) * self.w",
}
CERTAIN = {
    "the input's": f"{NORM}y = (self.w * h).to(x.dtype)",
    "as the input": f"{NORM}y = (self.w * h).type_as(x)",
    "the input's, by a name": "dtype = x.dtype\nx = x.to(torch.float32)\n"
    "x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)\ny = self.w * x.to(dtype)",
    "gelu": f"y = {GELU}.to(x.dtype)",
    "as the input, by a helper": f"{LIKE}y = x * 0.5 * like(1.0 + torch.erf(x / math.sqrt(2.0)), x)",
    "the input's, by a helper": f"{TO}y = x * 0.5 * to(1.0 + torch.erf(x / math.sqrt(2.0)), x.dtype)",
}


# What the vectors say of the result's dtype, or do to it.
OF_VECTORS = (
    *("before the weight", "the weight's", "of another tensor", "of a name"),
    *("the mean's", "a weight that is cast", "a weight that a helper casts", "the mean's, in a helper"),
)


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        *((name, parts) for name in (*ASKED, *(f"{each}, certain" for each in CERTAIN)) for parts in ("all", "layers")),
        *((name, "vectors") for name in OF_VECTORS),
    ],
)
def test_the_result_has_the_dtype_it_had(tmp_path: Path, name: str, parts: str) -> None:
    """Whatever is made half: the layers before, or the vectors of a norm."""
    body = ASKED.get(name) or CERTAIN[name.removesuffix(", certain")]
    entry = spelled.entry(tmp_path, body, "dtype")
    model, batch = swapped.built(entry)
    found = swapped.planned(entry, model, batch, RECIPES)
    assert found.supported, found.table.reasons.tolist()
    if parts != "vectors":
        batch = batch.bfloat16()
        for layer in (model.inp, model.up):
            layer.bfloat16()
    if parts != "layers":
        for vector in (model.w, model.b):
            vector.data = vector.data.bfloat16()
    before, after = swapped.before_and_after(model, found, batch, autocast=False)
    assert before.dtype is after.dtype
    torch.testing.assert_close(after, before, rtol=2**-5, atol=2**-5)  # bfloat16 has 8 bits, rounded some times


@pytest.mark.parametrize("name", CERTAIN)
def test_the_inputs_own_dtype_is_not_asked_for(tmp_path: Path, name: str) -> None:
    entry = spelled.entry(tmp_path, CERTAIN[name], "certain")
    assert not any(".dtype ==" in line for line in swapped.changed_lines(entry, RECIPES))
