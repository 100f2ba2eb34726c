"""Rules about recipes: where one belongs they find it, once, and say by how much; elsewhere they are silent."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradscope.diagnose.case import Case, StepFacts
from gradscope.diagnose.engine import diagnose
from gradscope.diagnose.rules.recipes.attention import why_math
from gradscope.diagnose.worth import LEFT
from gradscope.tables import Finding, PlaceFact
from tests.diagnose import twins_recipes as twins
from tests.diagnose.made_graph import changed_call
from tests.diagnose.run_case import Twin, case_of, findings_of, timed_by_operations
from tests.diagnose.twins_recipes import TWINS

RULES = {twin.rule for twin in TWINS}


@pytest.fixture(autouse=True)
def same_numbers() -> None:
    torch.manual_seed(0)


def with_savings(case: Case, ns: int | None = 1_000_000, size: int | None = 1_000_000) -> Case:
    """As if every micro-run had given this."""
    places = [replace(each, predicted_saving_ns=ns, predicted_saving_bytes=size) for each in case.facts.places]
    return Case(case.run, replace(case.facts, places=places))


def of_recipes(case: Case) -> list[Finding]:
    """What these rules find."""
    found, notes = diagnose(case)
    assert not notes, notes
    return [each for each in found if each.rule in RULES]


def one_of(case: Case, rule: str) -> Finding:
    """The only finding of a rule."""
    (found,) = (each for each in of_recipes(case) if each.rule == rule)
    return found


@pytest.mark.parametrize("twin", TWINS, ids=lambda twin: f"{twin.rule}: {twin.name}")
def test_fires_on_the_bad_twin_and_not_on_the_good(twin: Any) -> None:
    bad, good = with_savings(case_of(**twin.bad())), with_savings(case_of(**twin.good()))
    found = one_of(bad, twin.rule)
    assert found.layers
    assert found.line is not None
    assert found.line.startswith("tests/diagnose/twins_recipes.py:")
    assert found.message[0].isupper()
    assert not found.message.endswith(".")
    assert found.advice.endswith(".")
    assert found.code
    assert found.predicted_low_ns is not None and found.predicted_high_ns is not None
    assert found.predicted_low_ns <= (found.predicted_saving_ns or 0) <= found.predicted_high_ns
    assert twin.rule not in {each.rule for each in of_recipes(good)}


@pytest.mark.parametrize("twin", TWINS, ids=lambda twin: f"{twin.rule}: {twin.name}")
def test_no_place_has_two_findings(twin: Any) -> None:
    found = of_recipes(with_savings(case_of(**twin.bad(), memory=False, lines=True)))
    lines = [each.line for each in found]
    assert len(lines) == len(set(lines))


@pytest.mark.micro_runs
def test_attention_by_hand_saves_time_and_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory is measured; the time is what the replay of both ways would have told."""
    from gradscope.patching import places as found_places
    from gradscope.patching.prove import predict

    monkeypatch.setattr(found_places, "PREDICTION_NS", 10**15)  # however long the step took
    monkeypatch.setattr(predict.Replay, "times_ns", lambda *_: (3_000_000, 1_000_000))
    (found,) = [each for each in findings_of(twins.ByHand(), torch.randn(2, 512, 64)) if each.rule in RULES]
    assert found.rule == "attention-by-hand"
    assert (found.predicted_saving_ns or 0) > 0
    assert (found.predicted_saving_bytes or 0) > 4_000_000  # scores of 8 heads
    assert "`if q.size(-2) == k.size(-2): y = attention(q, k, v, is_causal=True" in found.advice  # keys of a helper's
    assert "softmax" not in found.advice


