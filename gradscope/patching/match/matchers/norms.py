"""RMS and layer normalisation by hand: the last dimension over the root of its mean square or its variance."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor

from gradscope import recipes
from gradscope.ops import CASTS
from gradscope.patching.match.behaviour import CLOSE, REDUCTIONS, UNIT, Proofs, Trial, bound_of, rows
from gradscope.patching.match.graph import is_half, number, uncast
from gradscope.patching.match.match import Argument, Match, Of, Piece, Scalar, Setting, why_idle
from gradscope.patching.match.search import (
    NOT_CONTIGUOUS,
    Region,
    after,
    asked_forms,
    before,
    begins,
    keeps_its_form,
    read_by,
    region,
)
from gradscope.recording.graph import Node, Recording, Value

# How near what is normalised comes to unit variance that is divided by one less than the number of features.
_NEAR = 0.2

_SMALL = 1e-9  # rows of this size are normalised by eps alone

RMS = "rms_norm"
LAYER = "layer_norm"

# A norm by hand adds its parameters' gradients up more exactly than torch's on a CPU: what replaces it must as well.
_EXACT = (Argument("exact", ("True",)),)
# Nor is its result cast to the input's dtype, where the code does not say so.
_PROMOTE = (Argument("promote", ("True",)),)


@dataclass(frozen=True)
class Norm:
    """A normalisation by hand."""

    region: Region
    centred: bool  # layer normalisation; else RMS normalisation
    weight: Value | None
    bias: Value | None
    eps: tuple[Piece, ...]
    reasons: tuple[str, ...] = field(default=())
    least: tuple[Piece, ...] = ()  # the least length of a row, where it is divided by its length
    forms: tuple[str, ...] = ()  # what it relies on of the shape of what is normalised
    bare: Norm | None = None  # without weight and bias, which may stand under a condition

    def arguments(self) -> list[Argument]:
        """Return weight, bias and eps of a recipe's call, and whether they promote its result."""
        found = [
            Argument(name, (Of(value, name, ".flatten()" if len(value.shape) > 1 else ""),))
            for name, value in (("weight", self.weight), ("bias", self.bias))
            if value is not None
        ]
        promotes = any(_promotes(self.region, value) for value in (self.weight, self.bias) if value is not None)
        least = [Argument("least", self.least)] if self.least else []
        return [*found, Argument("eps", self.eps), *least, *(_PROMOTE if promotes else ())]

    def asked(self, x: Value) -> tuple[tuple[Value, str], ...]:
        """Return what the new code asks of shapes, where it reads what is normalised as ``x``."""
        vectors = [each for each in (self.weight, self.bias) if each is not None]
        return (*((x, each) for each in self.forms), *asked_forms(vectors))


def rms(recording: Recording) -> Iterator[Match]:
    """Yield every unfused RMS norm; on a CPU torch's own too, which is of plain operations there."""
    for node in recording.nodes:
        if node.op == RMS and node.inputs and node.output.device.type == "cpu" and not node.autocast:
            yield _of_torch(node)
    yield from (_match(found) for found in norms(recording) if not found.centred)


def layer(recording: Recording) -> Iterator[Match]:
    """Return every unfused layer norm."""
    return (_match(found) for found in norms(recording) if found.centred)


def norms(recording: Recording) -> list[Norm]:
    """Return every normalisation that is spelled out, and what is one but for a factor."""
    known: list[Norm] | None = recording.found.get("norms")
    if known is not None:
        return known
    norms: list[Norm] = []
    inside: set[Node] = set()
    proofs = Proofs()
    for node in recording.nodes:
        if node.op in REDUCTIONS and node.inputs and _has_features(node.inputs[0]) and node not in inside:
            found = _around(node, proofs)
            if found is not None:
                inside |= found.region.nodes
                norms.append(found)
    recording.found["norms"] = norms
    return norms


def _has_features(value: Value) -> bool:
    """Check that there is more than one: a positive number over its own sum is 1, as over its own size."""
    return len(value.shape) > 1 and value.shape[-1] > 1


