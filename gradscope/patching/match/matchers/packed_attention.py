"""Attention from one projection of q, k and v to merged heads: the views around an attention go with it."""

from __future__ import annotations

import ast
import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from gradscope.ops import RESHAPES_TO_SIZES, SCALES
from gradscope.patching.match.graph import called, is_view, made_from, number, replayed
from gradscope.patching.match.masks import Mask
from gradscope.patching.match.match import Argument, FromSizes, Like, Match, Of, Piece, Scalar, Size, why_idle
from gradscope.patching.match.matchers import attention
from gradscope.recording.graph import Node, Recording, Value

RECIPE = "packed_attention"

_ROLES = ("query", "key", "value")
_SDPA = "scaled_dot_product_attention"


def matches(recording: Recording) -> Iterator[Match]:
    """Yield every attention whose operands are the heads of one tensor and whose result's heads are merged."""
    found = list(attention.matches(recording))
    by_hand = {match.last for match in found}
    found += [_sdpa(node) for node in recording.nodes if node.op == _SDPA and node not in by_hand]
    for match in found:
        packed = _Packed.of(match)
        if packed is not None:
            yield packed


def _sdpa(node: Node) -> Match:
    """A call of torch's own attention, as the attention recipe would be called."""
    arguments = [Argument("", (Of(node.argument(at, role), role),)) for at, role in enumerate(_ROLES)]
    mask = node.argument(3, "attn_mask")
    if isinstance(mask, Value):
        arguments.append(Argument("attn_mask", (Of(mask, "mask"),)))
    for position, name, default in ((4, "dropout_p", 0.0), (5, "is_causal", False), (6, "scale", None)):
        if name in node.kwargs or node.argument(position, name, default) != default:
            arguments.append(Argument(name, (Scalar(node, position, name, str(default)),)))
    return Match(attention.RECIPE, "attention", tuple(arguments), frozenset({node}), node.output)


def _operands(match: Match) -> list[Of]:
    """Return queries, keys and values, where each is a tensor of which only the shape is changed."""
    found = {}
    for each in match.arguments:
        for before, piece, after in zip(("", *each.pieces), each.pieces, (*each.pieces[1:], ")"), strict=False):
            alone = len(each.pieces) == 1 or (before == QUERY and after == ")")
            if isinstance(piece, Of) and piece.role in _ROLES and alone:
                found[piece.role] = piece
    return [found[role] for role in _ROLES if role in found]


@dataclass
class _PackedCuts:
    """A tensor and what it is made from, over views and products with numbers, nearest first."""

    values: list[Value]
    scales: list[Scalar | tuple[Scalar]] = field(default_factory=list)  # in brackets where it divides
    worth: float = 1.0

    @classmethod
    def of(cls, value: Value) -> _PackedCuts:
        chain = cls([value])
        while (node := value.producer) is not None and len(node.inputs) == 1 and not node.changed:
            if not is_view(node) and not chain._scaled(node):
                break
            value = node.inputs[0]
            chain.values.append(value)
        return chain

    def _scaled(self, node: Node) -> bool:
        if node.op not in SCALES or len(node.args) != 2 or node.kwargs:
            return False
        position = 1 if node.args[0] is node.inputs[0] else 0
        by = number(node.args[position])
        if by is None or not by or (node.op == "div" and position == 0):
            return False
        scale = Scalar(node, position)
        self.scales.append((scale,) if node.op == "div" else scale)
        self.worth *= 1.0 / by if node.op == "div" else by
        return True

    def down_to(self, root: Value) -> list[Value]:
        """The values above ``root``."""
        return self.values[: self.values.index(root)]


