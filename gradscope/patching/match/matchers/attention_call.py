"""The call of the recipe that stands for an attention by hand, or for torch's own that is given a causal mask."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from gradscope.ops import COPIES
from gradscope.patching.match.graph import cast_source
from gradscope.patching.match.masks import HIDDEN, Made, Mask, causal
from gradscope.patching.match.match import Argument, Beside, Like, Match, Of, Piece, Scalar, why_idle
from gradscope.patching.match.matchers.sinks import Sinks
from gradscope.patching.match.products import Operand, is_product
from gradscope.recording.graph import Node, Value

RECIPE = "attention"


@dataclass(frozen=True, eq=False)
class Factor:
    """A number, or a tensor of one value a query or head, that the scores are multiplied with or divided by."""

    node: Node
    position: int
    divides: bool
    value: float = 0.0
    tensor: Value | None = None
    number_node: Node | None = None  # what makes a tensor of the number


@dataclass(frozen=True, eq=False)
class Cap:
    """The number ``c`` of ``c * tanh(scores / c)``: where it divides."""

    node: Node
    position: int


@dataclass
class ScoresChain:
    """What was found on the way from the weights back to the scores."""

    product: Node
    softmax: Node
    nodes: set[Node]
    steps: list[Factor | Cap | Mask]  # in the order of the run
    shape: tuple[int, int]  # queries, keys
    dropout: tuple[Piece, ...] | None
    heads: tuple[Piece, ...] | None  # what the first dimension stands for, where it is unfolded
    folded: int  # dimensions with heads (3) or windows (4) in the batch; 0 where they are in none
    suffix: str
    reasons: list[str]
    beside: tuple[Beside, ...] = ()
    sinks: Sinks | None = None


@dataclass
class Call:
    """The call that stands for an attention."""

    found: ScoresChain
    query: Operand
    key: Operand
    value: Operand
    reasons: list[str] = field(default_factory=list)

    def match(self) -> Match:
        """The match; where a mask is made on the fly, one that does without it comes before one that looks at it."""
        self.reasons = self.found.reasons
        steps = self.found.steps
        self._check_operands()
        self._check_order(steps)
        masks = [step for step in steps if isinstance(step, Mask)]
        self._check_together(masks)
        frame = self.found.product.places[0].frame if self.found.product.places else None
        made = [causal(mask, self.found.shape, frame) for mask in masks] if frame is not None else []
        plain = self._with(masks, None)
        known = _dispensable(masks, made)
        if known is None:
            return plain
        shorter = self._with(masks, known)
        shorter.otherwise = plain if masks[known].positions is None else None
        found = made[known]
        assert found is not None
        if not found.is_of_scores(shorter.nodes):
            shorter.lengths = (_length(self.query), _length(self.key))
        shorter.nodes |= found.nodes
        shorter.fixed += found.fixed
        return shorter

    def _with(self, masks: list[Mask], known: int | None) -> Match:
        """The match in which the mask ``known`` is told by ``is_causal``."""
        reasons = list(self.reasons)
        others = [mask for index, mask in enumerate(masks) if index != known]
        finite = any(map(self._leaves_even, others))
        query = [] if finite else [Argument("", self._operand(self.query, "query"))]
        names = ("key", "value") if finite else ("", "")
        arguments = [
            *query,
            Argument(names[0], self._operand(self.key, "key")),
            Argument(names[1], self._operand(self.value, "value")),
        ]
        if self.found.dropout is not None:
            arguments.append(Argument("dropout_p", self.found.dropout))
        if known is not None and not others:
            arguments.append(Argument("is_causal", ("True",)))
        arguments.append(Argument("scale", self._scale()))
        caps = [step for step in self.found.steps if isinstance(step, Cap)]
        if caps:
            arguments.append(Argument("softcap", (Scalar(caps[0].node, caps[0].position, asked=True),)))
        if self.found.sinks is not None:
            arguments.append(Argument("sinks", (self.found.sinks.piece,)))
        if self._grouped():
            arguments.append(Argument("enable_gqa", ("True",)))
        helpers: tuple[str, ...] = ()
        if others:
            arguments.append(Argument("**", self._masks(others, after_causal=known is not None)))
            helpers = ("attention_mask",)
        if any(mask.positions is not None for mask in others):
            reasons.append("scores are assigned by index at positions that may not be causal")
        suffix = self.found.suffix
        if self._is_folded(self.found.product.output.shape):
            suffix = f".flatten(0, 1){suffix}"
        return Match(
            RECIPE,
            "attention",
            tuple(arguments),
            frozenset(self.found.nodes),
            self.found.product.output,
            helpers=helpers,
            suffix=suffix,
            reasons=reasons,
            like=self._like(),
            idle=self._idle() if caps else "",
            forms=tuple(self._forms(others)),
            beside=self.found.beside,
        )

    def _idle(self) -> str:
        """Say why few capped scores gain nothing on a CPU: the recipe is unfused there, as torch's has no cap."""
        query, output = self.query.value, self.found.product.output
        if query.dtype not in (torch.float32, torch.float64):  # of which nothing was measured
            return ""
        rows = math.prod(output.shape[:-1])
        return why_idle("attention with a soft-cap", output, scores=rows * self.found.shape[1])

    def _like(self) -> Like | None:
        """The shape of the scores."""
        scores = next(node for node in self.found.nodes if is_product(node) and node is not self.found.product).output
        query, key = self.query, self.key
        if self.found.sinks is not None or query.broadcast or len(query.shape) != len(scores.shape) != len(key.shape):
            return None
        rows = query.order or tuple(range(len(query.shape)))
        columns = key.order or tuple(range(len(key.shape)))
        sizes = [(query.value, each) for each in rows[:-1]]
        key_dimension = columns[-2] - int(key.broadcast)
        return Like(scores.shape, (*sizes, (key.value, key_dimension)), query.value)

    def _operand(self, operand: Operand, role: str) -> tuple[Piece, ...]:
        factors = [step for step in self.found.steps if isinstance(step, Factor) and step.tensor is not None]
        pieces: list[Piece] = [Of(operand.value, role, operand.suffix, bracketed=role == "query" and bool(factors))]
        if self._is_folded(operand.shape):
            assert self.found.heads is not None
            pieces = [Of(operand.value, role, f"{operand.suffix}.unflatten"), "(0, (", *self.found.heads, "))"]
        if role != "query":
            return tuple(pieces)
        for step in factors:
            assert step.tensor is not None
            pieces += [" / " if step.divides else " * ", Of(step.tensor, "scale", bracketed=True)]
        return tuple(pieces)

    def _scale(self) -> tuple[Piece, ...]:
        numbers = [step for step in self.found.steps if isinstance(step, Factor) and step.tensor is None]
        times = [_scalar(step) for step in numbers if not step.divides]
        over = [_scalar(step) for step in numbers if step.divides]
        if not over and len(times) <= 1:
            return (times[0],) if times else ("1.0",)
        pieces: list[Piece] = []
        for text in times:
            pieces += [" * (" if pieces else "(", text, ")"]
        for text in over:
            pieces += [" / (" if pieces else "1.0 / (", text, ")"]
        return tuple(pieces)

    def _masks(self, masks: list[Mask], *, after_causal: bool) -> tuple[Piece, ...]:
        """``attention_mask(mask, ...)``; masks that were applied before are what it comes ``after``."""
        *before, last = masks
        settings = list(self._settings(last))
        if before:
            settings += [", after=", *self._before(before, after_causal)]
        elif after_causal:
            settings.append(', after="causal"')
        if any(map(self._leaves_even, masks)):
            settings += [", query=", *self._operand(self.query, "query")]
        if self.found.sinks is not None and not all(mask.hides for mask in masks):
            settings.append(", sinks=True")
        return ("attention_mask", "(", self._mask(last)[0], *self._mask(last)[1:], *settings, ")")

    def _before(self, masks: list[Mask], after_causal: bool) -> Iterator[Piece]:
        *before, last = masks
        yield "{"
        yield '"mask": '
        yield from self._mask(last)
        yield f', "hides": "{last.hides or "added"}"'
        if self._leaves_even(last):
            yield ', "finite": True'
        if before:
            yield ', "after": '
            yield from self._before(before, after_causal)
        elif after_causal:
            yield ', "after": "causal"'
        yield "}"

    def _mask(self, mask: Mask) -> tuple[Piece, ...]:
        value = mask.value
        heads = self.found.heads
        minus = ("-",) if mask.negative else ()
        if heads is not None and mask.rank == self.found.folded == len(value.shape) and value.shape[0] != 1:
            return (*minus, Of(value, "mask", ".unflatten"), "(0, (", *heads, "))")
        return (*minus, Of(value, "mask", bracketed=mask.negative))

    def _forms(self, masks: list[Mask]) -> Iterator[tuple[Value, str]]:
        """Yield what is asked of a mask that is laid over all windows: whether each sample's has its own."""
        for mask in masks:
            value, node = mask.value, mask.value.producer
            if self.found.folded != 4 or mask.rank != 4 or len(value.shape) != 4:
                continue
            added = node is not None and node.op == "unsqueeze" and node.argument(1, "dim") in (0, -4)
            if not (added and node is not None and node.places[0].frame is self.found.product.places[0].frame):
                yield value, ".dim() == 4"
                yield value, f".shape[0] {'==' if value.shape[0] == 1 else '!='} 1"

    def _settings(self, mask: Mask) -> Iterator[Piece]:
        yield f', hides="{mask.hides or "added"}"'
        if self._leaves_even(mask):
            yield ", finite=True"

    def _leaves_even(self, mask: Mask) -> bool:
        """Return whether a row in which it hides all has even weights: with sinks they have the weight of all."""
        return mask.finite and self.found.sinks is None

    def _is_folded(self, shape: tuple[int, ...]) -> bool:
        """Return whether a tensor's first dimension is taken apart for the call."""
        return self.found.heads is not None and len(shape) == self.found.folded

    def _shape(self, operand: Operand) -> tuple[int, ...]:
        """Return the shape of an operand as the call sees it."""
        return (-1, -1, *operand.shape[1:]) if self._is_folded(operand.shape) else operand.shape

    def _grouped(self) -> bool:
        query, key = self._shape(self.query), self._shape(self.key)
        return len(query) == len(key) >= 3 and query[-3] != key[-3] == 1

    def _check_operands(self) -> None:
        output = self.found.product.output
        if self.found.folded and self.found.heads is None:
            what = "heads" if self.found.folded == 3 else "windows"
            self.reasons.append(f"the number of {what} folded into the batch is not in the code")
        if self.found.folded and self.found.sinks is not None:
            self.reasons.append("sinks are combined with heads or windows folded into the batch")
        operands = (self.query, self.key, self.value)
        if len({output.dtype, *(each.value.dtype for each in operands)}) != 1:
            self.reasons.append("queries, keys and values have different dtypes")
        query, key, value = (self._shape(each) for each in operands)
        if not (len(query) == len(key) == len(value)) or len(query) < 3:
            self.reasons.append("queries, keys and values have different numbers of dimensions")
            return
        if self.found.heads is not None and self.found.folded == 3:  # folded or not, the heads are as many
            return
        if not query[:-3] == key[:-3] == value[:-3]:
            self.reasons.append("queries, keys and values have different batch sizes")
        elif key[-3] != value[-3] or key[-3] not in (1, query[-3]):
            self.reasons.append("queries, keys and values have different numbers of heads")

    def _check_together(self, masks: list[Mask]) -> None:
        """Add a reason where masks with finite fills may leave other weights to a query that sees no key."""
        finite = [mask for mask in masks if self._leaves_even(mask)]
        if not finite or len(masks) == 1:
            return
        if len({mask.fill for mask in finite}) > 1:
            self.reasons.append("two masks use different fill values")
        for index, mask in enumerate(masks):
            if not mask.hides and (index > masks.index(finite[0]) or not mask.is_bias()):
                self.reasons.append("one mask is added, and another uses a finite fill value")

    def _check_order(self, steps: list[Factor | Cap | Mask]) -> None:
        """A scale after a mask scales what hides as well, a cap shows it again."""
        masks: list[Mask] = []
        capped = False
        for step in steps:
            if isinstance(step, Mask):
                masks.append(step)
                continue
            if capped:
                self.reasons.append("the scores are scaled or soft-capped again after the soft-cap")
            if isinstance(step, Cap):
                capped = True
                if masks:
                    self.reasons.append("a mask is applied before the soft-cap")
            elif step.tensor is not None:
                self._check_tensor(step.tensor, masks)
            else:
                self._check_number(step, masks)

    def _check_tensor(self, tensor: Value, masks: list[Mask]) -> None:
        if masks:
            self.reasons.append("a mask is applied before the scores are multiplied by a tensor")
        if self.found.heads is not None and len(tensor.shape) >= self.found.folded:
            self.reasons.append("scores with heads or windows folded into the batch are multiplied by a tensor")
        if tensor.dtype != self.query.value.dtype and tensor.shape:
            self.reasons.append("the scores are multiplied by a tensor of another dtype")

    def _check_number(self, step: Factor, masks: list[Mask]) -> None:
        factor = (1.0 / step.value if step.value else 0.0) if step.divides else step.value
        for mask in masks:
            if not mask.hides:
                self.reasons.append("a mask is added before the scores are scaled")
            elif not factor > 0 or mask.fill * factor > 0.1 * HIDDEN:
                self.reasons.append(f"masked scores become {mask.fill * factor}, which does not mask them out")


