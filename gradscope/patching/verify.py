"""Puts a plan's sites into the model, proves and measures each, and takes out what is wrong, slower or hungrier."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import nn

from gradscope.capture.model_steps import Stepper
from gradscope.capture.state import preserved
from gradscope.patching.compare import Errors
from gradscope.patching.gains import NOTHING, Gain, Side, compare_work, sides_of
from gradscope.patching.plan import Plan
from gradscope.patching.proof import first_line, prove
from gradscope.patching.sites import Site
from gradscope.patching.swap import Swap, swaps
from gradscope.patching.unit import Unit, captured
from gradscope.trace.peak import peaks_bytes
from gradscope.tree import modules_of, parameters_of
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


def verify(workload: Workload, plan: Plan, device: str = "auto", *, rounds: int = 3) -> Verified:
    """Prove and measure every supported site of ``plan``; the model is left as it was.

    Args:
        workload: model, batch and loss.
        plan: of that model.
        device: as of :func:`gradscope.patching.plan.plan`.
        rounds: of time, each way once in each.

    Raises:
        Exception: what the model raises without any change.
    """
    place = resolve_device(device, workload.model)
    with preserved(workload.model, workload.batch, workload.optimizer, place), import_path(workload.folder):
        step = _Step(workload, next(Batches(workload.batch, place, needed=1)), place, rounds)
        held = swaps([site for site in plan.supported if not site.idle], plan.files)
        results = [Result(site, "refused", "; ".join(site.reasons)) for site in plan.sites if not site.supported]
        results += [Result(site, "refused", site.idle) for site in plan.supported if site.idle]
        wide = [swap for swap in held if any(site.recipe in _OF_THE_STEP for site in swap.sites)]
        units = step.units([swap for swap in held if swap not in wide])
        measured: dict[object, Gain] = {}
        small: list[Swap] = []
        for swap in held:
            if swap not in wide:
                unit = units.get(swap.module)
                found = _judged(swap, unit, plan, measured, step)
                results += found
                small += _with(swap, found, plan)
        small, failing = step.standing(small)
        results = [_failing(result, failing) for result in results]
        proved = {swap: prove(swap, step.unit, plan.files) for swap in wide}
        good = [_of(swap, sites, plan) for swap in wide if (sites := _right(proved[swap]))]
        before, of_small, of_all = step.measured(small, good)
        of_wide = Gain(of_small, of_all) if good else None
        reason = "" if of_wide is None else _why_undone(of_wide, lambda: before.peak_bytes)
        for swap in wide:
            results += _results(proved[swap], of_wide, reason)
        kept = [*small, *([] if reason else good)]
        whole = Gain(before, of_small if reason else of_all)
        difference = step.loss_difference(kept) if kept else 0.0
    order = {site: index for index, site in enumerate(plan.sites)}
    return Verified(sorted(results, key=lambda result: order[result.site]), whole if kept else None, difference)


# What these save shows only where the loss is: the logits that are not made, the gradient that two share.
_OF_THE_STEP = frozenset({"linear_cross_entropy", "embedding"})


class _Step:
    """The user's training step: forward, loss and backward, with nothing or something put in."""

    def __init__(self, workload: Workload, batch: object, device: torch.device, rounds: int) -> None:
        self.workload, self.batch, self.device, self.rounds = workload, batch, device, rounds
        self.unit = Unit("the step", workload.model, self._loss_of, (batch,), {})
        self._stepper = Stepper(Workload(workload.model, workload.batch, loss=workload.loss))

    @cached_property
    def peak_bytes(self) -> int:
        """Of the step as it is."""
        return peaks_bytes([self._run], self.device, settled=True)[0]

    def units(self, held: list[Swap]) -> dict[nn.Module, Unit]:
        """What each module with a site is given."""
        modules = {swap.sites[0].path: swap.module for swap in held}
        found = captured(modules, lambda: self._loss_of(self.batch))
        return {modules[path]: unit for path, unit in found.items()}

    def standing(self, held: list[Swap]) -> tuple[list[Swap], dict[Site, str]]:
        """Those of ``held`` with which the whole step runs, and of the others' sites why it does not.

        A caller may do with a result what only the old code's allows, as change it in place.
        """
        if not held or self._fails(held) is None:
            return held, {}
        standing: list[Swap] = []
        why: dict[Site, str] = {}
        for swap in held:
            error = self._fails([*standing, swap])
            if error is None:
                standing.append(swap)
            else:
                why |= dict.fromkeys(swap.sites, f"with it the step fails: {first_line(error)}")
        return standing, why

    def _fails(self, held: list[Swap]) -> Exception | None:
        try:
            for swap in held:
                swap.put()
            self._run()
        except Exception as error:
            return error
        finally:
            for swap in held:
                swap.take_off()
        return None

    def measured(self, small: list[Swap], wide: list[Swap]) -> tuple[Side, Side, Side]:
        """The whole step without any, with ``small``, and with all; each different one is measured once."""
        states: list[list[Swap]] = [[], *([small] if small else []), *([[*small, *wide]] if wide else [])]
        if len(states) == 1:
            return NOTHING, NOTHING, NOTHING
        every = [*small, *wide]

        def switch(on: list[Swap]) -> Callable[[], None]:
            def do() -> None:
                for swap in every:
                    swap.put() if swap in on else swap.take_off()

            return do

        try:
            ways = [(self._run, switch(on)) for on in states]
            sides = sides_of(ways, self.device, self.rounds, settled=True, first_peak=vars(self).get("peak_bytes"))
        finally:
            switch([])()
        return sides[0], sides[1] if small else sides[0], sides[-1]

    def loss_difference(self, kept: list[Swap]) -> float:
        """Of the loss without and with ``kept``, in evaluation mode: a share of the loss."""
        with _evaluating(self.workload.model):
            before = self._loss_of(self.batch).item()
            try:
                for swap in kept:
                    swap.put()
                after = self._loss_of(self.batch).item()
            finally:
                for swap in kept:
                    swap.take_off()
        return abs(after - before) / (abs(before) or 1.0)

    def _loss_of(self, batch: object) -> torch.Tensor:
        output = call_model(self.workload.model, batch)
        return scalar_loss(output, batch, self.workload.loss)[0]

    def _run(self) -> None:
        self._stepper.step(self.batch)
        for parameter in parameters_of(self.workload.model):
            parameter.grad = None