@dataclass
class _Packed:
    """One attention between the views of its heads."""

    match: Match
    operands: list[Of]
    chains: list[_PackedCuts]
    root: Value
    heads: int
    kv_heads: int
    size: int

    @classmethod
    def of(cls, match: Match) -> Match | None:
        """The match that takes the views in; None where the heads are not those of one packed tensor."""
        views = _operands(match)
        if match.reasons or len(views) != 3 or not is_carried(match):
            return None
        chains = [_PackedCuts.of(each.value) for each in views]
        others = [set(map(id, chain.values)) for chain in chains[1:]]
        for root in chains[0].values:
            if len(root.shape) == 3 and all(id(root) in other for other in others):
                found = cls(match, views, chains, root, 0, 0, 0)
                if found._has_the_layout():
                    return found._match()
        return None

    def _has_the_layout(self) -> bool:
        """Return whether the three are, element for element, what the recipe takes for queries, keys and values."""
        if any(chain.scales for chain in self.chains[2:]) or self.root.dtype != self.match.output.dtype:
            return False
        positions = _positions(self.root.shape)
        found = []
        for operand in self.operands:
            made = replayed(operand.value, self.root, positions)
            made = None if made is None else called(made, operand.suffix)
            if made is None:
                return False
            found.append(made[:, None] if made.dim() == 3 else made)
        if any(made.dim() != 4 for made in found):
            return False
        batch, tokens, width = self.root.shape
        self.heads, self.size = found[0].shape[1], found[0].shape[3]
        parts, rest = divmod(width, self.size) if self.size else (0, 1)
        self.kv_heads = (parts - self.heads) // 2
        if rest or self.kv_heads < 1 or self.heads + 2 * self.kv_heads != parts or self.heads % self.kv_heads:
            return False
        if found[0].shape != (batch, self.heads, tokens, self.size):
            return False
        by_head = positions.unflatten(2, (parts, self.size)).transpose(1, 2)
        wanted = by_head.split([self.heads, self.kv_heads, self.kv_heads], dim=1)
        return all(
            torch.equal(made, view) or torch.equal(made, view.repeat_interleave(self.heads // self.kv_heads, 1))
            for made, view in zip(found, wanted, strict=True)
        )

    def _match(self) -> Match | None:
        merged = self._merged()
        if merged is None:
            return None
        if not self._is_spelled():
            return None
        output, nodes = merged
        for chain in self.chains:
            nodes |= {value.producer for value in chain.down_to(self.root) if value.producer is not None}
        below = self.match.otherwise
        return dataclasses.replace(
            self.match,
            beside=(),
            recipe=RECIPE,
            function="packed_attention",
            arguments=tuple(self._arguments()),
            nodes=self.match.nodes | nodes,
            output=output,
            suffix="",
            like=self._like(),
            lengths=None,  # the calls that made them of one tensor are part of the pattern
            idle=self._idle(),
            otherwise=None if below is None else _Packed.of(below),
        )

    def _is_spelled(self) -> bool:
        """Return whether the source says what the recipe needs beside the tensor; a number is this model's alone."""
        scaled = any(chain.scales for chain in self.chains[:2])
        if scaled and all(each.name != "scale" for each in self.match.arguments):  # by the root of a head's size, too
            return False
        return self.heads == self.kv_heads == 1 or isinstance(self._count(self.chains[0], self.heads), Size)

    def _idle(self) -> str:
        """Say why it gains nothing: beside torch's attention by rules of its own, unfused as the attention does."""
        node = self.match.last
        if node.op != _SDPA:
            return self.match.idle
        batch, tokens, _ = self.root.shape
        scores = batch * self.heads * tokens * tokens
        if number(node.argument(4, "dropout_p", 0.0)) != 0:
            return why_idle("attention with dropout", self.root, scores=scores)
        held = why_idle(f"{RECIPE} with held scores", self.root, scores=scores)
        return held and why_idle(RECIPE, self.root, tokens=tokens)

    def _like(self) -> Like | None:
        """The shape of the scores, by the packed tensor."""
        like = self.match.like
        if like is None or len(like.shape) != 4:
            return None
        sizes = ((self.root, 0), None, (self.root, 1), (self.root, 1))
        return Like(like.shape, sizes, self.root)

    def _merged(self) -> tuple[Value, set[Node]] | None:
        """The result with its heads merged, and the calls that merge them."""
        batch, tokens, _ = self.root.shape
        result = _positions((batch, self.heads, tokens, self.size))
        wanted = result.transpose(1, 2).flatten(2)
        value, nodes = self.match.output, set[Node]()
        made = result[:, 0] if len(value.shape) == 3 and self.heads == 1 else result
        spread = called(made, self.match.suffix)
        if spread is None or tuple(spread.shape) != value.shape:
            return None
        start = value
        while True:
            shown = replayed(value, start, spread)
            if shown is None:
                return None
            if shown.shape == wanted.shape and torch.equal(shown, wanted):
                return value, nodes
            if len(value.users) != 1:
                return None
            node = value.users[0]
            if not is_view(node) or len(node.outputs) != 1 or len(node.inputs) != 1 or node.changed:
                return None
            nodes.add(node)
            value = node.output

    def _arguments(self) -> Iterator[Argument]:
        yield Argument("", (Of(self.root, "qkv"),))
        yield Argument("", (self._count(self.chains[0], self.heads),))
        scale: tuple[Piece, ...] | None = None
        for each in self.match.arguments:
            if each.name == "scale":
                scale = each.pieces
            elif each.name == "**":
                yield Argument("**", without_query(each.pieces))
            elif each.name not in {"", "enable_gqa", *_ROLES}:
                yield each
        pieces = self._scale(scale)
        if pieces:
            yield Argument("scale", pieces)
        if self.kv_heads != self.heads:
            yield Argument("kv_heads", (self._count(self.chains[1], self.kv_heads),))

    def _scale(self, own: tuple[Piece, ...] | None) -> tuple[Piece, ...]:
        """The attention's own scale, times what queries and keys were multiplied with before."""
        before = [scale for chain in self.chains[:2] for scale in chain.scales]
        if own is None:
            return ()
        worth = _worth(own) * self.chains[0].worth * self.chains[1].worth
        if before and own == ("1.0",):
            own = ()
        factors: list[tuple[Piece, ...]] = [own] if own else []
        factors += [("1.0 / (", *each, ")") if isinstance(each, tuple) else (each,) for each in before]
        pieces: tuple[Piece, ...] = factors[0]
        if len(factors) > 1:
            pieces = ("(", *factors[0], ")")
            for factor in factors[1:]:
                pieces = (*pieces, " * (", *factor, ")")
        usual = math.isclose(worth * math.sqrt(self.size), 1.0, rel_tol=1e-6)
        return (FromSizes(pieces, self.size, "None"),) if usual else pieces

    def _count(self, chain: _PackedCuts, heads: int) -> Piece:
        """Return the number of heads, as the view that splits them has it."""
        positions = _positions(self.root.shape)
        for value in reversed(chain.down_to(self.root)):
            node = value.producer
            if node is None or node.op not in RESHAPES_TO_SIZES:
                continue
            made = replayed(value, self.root, positions)
            if made is None:
                continue
            first = node.argument(1, "dim") % len(node.inputs[0].shape) if node.op == "unflatten" else 0
            count = 1 + made.dim() - len(node.inputs[0].shape) if node.op == "unflatten" else made.dim()
            for dim in range(first, first + count):
                if made.shape[dim] == heads and self._counts(made, dim):
                    place = dim - first
                    rest: tuple[Piece, ...] = ()
                    if self.heads == self.kv_heads and place + 1 < count and made.shape[dim + 1] == self.size:
                        width = Of(self.root, "qkv", ".size(-1)", again=True)
                        rest = (width, " // 3 // ", Size(node, place + 1, count, self.size))
                    return Size(node, place, count, heads, rest)
        return str(heads)

    def _counts(self, made: Tensor, dim: int) -> bool:
        """Return whether a dimension goes from head to head."""
        if made.shape[dim] == 1:
            return dim == made.dim() - 2 and made.shape[-1] == self.size
        steps = made.select(dim, 1) - made.select(dim, 0)
        return bool((steps == self.size).all())


def _positions(shape: tuple[int, ...]) -> Tensor:
    """A tensor that holds at each place the place's number: views of it show what they are views of."""
    return torch.arange(math.prod(shape)).view(shape)


def _worth(pieces: tuple[Piece, ...]) -> float:
    """A scale's number in the recorded run; NaN where it is not known."""
    text = ""
    for piece in pieces:
        if isinstance(piece, Scalar):
            known = number(piece.node.argument(piece.position, piece.name or "value"))
            text += "None" if known is None else repr(known)
        else:
            text += piece if isinstance(piece, str) else "None"
    return _product(ast.parse(text, mode="eval").body)


def _product(expression: ast.expr) -> float:
    if isinstance(expression, ast.BinOp) and isinstance(expression.op, (ast.Mult, ast.Div)):
        left, right = _product(expression.left), _product(expression.right)
        if isinstance(expression.op, ast.Mult):
            return left * right
        return left / right if right else math.nan
    if isinstance(expression, ast.BinOp) and isinstance(expression.op, ast.Pow):
        return float(_product(expression.left) ** _product(expression.right))
    if isinstance(expression, ast.UnaryOp) and isinstance(expression.op, ast.USub):
        return -_product(expression.operand)
    found = expression.value if isinstance(expression, ast.Constant) else None
    return float(found) if isinstance(found, (int, float)) else math.nan


# Which masks of an attention the packed recipe can be given.


# How attention_mask is handed the queries, which it changes where a row is hidden altogether by a finite number.
QUERY = ", query="


def is_carried(match: Match) -> bool:
    """Return whether the attention's mask is right for the packed recipe too, whatever it holds in another step.

    A row that is hidden altogether by finite numbers weighs all keys and gives queries no gradient: then the packed
    recipe takes the queries apart. So finite numbers are taken of causal constants only, which may change all the same.
    """
    if any(each.name in {"softcap", "sinks"} for each in match.arguments):
        return False
    pieces = next((each.pieces for each in match.arguments if each.name == "**"), ())
    masks = [piece for piece in pieces if isinstance(piece, Of) and piece.role == "mask"]
    text = "".join(piece for piece in pieces if isinstance(piece, str))
    if text.count("zero") == len(masks) and "finite" not in text:  # "nonzero" too
        return True
    if len(masks) != 1 or "after" in text or not _is_constant(masks[0].value, match):
        return False
    kind = next((kind for kind in ("zero", "nonzero") if f'hides="{kind}"' in text), "")
    shape = masks[0].value.shape[-2:]
    return len(shape) == 2 and Mask(masks[0].value, kind, -math.inf, rank=4).is_causal_now((shape[0], shape[1]))


def without_query(pieces: tuple[Piece, ...]) -> tuple[Piece, ...]:
    """The call of attention_mask for a packed tensor, which has no queries apart."""
    return (*pieces[: pieces.index(QUERY)], ", packed=True)") if QUERY in pieces else pieces


def _is_constant(mask: Value, match: Match) -> bool:
    """Return whether it comes from tensors that the modules around hold, and that are no parameters."""
    owners = [place.frame.owner for place in match.last.places]
    held: list[object] = [each for owner in owners if owner is not None for each in vars(owner).values()]
    held += [each for owner in owners for each in getattr(owner, "_buffers", {}).values()]
    tensors = {id(each) for each in held if isinstance(each, Tensor) and not each.requires_grad}
    leaves = made_from(mask)
    return bool(leaves) and all(leaf.alive and id(leaf.tensor()) in tensors for leaf in leaves)
