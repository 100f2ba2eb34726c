"""Proof of a replacement: on what the user's step gave to the module, against its own code in float64.

Each module that holds a site is run with its own code and with the rewritten one. Both are compared with a run of its
own code in float64: outputs, and the gradients of its parameters and inputs for a random upstream gradient. The
rewritten code may be off by twice what the original is off. That the comparison can fail at all is tried each time: a
planted fault, every second feature of the recipe's result made a sixteenth larger, must be found.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from types import CellType, FunctionType
from typing import Any

import torch
from torch import Tensor

from gradscope import recipes
from gradscope.patching.edit.source import Refusal, SourceFile
from gradscope.patching.prove.unit import GRADIENT, Outcome, Unit
from gradscope.patching.sites import Site
from gradscope.patching.swap import Swap

# How far what a replacement computes may be from the truth, beside what the original computes.


# A replacement may be off by twice what the original is off: both round, in another order.
TIMES = 2.0

# What a float64 model is compared with is float64 too, so the original is off by nothing: how much both round is not
# known. Losses and softmaxes of some hundred numbers in another order were off by 4 eps at most.
_ROUNDINGS = 32

# What is smaller than this share of the largest of its like may be off by one rounding of that share.
_SMALL = 0.1


@dataclass(frozen=True)
class Distance:
    """How far one output or gradient is from the truth, ``|x - truth| / |truth|`` in the Euclidean norm."""

    name: str
    new: float
    original: float
    limit: float

    @property
    def within(self) -> bool:
        """Return whether the replacement is as good as the original."""
        return self.new <= self.limit


@dataclass(frozen=True)
class Errors:
    """The distances of all outputs and gradients."""

    distances: tuple[Distance, ...]

    @property
    def worst(self) -> Distance | None:
        """The one that is furthest over its limit, or nearest to it."""
        return max(self.distances, key=lambda each: each.new - each.limit, default=None)

    @property
    def within(self) -> bool:
        """Return whether the replacement is as good in all."""
        return all(each.within for each in self.distances)

    def largest(self, *, original: bool = False) -> float:
        """Return the largest distance of a gradient; where there is none, of an output."""
        gradients = [each for each in self.distances if each.name.startswith(GRADIENT)]
        return max((each.original if original else each.new for each in gradients or self.distances), default=0.0)


def compare(new: Outcome, original: Outcome, truth: Outcome) -> Errors:
    """Return the distances of ``new`` and ``original`` from ``truth``.

    Raises:
        ValueError: an output or gradient is missing on one side, or has another shape or dtype.
    """
    if set(new) != set(original):
        missing = sorted(set(new) ^ set(original))
        raise ValueError(f"{missing[0]} exists in only one version")
    sizes = {
        kind: max((_rms(true) for name, true in truth.items() if name.startswith(GRADIENT) is kind), default=0.0)
        for kind in (False, True)
    }
    found = []
    for name, value in original.items():
        other, true = new[name], truth.get(name)
        if other.shape != value.shape or other.dtype != value.dtype:
            raise ValueError(f"{name} is {_kind(other)} instead of {_kind(value)}")
        if true is None:
            raise ValueError(f"{name} does not exist in the higher-precision reference")
        found.append(_of(name, other, value, true, sizes[name.startswith(GRADIENT)]))
    return Errors(tuple(found))


def _of(name: str, new: Tensor, original: Tensor, truth: Tensor, size: float) -> Distance:
    """Return one tensor's error; of one that is nearly 0 beside its like, relative to these.

    A bias that a softmax takes no notice of has the gradient 0: what a float32 run gives for it is rounding alone.
    """
    finite = torch.isfinite(new) & torch.isfinite(original)
    alike = finite | (new == original) | (new.isnan() & original.isnan())
    if not bool(alike.all()):
        return Distance(name, float("inf"), 0.0, 0.0)
    scale = max(_norm(truth), _SMALL * size * truth.numel() ** 0.5)
    mine, theirs = _distance(new, truth, scale), _distance(original, truth, scale)
    # Where the original happens to be exact: the rounding of one more operation.
    roundings = _ROUNDINGS if original.dtype == truth.dtype == torch.float64 else 1
    return Distance(name, mine, theirs, TIMES * theirs + roundings * torch.finfo(original.dtype).eps)


def _distance(value: Tensor, truth: Tensor, scale: float) -> float:
    """Return the Euclidean distance. What is not finite in both does not count."""
    value, truth = value.double(), truth.double()
    finite = torch.isfinite(truth) & torch.isfinite(value)
    apart = float((value[finite] - truth[finite]).norm())
    return apart / scale if scale > 0 else apart


def _norm(tensor: Tensor) -> float:
    return float(tensor.double()[torch.isfinite(tensor)].norm())


def _rms(tensor: Tensor) -> float:
    return _norm(tensor) / max(tensor.numel(), 1) ** 0.5


def _kind(tensor: Tensor) -> str:
    return f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"


PLANTED = 1 + 2**-4


class NoProof(str):
    """Why a place cannot be proved: nothing was seen to be right, and nothing to be wrong."""


def prove(swap: Swap, unit: Unit, files: dict[str, SourceFile]) -> dict[Site, Errors | str]:
    """Return for each site of ``swap`` the errors of its module's run with it, or why it cannot stand.

    The sites are put in together; where that fails, each alone. A :class:`NoProof` says nothing against the recipe.
    """
    sites = list(swap.sites)
    try:
        original, truth = unit.references
    except Exception as error:
        return dict.fromkeys(sites, NoProof(_why_not_again(error)))
    together = _tried(swap, unit, original, truth, files)
    if isinstance(together, Errors) or len(sites) == 1:
        return dict.fromkeys(sites, together)
    found: dict[Site, Errors | str] = {}
    for site in sites:
        try:
            found[site] = _tried(Swap(swap.module, [site], files), unit, original, truth, files)
        except Refusal as refusal:
            found[site] = NoProof(refusal)
    return found


def _why_not_again(error: Exception) -> str:
    """Return why the module's own code did not run for the proof, which asks for gradients of chosen tensors."""
    if isinstance(error, RuntimeError) and "use_reentrant=True" in str(error):
        return "it calls a checkpoint with use_reentrant=True, which hides gradients from the verification"
    return f"it could not be rerun for verification: {first_line(error)}"


