"""A tensor has another shape after the proof: numbers were equal by chance, or sizes were."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import gradscope
from gradscope.patching.patches import Patches
from gradscope.recording.record import record
from tests.patching import spelled
from tests.patching.exactness import TOLERANCE, difference, results

WIDTH = spelled.WIDTH
BY_SUM = "x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) / {} + self.eps) * self.w"

CHANCE = {
    "size of another dimension": BY_SUM.format("x.shape[1]"),
    "by a name": "n = x.size(1)\ny = " + BY_SUM.format("n"),
    "taken apart": "b, n, c = x.shape\ny = " + BY_SUM.format("n"),
    "another tensor's, taken apart": "s = x @ u.mT\nb, n, c = s.shape\ny = " + BY_SUM.format("c"),
    "another tensor's last": "s = x @ u.mT\ny = " + BY_SUM.format("s.shape[-1]"),
    "a root": "n = math.sqrt(x.shape[-2])\ny = x / x.norm(dim=-1, keepdim=True) * n * self.w",
    "of all": BY_SUM.format("(x.numel() // (2 * WIDTH))").replace("WIDTH", str(WIDTH)),
    "counted from the front": BY_SUM.format("x.size(2)"),
    "a tensor of it": "n = torch.tensor(x.shape[1])\ny = " + BY_SUM.format("n"),
    "filled with it": "n = torch.full((), x.shape[1])\ny = " + BY_SUM.format("n"),
    "picked out of a tensor": "n = torch.tensor(x.shape)[1]\ny = " + BY_SUM.format("n"),
    "the correction of a variance": "v = x.var(-1, correction=x.shape[0] - 2, keepdim=True)\n"
    "y = (x - x.mean(-1, keepdim=True)) / torch.sqrt(v + self.eps)",
    "the power of a norm": "y = x / x.norm(x.dim() - 1, dim=-1, keepdim=True) * math.sqrt(24) * self.w",
    "gelu's root of the batch": "y = 0.5 * x * (1 + torch.erf(x / math.sqrt(x.shape[0])))",
}

CERTAIN = {
    "last": BY_SUM.format("x.shape[-1]"),
    "last by size": BY_SUM.format("x.size(-1)"),
    "taken apart": "b, t, c = x.shape\ny = " + BY_SUM.format("c"),
    "of a cast": "h = x.double()\ny = h * torch.rsqrt(h.pow(2).sum(-1, keepdim=True) / h.shape[-1] + 1e-3) * self.w",
    "a root": "x / x.norm(dim=-1, keepdim=True) * x.shape[-1] ** 0.5 * self.w",
}

NORMED = "y = (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5))"

# A vector of the features in a batch of two, and something else in one of three.
VECTORS = {
    "a row, then a matrix": "c = u[0] if u.shape[0] == 2 else u",
    "a row, then a number": "c = u[0] if u.shape[0] == 2 else u[0, :1]",
    "made in many steps": "c = u[0] if u.shape[0] == 2 else u\nfor _ in range(9):\n    c = c * 1.1",
    "rows of a parameter": "c = self.inp.weight[0 if u.shape[0] == 2 else [3, 1, 2]]",
    "no parameter": "c = torch.from_numpy(np.linspace(1, 2, 24 if u.shape[0] == 2 else 1))",
}
USES = {
    "a bias": "y = F.gelu(x + c)",
    "a weight": NORMED + " * c",
    "a shift": "m = x - x.mean(-1, keepdim=True)\ny = m / (m.square().mean(-1, keepdim=True) + 1e-5).sqrt() + c",
}

# Of 48 features, and later of 72.
WRITTEN_HALVES = ["F.silu(h[..., :24]) * h[..., 24:48]", "F.silu(h[..., :24]) * h[..., -24:]"]


def difference_later(folder: Path, body: str, first: tuple[int, ...], later: tuple[int, ...]) -> tuple[float, str]:
    """How far a patched model is from the plain one on a batch of another form; and the change."""
    model = spelled.entry(folder, body, "form").build()[0].double()
    original = copy.deepcopy(model)
    patches = Patches(gradscope.plan(model, torch.randn(first, dtype=torch.float64)))
    patches.apply()
    assert patches.table.supported.any(), patches.table.reasons.tolist()
    batch = torch.randn(later, dtype=torch.float64)
    found = difference(results(original, batch), results(model, batch))
    diff = patches.diff
    patches.revert()
    return found, diff


def difference_of_a_wider(folder: Path, body: str, batch: Tensor, width: int) -> float:
    """How far a model without layers that was patched for ``width`` features is from the plain one on all of them."""
    model = spelled.entry(folder, body, "wider").build()[0].double()
    model.inp, model.up, model.out, model.b = nn.Identity(), nn.Identity(), nn.Identity(), model.w
    original = copy.deepcopy(model)
    patches = Patches(gradscope.plan(model, batch[..., :width]))
    patches.apply()
    assert patches.table.supported.any(), patches.table.reasons.tolist()
    found = difference(results(original, batch), results(model, batch))
    patches.revert()
    return found


@pytest.mark.parametrize("later", [(2, 7, WIDTH), (3, WIDTH, WIDTH), (2, 3, 7, WIDTH)], ids=str)
@pytest.mark.parametrize("body", CHANCE.values(), ids=CHANCE)
def test_sizes_that_are_equal_by_chance(tmp_path: Path, body: str, later: tuple[int, ...]) -> None:
    if len(later) == 4 and "b, n, c" in body:
        later = (4, 5, WIDTH)
    found, diff = difference_later(tmp_path, body, (2, WIDTH, WIDTH), later)
    assert found <= TOLERANCE
    assert "+        if " in diff


PART_OF_THE_WIDTH = {
    "gelu": "k = x.shape[-1] / 48\ny = k * x * (1 + torch.erf(x / 2**0.5))",
    "gelu, divided": "y = x / x.shape[-1] * 12 * (1 + torch.erf(x / 2**0.5))",
    "swiglu": "y = x * torch.sigmoid(x * x.shape[-1] / 24) * (x * 2 + 1)",
    "numbers that cancel": "y = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) * 24 / x.shape[-1] + self.eps)",
    "a norm's factor": "k = x.shape[-1] / 24\ny = k * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)",
}


@pytest.mark.parametrize("body", PART_OF_THE_WIDTH.values(), ids=PART_OF_THE_WIDTH)
def test_a_number_of_this_width_alone(tmp_path: Path, body: str) -> None:
    """It is 1, or what the function has there, for so many features and for no others."""
    batch = torch.randn(2, 5, 2 * WIDTH, dtype=torch.float64)
    assert difference_of_a_wider(tmp_path, body, batch, WIDTH) <= TOLERANCE


@pytest.mark.parametrize("body", CERTAIN.values(), ids=CERTAIN)
def test_nothing_is_asked_for_the_last_size(tmp_path: Path, body: str) -> None:
    found, diff = difference_later(tmp_path, body, (2, 5, WIDTH), (3, 7, WIDTH))
    assert found <= TOLERANCE
    assert " if " not in diff


BARE_NORM = "h = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)\n"
CENTRED = "h = x - x.mean(-1, keepdim=True)\nh = h / torch.sqrt(h.pow(2).mean(-1, keepdim=True) + self.eps)\n"
UNDER_A_CONDITION = {
    "two sides": BARE_NORM + "if x.shape[1] == 5:\n    y = h * self.w\nelse:\n    y = h",
    "one side": BARE_NORM + "if x.shape[1] == 5:\n    h = h * (1 + self.w)\ny = h",
    "in place": BARE_NORM + "if x.shape[1] == 5:\n    h *= self.w\ny = h + u",
    "in an expression": BARE_NORM + "y = h * self.w if x.shape[1] == 5 else h",
    "with": BARE_NORM + "with torch.set_grad_enabled(x.shape[1] == 5):\n    y = h * self.w\ny = y + u",
    "weight and bias": CENTRED + "if x.shape[1] == 5:\n    h = h * self.w + self.b\ny = h",
}


@pytest.mark.parametrize("later", [(2, 5, WIDTH), (3, 7, WIDTH)], ids=str)
@pytest.mark.parametrize("body", UNDER_A_CONDITION.values(), ids=UNDER_A_CONDITION)
def test_a_weight_under_a_condition_is_left_to_the_code(tmp_path: Path, body: str, later: tuple[int, ...]) -> None:
    found, diff = difference_later(tmp_path, body, (2, 5, WIDTH), later)
    assert found <= TOLERANCE
    assert "norm(x, x.shape[-1:], eps=self.eps)" in diff


@pytest.mark.parametrize(
    ("body", "first", "later"),
    [
        pytest.param(
            NORMED + " * self.w[None, None]",
            (2, 5, WIDTH),
            (5, WIDTH),
            id="a weight of more dimensions than the input",
        ),
        pytest.param(NORMED + " * self.w[None]", (2, 5, WIDTH), (WIDTH,), id="a weight of one more than the input"),
        pytest.param("y = F.gelu(x + u[0])", (2, WIDTH), (3, 3, WIDTH), id="a row is a matrix"),
        *(
            pytest.param(f"{form.format('u')}\n{body}", (2, WIDTH), (3, WIDTH), id=f"{name}: {one}")
            for one, form in VECTORS.items()
            for name, body in USES.items()
        ),
        *(
            pytest.param(f"h = torch.cat([x, u, u][:u.shape[0]], -1)\ny = {body}", (2, WIDTH), (3, WIDTH), id=body)
            for body in WRITTEN_HALVES
        ),
        pytest.param(
            "h = torch.cat([x, u], -1 if x.dim() == 1 else 0)\ny = F.silu(h[:C]) * h[C:]",
            (WIDTH,),
            (WIDTH, WIDTH),
            id="halves of rows",
        ),
        pytest.param(
            "g = u.mean(0) if u.shape[0] == 3 else u\ny = F.silu(g) * x",
            (2, 5, WIDTH),
            (3, 5, WIDTH),
            id="a gate of one row",
        ),
        pytest.param(
            "v = u[:1] if u.shape[0] == 3 else u\ny = F.silu(x) * v",
            (2, 5, WIDTH),
            (3, 5, WIDTH),
            id="one row is gated",
        ),
    ],
)
def test_another_form_later(tmp_path: Path, body: str, first: tuple[int, ...], later: tuple[int, ...]) -> None:
    assert difference_later(tmp_path, body, first, later)[0] <= TOLERANCE


HALVES = {
    "two of the parts": "g, v = x.split(24, -1)[:2]\ny = F.silu(g) * v",
    "parts of a sum": "g, v = (x + u).split(24, -1)[:2]\ny = F.silu(g) * v",
    "parts by their index": "p = x.split(C, -1)\ny = F.silu(p[0]) * p[1]",
    "both ends": "y = F.silu(x[..., :24]) * x[..., 24:48]",
    "from the end": "y = F.silu(x[..., :24]) * x[..., -24:]",
    "by a name": "d = C\ny = F.silu(x[..., :d]) * x[..., d : 2 * d]",
    "of as many rows": "d = x.shape[1] // 2\ny = F.silu(x[..., :d]) * x[..., d : 2 * d]",
}


@pytest.mark.parametrize("body", HALVES.values(), ids=HALVES)
def test_what_were_halves_are_parts_of_more(tmp_path: Path, body: str) -> None:
    batch = torch.randn(2, 2 * WIDTH, 3 * WIDTH, dtype=torch.float64)
    assert difference_of_a_wider(tmp_path, body, batch, 2 * WIDTH) <= TOLERANCE


PICKED = {
    "dimensions counted from the front": "nll = -x.log_softmax(2).gather(-1, t.unsqueeze(-1)).squeeze(-1)",
    "all dimensions by an index": "nll = -x.log_softmax(-1).gather(-1, t[:, :, None])[:, :, 0]",
    "logits of an expression": "nll = -(x / self.beta).log_softmax(-1).gather(-1, t[..., None]).squeeze(-1)",
    "the batch's dimension dropped": "nll = -x.log_softmax(-1).gather(-1, t[..., None])[0]",
    "the batch's dimension added": "nll = -x.log_softmax(-1).gather(-1, t[:, None])",
    "by the log-sum-exp in another form": "nll = x.logsumexp(-1) - x.gather(-1, t[..., None])",
    "a dtype that is today's": "nll = -x.log_softmax(-1, torch.float32).gather(-1, t[..., None]).squeeze(-1)",
    "a dtype by its name": "nll = -x.log_softmax(-1, dtype=torch.float32).gather(-1, t[..., None]).squeeze(-1)",
    "short indices": "nll = -x.log_softmax(-1).gather(-1, t.int()[..., None]).squeeze(-1)",
}


@pytest.mark.parametrize("later", [(1, 1, WIDTH), (3, 3, WIDTH), (2, 7, WIDTH), (3, WIDTH), (2, 3, 3, WIDTH)], ids=str)
@pytest.mark.parametrize("body", PICKED.values(), ids=PICKED)
def test_losses_of_rows_in_another_form(tmp_path: Path, body: str, later: tuple[int, ...]) -> None:
    """What the plain model raises aside, the patched one does the same, and in the same dtype."""
    first = (1, 1, WIDTH) if any(each in body for each in ("[0]", "logsumexp", "t[:, None]")) else (2, 5, WIDTH)
    lines = f"t = (u[..., 0].abs() * 7).long() % {WIDTH}\n{body}\ny = x + nll.sum() + nll.dtype.itemsize"
    model = spelled.entry(tmp_path, lines, "picked").build()[0]
    patches = Patches(gradscope.plan(model, torch.randn(first), recipes=["cross_entropy"]))
    model.double()
    original, batch = copy.deepcopy(model), torch.randn(later, dtype=torch.float64)
    try:
        wanted = results(original, batch)
    except (RuntimeError, IndexError):  # of so many dimensions it is not written for
        return
    patches.apply()
    found = results(model, batch)
    patches.revert()
    assert difference(wanted, found) <= TOLERANCE


@pytest.mark.parametrize("target", ["t", "t[..., :1]"])
def test_a_column_of_targets_is_not_gathered_by(tmp_path: Path, target: str) -> None:
    """What is asked of the targets' form holds in the step that was recorded, whichever form that is."""
    body = f"t = (u[..., :1].abs() * 7).long() % {WIDTH}\ny = x - x.log_softmax(-1).gather(-1, {target})"
    model, batch = spelled.entry(tmp_path, body, "column").build()[0], torch.randn(2, 5, WIDTH)
    patches = Patches(gradscope.plan(model, batch, recipes=["cross_entropy"]))
    patches.apply()
    assert patches.table.supported.any(), patches.table.reasons.tolist()
    recording, _ = record(lambda: model(batch))
    patches.revert()
    assert not [node for node in recording.nodes if node.op == "gather" and node.places[0].frame.owner is model]


