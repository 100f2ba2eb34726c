"""Attention modules as source text, in the many ways people write them, and some that only look like it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

HEADS, SIZE, LONGEST = 3, 4, 16
WIDTH = HEADS * SIZE

HEADER = f"""import math

import torch
import torch.nn.functional as F
from torch import nn


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.query, self.key, self.value = (nn.Linear({WIDTH}, {WIDTH}) for _ in range(3))
        self.proj = nn.Linear({WIDTH}, {WIDTH})
        self.n_head, self.head_size, self.calls = {HEADS}, {SIZE}, 0
        self.scale = {SIZE} ** -0.5
        self.softmax = nn.Softmax(dim=-1)
        self.drop = nn.Dropout(0.0)
        self.p = 0.0
        self.causal = True
        self.temperature = nn.Parameter(torch.tensor(1.7))
        self.slopes = nn.Parameter(torch.randn({HEADS}, 1, 1))
        self.register_buffer("root", torch.tensor(2.0))
        self.register_buffer("tril", torch.tril(torch.ones({LONGEST}, {LONGEST})))
        self.register_buffer("future", torch.full(({LONGEST}, {LONGEST}), float("-inf")).triu(1))
        self.kept = []

    def split(self, x):
        b, t, _ = x.shape
        return x.view(b, t, self.n_head, self.head_size).transpose(1, 2)
"""


@dataclass(frozen=True)
class Case:
    """One module's source, and what its forward takes."""

    text: str
    mask: str  # "", "causal", "padding" or "additive": its second argument
    mutation: str  # "" where it is plain attention

    def __repr__(self) -> str:
        return f"{self.mutation or 'plain'}, mask argument {self.mask or 'none'}\n{self.text[len(HEADER) :]}"


_NAMES = [("q", "k", "v"), ("query", "key", "value"), ("xq", "xk", "xv"), ("Q", "K", "V")]
_SCORES = ["att", "scores", "w", "attn_weights", "energy", "dots"]
_FILLS = ['float("-inf")', "-torch.inf", "-1e9", "torch.finfo({s}.dtype).min", "-1e4"]

_PRODUCTS = [
    "{q} @ {k}.transpose(-2, -1)",
    "torch.matmul({q}, {k}.transpose(2, 3))",
    "{q}.matmul({k}.mT)",
    "{q} @ {k}.permute(0, 1, 3, 2)",
    'torch.einsum("bhid,bhjd->bhij", {q}, {k})',
    'torch.einsum("... i d, ... j d -> ... i j", {q}, {k})',
    'torch.einsum("bhqd,bhkd->bhqk", [{q}, {k}])',
]
_FOLDED = [
    "torch.bmm({q}, {k}.transpose(1, 2))",
    "{q}.bmm({k}.mT)",
    "{q} @ {k}.transpose(-1, -2)",
    'torch.einsum("bid,bjd->bij", {q}, {k})',
    "torch.baddbmm(torch.empty({q}.size(0), t, t), {q}, {k}.transpose(1, 2), beta=0, alpha=0.5)",
    "torch.baddbmm(torch.zeros({q}.size(0), t, t), {q}, {k}.transpose(1, 2), alpha=self.scale)",
]
_SCALES = [
    "",
    "{s} = {s} * self.scale",
    "{s} = {s} / math.sqrt(self.head_size)",
    "{s} = {s} / {q}.size(-1) ** 0.5",
    "{s} = self.scale * {s}",
    "{s} *= self.scale",
    "{s} /= 2",
    "{s} = torch.mul({s}, 0.5)",
    "{s} = {s} * (1.0 / math.sqrt({k}.size(-1)))",
    "{s} = {s} / self.root",
    "{s} = {s} * self.temperature",
    "{s} = 5.0 * torch.tanh({s} * self.scale / 5.0)",
    "{s} = {s} / torch.full([], 2.0, dtype={s}.dtype, device={s}.device)",
]
_BEFORE = ["", "{q} = {q} * self.scale", "{k} = {k} / 2", "{q} = {q} / math.sqrt({q}.size(-1))"]

