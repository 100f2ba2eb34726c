"""Places that a recipe would do otherwise than torch: each is left alone, for its reason or without a word."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.patching import spelled, swapped

ROWS = "t, rows = torch.arange(10) % 5, x.flatten(0, 1)\n"
LOGITS = f"{ROWS}logits = self.out(x).flatten(0, 1)\n"
SUM = "h = u + self.drop(x)\n"
GELU = "y = F.gelu"
AVERAGE, PROBABILITIES = "size_average and reduce are not supported", "the targets are probabilities"

REASONS = [
    ("cross_entropy", f"{ROWS}y = x + F.cross_entropy(rows, u.flatten(0, 1).softmax(-1))", PROBABILITIES),
    ("cross_entropy", f"{ROWS}y = x + F.cross_entropy(rows, t.byte())", "the targets are uint8"),
    ("cross_entropy", f"{ROWS}y = x + F.cross_entropy(rows, t, None, False)", AVERAGE),
    ("cross_entropy", f"{ROWS}y = x + F.cross_entropy(rows, t, reduce=False).mean()", AVERAGE),
    (
        "cross_entropy",
        "y = x + F.nll_loss(F.log_softmax(x, -1), torch.zeros(2, C, dtype=torch.long))",
        "the softmax and the loss use different dimensions",
    ),
    (
        "cross_entropy",
        f"{ROWS}y = x + F.nll_loss(F.log_softmax(rows, -1, dtype=torch.float64), t).float()",
        "log_softmax changes the dtype",
    ),
    (
        "linear_cross_entropy",
        f"{LOGITS}y = x + F.cross_entropy(logits, u.flatten(0, 1).softmax(-1))",
        PROBABILITIES,
    ),
    ("linear_cross_entropy", f"{LOGITS}y = x + F.cross_entropy(logits, t.byte())", "the targets are uint8"),
    ("linear_cross_entropy", f"{LOGITS}y = x + F.cross_entropy(logits, t, None, False)", AVERAGE),
    ("linear_cross_entropy", f"{LOGITS}y = x + F.cross_entropy(logits, t, reduce=False).mean()", AVERAGE),
    (
        "linear_cross_entropy",
        "y = x + F.cross_entropy(self.out(x), torch.zeros(2, C, dtype=torch.long))",
        "the loss and the head have the classes in different dimensions",
    ),
    (
        "linear_cross_entropy",
        f"{LOGITS}y = x + F.cross_entropy(logits, t) + F.cross_entropy(logits, t.flip(0))",
        "two losses read the logits, so they would be computed twice",
    ),
    (
        "linear_cross_entropy",
        f"{LOGITS}y = x + F.cross_entropy(logits, t) + logits.relu().sum()",
        "the logits are also read by relu",
    ),
    (
        "linear_cross_entropy",
        f"{ROWS}logits = F.linear(rows, self.out.weight, self.b)\nwith torch.no_grad():\n    self.b.add_(1.0)\n"
        "y = x + F.cross_entropy(logits, t)",
        "add modifies the head's input in place",
    ),
    ("swiglu", "y = (F.silu(x) * u.double()).float()", "the gate's dtype differs from that of the gated tensor"),
    ("swiglu", "y = (F.silu(x.mT) * u.mT).mT", "the result's memory layout differs from the recipe's"),
    ("bias_gelu", f"{GELU}(x + self.b.bfloat16())", "the bias's dtype differs from that of the tensor it is added to"),
    (
        "bias_gelu",
        f"{GELU}(x.bfloat16() + self.b).float()",
        "the bias's dtype differs from that of the tensor it is added to",
    ),
    (
        "layer_norm",
        "x = x.mT.contiguous().mT\ny = (x - x.mean(-1, True)) * (x.var(-1, False, True) + 1e-6).rsqrt()",
        "the result's memory layout differs from the recipe's",
    ),
    (
        "add_norm",
        "y = self.norm(u + F.dropout(x, 1.0, self.training))",
        "the dropout probability is 1 or a tensor",
    ),
    (
        "add_norm",
        "y = self.norm(u + F.dropout(x + 0, 0.1, self.training, True))",
        "dropout modifies its input in place",
    ),
    (
        "add_norm",
        "y = F.layer_norm(u.double() + self.drop(x), (C,)).float()",
        "the residual's dtype differs from that of the added tensor",
    ),
    (
        "add_norm",
        "y = self.norm(u[:, :1] + self.drop(x))",
        "the residual's shape differs from that of the added tensor",
    ),
    ("add_norm", "y = F.layer_norm(u + self.drop(x), (5, C))", "more than the last dimension is normalized"),
    ("add_norm", f"{SUM}if not self.flag:\n    y = self.norm(h)\ny = y + h", "does not always run after line"),
    (
        "add_norm",
        f"{SUM}y = h + (h if self.flag else self.norm(h))",
        "contains a condition, a lambda or a comprehension",
    ),
    ("add_norm", f"{SUM}z = h * 2\nh = h\ny = self.norm(h) + z", "reassigns h"),
    ("add_norm", f"{SUM}if not self.flag:\n    z = h.sum()\ny = self.norm(h) + h + z", "uses h under a condition"),
    (
        "add_norm",
        f"{SUM}with torch.no_grad():\n    self.norm.bias.add_(1.0)\ny = self.norm(h) + h",
        "modifies in place a tensor that layer_norm reads",
    ),
    # No site at all.
    ("bias_gelu", f"s = x + self.b\n{GELU}(s) + s", ""),
    ("bias_gelu", f"{GELU}(torch.add(x, self.b, alpha=2))", ""),
    ("add_norm", "y = self.norm(torch.add(u, self.drop(x), alpha=2))", ""),
    ("linear_cross_entropy", f"{LOGITS}y = x + F.nll_loss(logits, t)", ""),
    ("cross_entropy", f"{ROWS}y = x + F.nll_loss(rows, t)", ""),
]


@pytest.mark.filterwarnings("ignore:size_average and reduce args")
@pytest.mark.parametrize(("recipe", "body", "reason"), REASONS, ids=lambda each: each[:40])
def test_left_alone(recipe: str, body: str, reason: str, tmp_path: Path) -> None:
    entry = spelled.entry(tmp_path, body, "alone")
    model, batch = swapped.built(entry, dropout=True)
    found = swapped.planned(entry, model, batch, [recipe])
    assert not found.supported
    reasons = {each for site in found.sites for several in site.reasons for each in several.split("; ")}
    assert any(reason in each for each in reasons) if reason else not reasons, reasons
