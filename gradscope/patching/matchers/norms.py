"""RMS and layer normalisation by hand: the last dimension over the root of its mean square or its variance."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from gradscope import recipes
from gradscope.patching import algebra
from gradscope.patching.again import CONSTANTS, Proofs
from gradscope.patching.algebra import Sum
from gradscope.patching.formula import Formulas, is_half, uncast
from gradscope.patching.graph import CASTS, argument
from gradscope.patching.idle import why_idle
from gradscope.patching.match import Argument, Match, Of, Piece, Scalar, Setting
from gradscope.patching.matchers.search import NOT_CONTIGUOUS, Region, after, before, formula_of, is_function_of, region
from gradscope.patching.recording import Node, Recording, Value

# How near a formula's numbers come that is divided by one less than the number of features.
_NEAR = 0.2

RMS = "rms_norm"
LAYER = "layer_norm"

# A norm by hand adds its parameters' gradients up more exactly than torch's on a CPU: what replaces it must as well.
_EXACT = (Argument("exact", ("True",)),)
# Nor is its result cast to the input's dtype, where the code does not say so.
_PROMOTE = (Argument("promote", ("True",)),)

_STATISTICS = frozenset(
    {"mean", "sum", "var", "std", "var_mean", "std_mean", "norm", "linalg_norm", "linalg_vector_norm"}
)


@dataclass(frozen=True)
class Norm:
    """A normalisation by hand."""

    region: Region
    centred: bool  # layer normalisation; else RMS normalisation
    weight: Value | None
    bias: Value | None
    eps: tuple[Piece, ...]
    reasons: tuple[str, ...] = field(default=())

    def arguments(self) -> list[Argument]:
        """Weight, bias and eps of a recipe's call, and whether they promote its result."""
        found = [
            Argument(name, (Of(value, name, ".flatten()" if len(value.shape) > 1 else ""),))
            for name, value in (("weight", self.weight), ("bias", self.bias))
            if value is not None
        ]
        promotes = any(_promotes(self.region, value) for value in (self.weight, self.bias) if value is not None)
        return [*found, Argument("eps", self.eps), *(_PROMOTE if promotes else ())]


def rms(recording: Recording) -> Iterator[Match]:
    """Every RMS normalisation that is spelled out; on a CPU torch's own too, which is of plain operations there."""
    for node in recording.nodes:
        if node.op == RMS and node.inputs and node.output.device.type == "cpu" and not node.autocast:
            yield _of_torch(node)
    yield from (_match(found) for found in norms(recording) if not found.centred)


def layer(recording: Recording) -> Iterator[Match]:
    """Every layer normalisation that is spelled out."""
    return (_match(found) for found in norms(recording) if found.centred)


def norms(recording: Recording) -> list[Norm]:
    """Every normalisation that is spelled out, and formulas that are one but for their numbers."""
    known: list[Norm] | None = recording.found.get("norms")
    if known is not None:
        return known
    norms: list[Norm] = []
    inside: set[Node] = set()
    proofs = Proofs()
    for node in recording.nodes:
        if node.op in _STATISTICS and node.inputs and len(node.inputs[0].shape) > 1 and node not in inside:
            found = _around(node, proofs)
            if found is not None:
                inside |= found.region.nodes
                norms.append(found)
    recording.found["norms"] = norms
    return norms


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
        idle="" if found.centred else _idle(x),
    )


def _idle(x: Value) -> str:
    """Torch's layer normalisation is a gain beside one by hand; its RMS normalisation is of the same operations."""
    return why_idle(RMS, x, elements=math.prod(x.shape))


def _of_torch(node: Node) -> Match:
    """RMS normalisation by torch's own function or module."""
    x, weight = node.inputs[0], argument(node, 2, "weight")
    shape = Setting(node, "normalized_shape", Scalar(node, 1, "normalized_shape"))
    arguments = [Argument("", (Of(x, "x"),)), Argument("", (shape,))]
    if isinstance(weight, Value):
        arguments.append(Argument("weight", (Setting(node, "weight", Of(weight, "weight")),)))
    arguments.append(Argument("eps", (Setting(node, "eps", Scalar(node, 3, "eps", "None")),)))
    reasons = []
    if isinstance(weight, Value) and weight.dtype not in {x.dtype, torch.float32}:
        reasons.append("the weight has another dtype than the input")
    if node.output.dtype != x.dtype:
        reasons.append("the result has another dtype than the input")
    return Match(RMS, RMS, tuple(arguments), frozenset({node}), node.output, reasons=reasons, idle=_idle(x))


def _around(statistic: Node, proofs: Proofs) -> Norm | None:
    """The normalisation that ``statistic`` is a part of, with as much of weight and bias as there is.

    One with other numbers where there is none.
    """
    spelled: list[_Spelled] = []
    for x in before(statistic.inputs[0], statistic.inputs[0].shape):
        if not is_function_of(Formulas(x, alone=True), statistic.inputs[0], x):
            continue
        known: dict[tuple[int, ...], Formulas] = {}
        outputs = {output for made in statistic.outputs for output in after(made, x.shape)}
        for output in sorted(outputs, key=lambda each: -each.index):
            each = _spelled(x, output, known)
            if each is not None:
                norm = _norm(each, CONSTANTS, proofs)
                if norm is not None:
                    return norm
                spelled.append(each)
    return next(filter(None, (_norm(each, _NEAR, proofs) for each in spelled)), None)


@dataclass(frozen=True)
class _Spelled:
    """A tensor that may be a normalised ``x``, as a formula."""

    x: Value
    output: Value
    formulas: Formulas
    formula: Sum
    used: list[Value]  # vectors of the features
    eps: float