@pytest.mark.micro_runs
def test_repeated_blocks_are_one_finding_and_one_micro_run(monkeypatch: pytest.MonkeyPatch) -> None:
    from gradscope.patching import places as found_places
    from gradscope.patching.prove import predict
    from gradscope.patching.prove.predict import Saving

    runs: list[object] = []
    monkeypatch.setattr(found_places, "PREDICTION_NS", 10**15)
    monkeypatch.setattr(predict, "measured", lambda match, *_: runs.append(match) or Saving(5, 7))
    case = case_of(nn.Sequential(*(twins.ByHand() for _ in range(5))), torch.randn(1, 128, 64))
    assert len(runs) == 1
    savings = {place.predicted_saving_ns for place in case.facts.places}
    assert len(case.facts.places) == 5
    assert len(savings) == 1
    found = one_of(with_savings(case, 1_000), "attention-by-hand")
    assert found.layers == ("0", "1", "2", "3", "4")
    assert found.predicted_saving_ns == 5_000
    assert "in each of 5 layers" in found.evidence


def test_attention_by_hand_is_shown_at_its_softmax() -> None:
    case = with_savings(case_of(twins.ByHand(), torch.randn(2, 256, 64)))
    found = one_of(case, "attention-by-hand")
    assert case.lines[str(found.line)].text.startswith("weights = F.softmax(")
    assert re.search(r" on 4 lines, \d+ to \d+, ", found.evidence)


def test_what_a_module_that_runs_twice_saves_is_counted_once() -> None:
    """A prediction is of a step already; tests/fixing/test_one_recording.py has it twice that of one call."""

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = twins.ByHand()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.attention(self.attention(x))

    from gradscope.patching import places as found_places
    from gradscope.patching.prove.predict import Saving

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(found_places, "PREDICTION_NS", 10**15)
        patch.setattr(found_places, "predict", lambda sites, *_: {site: Saving(7, 11) for site in sites})
        (place,) = case_of(Twice(), torch.randn(1, 64, 64)).facts.places
    assert (place.predicted_saving_ns, place.predicted_saving_bytes) == (7, 11)


def test_rounds_of_a_micro_run_fit_the_time() -> None:
    """Many of what is short, one of what is long, none where there is no time; and never more than is left."""
    from gradscope.patching.places import _FIXED_NS, _rounds
    from gradscope.patching.prove.predict import FEWEST_ROUNDS

    assert _rounds(100_000, 10**9) > FEWEST_ROUNDS
    assert _rounds(20_000_000, 10**9) == FEWEST_ROUNDS
    assert _rounds(200_000_000, 10**9) == 1
    assert _rounds(400_000_000, 10**9) == _rounds(100_000, _FIXED_NS / 1_000) == 0


def test_a_piece_that_would_take_too_long_is_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    from gradscope.patching import places as found_places

    monkeypatch.setattr(found_places, "PREDICTION_NS", 1)
    monkeypatch.setattr(found_places, "predict", lambda *_: pytest.fail("it was run"))
    case = timed_by_operations(case_of(twins.ByHand(), torch.randn(2, 256, 64)))
    found = one_of(case, "attention-by-hand")
    spent = case.lines_ns({case.call(index).source or "" for index in case.facts.places[0].calls})
    assert 0 < (found.predicted_low_ns or 0) <= (found.predicted_saving_ns or 0) <= (found.predicted_high_ns or 0)
    assert found.predicted_saving_ns is not None and found.predicted_saving_ns <= spent
    assert found.predicted_saving_bytes  # the scores that memory shows


def test_torchs_own_norm_is_told_from_one_by_hand_however_often_it_runs() -> None:
    class Twice(nn.Module):
        def __init__(self, unit: twins.Unit) -> None:
            super().__init__()
            self.unit = unit

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.unit(x) + self.unit(2 * x)

    own = one_of(case_of(Twice(twins.RmsByTorch()), torch.randn(512, 16)), "norm-by-hand")
    by_hand = one_of(case_of(Twice(twins.RmsByHand()), torch.randn(512, 16)), "norm-by-hand")
    assert own.message.startswith("PyTorch runs RMS norm unfused on the CPU")
    assert by_hand.message.startswith("Unfused RMS norm")


def test_large_logits_without_a_micro_run_are_estimated_by_the_loss() -> None:
    case = with_savings(case_of(twins.Language(20_000), torch.randint(20_000, (8, 128))), None, None)
    found = one_of(case, "logits-materialised")
    assert found.predicted_saving_bytes == 2 * 4 * 1024 * 20_000
    assert (found.predicted_saving_ns or 0) > 0
    assert "lazy_linear(self.head, " in found.advice


