"""``fix`` proves what its profile has found: one recording, one matching, one prediction."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from gradscope import Workload, pipeline
from gradscope.fixing import run
from gradscope.fixing.options import FixOptions
from gradscope.fixing.run import fix_workload
from gradscope.patching import plan as planning
from gradscope.patching.places import Found, find_places
from gradscope.patching.sites import Site
from gradscope.recording.graph import Recording
from gradscope.recording.record import Recorder
from gradscope.tables import Options, PlaceFact
from tests.fixing.fix_fixtures import gains_fixture  # noqa: F401 (a fixture is used by its name)
from tests.made_times import BETTER, Saves
from tests.patching.corpus import activations, lookalikes_losses, lookalikes_source
from tests.patching.corpus.entry import Entry

ENTRIES_ALIKE = (*lookalikes_losses.ENTRIES, *lookalikes_source.ENTRIES)
QUICK = Options(steps=1, warmup=0, memory=False, lines=False, device="cpu")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(32, 96)

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.shape
        q, k, v = self.proj(x).view(b, t, 3, 4, 8).permute(2, 0, 3, 1, 4)
        weights = (q @ k.transpose(-2, -1) / 8**0.5).softmax(-1)
        return (weights @ v).transpose(1, 2).reshape(b, t, c)


class Net(nn.Module):
    """The block runs twice in a step."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, x: Tensor) -> Tensor:
        return self.block(self.block(x))


class Tabled(Net):
    """It makes a table in its first step, which is gone when the model is as it was before."""

    table: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.table is None:
            self.table = torch.linspace(0, 1, 32)
        return super().forward(x * self.table)


class Long(Net):
    """More calls than a profile writes down."""

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(100):
            x = x + 1
        return super().forward(x)


class Keeping(Net):
    """What was made in a step lives on in the model."""

    def forward(self, x: Tensor) -> Tensor:
        self.last = super().forward(x)
        return self.last


def data() -> Tensor:
    return torch.randn(2, 12, 32, generator=torch.Generator().manual_seed(5))


def smooth(output: Tensor, batch: Any) -> Tensor:
    """A loss of the user's: it belongs to no module."""
    return F.softmax(output, -1).log().mean()


@pytest.fixture(name="recorded")
def recorded_fixture(monkeypatch: pytest.MonkeyPatch) -> list[Workload]:
    """The workloads that a step of their own was recorded of."""
    seen: list[Workload] = []
    real = planning.record_step

    def counted(workload: Workload, device: torch.device) -> Recording:
        seen.append(workload)
        return real(workload, device)

    monkeypatch.setattr(planning, "record_step", counted)
    return seen


@pytest.fixture(name="places")
def places_fixture(monkeypatch: pytest.MonkeyPatch) -> list[tuple[PlaceFact, ...]]:
    """What the rules of each profile were told."""
    seen: list[tuple[PlaceFact, ...]] = []

    def noted(*args: Any) -> tuple[PlaceFact, ...]:
        seen.append(find_places(*args))
        return seen[-1]

    monkeypatch.setattr("gradscope.patching.places.find_places", noted)
    return seen


@pytest.fixture(name="worth")
def worth_fixture(gains: Callable[[Saves], None]) -> None:
    """Every place saves something, and no clock is asked."""
    gains(BETTER)


def rows(found: Any) -> list[Any]:
    return [replace(site, predicted_saving_ns=None, predicted_saving_bytes=None) for site in found.data.sites]


@pytest.mark.usefixtures("worth")
@pytest.mark.parametrize(
    ("recipes", "trained", "foreseen"),
    [
        (None, False, True),
        (None, True, True),
        (("gelu", "packed_attention"), False, True),
        (("attention",), False, False),  # the profile has foreseen what packed attention saves there
    ],
)
def test_fix_takes_the_sites_of_its_profile(
    recorded: list[Workload],
    places: list[tuple[PlaceFact, ...]],
    recipes: tuple[str, ...] | None,
    trained: bool,
    foreseen: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.manual_seed(0)
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters()) if trained else None
    workload, settings = Workload(net, data(), loss=smooth, optimizer=optimizer), FixOptions(QUICK, recipes)
    found = fix_workload(workload, settings)
    assert recorded == [], "the profile's is the only one"
    (site,) = found.data.kept
    (place,) = places[0]
    assert (place.recipe == site.recipe) == foreseen
    assert place.predicted_saving_ns == 2 * BETTER.ns, "of a step: the block runs twice"
    expected = (place.predicted_saving_ns, place.predicted_saving_bytes) if foreseen else (None, None)
    assert (site.predicted_saving_ns, site.predicted_saving_bytes) == expected
    monkeypatch.setattr(run, "plan_of", lambda *args: None)
    alone = fix_workload(workload, settings)
    assert len(recorded) == 1
    assert alone.data.diff == found.data.diff != ""
    assert rows(alone) == rows(found)