def _match(found: Norm) -> Match:
    x = found.region.x
    form = Argument("", (Of(x, "x", ".shape[-1:]", again=True),))
    name = LAYER if found.centred else RMS
    return Match(
        name,
        name,
        (Argument("", (Of(x, "x"),)), form, *found.arguments(), *(_EXACT if found.centred and found.weight else ())),
        found.region.nodes,
        found.region.output,
        optional=found.region.constants,
        reasons=list(found.reasons),
        forms=found.asked(x),
        idle="" if found.centred else _idle(x),
        less=None if found.bare is None else _match(found.bare),
    )


def _idle(x: Value) -> str:
    """Say why a RMS norm gains nothing: torch's is of the same operations. Its layer norm is a gain."""
    return why_idle(RMS, x, elements=math.prod(x.shape))


def _of_torch(node: Node) -> Match:
    """Match RMS normalisation by torch's own function or module."""
    x, weight = node.inputs[0], node.argument(2, "weight")
    shape = Setting(node, "normalized_shape", Scalar(node, 1, "normalized_shape"))
    arguments = [Argument("", (Of(x, "x"),)), Argument("", (shape,))]
    if isinstance(weight, Value):
        arguments.append(Argument("weight", (Setting(node, "weight", Of(weight, "weight")),)))
    arguments.append(Argument("eps", (Setting(node, "eps", Scalar(node, 3, "eps", "None")),)))
    reasons = []
    if isinstance(weight, Value) and weight.dtype not in {x.dtype, torch.float32}:
        reasons.append("the weight's dtype differs from the input's")
    if node.output.dtype != x.dtype:
        reasons.append("the result's dtype differs from the input's")
    return Match(RMS, RMS, tuple(arguments), frozenset({node}), node.output, reasons=reasons, idle=_idle(x))


def _around(statistic: Node, proofs: Proofs) -> Norm | None:
    """The normalisation that ``statistic`` is a part of, with as much of weight and bias as there is.

    One with another factor where there is none.
    """
    near: list[tuple[_Spelled, _Form]] = []
    whole: Norm | None = None
    small = max(_SMALL, 10 * (_shortest(statistic) or 0.0))
    for x in begins(statistic.inputs[0], statistic.inputs[0].shape):
        outputs = {output for made in statistic.outputs for output in after(made, x.shape)}
        for output in sorted(outputs, key=lambda each: -each.index):
            spelled = _spelled(x, output)
            if spelled is None or (whole is not None and spelled.used):
                continue
            for form in _forms(spelled, small):
                if abs(form.factor - 1) > CLOSE:
                    near.append((spelled, form))
                    continue
                norm = _norm(spelled, form, proofs)
                if norm is not None and whole is None and spelled.used:
                    whole = norm
                elif norm is not None:
                    return norm if whole is None else replace(whole, bare=norm)
    return whole or next(filter(None, (_unlike(*each) for each in near)), None)


@dataclass(frozen=True)
class _Spelled:
    """A tensor that may be a normalised ``x``."""

    x: Value
    output: Value
    used: list[Value]  # vectors of the features


@dataclass(frozen=True)
class _Form:
    """What normalises: ``x``, less its mean if ``centred``, over the root of ``factor`` mean squares and ``eps``."""

    centred: bool
    weight: Value | None
    bias: Value | None
    factor: float
    eps: float


def _spelled(x: Value, output: Value) -> _Spelled | None:
    vectors = _vectors(output, x)
    used = read_by(output, (x, *vectors)) if len(vectors) <= 4 else None
    return None if used is None or x not in used else _Spelled(x, output, [each for each in used if each is not x])


def _shortest(statistic: Node) -> float | None:
    """What shorter vectors than that are divided by; None where they are divided by their length, or by no length."""
    if statistic.op == UNIT:
        return _least(statistic)
    bounded = (_least(value.producer) for value in after(statistic.output, statistic.output.shape) if value.producer)
    return next((least for least in bounded if least is not None), None)


def _least(node: Node) -> float | None:
    """The least length that ``F.normalize`` or the clamp of a length divides by; None of any other call."""
    if node.op == UNIT:
        return number(node.argument(3, "eps", 1e-12))
    bound = bound_of(node)
    return None if bound is None else bound[0] / bound[1]