class Head(nn.Module):
    """Logits of many words; with targets the loss of them."""

    def __init__(self) -> None:
        super().__init__()
        self.rows, self.head = nn.Embedding(20_000, 64), nn.Linear(64, 20_000)

    def forward(self, ids: Tensor) -> Tensor:
        logits = self.head(self.rows(ids))
        return logits.float()


@pytest.mark.parametrize("criterion", [False, True])
def test_a_loss_that_a_script_computes_itself(criterion: bool) -> None:
    """fix runs a script's models alone: what it says it does it must find."""
    ids = torch.randint(20_000, (8, 128))
    model, loss_module = Head(), nn.CrossEntropyLoss()
    function = loss_module if criterion else F.cross_entropy

    def loss(output: Tensor, batch: Tensor) -> Tensor:
        return torch.as_tensor(function(output.view(-1, 20_000), batch.flatten()))

    case = with_savings(case_of(model, ids, loss))
    assert "`gradscope fix FILE` does this" in one_of(case, "logits-materialised").advice
    script = replace(case.run, workload=replace(case.run.workload, mode="script"))
    found = one_of(Case(script, case.facts), "logits-materialised")
    assert "`gradscope fix FILE` does this" not in found.advice
    assert found.code == "gradscope.patch(model, batch, loss, recipes=['linear_cross_entropy'])"


def waiting(case: Case, share: float) -> Case:
    """As if the training thread had waited for a core for so much of each step, and the steps had been alike."""
    step = replace(case.run.step, waited_ns=int(share * case.run.step.wall_ns), spread={})
    return Case(replace(case.run, step=step), case.facts)


def test_a_machine_that_was_busy_hides_no_memory() -> None:
    """Two short runs on it may say anything of the time."""
    case = with_savings(case_of(twins.GeluByHand(), torch.randn(512, 16)), -(10**9), 10**6)
    assert not of_recipes(waiting(case, 0.0))
    found = one_of(waiting(case, 0.5), "activation-by-hand")
    assert found.predicted_saving_bytes and found.predicted_saving_ns is None
    assert not of_recipes(waiting(with_savings(case, -(10**9), 0), 0.5))


def test_nothing_is_said_where_the_micro_run_gained_nothing() -> None:
    case = waiting(case_of(twins.GeluByHand(), torch.randn(512, 16)), 0.0)
    assert not of_recipes(with_savings(case, 0, 0))
    assert not of_recipes(with_savings(case, -(10**9), 10**9))
    assert one_of(with_savings(case, -1, 10**6), "activation-by-hand").predicted_saving_ns is None


def test_the_mask_rule_has_the_packed_places_with_a_causal_mask() -> None:
    class PackedMask(twins.Packed):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            batch, tokens, width = x.shape
            q, k, v = (
                each.view(batch, tokens, self.heads, -1).transpose(1, 2) for each in self.c_attn(x).split(width, dim=2)
            )
            mask = torch.ones(tokens, tokens, dtype=torch.bool).tril()
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
            return y.transpose(1, 2).reshape(batch, tokens, width)

    found = of_recipes(with_savings(case_of(PackedMask(), torch.randn(2, 64, 256))))
    assert [each.rule for each in found] == ["attention-explicit-mask"]
    assert found[0].advice.startswith("Pass `is_causal=True` instead of the mask. ")


@pytest.mark.parametrize(
    ("dropout", "bias", "reason"),
    [(0.1, False, "has no dropout"), (0.0, True, "computes no gradient for the mask")],
)
def test_the_math_kernel_is_told_with_its_reason(dropout: float, bias: bool, reason: str) -> None:
    model = twins.LearntBias(512) if bias else twins.Causal(dropout=dropout)
    found = one_of(case_of(model, torch.randn(8 if bias else 2, 512, 64)), "attention-math-kernel")
    assert found.message.endswith(reason)
    assert "_scaled_dot_product_attention_math" in found.evidence
    assert found.recipe == "attention"
    assert (found.predicted_saving_bytes or 0) >= 4 * 8 * 512 * 512