def _tried(swap: Swap, unit: Unit, original: Outcome, truth: Outcome, files: dict[str, SourceFile]) -> Errors | str:
    """Return the errors with the rewritten code, or what is wrong."""
    try:
        with _on(swap):
            with _recipes(swap, _without_dropout):
                errors = compare(unit.outcome(), original, truth)
            worst = errors.worst
            if worst is not None and not worst.within:
                return (
                    f"{worst.name} is off by {worst.new:.1e} (relative), where the original is off by "
                    f"{worst.original:.1e} and {worst.limit:.1e} is allowed"
                )
        for site in swap.sites:
            one = _apart(site, swap, files)
            with _on(one), _recipes(one, _without_dropout), _recipes(one, _planted, [getattr(recipes, site.function)]):
                if not _seen(unit, original, truth):
                    return NoProof(
                        "an error injected into the recipe's result was not detected, so the verification is "
                        "inconclusive"
                    )
    except Exception as error:
        return f"the rewritten code raises an error: {first_line(error)}"
    return errors


def _apart(site: Site, swap: Swap, files: dict[str, SourceFile]) -> Swap:
    """Return a swap where a fault of the recipe is one of ``site``: alone where another of its sites calls it too."""
    if [each.function for each in swap.sites].count(site.function) == 1:
        return swap
    try:
        return Swap(swap.module, [site], files)
    except Refusal:  # it stands with the others only
        return swap


def _seen(unit: Unit, original: Outcome, truth: Outcome) -> bool:
    """Return whether the unit is told from the original: by its outputs, which cost less, or a gradient."""
    outputs = {name: value for name, value in original.items() if not name.startswith(GRADIENT)}
    if outputs and not compare(unit.outcome(gradients=False), outputs, truth).within:
        return True
    return not compare(unit.outcome(), original, truth).within


@contextmanager
def _on(swap: Swap) -> Iterator[None]:
    swap.put()
    try:
        yield
    finally:
        swap.take_off()


def dropout_off(swap: Swap) -> AbstractContextManager[None]:
    """Let the recipes that the rewritten code calls drop nothing, for the length of the block."""
    return _recipes(swap, _without_dropout)


@contextmanager
def _recipes(swap: Swap, change: Callable[[Any], Any], functions: Iterable[Any] | None = None) -> Iterator[None]:
    """Replace the recipes that the rewritten code calls by changed ones, for the length of the block."""
    wanted = None if functions is None else {_base(each) for each in functions}
    kept: list[tuple[CellType, Any]] = []
    try:
        for cell in _cells(swap.methods.values()):
            held = cell.cell_contents
            if wanted is None or _base(held) in wanted:
                kept.append((cell, held))
                cell.cell_contents = change(held)
        yield
    finally:
        for cell, held in kept:
            cell.cell_contents = held


def _cells(functions: Iterable[FunctionType]) -> Iterator[CellType]:
    """Yield the cells of rewritten functions, and of those that they call, that hold a recipe."""
    known = {_base(getattr(recipes, name)) for name in recipes.__all__}
    for function in functions:
        for cell in function.__closure__ or ():
            try:
                held = cell.cell_contents
            except ValueError:  # a name of the user's that is not bound yet
                continue
            if callable(held) and _base(held) in known:
                yield cell
            elif isinstance(held, FunctionType) and _base_function(held).__code__.co_filename.startswith("<gradscope "):
                yield from _cells([held])


def _base(function: Any) -> int:
    """Equal for a function and what was wrapped around it."""
    return id(inspect.unwrap(function))


def _base_function(function: FunctionType) -> FunctionType:
    inner = inspect.unwrap(function)
    return inner if isinstance(inner, FunctionType) else function


def _without_dropout(recipe: Any) -> Any:
    """Return the recipe with dropout off."""
    if "dropout_p" not in inspect.signature(recipe).parameters:
        return recipe

    @functools.wraps(recipe)
    def without(*args: Any, **kwargs: Any) -> Any:
        bound = inspect.signature(recipe).bind(*args, **kwargs)
        bound.arguments["dropout_p"] = 0.0
        return recipe(*bound.args, **bound.kwargs)

    return without


def _planted(recipe: Any) -> Any:
    """Return the recipe with a fault in its result."""

    @functools.wraps(recipe)
    def wrong(*args: Any, **kwargs: Any) -> Any:
        result = recipe(*args, **kwargs)
        if isinstance(result, Tensor):
            return _faulty(result)
        return tuple(map(_faulty, result)) if isinstance(result, tuple) else result

    return wrong


def _faulty(result: Tensor) -> Tensor:
    """Make every second feature larger: a norm behind it would hide a fault that is the same in all."""
    if result.dim() == 0 or result.shape[-1] < 2:
        return result * PLANTED
    factor = torch.ones(result.shape[-1], dtype=result.dtype, device=result.device)
    factor[::2] = PLANTED
    return result * factor


def first_line(error: Exception) -> str:
    """Return the kind of an error and the first line of its message."""
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
