"""Rules about copies and about what is kept: planted problems, and look-alikes that must be left alone."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from gradscope.diagnose.case import Case, StepFacts
from gradscope.diagnose.rules import RULES
from gradscope.diagnose.rules.memory import saved_dropout
from gradscope.kernels import pays
from gradscope.tables import CHECKPOINT, Finding, SavedRow
from tests.diagnose.run_case import case_of, findings_of
from tests.diagnose.twins_memory import TWINS, WIDTH, Checkpointed, Dropped, Gate, Items, Remembering, Wide

FEWEST_ELEMENTS = pays.FEWEST["dropout"]["elements"]  # other tests have every size fit

NAMES = (
    "slices-zero-filled",
    "slices-written",
    "copies",
    "saved-dropout",
    "saved-activation-inputs",
    "checkpoint-share",
    "leak",
    "embedding-dense-gradient",
)


class Model(nn.Module):
    """A projection, and what a test does with it."""

    def __init__(self, then: Callable[[Tensor], Tensor], width: int = 4 * WIDTH) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, width)
        self.then = then

    def forward(self, x: Tensor) -> Tensor:
        return self.then(self.up(x))


def found(rule: str, model: nn.Module, batch: Tensor | None = None, **options: Any) -> list[Finding]:
    batch = torch.randn(8, 64, WIDTH) if batch is None else batch
    return list(RULES[rule].find(case_of(model, batch, **options)))


def of(rule: str, findings: list[Finding]) -> list[Finding]:
    return [each for each in findings if each.rule == rule]


@pytest.mark.parametrize("twin", TWINS, ids=lambda twin: twin.name)
def test_the_bad_twin_is_found_and_well_worded(twin: Any) -> None:
    (one,) = of(twin.rule, findings_of(**twin.bad()))
    assert one.layers and one.line is not None and "twins_memory.py:" in one.line
    assert one.message[0].isupper()
    assert not one.message.endswith(".") and one.advice.endswith(".") and one.advice[0].isupper()
    assert one.code and any(sign.isdigit() for sign in one.evidence)
    if one.predicted_saving_ns is not None:
        low, high = one.predicted_low_ns, one.predicted_high_ns
        assert low is not None and high is not None and 0 < low <= one.predicted_saving_ns <= high


@pytest.mark.parametrize("twin", TWINS, ids=lambda twin: twin.name)
def test_the_good_twin_is_left_alone(twin: Any) -> None:
    assert of(twin.rule, findings_of(**twin.good())) == []


@pytest.fixture(scope="module")
def case() -> Case:
    """One run with several of the problems."""
    return case_of(Checkpointed(run_again=True), torch.randn(2, 16, 4 * WIDTH))


@pytest.mark.parametrize("rule", NAMES)
def test_nothing_recorded_and_nothing_measured(rule: str, case: Case) -> None:
    ops = tuple(replace(row, self_ns=0) for row in case.run.ops)
    for facts in (StepFacts(), case.facts):
        for memory in (None, case.run.memory):
            for found_ops in (case.run.ops, ops, ()):
                run = replace(case.run, memory=memory, ops=found_ops, lines=())
                for one in RULES[rule].find(Case(run, facts)):
                    assert one.message and one.evidence


# --------------------------------------------------------------------------------------------------------------------
# Slices
# --------------------------------------------------------------------------------------------------------------------


def test_repeated_blocks_are_one_finding_that_names_the_tensor() -> None:
    model = nn.Sequential(Gate(sliced=True), Gate(sliced=True))
    (one,) = found("slices-zero-filled", model, memory=False)
    assert list(one.layers) == ["0", "1"]
    assert one.message == "One tensor is indexed 2 times: backward zero-fills a full-size gradient for each slice"
    assert one.code == "a, b = h.chunk(2, dim=2)"
    assert one.advice == "Take all slices with one split, whose backward writes the whole gradient once."
    assert "2 slices of a tensor of shape 8x64x512, 2 times per step" in one.evidence


def test_parts_of_unequal_size_are_split_by_their_sizes() -> None:
    (one,) = found("slices-zero-filled", Model(lambda h: h[..., :64].mean() + h[..., 64:].exp().mean()), memory=False)
    assert one.code == "a, b = h.split([64, 192], dim=2)"
    assert one.line is not None and "test_memory.py" in one.line


@pytest.mark.parametrize(
    "then",
    [
        lambda h: h[:, :-1] * h[:, 1:],  # they overlap
        lambda h: h[..., :64].sin() * h[..., :64].cos(),  # one part, twice
        lambda h: h[:, 0] * h[:, -1],  # two of 64
        lambda h: h[:, :32],  # a part alone
        lambda h: h.detach()[..., :128] * h.detach()[..., 128:] + h.mean(),  # no gradient
        lambda h: h[:, torch.arange(32)].mean() + h[:, torch.arange(32, 64)].mean(),  # no views
        lambda h: torch.stack([h[:, t : t + 8].sum(1) for t in range(56)]),  # windows
    ],
)
def test_parts_that_no_split_gives_are_left_alone(then: Callable[[Tensor], Tensor]) -> None:
    assert found("slices-zero-filled", Model(then), memory=False) == []


def test_a_part_that_is_written_to_is_left_alone() -> None:
    def then(h: Tensor) -> Tensor:
        a, b = h[..., :128], h[..., 128:]
        a.mul_(2)
        return torch.tanh(a) + b

    assert found("slices-zero-filled", Model(then), memory=False) == []


def test_a_tensor_that_the_line_writes_to_is_not_the_one_it_reads() -> None:
    def then(h: Tensor) -> Tensor:
        y = torch.zeros(h.shape)
        for step in range(h.shape[1]):
            y[:, step] = h[:, step]
        return y

    (one,) = found("slices-zero-filled", Model(then), memory=False)
    assert one.code == "h_parts = h.unbind(1)"


def test_which_of_several_tensors_a_line_reads_part_by_part_is_not_guessed() -> None:
    def then(h: Tensor) -> Tensor:
        weights = torch.ones(64)
        return sum((weights[step] * h[:, step]).sum() for step in range(64))  # type: ignore[return-value]

    (one,) = found("slices-zero-filled", Model(then), memory=False)
    assert one.code == "parts = x.unbind(1)"


# --------------------------------------------------------------------------------------------------------------------
# Copies
# --------------------------------------------------------------------------------------------------------------------


def _cached(h: Tensor) -> Tensor:
    """Each prefix is read: one cat at the end would not do."""
    known, total = h[:, :1], h.new_zeros(())
    for step in range(1, 8):
        known = torch.cat([known, h[:, step : step + 1]], 1)
        total = total + known.exp().mean()
    return total


def _written(h: Tensor) -> Tensor:
    kept = h.clone()
    kept.relu_()
    return kept + h


@pytest.mark.parametrize(
    "then",
    [
        lambda h: h.unflatten(-1, (4, -1)).transpose(1, 2).contiguous().view(8, -1) * 2,  # another form needs it
        lambda h: torch.cat([h.sin(), h], dim=-1).tanh(),  # a skip connection
        lambda h: h.repeat(1, 2, 1).tanh() + 1,  # more of what is more than one
        lambda h: h.mean(1, keepdim=True).repeat(1, 64, 1) @ h.transpose(1, 2),  # a product
        lambda h: h.transpose(1, 2).contiguous() @ h,  # torch would copy by itself
        lambda h: F.scaled_dot_product_attention(*[h.unflatten(-1, (4, -1)).mT.contiguous()] * 3),  # last stride
        _cached,
        _written,
    ],
)
def test_copies_that_are_needed_are_left_alone(then: Callable[[Tensor], Tensor]) -> None:
    assert found("copies", Model(then)) == []


def test_heads_are_copied_for_attention() -> None:
    model = Model(
        lambda h: F.scaled_dot_product_attention(*[h.unflatten(-1, (4, -1)).transpose(1, 2).contiguous()] * 3)
    )
    (one,) = found("copies", model)
    assert one.message == "Heads are copied before attention, which can read the view directly"
    assert one.evidence.startswith("1 copy, 524 kB per step")


# --------------------------------------------------------------------------------------------------------------------
# What is kept
# --------------------------------------------------------------------------------------------------------------------


def test_masks_of_dropout_on_a_cpu_are_as_large_as_what_is_dropped() -> None:
    (one,) = found("saved-dropout", Dropped(nn.Dropout(0.1)))
    assert one.predicted_saving_bytes == 8 * 64 * 4 * WIDTH * 4
    assert list(one.layers) == ["dropout"]
    assert one.code == 'gradscope.recipes.dropout(x, p, self.training, backend="cpu")'


@pytest.mark.parametrize(
    ("threads", "rows", "device", "asked"),
    [(2, 8192, "cpu", False), (2, 7812, "cpu", True), (1, 8192, "cpu", True), (1, 7812, "cuda", False)],
)
def test_a_recipe_that_leaves_few_elements_to_torch_is_to_be_asked_for(
    threads: int, rows: int, device: str, asked: bool
) -> None:
    case = case_of(Dropped(nn.Dropout(0.1)), torch.randn(8, 64, WIDTH))
    row = SavedRow("dropout", None, "MulBackward0", "other", f"{rows}x128", "float32", 1, rows * 512, 0)
    environment = {**case.run.environment, "threads": threads, "device": device}
    advice, code = saved_dropout._cure(
        replace(case, run=replace(case.run, environment=environment)), [row], module=True
    )
    assert ("asked for" in advice, "backend=" in code) == (asked, asked)
    assert (pays.NEVER, saved_dropout.FEWEST_ON_CPU) == FEWEST_ELEMENTS


def test_masks_of_dropout_on_a_gpu_are_bytes() -> None:
    case = case_of(Dropped(nn.Dropout(0.1)), torch.randn(8, 64, WIDTH))
    memory = case.run.memory
    assert memory is not None
    elements = 8 * 64 * 4 * WIDTH

    def on_gpu(row: SavedRow) -> SavedRow:
        if row.layer != "dropout":
            return row
        return replace(row, node="NativeDropoutBackward0", what="result1", dtype="bool", bytes=elements)

    saved = tuple(map(on_gpu, memory.saved))
    total = sum(row.bytes for row in saved)
    rest = [replace(row, saved_bytes=None, saved_total_bytes=None) for row in case.run.layers]
    layers = [
        replace(row, saved_bytes=sum(each.bytes for each in saved if each.layer == row.path))
        for row in rest
        if row.path
    ]
    root = replace(rest[0], saved_bytes=0, saved_total_bytes=total)
    own = sum(each.bytes for each in saved if each.layer == "")
    run = replace(
        case.run,
        layers=(replace(root, saved_bytes=own), *layers),
        memory=replace(memory, saved=saved, saved_bytes=total),
        environment={**case.run.environment, "device": "cuda"},
    )
    (one,) = RULES["saved-dropout"].find(Case(run, case.facts))
    assert one.predicted_saving_bytes == elements


def test_masks_of_modules_in_a_sequence() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.Dropout(0.1), nn.Tanh(), nn.Dropout(0.2))
    (one,) = found("saved-dropout", model)
    assert list(one.layers) == ["1", "3"] and one.line is None  # it is called by no line of the user's
    assert one.predicted_saving_bytes == 2 * 8 * 64 * 4 * WIDTH * 4


@pytest.mark.parametrize("model", [Dropped(nn.Dropout(0.0)), Dropped(nn.Dropout(0.1).eval())])
def test_dropout_that_drops_nothing_is_left_alone(model: nn.Module) -> None:
    assert found("saved-dropout", model) == []


def test_another_factor_of_the_line_is_no_mask() -> None:
    assert found("saved-dropout", Model(lambda h: F.dropout(h, 0.1, False) * h.sin())) == []


def test_small_masks_are_left_alone() -> None:
    class Small(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down, self.drop = nn.Linear(WIDTH, 64 * WIDTH), nn.Linear(64 * WIDTH, 8), nn.Dropout(0.1)

        def forward(self, x: Tensor) -> Tensor:
            return self.drop(self.down(torch.tanh(self.up(x))))

    assert found("saved-dropout", Small()) == []


def test_what_is_kept_twice_is_what_the_linear_layer_keeps() -> None:
    (one,) = found("saved-activation-inputs", Wide())
    assert one.predicted_saving_bytes == 8 * 64 * 4 * WIDTH * 4 and one.severity == "info"
    assert one.message == "Both the input and the output of GELU are saved for backward"
    assert one.code == "checkpoint(lambda h: self.down(F.gelu(h)), h, use_reentrant=False)"


def test_modules_in_a_sequence_are_called_by_index() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.SiLU(), nn.Linear(4 * WIDTH, WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            return self.mlp(x)

    (one,) = found("saved-activation-inputs", Block())
    assert list(one.layers) == ["mlp.1"] and one.predicted_saving_bytes == 8 * 64 * 4 * WIDTH * 4
    assert one.code == "checkpoint(lambda h: mlp[2](mlp[1](h)), h, use_reentrant=False)"


def test_a_norm_that_several_layers_read_is_left_alone() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.a, self.b = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 8), nn.Linear(WIDTH, 8)

        def forward(self, x: Tensor) -> Tensor:
            x = self.norm(x)
            return self.a(x) + self.b(x)

    assert found("saved-activation-inputs", Block()) == []


def test_an_activation_that_is_read_by_a_product_of_elements_is_left_alone() -> None:
    assert found("saved-activation-inputs", Model(lambda h: F.gelu(h) * h.sin())) == []


# --------------------------------------------------------------------------------------------------------------------
# Checkpointing
# --------------------------------------------------------------------------------------------------------------------


def _timed(case: Case, product_ns: int, other_ns: int) -> Case:
    """With these times of recompute, in a step of 100 ms."""
    ops = []
    for row in case.run.ops:
        if row.phase == "recompute":
            time = product_ns if row.name == "aten::addmm" else other_ns if row.name == "aten::gelu" else 0
            row = replace(row, self_ns=time)
        ops.append(row)
    again = sum(row.self_ns for row in ops if row.phase == "recompute")
    step, ledger = case.run.step, case.run.ledger
    layers = [
        replace(
            row,
            backward_self_ns=0,
            gradient_sum_ns=0,
            accumulate_ns=0,
            recompute_ns=again if row.path == "" else 0,
            backward_total_ns=again if row.path == "" else 0,
        )
        for row in case.run.layers
    ]
    parts = dict.fromkeys(ledger.PARTS, 0)
    ledger = replace(ledger, **{**parts, "recompute_ns": again, "backward_ns": again})
    other = 100_000_000 - again
    step = replace(step, wall_ns=100_000_000, forward_ns=0, backward_ns=again, optimizer_ns=0, other_ns=other)
    return Case(replace(case.run, ops=tuple(ops), layers=tuple(layers), ledger=ledger, step=step), case.facts)


def test_products_that_are_run_again(case: Case) -> None:
    number = sum(row.phase == "recompute" and row.name == "aten::addmm" for row in case.run.ops)
    timed = _timed(case, product_ns=4_000_000, other_ns=1_000_000)
    (one,) = RULES["checkpoint-share"].find(timed)
    rows = [row for row in timed.run.ops if row.phase == "recompute" and row.name.startswith("aten::")]
    asked = round(sum(row.calls for row in rows) * 2 * 6_000)  # the policy, in forward and again
    assert one.predicted_saving_ns == number * 4_000_000 - asked and one.severity == "critical"
    assert one.cost_ns == timed.run.ledger.recompute_ns
    assert one.message == "Checkpointing recomputes the forward pass, mostly expensive matmuls"
    assert one.code == (
        "checkpoint(block, x, use_reentrant=False, "
        "context_fn=functools.partial(create_selective_checkpoint_contexts, [torch.ops.aten.addmm.default]))"
    )
    assert "of the step; matmuls are" in one.evidence and "saving these layers' tensors instead" in one.evidence


@pytest.mark.parametrize(
    ("name", "called"),
    [
        ("mm", "mm"),
        ("bmm", "bmm"),
        ("mv", "mv"),
        ("mkldnn_convolution", "convolution"),  # every kernel of convolution's is called through the one operation
        ("cudnn_convolution", "convolution"),
        ("_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_flash_attention_for_cpu"),
    ],
)
def test_every_kind_of_product_that_is_run_again(case: Case, name: str, called: str) -> None:
    timed = _timed(case, product_ns=4_000_000, other_ns=1_000_000)
    ops = [replace(row, name=f"aten::{name}") if row.name == "aten::addmm" else row for row in timed.run.ops]
    (one,) = RULES["checkpoint-share"].find(Case(replace(timed.run, ops=tuple(ops)), timed.facts))
    assert one.message == "Checkpointing recomputes the forward pass, mostly expensive matmuls"
    assert one.code is not None and f"[torch.ops.aten.{called}.default]" in one.code


def test_cheap_operations_that_are_run_again(case: Case) -> None:
    (one,) = RULES["checkpoint-share"].find(_timed(case, product_ns=0, other_ns=5_000_000))
    assert one.predicted_saving_ns is None and one.message == "Checkpointing recomputes the forward pass"
    assert list(RULES["checkpoint-share"].find(_timed(case, product_ns=0, other_ns=2_000_000))) == []


def test_forward_in_the_backward_of_a_custom_function_is_no_checkpoint(case: Case) -> None:
    """torchdiffeq's adjoint solves another equation there: nothing could be saved in its place."""
    timed = _timed(case, product_ns=4_000_000, other_ns=1_000_000)
    memory = timed.run.memory
    assert memory is not None and any(row.node == CHECKPOINT for row in memory.saved)
    rest = tuple(replace(row, node="FunctionBackward") for row in memory.saved)
    run = replace(timed.run, memory=replace(memory, saved=rest))
    assert list(RULES["checkpoint-share"].find(Case(run, timed.facts))) == []
    nested = tuple(
        replace(row, name="CheckpointFunctionBackward") if row.name == "aten::gelu" else row for row in run.ops
    )
    assert list(RULES["checkpoint-share"].find(Case(replace(run, ops=nested), timed.facts)))
    assert list(RULES["checkpoint-share"].find(Case(replace(run, memory=None), timed.facts))), "nobody knows"


