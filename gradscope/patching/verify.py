"""Puts a plan's sites into the model, proves and measures each, and takes out what is wrong, slower or hungrier."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from gradscope.capture.model_steps import Stepper
from gradscope.capture.state import preserved
from gradscope.patching.compare import Errors
from gradscope.patching.gains import Gain, compare_work
from gradscope.patching.plan import Plan
from gradscope.patching.proof import prove
from gradscope.patching.sites import Site
from gradscope.patching.swap import Swap, swaps
from gradscope.patching.unit import Unit, captured
from gradscope.workload import Batches, Workload, call_model, import_path, resolve_device, scalar_loss


@dataclass(frozen=True)
class Result:
    """What became of one site."""

    site: Site
    status: str  # "kept", "undone" or "refused"
    reason: str = ""
    errors: Errors | None = None
    gain: Gain | None = None  # of its module's forward and backward, with all of the module's sites


@dataclass(frozen=True)
class Verified:
    """Every site's result, and the whole step's."""

    results: list[Result]
    step: Gain | None  # None where nothing was kept
    loss_difference: float  # of the same batch and random numbers, dropout aside; relative

    @property
    def failed(self) -> bool:
        """Whether a recipe computed something else than what it replaced."""
        return any(result.status == "undone" and result.gain is None for result in self.results)


def verify(workload: Workload, plan: Plan, device: str = "auto", *, rounds: int = 5) -> Verified:
    """Prove and measure every supported site of ``plan``; the model is left as it was.

    Raises:
        Exception: what the model raises without any change.
    """
    results = [Result(site, "refused", "; ".join(site.reasons)) for site in plan.sites if not site.supported]
    place = resolve_device(device, workload.model)
    with preserved(workload.model, workload.batch, workload.optimizer, place), import_path(workload.folder):
        batch = next(Batches(workload.batch, place, needed=1))
        held = swaps(plan.supported, plan.files)
        units = _units(workload, batch, held)
        measured: dict[object, Gain] = {}
        kept: list[Swap] = []
        for swap in held:
            found = _judged(swap, units, plan, measured, place, rounds)
            results += found
            good = [result.site for result in found if result.status == "kept"]
            if good:
                kept.append(Swap(swap.module, good, plan.files))
        step, difference = (None, 0.0) if not kept else _whole_step(workload, batch, kept, place, rounds)
    order = {site: index for index, site in enumerate(plan.sites)}
    return Verified(sorted(results, key=lambda result: order[result.site]), step, difference)


# What these save shows only where the loss is: the logits that are not made, the gradient that two share.
_OF_THE_STEP = frozenset({"linear_cross_entropy", "embedding"})


def _units(workload: Workload, batch: object, held: list[Swap]) -> dict[nn.Module, Unit]:
    """What each module with a site is given in the user's step; for some recipes the whole step."""
    wide = {swap.module for swap in held if any(site.recipe in _OF_THE_STEP for site in swap.sites)}
    modules = {swap.sites[0].path: swap.module for swap in held if swap.module not in wide}

    def loss_of(given: object) -> torch.Tensor:
        return scalar_loss(call_model(workload.model, given), given, workload.loss)[0]

    found = captured(modules, lambda: loss_of(batch))
    units = {modules[path]: unit for path, unit in found.items()}
    stepper = Stepper(Workload(workload.model, workload.batch, loss=workload.loss))
    for module in wide:
        units[module] = Unit("the step", workload.model, loss_of, (batch,), {}, work=lambda: stepper.step(batch))
    return units


def _judged(
    swap: Swap,
    units: dict[nn.Module, Unit],
    plan: Plan,
    measured: dict[object, Gain],
    device: torch.device,
    rounds: int,
) -> list[Result]:
    unit = units.get(swap.module)
    if unit is None:
        return [Result(site, "undone", "the module was not called in the second run") for site in swap.sites]
    proofs = prove(swap, unit, plan.files)
    good = [site for site, proof in proofs.items() if isinstance(proof, Errors)]
    results = [Result(site, "undone", proof) for site, proof in proofs.items() if not isinstance(proof, Errors)]
    if not good:
        return results
    # The same code on the same shapes takes the same time: it is measured once.
    key = (unit.signature, tuple(sorted((site.recipe, site.source) for site in good)))
    gain = measured.get(key)
    if gain is None:
        gain = measured[key] = _measured(Swap(swap.module, good, plan.files), unit, device, rounds)
    status, reason = "kept", ""
    if gain.slower:
        status, reason = "undone", "it is slower on this batch"
    elif gain.hungrier:
        status, reason = "undone", "it needs more memory on this batch"
    for site in good:
        proof = proofs[site]
        assert isinstance(proof, Errors)
        results.append(Result(site, status, reason, proof, gain))
    return results


def _measured(swap: Swap, unit: Unit, device: torch.device, rounds: int) -> Gain:
    def switch(new: bool) -> None:
        swap.put() if new else swap.take_off()

    try:
        return compare_work(unit.step, unit.step, switch, device, rounds)
    finally:
        swap.take_off()


def _whole_step(
    workload: Workload, batch: object, kept: list[Swap], device: torch.device, rounds: int
) -> tuple[Gain, float]:
    """Forward, loss and backward of the model without and with all that is kept."""
    stepper = Stepper(Workload(workload.model, workload.batch, loss=workload.loss))

    def switch(new: bool) -> None:
        for swap in kept:
            swap.put() if new else swap.take_off()

    try:
        losses = []
        for new in (False, True):
            switch(new)
            with _eval_dropout(workload.model):
                losses.append(scalar_loss(call_model(workload.model, batch), batch, workload.loss)[0].item())
        gain = compare_work(lambda: stepper.step(batch), lambda: stepper.step(batch), switch, device, rounds)
    finally:
        switch(False)
    scale = abs(losses[0]) or 1.0
    return gain, abs(losses[1] - losses[0]) / scale


@contextmanager
def _eval_dropout(model: nn.Module) -> Iterator[None]:
    """Evaluation for the length of the block: two runs draw no random numbers that differ."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