_CAUSAL = {
    "zero": [
        "self.tril[:t, :t]",
        "torch.tril(torch.ones(t, t, device=x.device))",
        "torch.ones(t, t).tril().bool()",
        "(torch.arange(t)[:, None] >= torch.arange(t)[None, :])",
        "torch.ones_like({s}).tril()",
        "mask",
    ],
    "nonzero": [
        "torch.triu(torch.ones(t, t, dtype=torch.bool), diagonal=1)",
        "torch.ones((t, t), device=x.device).triu(1).bool()",
        "(self.tril[:t, :t] == 0)",
        "~self.tril[:t, :t].bool()",
        "torch.ones_like({s}, dtype=torch.bool).triu(1)",
    ],
    "additive": [
        "self.future[:t, :t]",
        'torch.full((t, t), float("-inf")).triu(1)',
        "torch.triu(torch.full((t, t), -torch.inf, device=x.device), diagonal=1)",
        "(1.0 - self.tril[:t, :t]) * -1e9",
        'torch.full_like({s}, float("-inf")).triu(1)',
    ],
}
_SOFTMAX = [
    "F.softmax({s}, dim=-1)",
    "{s}.softmax(-1)",
    "{s}.softmax(dim=-1)",
    "torch.softmax({s}, {last})",
    "self.softmax({s})",
    "F.softmax({s}.float(), dim=-1).type_as({q})",
    "nn.functional.softmax({s}, dim=-1, dtype=torch.float32).to({q}.dtype)",
    "nn.Softmax(dim=-1)({s})",
]
_DROPOUT = [
    "",
    "",
    "{s} = self.drop({s})",
    "{s} = F.dropout({s}, p=self.p, training=self.training)",
    "{s} = F.dropout({s}, self.p, self.training)",
    "{s} = self.drop({s}) if self.training else {s}",
    "if self.training:\n    {s} = self.drop({s})",
]
_RESULTS = [
    "{s} @ {v}",
    "torch.matmul({s}, {v})",
    "{s}.matmul({v})",
    'torch.einsum("... i j, ... j d -> ... i d", {s}, {v})',
]
_HARMLESS = [
    "",
    "",
    "",
    "self.calls += 1",
    "n = x.size(0)",
    "assert {s}.size(-1) == t",
    "# scores",
    "rows, cols = {s}.size(-2), {s}.size(-1)",
]

MUTATIONS = {
    "softmax over queries": ("softmax", "{s}.softmax(-2)"),
    "weights returned": ("end", "return self.proj(out), {s}"),
    "weights stored": ("dropout", "self.seen = {s}"),
    "weights listed": ("dropout", "self.kept.append({s}.detach())"),
    "mask after softmax": ("dropout", "{s} = {s}.masked_fill({s} < 0.05, 0.0)"),
    "window": ("mask", '{s} = {s}.masked_fill(torch.ones(t, t).tril().triu(-5) == 0, float("-inf"))'),
    "window beyond": ("mask", '{s} = {s}.masked_fill(torch.ones(t, t).tril().triu(-8) == 0, float("-inf"))'),
    "one ahead": ("mask", '{s} = {s}.masked_fill(torch.ones(t, t).tril(1) == 0, float("-inf"))'),
    "diagonal by length": ("mask", '{s} = {s}.masked_fill(torch.ones(t, t).tril(t // 10) == 0, float("-inf"))'),
    "window of its form": (
        "mask", '{s} = {s}.masked_fill(torch.ones_like({s}).tril().triu(-5) == 0, float("-inf"))'
    ),
    "one ahead of its form": ("mask", '{s} = {s}.masked_fill(torch.ones_like({s}).tril(1) == 0, float("-inf"))'),
    "strictly before": ("mask", "{s} = {s}.masked_fill(torch.ones(t, t).tril(-1) == 0, -1e9)"),
    "weak fill": ("mask", "{s} = {s}.masked_fill(self.tril[:t, :t] == 0, -2.0)"),
    "learnt bias": ("mask", "{s} = {s} + self.slopes.mean() * torch.arange(t)"),
    "bias a head": ("mask", "{s} = {s} + self.slopes.mean() * torch.ones(t, t).cumsum(-1)"),
    "values changed": ("mask", "{v} += 0.1"),
    "values changed after": ("dropout", "{v} = {v} * 1.5"),
    "scores read": ("mask", "self.largest = {s}.detach().amax()"),
    "detached": ("dropout", "{s} = {s}.detach()"),
    "renormalised": ("dropout", "{s} = {s} / ({s}.sum(-1, keepdim=True) + 1.0)"),
    "dropout first": ("mask", "{s} = F.dropout({s}, 0.0, self.training)"),
    "floor": ("mask", '{s} = torch.div({s}, 0.1, rounding_mode="floor")'),
    "added twice": ("mask", "{s} = torch.add({s}, self.future[:t, :t].clamp(min=-1.0), alpha=2)"),
    "clamped": ("mask", "{s} = {s}.clamp(max=0.5)"),
    "soft cap": ("mask", "{s} = 2.0 * torch.tanh({s} / 2.0)"),
    "soft cap of two numbers": ("mask", "{s} = 2.0 * torch.tanh({s} / 3.0)"),
    "scale after a soft cap": ("mask", "{s} = 2.0 * torch.tanh({s} / 2.0) * 0.5"),
    "scale by step": ("mask", "{s} = {s} * (0.5 if self.calls < 3 else 0.1); self.calls += 1"),
    "branch by flag": ("mask", "if self.causal:\n    {s} = {s}.masked_fill(self.tril[:t, :t] == 0, -torch.inf)"),
    "branch on data": ("mask", "if {s}.max() > 0.5:\n    {s} = {s} * 0.5"),
    "bias before scale": ("mask", "{s} = ({s} + self.tril[:t, :t]) / 3"),
    "locals": ("end", "self.seen = sorted(locals())\nreturn self.proj(out)"),
    "gradient off": ("softmax_block", "with torch.no_grad():\n    {s} = {s}.softmax(-1)"),
    "weights transposed": ("dropout", "{s} = {s}.transpose(-2, -1)"),
    "tensor dropout": ("dropout", "{s} = {s} * torch.ones_like({s})"),
}  # fmt: skip