def test_losses_of_rows_of_a_matrix_later_of_more_dimensions(tmp_path: Path) -> None:
    body = f"t = (u[..., 0].abs() * 7).long() % {WIDTH}\ny = x - x.log_softmax(-1).gather(-1, t[..., None])"
    assert difference_later(tmp_path, body, (5, WIDTH), (2, 5, WIDTH))[0] <= TOLERANCE


SHOWN = "g = x.log_softmax(-1).gather(-1, t[..., None])"


@pytest.mark.parametrize(
    ("body", "first", "later"),
    [
        pytest.param(f"{SHOWN}\ny = x - g.squeeze(-1).sum() - g.mean()", (2, 5), (3, 7), id="with its column too"),
        pytest.param(f"{SHOWN}.view(2, 3)\ny = x - (g * g.sum(0)).sum()", (6,), (6,), id="in another form"),
        pytest.param(
            f"{SHOWN}.view(x.shape[1], x.shape[0])\ny = x - (g * torch.arange(x.shape[0])).sum()",
            (5, 5),
            (2, 7),
            id="in a form that is the rows' by chance",
        ),
    ],
)
def test_losses_of_rows_that_are_read(
    tmp_path: Path, body: str, first: tuple[int, ...], later: tuple[int, ...]
) -> None:
    lines = f"t = (u[..., 0].abs() * 7).long() % {WIDTH}\n{body}"
    assert difference_later(tmp_path, lines, (*first, WIDTH), (*later, WIDTH))[0] <= TOLERANCE


def test_losses_of_some_rows_are_none_of_all(tmp_path: Path) -> None:
    body = f"t = (u[:, :3, 0].abs() * 7).long() % {WIDTH}\ny = x - x.log_softmax(-1).gather(-1, t[..., None]).sum()"
    assert not gradscope.plan(*spelled.entry(tmp_path, body, "some").build(), recipes=["cross_entropy"]).sites


@pytest.mark.parametrize("count", ["-1", "u.shape[-1] // 8"])
def test_a_view_that_counts_its_parts_itself(tmp_path: Path, count: str) -> None:
    """Queries, keys and values are the first three of a wider tensor's four."""
    body = (
        f"h = u.view(2, 5, {count}, 2, 4).permute(2, 0, 3, 1, 4)\n"
        "y = F.scaled_dot_product_attention(h[0], h[1], h[2]).transpose(1, 2).reshape(2, 5, -1)"
    )
    batch = torch.randn(2, 5, 32, dtype=torch.float64)
    assert difference_of_a_wider(tmp_path, body, batch, 24) <= TOLERANCE