def _spelled(x: Value, output: Value, known: dict[tuple[int, ...], Formulas]) -> _Spelled | None:
    vectors = _vectors(output, x)
    if len(vectors) > 4:
        return None
    formulas = known.setdefault(tuple(each.index for each in vectors), Formulas(x, *vectors, alone=True))
    formula = formula_of(formulas, output)
    if formula is None:
        return None
    eps = _eps(formula)
    used = [value for value in vectors if formulas.index(value) in formula.leaves]
    if eps is None or formula.leaves - {formulas.index(each) for each in (x, *used)}:
        return None
    return _Spelled(x, output, formulas, formula, used, eps)


def _norm(spelled: _Spelled, tolerance: float, proofs: Proofs) -> Norm | None:
    x, output, used, eps = spelled.x, spelled.output, spelled.used, spelled.eps
    formulas, formula = spelled.formulas, spelled.formula
    for centred in (False, True):
        for weight, bias in _roles(used, centred):
            wanted = _formula(formulas, x, weight, bias, eps, centred)
            if wanted is None or not algebra.close(formula, wanted, tolerance):
                continue
            found = region(output, (x, *used))
            if found is None or _rounds_between(found):
                return None
            if not algebra.close(formula, wanted, CONSTANTS):
                reason = "it is divided by another number than the count of features: unbiased, or scaled"
                return Norm(found, centred, weight, bias, ("0.0",), (reason,))

            def unit(
                tensors: Mapping[int, Tensor],
                weight: Value | None = weight,
                bias: Value | None = bias,
                centred: bool = centred,
            ) -> Tensor:
                given = tensors[uncast(x).index]
                scale, shift = (
                    None if each is None else tensors[uncast(each).index].flatten() for each in (weight, bias)
                )
                if centred:
                    return recipes.layer_norm(given, given.shape[-1:], scale, shift, eps, exact=True)
                return recipes.rms_norm(given, given.shape[-1:], scale, eps)

            name = f"{centred} {weight is None} {bias is None} {eps}"
            if not proofs.proves(name, found.nodes, output, found.given, formula, wanted, unit):
                return None
            return _with_reasons(found, centred, weight, bias, eps)
    return None


def _vectors(output: Value, x: Value) -> list[Value]:
    """Vectors of the features that are read on the way from ``x``, once each."""
    found: dict[int, Value] = {}
    shape = x.shape
    for value in [output, *before(output, shape, x)]:  # not beyond: a residual stream has read many by then
        for read in value.producer.inputs if value.producer is not None else ():
            if read.shape != shape and read.shape[-1:] == shape[-1:] and math.prod(read.shape) == shape[-1]:
                found.setdefault(uncast(read).index, read)
    return list(found.values())


def _eps(formula: Sum) -> float | None:
    """What is added to the mean square or the variance."""
    for atom, exponent in formula.atoms():
        if exponent == -0.5 and atom.kind == "mean":
            return 0.0
        if exponent == -0.5 and atom.kind == "sum" and atom.of is not None:
            squares = [
                coefficient
                for product, coefficient in atom.of.terms
                if len(product) == 1 and product[0][0].kind == "mean" and product[0][1] == 1
            ]
            if len(squares) == 1 and squares[0]:
                return atom.of.constant / squares[0]
    return None


def _roles(used: list[Value], centred: bool) -> Iterator[tuple[Value | None, Value | None]]:
    """Which vector may be the weight and which the bias."""
    if not used:
        yield None, None
    elif len(used) == 1:
        yield used[0], None
        if centred:
            yield None, used[0]
    elif centred and len(used) == 2:
        yield used[0], used[1]
        yield used[1], used[0]


def _formula(
    formulas: Formulas, x: Value, weight: Value | None, bias: Value | None, eps: float, centred: bool
) -> Sum | None:
    given = formulas.leaf(x)
    spread, middle = algebra.mean(algebra.power(given, 2)), algebra.mean(given)
    if centred:
        given = algebra.add(given, algebra.scaled(middle, -1))
        spread = algebra.add(spread, algebra.scaled(algebra.power(middle, 2), -1))
    try:
        found = algebra.times(given, algebra.power(algebra.add(spread, algebra.number(eps)), -0.5))
        if weight is not None:
            found = algebra.times(found, formulas.leaf(weight))
        return found if bias is None else algebra.add(found, formulas.leaf(bias))
    except algebra.TooLongError:
        return None


def _promotes(found: Region, vector: Value) -> bool:
    """Whether the dtype of a weight or bias, where it is another, becomes the result's: no cast follows it."""
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
    """Whether what is normalised is rounded before the end, as by a cast back before the weight."""
    return any(
        node.op in CASTS
        and node.output is not found.output
        and node.output.dtype.itemsize < node.inputs[0].dtype.itemsize
        for node in found.nodes
    )


def _with_reasons(found: Region, centred: bool, weight: Value | None, bias: Value | None, eps: float) -> Norm:
    x, reasons = found.x, found.reasons
    if not found.is_contiguous:
        reasons.append(NOT_CONTIGUOUS)
    if any(each is not None and each.dtype not in {x.dtype, torch.float32} for each in (weight, bias)):
        reasons.append("weight or bias has another dtype than the input")
    if is_half(x.dtype) and any(node.autocast for node in found.nodes):
        reasons.append("under autocast torch's normalisation gives another dtype")
    spelled = _spelled_eps(found, eps)
    if spelled is None:
        reasons.append("eps is not one number that is added to the mean square or the variance")
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