class Counted(TorchDispatchMode):
    """Counts products that are computed."""

    def __init__(self) -> None:
        super().__init__()
        self.products = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.products += func is torch.ops.aten.addmm.default
        return func(*args, **(kwargs or {}))


def _products(**options: Any) -> int:
    with Counted() as counted:
        Checkpointed(**options)(torch.randn(2, 4, 4 * WIDTH, requires_grad=True)).sum().backward()
    return counted.products


def test_the_advice_runs_no_product_again() -> None:
    contexts = functools.partial(create_selective_checkpoint_contexts, [torch.ops.aten.addmm.default])
    assert _products(run_again=True) > 6
    assert _products(run_again=True, context_fn=contexts) == 6


def test_only_the_activation_is_run_again() -> None:
    with Counted() as counted:
        Wide(run_again=True)(torch.randn(2, 4, WIDTH, requires_grad=True)).sum().backward()
    assert counted.products == 2


def test_about_what_would_be_kept_is_what_is_kept_without(case: Case) -> None:
    from gradscope.diagnose.rules.memory.checkpoint_share import _bytes_of

    plain = case_of(Checkpointed(run_again=False), torch.randn(2, 16, 4 * WIDTH)).run.memory
    assert plain is not None and case.run.memory is not None
    layers = {row.layer for row in case.run.ops if row.phase == "recompute" and row.layer}
    held, results = _bytes_of(case, layers)
    already = case.run.memory.saved_bytes
    assert held + already == pytest.approx(plain.saved_bytes, rel=0.1)
    assert results == 3 * 2 * 16 * (4 + 16) * WIDTH * 4


