"""What could be replaced in a model, found in one recorded step that leaves everything as it was."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from gradscope.capture.state import preserved
from gradscope.errors import UsageError
from gradscope.patching.edit.source import SourceFile
from gradscope.patching.match.matchers import MATCHERS
from gradscope.patching.places import Found
from gradscope.patching.prove.predict import Saving, predict
from gradscope.patching.sites import Site, find_sites
from gradscope.recording.graph import Recording, settle
from gradscope.recording.record import record
from gradscope.workload import (
    Batches,
    Workload,
    call_model,
    import_path,
    is_one_batch,
    resolve_device,
    scalar_loss,
)

if TYPE_CHECKING:
    import pandas as pd

Filter = Callable[[str, nn.Module], bool]


@dataclass(eq=False)
class Plan:
    """The sites of a model, and why those that cannot be replaced cannot."""

    sites: list[Site]
    files: dict[str, SourceFile] = field(repr=False)
    recording: Recording = field(repr=False)
    predicted: Mapping[Site, Saving] = field(default_factory=dict, repr=False)  # by the profile that has found it

    def __reduce__(self) -> Any:
        """Refuse to be pickled or copied: the sites hold the model's own modules, and parts of autograd's graph.

        Raises:
            TypeError: always.
        """
        raise TypeError(
            "a plan cannot be pickled or copied: it holds the model itself and a recorded step.\n"
            "Pickle plan.table, or make the plan again where it is needed: gradscope.plan(model, batch)."
        )

    def drop(self) -> None:
        """Let go of the model and of all else of the user's; what was asked of the plan before stays."""
        self.recording.drop()

    @property
    def supported(self) -> list[Site]:
        """The sites that can be replaced."""
        return [site for site in self.sites if site.supported]

    @property
    def tried(self) -> list[Site]:
        """Return those of them that may gain something on this batch."""
        return [site for site in self.supported if not site.idle]

    @cached_property
    def savings(self) -> dict[Site, Saving]:
        """Return what each supported site is expected to save, an estimate; it is made when first asked for."""
        return predict(self.supported)

    @property
    def table(self) -> pd.DataFrame:
        """One row a site: path, source, recipe, supported, reasons, predicted_saving_ns, predicted_saving_bytes."""
        import pandas as pd

        rows = []
        for site in self.sites:
            saving = self.savings.get(site)
            rows.append(
                {
                    "path": site.path,
                    "source": site.source,
                    "recipe": site.recipe,
                    "supported": site.supported,
                    "reasons": "; ".join(site.reasons),
                    "predicted_saving_ns": None if saving is None else saving.ns,
                    "predicted_saving_bytes": None if saving is None else saving.bytes,
                }
            )
        return pd.DataFrame(rows, columns=list(COLUMNS))


COLUMNS = (
    "path",
    "source",
    "recipe",
    "supported",
    "reasons",
    "predicted_saving_ns",
    "predicted_saving_bytes",
)


def plan(
    model: nn.Module | Workload,
    batch: Any = None,
    loss: Any = None,
    *,
    recipes: Iterable[str] | None = None,
    filter: Filter | None = None,
    device: str = "auto",
) -> Plan:
    """Find what could be replaced in ``model``, without changing anything.

    One training step, forward and backward, is run on ``batch`` and recorded; parameters, buffers, gradients, random
    state and the modules' attributes are put back.

    Args:
        model: an ``nn.Module``, or a :class:`~gradscope.Workload` that holds everything.
        batch: as in :func:`gradscope.profile`; of an iterator the first is taken.
        loss: as in :func:`gradscope.profile`.
        recipes: names of recipes to look for; None is all.
        filter: ``filter(path, module)`` tells which modules may be changed.
        device: "cpu", "cuda", or "auto": where the model is, or CUDA where there is one.

    Raises:
        UsageError: a recipe of that name is not matched by anything.
        WorkloadError: the model, batch and loss do not make a training step.
        Exception: whatever the model raises.
    """
    workload = model if isinstance(model, Workload) else Workload(model, batch, loss=loss)
    matchers = _chosen(recipes)
    recording = record_step(workload, resolve_device(device, workload.model))
    files: dict[str, SourceFile] = {}
    sites = find_sites(workload.model, recording, matchers, files)
    if filter is not None:
        sites = [site for site in sites if site.module is None or filter(site.path, site.module)]
    return Plan(sites, files, recording)


def plan_of(found: Found, workload: Workload, recipes: Iterable[str] | None = None) -> Plan | None:
    """Return the plan of ``workload`` as its profile found it; None where a step must be recorded for it.

    A profile records one of its later steps. Its batch must be the one that the sites are proved on. What was made in
    that step and lives on may be what Python has not collected yet, which the record of a plan does first; and what
    the model had kept of earlier steps, as a table, is gone.

    Raises:
        UsageError: a recipe of that name is not matched by anything.
    """
    matchers = _chosen(recipes)
    sites = next((sites for model, sites in found.sites if model() is workload.model), None)
    if sites is None or found.recording is None or not is_one_batch(workload.batch):
        return None
    if not _stands_alone(found.recording):
        return None
    savings = {_key(site): found.savings[site] for site in sites if site in found.savings}
    if recipes is not None:  # which of two that overlap is taken depends on all of them
        sites = find_sites(workload.model, found.recording, matchers, found.files)
        found.sites.append((weakref.ref(workload.model), sites))
    return Plan(
        sites, found.files, found.recording, {site: savings[_key(site)] for site in sites if _key(site) in savings}
    )


def _stands_alone(recording: Recording) -> bool:
    """Return whether the forward pass and the loss left nothing behind, and read nothing that was put away since."""
    before = {value.content[0] for value in recording.values if value.producer is None}
    for node in recording.nodes:
        if any(
            place.frame.globals for place in node.places
        ):  # no frame of backward and of the optimizer is looked into
            if any(value.kept and value.tensor() is None for value in node.inputs):
                return False
            if any(value.alive and value.content[0] not in before for value in node.outputs):
                return False
    return True


def _key(site: Site) -> tuple[str, str, str]:
    return site.path, site.recipe, site.source


def record_step(workload: Workload, device: torch.device) -> Recording:
    """Record one forward and loss of the workload; all is as before, and nothing of the step lives on."""
    with preserved(workload.model, workload.batch, None, device), import_path(workload.folder):
        batch = next(Batches(workload.batch, device, needed=1))

        def step() -> None:
            output = call_model(workload.model, batch)
            scalar_loss(output, batch, workload.loss, workload.model)

        # What the step makes stays in the youngest generation: collecting that frees what holds itself, at little cost.
        collects = gc.isenabled()
        gc.disable()
        try:
            recording, _ = record(step)
            gc.collect(0)
        finally:
            if collects:
                gc.enable()
        settle(recording.values)
    return recording


def _chosen(recipes: Iterable[str] | None) -> dict[str, Any]:
    if recipes is None:
        return dict(MATCHERS)
    names = list(recipes)
    unknown = sorted(set(names) - set(MATCHERS))
    if unknown:
        raise UsageError(f"there is no recipe {unknown[0]!r} to patch in. Known recipes: {', '.join(MATCHERS)}.")
    return {name: MATCHERS[name] for name in names}
