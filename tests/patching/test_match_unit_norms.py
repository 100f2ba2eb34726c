"""RMS norms that are scaled unit vectors, ``F.normalize(x, dim=-1) * sqrt(d) * g``, and weights less one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from gradscope.patching.patches import Patches
from tests.patching import spelled, swapped

RECIPES = ("rms_norm",)
_TOLERANCE = 1e-5  # float32: means of 24 features in another order

FOUND = [
    "F.normalize(x, dim=-1) * self.scale * (self.w + float(self.flag))",  # x-transformers
    "F.normalize(x, dim=-1) * C ** 0.5 * self.w",
    "F.normalize(x, dim=-1) * x.shape[-1] ** 0.5",
    "F.normalize(x, dim=-1, eps=self.eps) * self.w * math.sqrt(x.size(-1))",
    "math.sqrt(C) * F.normalize(x, p=2, dim=-1) * (1 + self.w)",
    "F.normalize(x, 2.0, -1, 1e-6) * (self.w + 1.0) * C ** 0.5",
    "n = F.normalize(x, dim=2)\ny = n * self.scale * self.w",
    "h = x.float()\ny = (F.normalize(h, dim=-1) * self.scale * self.w.float()).type_as(x)",
    "h = x.float()\ny = F.normalize(h, dim=-1).mul(self.scale).to(x.dtype) * self.w",
    # Gemma's
    "h = x.float()\nh = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + self.eps)\n"
    "y = (h * (1.0 + self.w.float())).type_as(x)",
    "y = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * (1 + self.w)",
    # lucidrains': the length, or the root mean square, of at least eps
    "x / x.norm(dim=-1, keepdim=True).clamp(min=self.eps) * self.scale * self.w",
    "n = torch.norm(x, dim=-1, keepdim=True) / self.scale\ny = x / n.clamp(min=self.eps) * self.w",
    "n = torch.linalg.vector_norm(x, dim=-1, keepdim=True) * C ** -0.5\ny = x / torch.clamp(n, 1e-8) * self.w",
    "n = C ** -0.5 * torch.linalg.norm(x, dim=-1)\ny = self.w * (x / n.clamp_min(self.eps + 1e-8)[..., None])",
    "x / x.norm(2, -1, True).mul(x.shape[-1] ** -0.5).clamp(min=1e-8)",
    "h = x.float()\nn = h.norm(dim=-1, keepdim=True).clamp(min=self.eps)\ny = (h / n * self.scale).type_as(x) * self.w",
    # ScaleNorm: the factor of all features stays
    "n = torch.norm(x, dim=-1, keepdim=True) * C ** -0.5\ny = x / n.clamp(min=self.eps) * self.w[:1]",
    # of what another norm centred
    "d = x - x.mean(-1, keepdim=True)\ny = d / d.norm(dim=-1, keepdim=True).clamp(min=self.eps) * self.scale * self.w",
]
NOT_FOUND = [
    "F.normalize(x, dim=-1)",  # of length 1
    "F.normalize(x, dim=-1) * self.w",
    "F.normalize(x, dim=-1) * 10.0",
    "F.normalize(x, dim=1) * x.shape[1] ** 0.5 * self.w",
    "F.normalize(x, dim=1) * self.scale * self.w",
    "F.normalize(x, dim=(1, 2)) * self.scale * self.w",
    "F.normalize(x, p=1, dim=-1) * self.scale * self.w",
    "F.normalize(x, p=3.0, dim=-1) * self.scale * self.w",
    "F.normalize(x, dim=-1) * x.shape[-1] * self.w",
    "F.normalize(x, dim=-1) * (C - 1) ** 0.5 * self.w",
    "F.normalize(x, dim=-1).detach() * self.scale * self.w",
    "F.normalize(F.normalize(x, dim=-1, eps=0.1), dim=-1) * self.scale * self.w",
    "F.normalize(x - x.mean(-1, keepdim=True), dim=-1) * self.scale * u",
    "F.normalize(x, dim=-1) * u.norm(dim=-1, keepdim=True)",
    "F.normalize(x * self.b, dim=-1) * self.b.norm() * self.w",
    "x / x.norm(dim=-1, keepdim=True).clamp(min=self.eps) * self.w",
    "x / x.norm(dim=-1, keepdim=True).clamp(min=self.eps, max=9.0) * self.scale * self.w",
    "x / x.norm(dim=-1, keepdim=True).clamp(max=9.0) * self.scale * self.w",
    "x / x.norm(dim=-1, keepdim=True).clamp(min=torch.tensor(1e-3)) * self.scale * self.w",
    "x / x.norm(p=1, dim=-1, keepdim=True).clamp(min=self.eps) * self.scale * self.w",
    "x / x.norm(dim=1, keepdim=True).clamp(min=self.eps) * x.shape[1] ** 0.5 * self.w",
    "x / x.norm(keepdim=True).clamp(min=self.eps) * self.scale * self.w",
    "x / x.norm(dim=-1, keepdim=True).clamp(min=self.eps).detach() * self.scale * self.w",
    "x / x.detach().norm(dim=-1, keepdim=True).clamp(min=self.eps) * self.scale * self.w",
    "x / (x.norm(dim=-1, keepdim=True) + self.eps) * self.scale * self.w",
    "x / u.norm(dim=-1, keepdim=True).clamp(min=self.eps) * self.scale * self.w",
    "x / x.norm(dim=-1, keepdim=True).clamp(min=self.eps).clamp(min=1e-6) * self.scale * self.w",
    "n = x.norm(dim=-1, keepdim=True)\ny = x / (n.clamp(min=1e-3) * n.clamp(min=1e-6)).sqrt() * self.scale * self.w",
    "x / (x.norm(dim=-1, keepdim=True) * 2).clamp(min=self.eps) * 2 * self.scale * self.w",
    "x / x.norm(dim=-1, keepdim=True, dtype=torch.float32).clamp(min=self.eps) * self.scale",
    "F.normalize(x, dim=-1, eps=1e-3) / x.norm(dim=-1, keepdim=True).clamp(min=1e-3) * self.scale",
    "x * x.norm(dim=-1, keepdim=True).clamp(min=self.eps) * self.scale",
    "n = x.norm(dim=-1, keepdim=True).clamp(min=1e-9)\ny = x * torch.sigmoid(n)",
]


def _entry(folder: Path, body: str) -> swapped.Entry:
    body = body if "\n" in body or body.startswith("y =") else f"y = {body}"
    return spelled.entry(folder, f"{body}", "unit")


def _built(entry: swapped.Entry) -> tuple[torch.nn.Module, Tensor]:
    model, batch = swapped.built(entry)
    model.scale = spelled.WIDTH**0.5
    return model, batch


@pytest.mark.parametrize("body", FOUND)
def test_found_and_exact(tmp_path: Path, body: str) -> None:
    entry = _entry(tmp_path, body)
    model, batch = _built(entry)
    found = swapped.planned(entry, model, batch, RECIPES)
    assert swapped.supported(found) == [("", "rms_norm")]
    swapped.assert_exact(entry, model, batch, found, _TOLERANCE)


@pytest.mark.parametrize("body", NOT_FOUND)
def test_another_formula(tmp_path: Path, body: str) -> None:
    entry = _entry(tmp_path, body)
    model, batch = _built(entry)
    assert not swapped.planned(entry, model, batch, RECIPES).supported


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight:UserWarning")  # torch's own of its rms_norm
@pytest.mark.parametrize("form", ["autocast", "bfloat16", "half"])
@pytest.mark.parametrize("body", FOUND)
def test_the_result_has_the_dtype_it_had(tmp_path: Path, body: str, form: str) -> None:
    """Recorded in float32; a float32 weight promotes a half stream where no cast follows it."""
    entry = _entry(tmp_path, body)
    model, batch = _built(entry)
    found = swapped.planned(entry, model, batch, RECIPES)
    if form != "autocast":
        kind = torch.bfloat16 if form == "bfloat16" else torch.float16
        batch = batch.to(kind)
        for part in (model.inp, model.up):
            part.to(kind)
    results = swapped.before_and_after(model, found, batch, autocast=form == "autocast")
    assert results[1].dtype == results[0].dtype
    torch.testing.assert_close(
        results[1], results[0], rtol=2**-5, atol=2**-5
    )  # bfloat16 has 8 bits, rounded some times


@pytest.mark.parametrize("size", [0.0, 1e-14, 1e-12, 1e-11, 1e-8, 1e4])
@pytest.mark.parametrize("body", [FOUND[0], FOUND[2], FOUND[3], *FOUND[11:16], FOUND[17]])
def test_rows_of_any_length(tmp_path: Path, body: str, size: float) -> None:
    """Rows of zeros, as padding has them, stay rows of zeros, and have the gradient that they had."""
    entry = _entry(tmp_path, body)
    model, batch = _built(entry)
    model, batch = model.double(), batch.double()
    found = swapped.planned(entry, model, batch, RECIPES)
    assert swapped.supported(found) == [("", "rms_norm")]
    with torch.no_grad():
        model.inp.bias.zero_()
    small = batch.clone()
    small[0] *= size
    swapped.assert_exact(entry, model, small, found, 1e-13)


def test_a_length_and_a_scale_that_change_later(tmp_path: Path) -> None:
    """The least length is read, the scale that makes it a norm of mean squares is asked for."""
    entry = _entry(tmp_path, "F.normalize(x, dim=-1, eps=self.eps) * self.scale * self.w")
    model, batch = _built(entry)
    found = swapped.planned(entry, model, batch, RECIPES)
    assert "least=self.eps" in Patches(found).diff
    for name, value in (("eps", 40.0), ("scale", 3.0), ("scale", torch.nn.Parameter(torch.tensor(24.0).sqrt()))):
        if name == "scale" and not isinstance(value, float):
            del model.scale
        setattr(model, name, value)
        swapped.assert_exact(entry, model, batch, found, _TOLERANCE)


def test_of_a_sum_with_dropout_the_norm_alone(tmp_path: Path) -> None:
    entry = _entry(tmp_path, "h = u + self.drop(x)\ny = F.normalize(h, dim=-1) * self.scale * self.w")
    model, batch = _built(entry)
    model.drop.p = 0.0
    found = swapped.planned(entry, model, batch, ("add_norm", "rms_norm"))
    assert swapped.supported(found) == [("", "rms_norm")]
    swapped.assert_exact(entry, model, batch, found, _TOLERANCE)


def test_another_power_later(tmp_path: Path) -> None:
    entry = _entry(tmp_path, "F.normalize(x, p=self.beta + 1, dim=-1) * self.scale * self.w")
    model, batch = _built(entry)
    found = swapped.planned(entry, model, batch, RECIPES)
    assert swapped.supported(found) == [("", "rms_norm")]
    model.beta = 2.0
    swapped.assert_exact(entry, model, batch, found, _TOLERANCE)


LENGTH = "y = x / x.norm(dim=-1, keepdim=True).clamp(min=self.eps) * self.scale * self.w"
MEAN_SQUARE = "n = x.norm(dim=-1, keepdim=True) / self.scale\ny = x / n.clamp(min=self.eps) * self.w"
BOTH_BOUNDS = "y = x / x.norm(dim=-1, keepdim=True).clamp(self.eps, self.most) * self.scale * self.w"


@pytest.mark.parametrize(
    ("body", "least"),
    [
        (LENGTH, "least=self.eps,"),
        (MEAN_SQUARE, "least=x.shape[-1] ** 0.5 * self.eps,"),
        (MEAN_SQUARE.replace("self.eps", "self.eps + 1e-8"), "least=x.shape[-1] ** 0.5 * (self.eps + 1e-8),"),
    ],
)
def test_the_least_length_is_read(tmp_path: Path, body: str, least: str) -> None:
    entry = _entry(tmp_path, body)
    assert least in Patches(swapped.planned(entry, *_built(entry), RECIPES)).diff


@pytest.mark.parametrize("value", [0.0, -1.0, 1e-12, 3, 40.0, "parameter", "tensor", "half of the rows"])
@pytest.mark.parametrize("body", [LENGTH, MEAN_SQUARE])
def test_another_least_length_later(tmp_path: Path, body: str, value: float | str) -> None:
    """Also one that is learnt: where it is what rows are divided by, it has the gradient that it had."""
    entry = _entry(tmp_path, body)
    model, batch = _built(entry)
    model, batch = model.double(), batch.double()
    found = swapped.planned(entry, model, batch, RECIPES)
    assert swapped.supported(found) == [("", "rms_norm")]
    del model.eps
    made = {
        "parameter": lambda: torch.nn.Parameter(torch.tensor(5.0, dtype=torch.float64)),
        "tensor": lambda: torch.tensor(5.0, dtype=torch.float64),
        "half of the rows": lambda: torch.tensor([0.0, 40.0, 0.0, 40.0, 0.0], dtype=torch.float64)[:, None],
    }
    model.eps = made[value]() if isinstance(value, str) else value
    swapped.assert_exact(entry, model, batch, found, 1e-13)


@pytest.mark.parametrize("body", [LENGTH, MEAN_SQUARE, MEAN_SQUARE.replace(" * self.w", "")])
@pytest.mark.parametrize("change", ["scale", "tensor", "shape", "features"])
def test_another_scale_or_shape_later(tmp_path: Path, body: str, change: str) -> None:
    entry = _entry(tmp_path, body)
    model, batch = _built(entry)
    model, batch = model.double(), batch.double()
    found = swapped.planned(entry, model, batch, RECIPES)
    assert swapped.supported(found) == [("", "rms_norm")]
    if change == "scale":
        model.scale = 3.0
    elif change == "tensor":
        model.scale = torch.nn.Parameter(torch.tensor(24.0, dtype=torch.float64).sqrt())
    elif change == "shape":
        batch = torch.randn(2, 3, 4, spelled.WIDTH, dtype=torch.float64)
    else:
        features = 7 if ".w" not in body else spelled.WIDTH
        model.inp = torch.nn.Linear(spelled.WIDTH, features, dtype=torch.float64)
        model.out = torch.nn.Linear(features, spelled.WIDTH, dtype=torch.float64)
    swapped.assert_exact(entry, model, batch, found, 1e-13)


def test_a_largest_length_later(tmp_path: Path) -> None:
    entry = _entry(tmp_path, BOTH_BOUNDS)
    model, batch = _built(entry)
    model.most = None
    found = swapped.planned(entry, model, batch, RECIPES)
    assert swapped.supported(found) == [("", "rms_norm")]
    model.most = 2.0
    swapped.assert_exact(entry, model, batch, found, _TOLERANCE)


def test_reason_why_another_bound_is_left(tmp_path: Path) -> None:
    body = "y = x / (x.norm(dim=-1, keepdim=True) * 2).clamp(min=self.eps) * 2 * self.scale * self.w"
    entry = _entry(tmp_path, body)
    (site,) = swapped.planned(entry, *_built(entry), RECIPES).sites
    assert site.reasons == ["the minimum is on another multiple of the row norm"]


@pytest.mark.parametrize("later", [0.5, 3.0])
def test_an_upper_bound_that_was_none(tmp_path: Path, later: float) -> None:
    """It is given by its name, beside the lower one that the new code reads."""
    body = "n = x.norm(dim=-1, keepdim=True).clamp(min=self.eps, max=self.most)\ny = x / n * self.scale * self.w"
    entry = _entry(tmp_path, body)
    model, batch = _built(entry)
    model.most = None  # type: ignore[assignment]
    found = swapped.planned(entry, model, batch, RECIPES)
    assert found.supported
    model.most = later  # type: ignore[assignment]
    before, after = swapped.before_and_after(model, found, batch, autocast=False)
    torch.testing.assert_close(after, before)