@st.composite
def cases(draw: Any) -> Case:
    """A case; one in four is not plain attention."""
    mutation = draw(st.sampled_from([*[""] * 3 * len(MUTATIONS), *MUTATIONS]))
    folded = draw(st.sampled_from([False, False, False, True]))
    q, k, v = draw(st.sampled_from(_NAMES))
    names = {"q": q, "k": k, "v": v, "s": draw(st.sampled_from(_SCORES)), "last": 2 if folded else 3}
    mask, mask_lines = _mask(draw, folded)
    where, change = MUTATIONS.get(mutation, ("", ""))
    product = draw(st.sampled_from(_FOLDED if folded else _PRODUCTS))
    scale = "" if "alpha" in product else draw(st.sampled_from(_SCALES))
    softmax = change if where == "softmax" else draw(st.sampled_from(_SOFTMAX))
    steps = [
        draw(st.sampled_from(_BEFORE)),
        f"{{s}} = {product}",
        draw(st.sampled_from(_HARMLESS)),
        scale,
        *mask_lines,
        change if where == "mask" else "",
        draw(st.sampled_from(_HARMLESS)),
        change if where == "softmax_block" else f"{{s}} = {softmax}",
        draw(st.sampled_from(_DROPOUT)),
        change if where == "dropout" else "",
    ]
    result = "torch.bmm({s}, {v})" if folded and draw(st.booleans()) else draw(st.sampled_from(_RESULTS))
    body = _laid_out(draw, steps, result, names, helper=draw(st.booleans()) and mutation == "", folded=folded)
    end = change if where == "end" else "return self.proj(out)"
    text = HEADER + body + _indented(end.format(**names), 8)
    return Case(text, mask, mutation)


def _mask(draw: Any, folded: bool) -> tuple[str, list[str]]:
    """What the forward is given as a mask, and the lines that lay it, or others, over the scores."""
    kind = draw(st.sampled_from(["none", "causal", "causal", "causal", "padding", "both", "additive", "given or none"]))
    if kind == "none" or (folded and kind in {"padding", "both", "additive"}):
        return "", []
    if kind == "additive":
        return "additive", [draw(st.sampled_from(["{s} = {s} + mask", "{s} += mask", "{s} = torch.add({s}, mask)"]))]
    if kind == "given or none":
        return draw(st.sampled_from(["", "causal"])), [
            "if mask is not None:\n    {s} = {s}.masked_fill(mask == 0, " + draw(st.sampled_from(_FILLS[:3])) + ")"
        ]
    padding = "{s} = {s}.masked_fill(~mask, " + draw(st.sampled_from(_FILLS)) + ")"
    if kind == "padding":
        return "padding", [padding]
    given, lines = _causal(draw, argument=kind != "both")
    if kind == "both":
        return "padding", [*lines, padding]
    return given, lines


