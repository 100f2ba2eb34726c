"""Puts a plan's sites into the model, proves each, and keeps those that the whole step gains by."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import nn

from gradscope.capture.model_steps import Stepper
from gradscope.capture.state import preserved
from gradscope.capture.uncompiled import uncompiled
from gradscope.compat import compiler_stance, compiles_nothing, is_compiled_module, many_versions, may_compile
from gradscope.errors import WorkloadError
from gradscope.patching.plan import Plan
from gradscope.patching.prove.choice import NO_GAIN, Choice, Gain, Group, Saved, Side, Way, choose
from gradscope.patching.prove.predict import kept_bytes
from gradscope.patching.prove.proof import Errors, NoProof, first_line, prove
from gradscope.patching.prove.unit import Unit, captured
from gradscope.patching.sites import Site
from gradscope.patching.swap import Swap, swaps
from gradscope.tree import modules_of, parameters_of
from gradscope.workload import Batches, Workload, call_model, import_path, resolve_device, scalar_loss

# Steps until torch.compile makes nothing new: of the first it takes what may be other in the second, as a gradient.
COMPILED_AFTER = 3
# More groups than this are not told apart by the shapes that they run on: each is one state more of the step.
_MOST_GROUPS = 8


@dataclass(frozen=True)
class Result:
    """What became of one site."""

    site: Site
    status: str  # "kept", "undone" or "refused"
    reason: str = ""
    errors: Errors | None = None  # None: it was not proved
    saved: Saved | None = None  # of the whole step; sites of one text have equal parts. None: it was not measured


@dataclass(frozen=True)
class Verified:
    """Every site's result, and the whole step's."""

    results: list[Result]
    step: Gain | None  # None where nothing was kept
    before: Side | None  # the step as it is; None where no place was measured
    loss_difference: float  # of the same batch and random numbers, dropout aside; relative
    loss: str | None = None  # what backward was called on; None where no place was measured
    as_it_stands: bool = False  # the program has compiled code run without compiling it

    @property
    def compiled(self) -> bool:
        """Return whether a place that was proved or measured runs under torch.compile."""
        return not self.as_it_stands and any(
            result.site.compiled for result in self.results if result.status != "refused"
        )

    @property
    def failed(self) -> bool:
        """Return whether a recipe computed something else than what it replaced."""
        return any(result.status == "undone" and result.errors is None for result in self.results)


def verify(workload: Workload, plan: Plan, device: str = "auto", say: Callable[[str], object] = str) -> Verified:
    """Prove every supported site of ``plan``, and measure the step with those that are right; the model is as it was.

    Args:
        workload: model, batch and loss.
        plan: of that model.
        device: as of :func:`gradscope.patching.plan.plan`.
        say: told what is being tried.

    Raises:
        WorkloadError: the model is compiled, and the program forbids to compile anything new.
        Exception: what the model raises without any change.
    """
    # What is compiled behind a place that is not may be given other strides, and be one more version.
    compiled = not compiles_nothing() and (
        any(site.compiled for site in plan.tried) or any(map(is_compiled_module, workload.model.modules()))
    )
    if compiled and not may_compile():
        raise WorkloadError(
            f'The stance of torch.compiler is "{compiler_stance()}": nothing that is compiled can be replaced.\n'
            "Patch the model before the stance is set."
        )
    place = resolve_device(device, workload.model)
    with preserved(workload.model, workload.batch, workload.optimizer, place), import_path(workload.folder):
        step = _Step(workload, next(Batches(workload.batch, place, needed=1)))
        held = swaps(plan.tried, plan.files)
        results = {site: Result(site, "refused", site.why_not) for site in plan.sites}
        results |= _proved(held, step, plan, say)
        step.compiled = compiled
        right = _Swaps(held, plan, {site for site, result in results.items() if result.status == "kept"})
        with many_versions() if step.compiled else nullcontext():
            for site, reason in step.failing(right.of(right.sites)).items():
                results[site] = replace(results[site], status="undone", reason=reason)
                right.sites.discard(site)
            choice, kept = _chosen(right, results, step, plan, place, say)
        results |= _judged(choice, results)
        difference = step.loss_difference(kept) if kept else 0.0
    ordered = [results[site] for site in plan.sites]
    return Verified(
        ordered,
        choice.gain,
        choice.before,
        difference,
        step.loss_kind if choice.before else None,
        compiles_nothing(),
    )


# What these save shows only where the loss is: the logits that are not made, the gradient that two share.
_OF_THE_STEP = frozenset({"linear_cross_entropy", "embedding"})


def _chosen(
    right: _Swaps,
    results: dict[Site, Result],
    step: _Step,
    plan: Plan,
    device: torch.device,
    say: Callable[[str], object],
) -> tuple[Choice, list[Swap]]:
    """Choose what the step gains by; where some sites of a module are kept, these are proved once more, together."""
    while True:
        try:
            choice = choose(_groups(right, step), lambda groups: step.way(right, groups), device, say)
        finally:
            right.take_off()
        kept = right.of({site for group in choice.kept for site in group})
        wrong = {
            site: _without_errors(site, proof)
            for swap in kept
            if frozenset(swap.sites) not in step.proved
            for site, proof in prove(swap, step.units_of[swap.module], plan.files).items()
            if not isinstance(proof, Errors)
        }
        if not wrong:
            return choice, kept
        results |= wrong
        right.sites -= wrong.keys()


def _proved(held: Sequence[Swap], step: _Step, plan: Plan, say: Callable[[str], object]) -> dict[Site, Result]:
    """Prove each site: by its module alone where that is possible, else by the whole step."""
    wide = [swap for swap in held if any(site.recipe in _OF_THE_STEP for site in swap.sites)]
    units = step.units([swap for swap in held if swap not in wide])
    found: dict[Site, Result] = {}
    for number, swap in enumerate(held, 1):
        recipes = ", ".join(dict.fromkeys(site.recipe for site in swap.sites))
        say(f"verifying {recipes} in {swap.sites[0].path or 'the model'} ({number} of {len(held)})")
        unit = step.unit if swap in wide else units.get(swap.module)
        if unit is None:
            proofs: dict[Site, Errors | str] = dict.fromkeys(
                swap.sites, NoProof("the module was not called in the second run")
            )
        else:
            step.units_of[swap.module] = unit
            proofs = prove(swap, unit, plan.files)
            if len({id(proof) for proof in proofs.values() if isinstance(proof, Errors)}) == 1:  # one for all: together
                step.proved.add(frozenset(site for site, proof in proofs.items() if isinstance(proof, Errors)))
        for site, proof in proofs.items():
            if isinstance(proof, Errors):
                found[site] = Result(site, "kept", "", proof)
            else:
                found[site] = _without_errors(site, proof)
    return found


def _without_errors(site: Site, reason: str) -> Result:
    """Return the result of a site that was not found right: put in and wrong, or without a proof."""
    return Result(site, "refused" if isinstance(reason, NoProof) else "undone", reason)


class _Swaps:
    """The swaps of a plan with any of their sites.

    Attributes:
        sites: that may be put in.
    """

    def __init__(self, held: Sequence[Swap], plan: Plan, sites: set[Site]) -> None:
        self._held, self._plan, self.sites = held, plan, sites
        self._made: dict[tuple[int, frozenset[Site]], Swap] = {}

    def of(self, sites: set[Site]) -> list[Swap]:
        """Return a swap of each module that holds some of ``sites``."""
        return [self._swap(swap, wanted) for swap in self._held if (wanted := sites & set(swap.sites))]

    def _swap(self, swap: Swap, wanted: set[Site]) -> Swap:
        if wanted == set(swap.sites):
            return swap
        key = id(swap), frozenset(wanted)
        if key not in self._made:
            ordered = [site for site in swap.sites if site in wanted]
            self._made[key] = Swap(swap.module, ordered, self._plan.files)
        return self._made[key]

    def take_off(self) -> None:
        """Take all of them out of the model."""
        for swap in (*self._held, *self._made.values()):
            swap.take_off()


def _groups(right: _Swaps, step: _Step) -> list[Group]:
    """Group the sites by the text that changes and the shapes that run it; what keeps most for backward comes first."""
    by_text: dict[object, list[Site]] = {}
    by_shape: dict[object, list[Site]] = {}
    for swap in right.of(right.sites):
        for site in swap.sites:
            text = (site.file, site.line, site.recipe)
            by_text.setdefault(text, []).append(site)
            by_shape.setdefault((text, step.units_of[swap.module].signature), []).append(site)
    groups = by_shape if len(by_shape) <= _MOST_GROUPS and not step.compiled else by_text
    kept = {site: sum(kept_bytes(match) for match in site.matches) for site in right.sites}
    return sorted(map(tuple, groups.values()), key=lambda group: -sum(kept[site] for site in group))


def _judged(choice: Choice, results: dict[Site, Result]) -> dict[Site, Result]:
    """Return what the step says of the sites that were measured."""
    found: dict[Site, Result] = {}
    for group, saved in choice.saved.items():
        reason = choice.reasons.get(group, "")
        for place, site in enumerate(group):
            status = "undone" if reason else "kept"
            part = _part(saved, place, len(group)) if reason != NO_GAIN else None  # noise, which a figure would belie
            found[site] = replace(results[site], status=status, reason=reason, saved=part)
    return found


def _part(saved: Saved, place: int, count: int) -> Saved:
    """Return one of equal parts, which add up: what is over goes to the first."""
    rest = (saved.ns % count, saved.bytes % count) if place == 0 else (0, 0)
    return Saved(saved.ns // count + rest[0], saved.bytes // count + rest[1], saved.time)


class _Step:
    """The user's training step: forward, loss and backward, with nothing or something put in."""

    def __init__(self, workload: Workload, batch: object) -> None:
        self.workload, self.batch = workload, batch
        # Not a method: the step would hold itself, and with it every gradient that a proof has compared.
        self.unit = Unit("the step", workload.model, partial(_loss_of, workload), (batch,), {})
        self.compiled = False  # whether torch.compile makes another graph of each way to do it
        self.units_of: dict[nn.Module, Unit] = {}  # by which the sites of a module are proved
        self.proved: set[frozenset[Site]] = set()  # sites of a module that are right together
        self._stepper = Stepper(Workload(workload.model, workload.batch, loss=workload.loss))

    @property
    def loss_kind(self) -> str:
        """Return what backward is called on."""
        return self._stepper.loss_kind

    def units(self, held: list[Swap]) -> dict[nn.Module, Unit]:
        """Return what each module with a site is given."""
        modules = {swap.sites[0].path: swap.module for swap in held}
        found = captured(modules, lambda: _loss_of(self.workload, self.batch))
        return {modules[path]: unit for path, unit in found.items()}

    def failing(self, held: Sequence[Swap]) -> dict[Site, str]:
        """Return why the whole step does not run with a site, for those with which it does not.

        A caller may do with a result what only the old code's allows, as change it in place.
        """
        why: dict[Site, str] = {}
        if held and self._fails(held) is not None:
            self._run()  # an error of the step as it is, or of compiling it, is no recipe's
            standing: list[Swap] = []
            for swap in held:
                error = self._fails([*standing, swap])
                if error is None:
                    standing.append(swap)
                else:
                    why |= dict.fromkeys(swap.sites, f"the step raises an error with it: {first_line(error)}")
        return why

    def _fails(self, held: Sequence[Swap]) -> Exception | None:
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

    def way(self, right: _Swaps, groups: Sequence[Group]) -> Way:
        """Return the step with ``groups`` in."""
        held = right.of({site for group in groups for site in group})

        def switch() -> None:
            right.take_off()
            for swap in held:
                swap.put()

        def work() -> None:
            self._run()

        return Way(switch, work, COMPILED_AFTER if self.compiled else 0)

    def loss_difference(self, kept: list[Swap]) -> float:
        """Return the difference of the loss with ``kept``, in evaluation mode: a share of the loss."""
        with uncompiled(), _evaluating(self.workload.model):
            before = _loss_of(self.workload, self.batch).item()
            try:
                for swap in kept:
                    swap.put()
                after = _loss_of(self.workload, self.batch).item()
            finally:
                for swap in kept:
                    swap.take_off()
        return abs(after - before) / (abs(before) or 1.0)

    def _run(self) -> None:
        self._stepper.step(self.batch)
        for parameter in parameters_of(self.workload.model):
            parameter.grad = None


def _loss_of(workload: Workload, batch: object) -> torch.Tensor:
    output = call_model(workload.model, batch)
    return scalar_loss(output, batch, workload.loss, workload.model)[0]


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Set the model to evaluation for the length of the block: two runs draw no random numbers that differ."""
    modes = [(module, module.training) for module in modules_of(model)]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