def _forms(spelled: _Spelled, small: float) -> Iterator[_Form]:
    """Yield what ``spelled`` does, told from rows of ordinary and of ``small`` numbers; nothing where it is no norm."""
    numbers = rows(spelled.x, 1.0, small)
    for centred in (False, True):
        given = numbers - numbers.mean(-1, keepdim=True) if centred else numbers
        for weight, bias in _roles(spelled.used, centred):
            neutral = {
                each: torch.full(each.shape, float(each is weight), dtype=torch.float64) for each in spelled.used
            }
            made = Trial({spelled.x: numbers, **neutral}).of(spelled.output)
            found = None if made is None else _divisor(made, given, small)
            if found is not None:
                yield _Form(centred, weight, bias, *found)


def _divisor(made: Tensor, given: Tensor, small: float) -> tuple[float, float] | None:
    """``factor`` and ``eps``, where ``given`` over ``made`` is the root of so many mean squares of its row and eps."""
    if made.shape != given.shape or given.dim() < 2 or not bool((made * given > 0).all()):
        return None
    squares = (given / made).square().flatten(0, -2)
    found, means = squares.mean(-1), given.square().mean(-1).flatten()
    factor = float((found[0] - found[1]) / (means[0] - means[1]))
    eps = float(found[1] - factor * means[1])
    if abs(eps) < CLOSE * small**2:
        eps = 0.0
    wanted = factor * means + eps
    same = bool(((squares - wanted[:, None]).abs() <= CLOSE * wanted[:, None]).all())
    return (factor, eps) if same and eps >= 0 and abs(factor - 1) <= _NEAR else None


def _norm(spelled: _Spelled, form: _Form, proofs: Proofs) -> Norm | None:
    found = region(spelled.output, (spelled.x, *spelled.used))
    if found is None or _rounds_between(found):
        return None
    eps = form.eps
    bounds = [node for node in found.nodes if node.op == UNIT or bound_of(node) is not None]
    least = _least(bounds[0]) if bounds else None
    if len(bounds) > 1 or (bounds and (least is None or eps != 0)):
        return None

    def unit(x: Tensor, *vectors: Tensor) -> Tensor:
        held = dict(zip(spelled.used, vectors, strict=True))
        weight, bias = (None if each is None else held[each] for each in (form.weight, form.bias))
        if form.centred:
            return recipes.layer_norm(x, x.shape[-1:], weight, bias, eps, exact=True)
        return recipes.rms_norm(x, x.shape[-1:], weight, eps, least=least)

    rank, features = len(found.x.shape), found.x.shape[-1]
    roles = (
        f"{least} {form.centred} {form.weight is None} {form.weight is spelled.used[0] if spelled.used else None} {eps}"
    )
    scale = math.sqrt(eps) or (1e-2 if not least else least / features)
    proves = partial(proofs.proves, found.nodes, found.output, found.given, unit, name=roles, scale=scale)
    if not proves():
        return None
    asked = [] if proves(more=(1, 0)) else [f".dim() == {rank}"]
    deepest = max((len(each.shape) for each in spelled.used), default=1)
    if deepest > 1 and len(asked) == 0:  # of [1, 1, C] the result of fewer dimensions would have more
        asked.append(f".dim() >= {deepest}")
    if not spelled.used and not proves(more=(0, 1)):  # a weight says how many features there are
        asked.append(f".size(-1) == {features}")
    norm = _with_reasons(found, form.centred, form.weight, form.bias, eps)
    if bounds and not _has_spelled_least(bounds[0], features):
        norm = replace(norm, reasons=(*norm.reasons, "the minimum is on another multiple of the row norm"))
    return replace(norm, forms=tuple(asked), least=_spelled_least(bounds[0], found.x) if bounds else ())


def _spelled_least(node: Node, x: Value) -> tuple[Piece, ...]:
    """The least length of a row; where its root mean square is bounded, the bound times the root of the features."""
    if node.op == UNIT:
        return (Scalar(node, 3, "eps", "1e-12"),)
    found = Scalar(node, 1, "min")
    _, factor = bound_of(node) or (0.0, 1.0)
    if math.isclose(factor, 1.0, rel_tol=CLOSE):
        return (found,)
    return (Of(x, "x", ".shape[-1] ** 0.5", again=True), " * (", found, ")")


def _has_spelled_least(node: Node, features: int) -> bool:
    """Return whether it bounds a length or a root mean square, of which a recipe's ``least`` can be written."""
    bound = bound_of(node)
    return bound is None or any(math.isclose(bound[1], each, rel_tol=CLOSE) for each in (1.0, features**-0.5))