def _causal(draw: Any, *, argument: bool) -> tuple[str, list[str]]:
    form = draw(st.sampled_from(sorted(_CAUSAL)))
    mask = draw(st.sampled_from([each for each in _CAUSAL[form] if argument or each != "mask"]))
    fill = draw(st.sampled_from(_FILLS))
    if form == "additive":
        spelled = draw(st.sampled_from(["{s} = {s} + MASK", "{s} += MASK", "{s} = MASK + {s}"]))
    elif form == "zero":
        seen = "MASK" if ".bool()" in mask or ">=" in mask else "MASK != 0"
        spelled = draw(
            st.sampled_from(
                [
                    f"{{s}} = {{s}}.masked_fill(MASK == 0, {fill})",
                    f"{{s}}.masked_fill_(MASK == 0, {fill})",
                    f"{{s}} = torch.where({seen}, {{s}}, {fill})",
                    f"{{s}} = {{s}}.where({seen}, torch.tensor({fill}))",
                ]
            )
        )
    else:
        spelled = draw(
            st.sampled_from(
                [
                    f"{{s}} = {{s}}.masked_fill(MASK, {fill})",
                    f"{{s}} = torch.where(MASK, {fill}, {{s}})",
                    f"{{s}}[..., MASK] = {fill}",
                ]
            )
        )
    given = "causal" if mask == "mask" else ""
    if draw(st.booleans()):
        return given, [f"hidden = {mask}", spelled.replace("MASK", "hidden")]
    return given, [spelled.replace("MASK", mask)]


def _laid_out(draw: Any, steps: list[str], result: str, names: dict[str, Any], *, helper: bool, folded: bool) -> str:
    """The forward up to ``out``, in one function or with a method that holds the pattern."""
    lines = [step.format(**names) for step in steps if step]
    if draw(st.booleans()):
        lines = _nested(lines, names["s"])
    q, k, v = names["q"], names["k"], names["v"]
    heads = f"{q}, {k}, {v} = self.split(self.query(x)), self.split(self.key(x)), self.split(self.value(x))"
    fold = f"{q}, {k}, {v} = {q}.flatten(0, 1), {k}.flatten(0, 1), {v}.flatten(0, 1)"
    start = ["b, t, c = x.shape", heads, *([fold] if folded else [])]
    final = result.format(**names)
    unfold = ["out = out.view(b, self.n_head, t, self.head_size)"] if folded else []
    end = [*unfold, "out = out.transpose(1, 2).reshape(b, t, c)"]
    if helper:
        inner = ["t = x.size(1)", *lines, f"return {final}"]
        method = _indented(f"def attend(self, x, {q}, {k}, {v}, mask):", 4) + _indented("\n".join(inner), 8)
        called = [*start, f"out = self.attend(x, {q}, {k}, {v}, mask)", *end]
        return "\n" + method + "\n    def forward(self, x, mask=None):\n" + _indented("\n".join(called), 8)
    body = "\n".join([*start, *lines, f"out = {final}", *end])
    return "\n    def forward(self, x, mask=None):\n" + _indented(body, 8)


def _nested(lines: list[str], name: str) -> list[str]:
    """Each step written into the next, where both are plain assignments and the name is read once."""
    made: list[str] = []
    for line in lines:
        plain = made and made[-1].startswith(f"{name} = ") and "\n" not in made[-1] and "if self" not in made[-1]
        if plain and line.startswith(f"{name} = ") and line.count(name) == 2 and "dtype" not in line:
            inner = made.pop().removeprefix(f"{name} = ")
            left, _, right = line.removeprefix(f"{name} = ").partition(name)
            made.append(f"{name} = {left}({inner}){right}")
        else:
            made.append(line)
    return made


def _indented(text: str, spaces: int) -> str:
    return "".join(f"{' ' * spaces}{line}\n" for line in text.split("\n"))