def test_a_learnt_bias_of_few_scores_is_best_as_it_is() -> None:
    """The recipe took 1.25 times as long there."""
    found = of_recipes(case_of(twins.LearntBias(512), torch.randn(2, 512, 64)))
    assert [each.rule for each in found] == []


def test_three_dimensions_are_a_reason_too() -> None:
    class Flat(twins.Attention):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.scaled_dot_product_attention(self.query(x), self.key(x), self.value(x), is_causal=True)

    x = torch.randn(2, 256, 64)
    found = [each for each in of_recipes(case_of(Flat(), x)) if "math" in each.rule]
    math = torch._fused_sdp_choice(x, x, x, is_causal=True) == 0  # torch 2.15 has the flash kernel take three as well
    reasons = ["query has 3 dimensions, and the fused kernels need 4"] if math else []
    assert [each.message.rpartition(": ")[2] for each in found] == reasons


def test_packed_attention_on_the_math_kernel_is_not_told_as_copies() -> None:
    class Dropping(twins.Packed):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            batch, tokens, width = x.shape
            q, k, v = self.c_attn(x).split(width, dim=2)
            q = q.view(batch, tokens, self.heads, width // self.heads).transpose(1, 2)
            k = k.view(batch, tokens, self.heads, width // self.heads).transpose(1, 2)
            v = v.view(batch, tokens, self.heads, width // self.heads).transpose(1, 2)
            y = F.scaled_dot_product_attention(q, k, v, dropout_p=0.1, is_causal=True)
            return y.transpose(1, 2).contiguous().view(batch, tokens, width)

    (found,) = of_recipes(with_savings(case_of(Dropping(), torch.randn(4, 256, 256))))
    assert (found.rule, found.recipe) == ("attention-math-kernel", "packed_attention")


def test_a_classifier_has_no_large_logits() -> None:
    model = nn.Sequential(nn.Linear(16, 256), nn.ReLU(), nn.Linear(256, 10))
    x, y = torch.randn(4096, 16), torch.randint(10, (4096,))
    assert not of_recipes(with_savings(case_of(model, (x,), loss=lambda output, batch: F.cross_entropy(output, y))))


def test_a_tied_embedding_says_what_is_made_for_how_many_tokens() -> None:
    case = case_of(twins.Language(30_000, tied=True), torch.randint(30_000, (2, 128)))
    found = one_of(case, "tied-embedding")
    row = case.layers["embedding"]
    assert "30.0 k rows" in found.evidence and "256 tokens" in found.evidence
    promised = (found.predicted_low_ns, found.predicted_saving_ns, found.predicted_high_ns)
    assert found.cost_ns is not None
    most = int(found.cost_ns * (1 - LEFT))  # of the lines, to which sums of gradients do not belong
    for part, ns in zip((0.5, 0.8, 0.95), promised, strict=True):
        assert ns is not None
        least = min(round(part * row.gradient_sum_ns), most)
        assert least <= ns <= round(part * (row.gradient_sum_ns + row.backward_self_ns))


def test_the_advice_holds_the_statements_that_would_stand_there() -> None:
    case = case_of(twins.Packed(), torch.randn(2, 64, 256))
    (place,) = case.facts.places
    assert place.new_text.splitlines() == [
        "qkv_ = self.c_attn(x)",
        "return packed_attention(qkv_, self.heads, is_causal=True)",
    ]


@pytest.mark.parametrize("recorded", [True, False])
def test_empty_facts_are_no_findings(recorded: bool) -> None:
    case = case_of(twins.Causal(), torch.randn(1, 16, 64), memory=False)
    assert not of_recipes(Case(case.run, StepFacts(recorded=recorded)))


def test_a_place_without_times_or_memory_is_no_error() -> None:
    case = case_of(twins.RmsByHand(), torch.randn(64, 16), memory=False)
    run = replace(case.run, lines=(), ops=(), memory=None)
    found = one_of(with_savings(Case(run, case.facts), 5, None), "norm-by-hand")
    assert found.predicted_saving_ns == 5
    assert math.isclose(found.predicted_low_ns or 0, 5 / 1.5, abs_tol=1)


def test_places_that_are_refused_or_idle_are_silent() -> None:
    case = case_of(twins.GeluByHand(), torch.randn(64, 16))

    def changed(**fields: Any) -> Case:
        places: list[PlaceFact] = [replace(each, **fields) for each in case.facts.places]
        return with_savings(Case(case.run, replace(case.facts, places=places)))

    assert of_recipes(changed())
    assert not of_recipes(changed(supported=False))
    assert not of_recipes(changed(idle="so few are sooner done at once"))


@pytest.mark.parametrize(
    ("dtype", "query", "options", "reason"),
    [
        (torch.float64, (2, 4, 512, 16), {}, "the fused kernels do not support float64"),
        (
            torch.float32,
            (2, 4, 512, 18),
            {},
            "in float32 the fused kernels need a head size that is a multiple of 4, not 18",
        ),
        (
            torch.float32,
            (2, 4, 512, 16),
            {"enable_gqa": True},
            "the fused kernels do not support grouped heads in float32",
        ),
        (torch.float32, (8, 512, 16), {}, "query has 3 dimensions, and the fused kernels need 4"),
        (torch.bfloat16, (2, 4, 512, 16), {"dropout_p": 0.1}, ""),  # nothing speaks against them: somebody asked for it
    ],
)
def test_reasons_on_cuda(dtype: torch.dtype, query: tuple[int, ...], options: dict[str, Any], reason: str) -> None:
    case = case_of(twins.Causal(dropout=0.1), torch.randn(2, 512, 64))
    (call,) = (each for each in case.facts.calls if each.op == "scaled_dot_product_attention")
    given = tuple(replace(each, device=torch.device("cuda"), dtype=dtype, shape=query) for each in call.inputs)
    changed = changed_call(call, {"is_causal": True, **options}, inputs=given)
    calls = [changed if each is call else each for each in case.facts.calls]
    assert why_math(Case(case.run, replace(case.facts, calls=calls)), changed) == reason


ONE_OF_EACH_RULE = list({twin.rule: twin for twin in reversed(TWINS)}.values())


@pytest.mark.parametrize("twin", ONE_OF_EACH_RULE, ids=lambda twin: twin.name)
def test_what_an_optimizer_does_is_in_no_recipes_way(twin: Twin) -> None:
    """It changes parameters in place, and reads them, after all that a recipe stands for."""
    given = twin.bad()
    case, model = case_of(**given), given["model"]
    given["optimizer"] = torch.optim.Adam(model.parameters(), foreach=False)
    trained = case_of(**given)
    assert [(place.recipe, place.source, place.reasons) for place in trained.facts.places] == [
        (place.recipe, place.source, place.reasons) for place in case.facts.places
    ]


@pytest.mark.parametrize(("rows", "phase"), [(4, "optimizer"), (2048, "backward")])
def test_no_more_is_freed_than_lives_at_the_peak(rows: int, phase: str) -> None:
    """Each micro-run has a peak of its own: they do not add up, and of them nothing lives while an optimizer runs."""
    blocks = nn.Sequential(*[GeluByHand(128) for _ in range(4)])
    case = case_of(blocks, torch.randn(rows, 128), optimizer=torch.optim.Adam(blocks.parameters(), foreach=True))
    assert case.run.memory is not None and case.run.memory.peak_phase == phase
    each = 15_000_000
    found = one_of(with_savings(case, size=each), "activation-by-hand")
    lines = {case.call(index).source for place in case.facts.places for index in place.calls}
    alive = sum(row.at_peak_bytes or 0 for row in case.run.memory.saved if row.line in lines)
    assert (found.predicted_saving_bytes or 0) == alive + (each if phase == "backward" else 0)
    assert phase == "optimizer" or alive > 1_000_000


class GeluByHand(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.up(x)
        h = h * 0.5 * (1.0 + torch.erf(h / math.sqrt(2.0)))
        return torch.as_tensor(self.down(h))