# --------------------------------------------------------------------------------------------------------------------
# Leaks
# --------------------------------------------------------------------------------------------------------------------


def test_a_kept_loss_is_a_warning_for_its_graph() -> None:
    (one,) = found("leak", Remembering(leaks=True))
    assert one.severity == "warning" and "their autograd graph stays too" in one.evidence
    assert one.code == "losses.append(loss.item())"


class Keeping(nn.Module):
    """A model that keeps something of a step."""

    def __init__(self, keep: Callable[[list[Tensor], Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.kept: list[Tensor] = []
        self.keep = keep

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x).tanh()
        loss = h.pow(2).mean()
        self.keep(self.kept, h, loss)
        return loss


def _latest(kept: list[Tensor], h: Tensor, loss: Tensor) -> None:
    kept[:] = [h.detach()]


@pytest.mark.parametrize("keep", [_latest, lambda kept, h, loss: kept.append(loss.detach())])
def test_what_does_not_grow_and_detached_numbers_are_left_alone(keep: Any) -> None:
    assert found("leak", Keeping(keep)) == []


def test_kept_activations_are_critical() -> None:
    (one,) = found("leak", Keeping(lambda kept, h, loss: kept.append(h.exp())))
    assert one.severity == "critical" and one.predicted_saving_bytes is not None
    assert one.predicted_saving_bytes >= 8 * 64 * 4 * WIDTH * 4
    assert one.code == "kept.append(x.detach().cpu())"


# --------------------------------------------------------------------------------------------------------------------
# Embeddings
# --------------------------------------------------------------------------------------------------------------------


class Tied(nn.Module):
    """A table that is also the head's."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(20_000, 32)
        self.head = nn.Linear(32, 20_000, bias=False)
        self.head.weight = self.table.weight

    def forward(self, items: Tensor) -> Tensor:
        return self.head(self.table(items))


class Weighed(Items):
    """A table whose norm is part of the loss."""

    def forward(self, items: Tensor) -> Tensor:
        return super().forward(items).mean() + self.table.weight.pow(2).mean()


@pytest.mark.parametrize(
    "model", [Tied(), Weighed(sparse=False, rows=20_000), Items(sparse=False, rows=1000)], ids=["tied", "norm", "small"]
)
def test_tables_whose_gradient_is_dense_or_small_are_left_alone(model: nn.Module) -> None:
    assert found("embedding-dense-gradient", model, torch.randint(0, 1000, (4, 8)), memory=False) == []


def test_the_optimizers_part_is_saved_too() -> None:
    model = Items(sparse=False)
    optimizer = torch.optim.AdamW(model.parameters())
    (one,) = found("embedding-dense-gradient", model, torch.randint(0, 40_000, (8, 32)), optimizer=optimizer)
    (alone,) = found("embedding-dense-gradient", Items(sparse=False), torch.randint(0, 40_000, (8, 32)))
    assert "share of the optimizer" in one.evidence and "part of the optimizer" not in alone.evidence
    for each in (one, alone):
        low, saving, high = each.predicted_low_ns, each.predicted_saving_ns, each.predicted_high_ns
        assert low is not None and saving is not None and high is not None and low < saving <= high
    assert (one.predicted_saving_ns or 0) < (one.predicted_high_ns or 0)
    assert one.message == "The gradient of table.weight is dense but almost entirely zero"
    assert "a batch uses at most 256 of 40.0 k rows (0.6 %)" in one.evidence
    assert one.code == "nn.Embedding(40000, 32, sparse=True); torch.optim.SparseAdam([model.table.weight])"