@pytest.mark.usefixtures("worth")
@pytest.mark.parametrize(
    "workload",
    [
        pytest.param(lambda: Workload(Net(), DataLoader(list(data().repeat(4, 1, 1)), 2)), id="another batch"),
        pytest.param(lambda: Workload(Keeping(), data()), id="what is kept may be garbage"),
        pytest.param(lambda: Workload(Tabled(), data()), id="what was kept of another step"),
        pytest.param(lambda: Workload(Long(), data()), id="too many calls"),
    ],
)
def test_a_step_of_its_own_is_recorded_where_the_profile_has_none(
    recorded: list[Workload], workload: Callable[[], Workload], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Recorder, "MOST_CALLS", 100)
    torch.manual_seed(0)
    fix_workload(workload(), FixOptions(QUICK))
    assert len(recorded) == 1


@pytest.mark.usefixtures("worth")
@pytest.mark.parametrize("ends", ["well", "in the check", "by an interrupt"])
def test_nothing_of_the_step_lives_on(ends: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[weakref.ref[Any]] = []
    real = planning.find_sites

    def noted(*args: Any) -> list[Site]:
        found = real(*args)
        seen.extend(map(weakref.ref, [args[1], *found]))
        return found

    monkeypatch.setattr("gradscope.patching.places.find_sites", noted)
    torch.manual_seed(0)
    model = Net()

    def check(files: Any) -> None:
        if ends == "in the check" and seen:  # not at the early one, before anything is recorded
            raise ValueError

    def stopped(*args: Any, **kwargs: Any) -> None:
        raise KeyboardInterrupt

    if ends == "by an interrupt":
        monkeypatch.setattr(run, "verify", stopped)
    try:
        fix_workload(Workload(model, data()), FixOptions(QUICK), check=check)
        assert ends == "well"
    except (ValueError, KeyboardInterrupt):
        assert ends != "well"
    seen.append(weakref.ref(model))
    del model
    gc.collect()
    assert len(seen) > 2
    assert [each() for each in seen if each() is not None] == []


def test_what_is_found_is_dropped_once_the_rules_have_read_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also by a profile that nobody has asked for its sites: their edits, which refer to themselves, hold the model."""
    dropped: list[Found] = []
    real = Found.drop

    def noted(found: Found) -> None:
        assert found.recording is not None and found.sites
        real(found)
        dropped.append(found)

    monkeypatch.setattr(Found, "drop", noted)
    pipeline.profile_workload(Workload(Net(), data()), QUICK)
    (found,) = dropped
    assert (found.recording, found.sites, found.savings, found.files) == (None, [], {}, {})


AGREED = ("gelu_tanh_numpy_inline", "gelu_erf_phi_module", "like_own_call", "like_smoothing_by_hand_outside")


@pytest.mark.parametrize(
    "entry",
    [each for each in (*activations.ENTRIES, *ENTRIES_ALIKE) if each.name in AGREED],
    ids=lambda entry: entry.name,
)
def test_a_profile_sees_what_a_plan_sees(entry: Entry) -> None:
    """Numbers of NumPy's, a ``__call__`` of the model's own, the frames of a loss."""
    torch.manual_seed(7)
    model, batch = entry.build()
    workload, found = Workload(model, batch, loss=entry.loss), Found()
    pipeline.profile_workload(workload, QUICK, found=found)
    ((_, sites),) = found.sites
    expected = planning.plan(workload, device="cpu").sites
    seen = [[(site.path, site.recipe, site.line, site.reasons) for site in each] for each in (sites, expected)]
    found.drop()
    assert seen[0] == seen[1] != []