def _length(operand: Operand) -> tuple[Value, int]:
    """Return which dimension of which tensor."""
    return operand.value, operand.order[-2] if operand.order else -2


def _scalar(step: Factor) -> Scalar:
    made = step.number_node
    if made is not None:
        return Scalar(made, int(made.op == "full"), "fill_value" if made.op == "full" else "data")
    if step.node.op == "baddbmm":
        return Scalar(step.node, 4, "alpha", "1.0")
    return Scalar(step.node, step.position)


def _dispensable(masks: list[Mask], made: list[Made | None]) -> int | None:
    """The mask that ``is_causal`` can stand for: no other has a say on what it hides."""
    for index, found in enumerate(made):
        others = [mask for other, mask in enumerate(masks) if other != index]
        if found is not None and (not others or (found.infinite and not any(mask.finite for mask in others))):
            return index
    return None


# The weights of an attention that are returned or stored: the recipe gives them beside its result.


def weights_of(weights: Value, softmax: Node, query: Operand, dropped: Node | None) -> Iterator[Beside]:
    """What becomes of the softmax until it is the operand ``weights`` of the matmul with the values, step by step.

    What is there before ``dropped`` takes the sinks' column off is not among it.
    """
    steps: list[Node] = []
    while weights.producer is not None and weights.producer is not softmax:
        steps.insert(0, weights.producer)
        weights = weights.producer.inputs[0]
    casts = [step for step in steps if cast_source(step.output) is not None]
    if any(step.changed or not (step in casts or step is dropped or step.op in {"dropout", *COPIES}) for step in steps):
        return  # a view of another shape
    drops = [step for step in steps if step.op == "dropout"]
    for count in range(len(steps) + 1):
        made, left = steps[:count], steps[count:]
        if dropped in left:
            continue
        before = [step for step in casts if step in made]
        value = made[-1].output if made else softmax.output
        mixed = not before and softmax.autocast and softmax.output.dtype == torch.float32
        wanted = torch.float32 if mixed else query.value.dtype
        own_dtype = not before and softmax.argument(2, "dtype") is not None
        if any(step in casts for step in left) or own_dtype or value.dtype != wanted:
            continue
        after = any(step in drops for step in left)
        arguments = (Argument("after_dropout", ("False",)),) if after else ()
        yield Beside(value, "attention_with_weights", arguments, before[-1] if before else None)