def _failing(result: Result, why: dict[Site, str]) -> Result:
    reason = why.get(result.site)
    return result if reason is None or result.status != "kept" else replace(result, status="undone", reason=reason)


def _judged(swap: Swap, unit: Unit | None, plan: Plan, measured: dict[object, Gain], step: _Step) -> list[Result]:
    """The verdicts of one module's sites."""
    if unit is None:
        return [Result(site, "undone", "the module was not called in the second run") for site in swap.sites]
    proofs = prove(swap, unit, plan.files)
    good = _right(proofs)
    if not good:
        return _results(proofs, None, "")
    # The same code on the same shapes takes the same time: it is measured once.
    key = (unit.signature, tuple(sorted((site.recipe, site.source) for site in good)))
    gain = measured.get(key)
    if gain is None:
        gain = measured[key] = _measured(_of(swap, good, plan), unit, step.device, step.rounds)
    return _results(proofs, gain, _why_undone(gain, lambda: step.peak_bytes))


def _right(proofs: dict[Site, Errors | str]) -> list[Site]:
    return [site for site, proof in proofs.items() if isinstance(proof, Errors)]


def _results(proofs: dict[Site, Errors | str], gain: Gain | None, reason: str) -> list[Result]:
    return [
        Result(site, "undone" if reason else "kept", reason, proof, gain)
        if isinstance(proof, Errors)
        else Result(site, "undone", proof)
        for site, proof in proofs.items()
    ]


def _with(swap: Swap, results: list[Result], plan: Plan) -> list[Swap]:
    """A swap of the sites that are kept, if any."""
    good = [result.site for result in results if result.status == "kept"]
    return [_of(swap, good, plan)] if good else []


def _of(swap: Swap, sites: list[Site], plan: Plan) -> Swap:
    """A swap of some of its sites."""
    return swap if set(sites) == set(swap.sites) else Swap(swap.module, sites, plan.files)


def _why_undone(gain: Gain, whole_bytes: Callable[[], int]) -> str:
    if gain.slower:
        return "it is slower on this batch"
    return "it needs more memory on this batch" if gain.hungrier() and gain.hungrier(whole_bytes()) else ""


def _measured(swap: Swap, unit: Unit, device: torch.device, rounds: int) -> Gain:
    def switch(new: bool) -> None:
        swap.put() if new else swap.take_off()

    try:
        return compare_work(unit.step, unit.step, switch, device, rounds)
    finally:
        swap.take_off()


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation for the length of the block: two runs draw no random numbers that differ."""
    modes = [(module, module.training) for module in modules_of(model)]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