def _unlike(spelled: _Spelled, form: _Form) -> Norm | None:
    """Return what is no norm for its factor alone."""
    found = region(spelled.output, (spelled.x, *spelled.used))
    reason = "the divisor is not the number of features (unbiased variance, or scaled)"
    if found is None or _rounds_between(found):
        return None
    return Norm(found, form.centred, form.weight, form.bias, ("0.0",), (reason,))


def _vectors(output: Value, x: Value) -> list[Value]:
    """Return the vectors of the features that are read on the way from ``x``, once each."""
    found: dict[int, Value] = {}
    shape = x.shape
    for value in [output, *before(output, shape, x)]:  # not beyond: a residual stream has read many by then
        for read in value.producer.inputs if value.producer is not None else ():
            fits = read.shape != shape and read.shape[-1:] == shape[-1:] and math.prod(read.shape) == shape[-1]
            if fits and (len(read.shape) == 1 or keeps_its_form(read)):
                found.setdefault(uncast(read).index, read)
    return list(found.values())


def _roles(used: list[Value], centred: bool) -> Iterator[tuple[Value | None, Value | None]]:
    """Yield which vector may be the weight and which the bias."""
    if not used:
        yield None, None
    elif len(used) == 1:
        yield used[0], None
        if centred:
            yield None, used[0]
    elif centred and len(used) == 2:
        yield used[0], used[1]
        yield used[1], used[0]


def _promotes(found: Region, vector: Value) -> bool:
    """Return whether the dtype of a weight or bias, where it is another, becomes the result's: no cast follows it."""
    if vector.producer is not None and vector.producer.op in CASTS:
        return False
    made = {vector}
    for node in sorted(found.nodes, key=lambda each: each.index):
        if not made.isdisjoint(node.inputs):
            if node.op in CASTS:
                return False
            made.update(node.outputs)
    return True


def _rounds_between(found: Region) -> bool:
    """Return whether what is normalised is rounded before the end, as by a cast back before the weight."""
    return any(
        node.op in CASTS
        and node.output is not found.output
        and node.output.dtype.itemsize < node.inputs[0].dtype.itemsize
        for node in found.nodes
    )


def _gives_a_dtype(found: Region) -> bool:
    """Return whether a call says its result's dtype, as ``mean(dtype=...)``, which no cast follows at the end."""
    cast_back = found.output.producer is not None and found.output.producer.op in CASTS
    return not cast_back and any(
        isinstance(each, torch.dtype)
        for node in found.nodes
        if node.op not in CASTS
        for each in (*node.args, *node.kwargs.values())
    )


def _with_reasons(found: Region, centred: bool, weight: Value | None, bias: Value | None, eps: float) -> Norm:
    x, reasons = found.x, found.reasons
    if not found.is_contiguous:
        reasons.append(NOT_CONTIGUOUS)
    if any(each is not None and each.dtype not in {x.dtype, torch.float32} for each in (weight, bias)):
        reasons.append("the dtype of weight or bias differs from the input's")
    if is_half(x.dtype) and any(node.autocast for node in found.nodes):
        reasons.append("under autocast, torch's normalization returns another dtype")
    if not reasons and _gives_a_dtype(found):
        reasons.append("part of it has a fixed dtype, whatever the input's")
    spelled = _spelled_eps(found, eps)
    if spelled is None:
        reasons.append("eps is not a single number added to the mean square or the variance")
    return Norm(found, centred, weight, bias, spelled or ("0.0",), tuple(reasons))


def _spelled_eps(found: Region, eps: float) -> tuple[Piece, ...] | None:
    if eps == 0:
        return ("0.0",)
    spelled: list[Scalar] = []
    for node in found.nodes:
        if node.op != "add":
            continue
        arguments = [*enumerate(node.args), *((1, each) for name, each in node.kwargs.items() if name == "other")]
        for position, given in arguments:
            if isinstance(given, float | int) and math.isclose(given, eps, rel_tol=1e-9):
                spelled.append(Scalar(node, position, "other" if "other" in node.kwargs else ""))
    return (spelled[0],) if len(spelled) == 1 else None