# torch's own attention that is given a causal mask, where it could be told that it is causal.


def with_causal_mask(node: Node) -> Iterator[Match]:
    """Match SDPA with a mask that says what ``is_causal`` says."""
    mask = node.argument(3, "attn_mask")
    if not isinstance(mask, Value) or mask.requires_grad or node.argument(5, "is_causal", False) or not node.places:
        return
    query, key, value = node.inputs[:3]
    shape = (query.shape[-2], key.shape[-2])
    given = Mask(mask, "zero" if mask.dtype is torch.bool else "", -math.inf)
    if not given.is_causal_now(shape):
        return
    arguments = [Argument("", (Of(each, role),)) for each, role in ((query, "query"), (key, "key"), (value, "value"))]
    if node.argument(4, "dropout_p", 0.0) or "dropout_p" in node.kwargs:
        arguments.append(Argument("dropout_p", (Scalar(node, 4, "dropout_p", "0.0"),)))
    for position, name, default in ((6, "scale", None), (7, "enable_gqa", False)):
        if node.argument(position, name, default) != default:
            arguments.append(Argument(name, (Scalar(node, position, name, str(default)),)))
    settings = ', hides="zero"' if given.hides else ""
    looked = Argument("**", ("attention_mask", "(", Of(mask, "mask"), f"{settings})"))
    plain = Match(
        RECIPE, "attention", (*arguments, looked), frozenset({node}), node.output, helpers=("attention_mask",)
    )
    made = causal(given, shape, node.places[0].frame)
    if made is None:
        yield plain
        return
    told = (*arguments, Argument("is_causal", ("True",)))
    yield Match(
        RECIPE,
        "attention",
        told,
        frozenset({node}) | made.nodes,
        node.output,
        fixed=made.fixed,
        lengths=((query, -2), (key, -2)),
        otherwise=plain,
    )
