"""Rotary position embedding of queries and keys in one pass each; backward is the same pass with -sin."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from gradscope.kernels import pays
from gradscope.kernels.check import dtype_text, refuse, require_dtype, require_range, require_same_device, shape_text
from gradscope.kernels.choice import BackendChoice, choose, explained_by
from gradscope.kernels.rope import composed, reference
from gradscope.kernels.rope.cpu import COMPOSED, WAYS
from gradscope.kernels.rope.launch import rotated
from gradscope.kernels.support import why_no_triton
from gradscope.recipes.kept import kept
from gradscope.recipes.recipe import Recipe

ABOUT = Recipe(
    name="rope",
    title="Rotary position embedding of queries and keys, written directly into the result",
    functions=("rope",),
    modules=("RotaryEmbedding",),
    replaces=(
        "q * cos + rotate_half(q) * sin, with rotate_half a concatenation of two slices",
        "stacked even and odd features (GPT-J), or a complex multiplication (Llama's original code)",
    ),
    saves=(
        "Unfused rotate_half writes a negated half, a concatenation, two products and a sum, and "
        "as much again in backward. This recipe writes only the result, and its backward only "
        "the gradient."
    ),
    limits=(
        "Compared with a complex multiplication it saves nothing on a CPU, where it is that multiplication.",
        "On a CPU, below 90,000 features, it falls back to torch's operations: the call overhead would be larger.",
        "If cos or sin require a gradient, it falls back to torch's operations.",
    ),
    backends=(
        ("triton", "NVIDIA GPUs from compute capability 8.0 on"),
        (
            "cpu",
            (
                "every device; interleaved pairs by torch's complex multiplication, halves by a "
                "multiplication and two fused multiply-adds; measured on CPU"
            ),
        ),
        ("torch", "every device; the unfused rotation, or a differentiable complex multiplication"),
    ),
    sources=(
        "J. Su et al., RoFormer (arXiv:2104.09864), section 3.4.2",
        "Liger-Kernel, rope: backward with -sin (their figures on an A100: 2.32 to 0.21 ms)",
    ),
)

_NAME = "rope"
_RULES = {False: "rope", True: "rope, interleaved"}  # names in kernels/pays.py


def _explain(
    x: Tensor | tuple[Tensor, Tensor],
    cos: Tensor,
    sin: Tensor,
    *,
    interleaved: bool = False,
    rotary: int | None = None,
    offset: int = 0,
    positions: Tensor | None = None,
    promote: bool = False,
    backend: str = "auto",
) -> BackendChoice:
    """What :func:`rope` would do with these arguments, and why."""
    if promote:
        x, cos, sin = _promoted(x, cos, sin)
    tensors = x if isinstance(x, tuple) else (x,)
    cos, sin = _without_heads(cos), _without_heads(sin)
    require_same_device(_NAME, ("x[0]", tensors[0]), **{"x[1]": tensors[-1]})
    for tensor in tensors:
        _check(tensor, cos, sin, rotary, offset, positions)
        first = tensors[0]
        if (tensor.shape[0], tensor.shape[2:]) != (first.shape[0], first.shape[2:]):
            got = f"{shape_text(tensor)}, {dtype_text(tensor.dtype)}"
            refuse(_NAME, "x[1]", got, f"as x[0] but for its heads: {tuple(first.shape)}, {dtype_text(first.dtype)}")
    double = "only the other backends support float64" if torch.float64 in {t.dtype for t in tensors} else None
    reasons = {
        "triton": "one kernel reads each tensor once and writes it once",
        "cpu": WAYS[interleaved],
        "torch": COMPOSED[interleaved],
    }
    learnt = "the tables require a gradient" if cos.requires_grad or sin.requires_grad else None
    against = {"triton": double or learnt or why_no_triton(tensors[0].device), "cpu": learnt}
    if backend == "auto" and tensors[0].is_cpu and not learnt:
        against["cpu"] = pays.against(_RULES[interleaved], features=sum(t.numel() for t in tensors))
    return choose(_NAME, backend, reasons, against)


def _plain(
    x: Tensor | tuple[Tensor, Tensor],
    cos: Tensor,
    sin: Tensor,
    *,
    interleaved: bool = False,
    rotary: int | None = None,
    offset: int = 0,
    positions: Tensor | None = None,
    promote: bool = False,
    backend: str = "auto",
) -> Any:
    if promote:
        x, cos, sin = _promoted(x, cos, sin)
    if isinstance(x, tuple):
        each = {"interleaved": interleaved, "rotary": rotary, "offset": offset, "positions": positions}
        return tuple(_plain(part, cos, sin, **each) for part in x)  # type: ignore[arg-type]
    _check_dimensions(x)
    tables = _tables(x, cos, sin, interleaved, rotary, offset, positions, whole=True)
    doubled = tables[0].shape[-1] == _features(x, cos, rotary)
    return (reference.rotated_each if doubled else reference.rotated)(x, *tables, interleaved)


@explained_by(_explain, _plain, ("triton", "cpu", "torch"))
def rope(
    x: Tensor | tuple[Tensor, Tensor],
    cos: Tensor,
    sin: Tensor,
    *,
    interleaved: bool = False,
    rotary: int | None = None,
    offset: int = 0,
    positions: Tensor | None = None,
    promote: bool = False,
    backend: str = "auto",
) -> Any:
    """Turn each pair of features by the angle of its token's position.

    Args:
        x: [batch, heads, tokens, size], any strides (what is [batch, tokens, heads, size] comes as a transposed view);
            or queries and keys, whose heads may differ in number. float16, bfloat16, float32 or float64.
        cos, sin: [positions, pairs], a row a position; or [batch or 1, tokens, pairs] for positions that differ, also
            with a dimension of one for the heads, before or behind the tokens. A doubled table, [..., 2 · pairs] with
            every angle twice as Hugging Face builds it, is taken too. It is looked at once for each content (on a GPU
            from a tensor's second use on): one whose halves differ turns each feature by its own number, in torch's
            operations; so do tables that require a gradient, which they get, and any doubled one in a compiled graph.
        interleaved: False pairs feature i with i + rotary / 2 (GPT-NeoX, Llama); True pairs 2i with 2i + 1 (GPT-J).
        rotary: how many features are turned, the first; the others pass. None: all that the table has angles for.
        offset: position of the first token, as with a cache of keys; for a table of positions.
        positions: [tokens] or [batch, tokens], int64, of each token, instead of an offset. They are not checked: on a
            GPU that would wait for it.
        promote: tables of another dtype promote the result, as in plain operations: bfloat16 by float32 is float32; and
            they may be integers, or of two dtypes.
        backend: "auto", "triton", "cpu" or "torch"; ``rope.explain`` tells what "auto" takes.

    Returns:
        A tensor for a tensor, a tuple for a tuple; each in its dtype unless ``promote``, computed in float32 (float64:
        float64).

    Raises:
        ValueError: a shape, dtype, device or setting does not fit.
    """
    if backend == "auto" and rotary is None and positions is None and not offset:
        turned = _of_few(x if isinstance(x, tuple) else (x,), cos, sin, interleaved)
        if turned is not None:
            return turned if isinstance(x, tuple) else turned[0]
    if promote:
        x, cos, sin = _promoted(x, cos, sin)
    choice = _explain(
        x,
        cos,
        sin,
        interleaved=interleaved,
        rotary=rotary,
        offset=offset,
        positions=positions,
        backend=backend,
    )
    tensors = x if isinstance(x, tuple) else (x,)
    if tensors[0].dtype != tensors[-1].dtype:
        each = {"interleaved": interleaved, "rotary": rotary, "offset": offset, "positions": positions}
        return tuple(rope(part, cos, sin, **each, backend=backend) for part in tensors)  # type: ignore[arg-type]
    if cos.requires_grad or sin.requires_grad or not _turns_pairs(tensors[0], cos, sin, rotary, interleaved):
        each = {"interleaved": interleaved, "rotary": rotary, "offset": offset, "positions": positions}
        return _plain(x, cos, sin, **each)  # type: ignore[arg-type]
    tables = _tables(tensors[0], cos, sin, interleaved, rotary, offset, positions)
    if choice.backend == "torch":
        turned = composed.rotated(tensors, *tables, interleaved)
        return turned if isinstance(x, tuple) else turned[0]
    found: Any
    if torch.is_grad_enabled() and any(each.requires_grad for each in tensors):
        found = _Rope.apply(*tables, interleaved, choice.backend, 1, *tensors)  # type: ignore[no-untyped-call]
    else:  # without a gradient torch 2.13's compiler forgets the context of a Function of two tensors in *tensors
        found = tuple(rotated(list(tensors), *tables, interleaved, 1, choice.backend))
    return found if isinstance(x, tuple) else found[0]


def _of_few(given: tuple[Tensor, ...], cos: Tensor, sin: Tensor, interleaved: bool) -> tuple[Tensor, ...] | None:
    """The rotation where auto leaves it to torch on a CPU, told by fewer looks than the checks take; None elsewhere."""
    first, last, shape = given[0], given[-1], cos.shape
    for each in (first, last, cos, sin):
        if not (each.is_cpu and each.dtype is torch.float32):
            return None
    if len(given) > 2 or first.dim() != 4 or len(shape) < 2 or sin.shape != shape:
        return None
    batch, _, tokens, size = first.shape
    if last is not first and (last.dim() != 4 or last.shape[0] != batch or last.shape[2:] != first.shape[2:]):
        return None
    features = first.numel() if len(given) == 1 else first.numel() + last.numel()
    doubled = shape[-1] == size
    if not size or size % 2 or (doubled and interleaved) or not (doubled or 2 * shape[-1] == size):
        return None
    if pays.against(_RULES[interleaved], features=features) is None:
        return None
    if len(shape) == 2 and tokens <= shape[0]:
        cos, sin = (cos, sin) if tokens == shape[0] else (cos[:tokens], sin[:tokens])
    elif len(shape) == 3 and (shape[0] == 1 or shape[0] == batch) and shape[1] == tokens:
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    elif len(shape) != 4 or (shape[0] != 1 and shape[0] != batch) or shape[1] != 1 or shape[2] != tokens:
        return None
    return composed.rotated(given, cos, sin, interleaved, doubled=doubled)


class _Rope(torch.autograd.Function):
    """A rotation by the tables' angles, or for ``sign`` -1 back; each is the other's backward, so any derivative is."""

    @staticmethod
    def forward(
        ctx: Any, cos: Tensor, sin: Tensor, interleaved: bool, backend: str, sign: int, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(cos, sin)
        ctx.interleaved, ctx.backend, ctx.sign = interleaved, backend, sign
        turned = rotated(list(tensors), cos, sin, interleaved, sign, backend)
        wanted = ctx.needs_input_grad[5:]
        ctx.mark_non_differentiable(*(each for each, needed in zip(turned, wanted, strict=True) if not needed))
        return tuple(turned)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        wanted = {
            index: gradient
            for index, (gradient, needed) in enumerate(zip(gradients, ctx.needs_input_grad[5:], strict=True))
            if needed and gradient is not None
        }
        found: list[Tensor | None] = [None] * len(gradients)
        given, back = list(wanted.values()), -ctx.sign
        turned: Any
        if torch.is_grad_enabled() and given:
            turned = _Rope.apply(cos, sin, ctx.interleaved, ctx.backend, back, *given)  # type: ignore[no-untyped-call]
        else:
            turned = rotated(given, cos, sin, ctx.interleaved, back, ctx.backend)
        for index, gradient in zip(wanted, turned, strict=True):
            found[index] = gradient
        return None, None, None, None, None, *found


class RotaryEmbedding(nn.Module):
    """:func:`rope` with tables of its own, ``cos(position · base^(-2 i / size))``, not part of the state dict.

    Args:
        size: features of a head that are turned; even.
        max_tokens: how many positions there are.
        base: of the angles.
        interleaved: see :func:`rope`.
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, size: int, max_tokens: int, *, base: float = 10000.0, interleaved: bool = False) -> None:
        super().__init__()
        if size < 2 or size % 2:
            refuse("RotaryEmbedding", "size", size, "a positive even number")
        require_range("RotaryEmbedding", "base", base, 0.0, float("inf"), open_low=True, open_high=True)
        self.size, self.interleaved = size, interleaved
        # In float64: at position 100,000 an angle in float32 is off by 0.004.
        rates = base ** (-torch.arange(0, size, 2, dtype=torch.float64) / size)
        angles = torch.arange(max_tokens, dtype=torch.float64)[:, None] * rates
        self.register_buffer("cos", angles.cos().float(), persistent=False)
        self.register_buffer("sin", angles.sin().float(), persistent=False)

    def forward(
        self, query: Tensor, key: Tensor, offset: int = 0, positions: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Queries and keys [batch, heads, tokens, size], turned."""
        found: tuple[Tensor, Tensor] = rope(
            (query, key),
            self.cos,
            self.sin,
            interleaved=self.interleaved,
            rotary=self.size,
            offset=offset,
            positions=positions,
        )
        return found

    def extra_repr(self) -> str:
        """The settings."""
        return f"{self.size}, {self.cos.shape[0]}, interleaved={self.interleaved}"


def _promoted(
    x: Tensor | tuple[Tensor, Tensor], cos: Tensor, sin: Tensor
) -> tuple[Tensor | tuple[Tensor, Tensor], Tensor, Tensor]:
    """Promote what is turned to the dtype of its product with the tables, and these to one dtype."""
    first, last = x if isinstance(x, tuple) else (x, x)
    dtype = torch.promote_types(cos.dtype, sin.dtype)
    if not dtype.is_floating_point and not dtype.is_complex:
        dtype = first.dtype
    first, last = (each.to(torch.promote_types(each.dtype, dtype)) for each in (first, last))
    return (first, last) if isinstance(x, tuple) else first, cos.to(dtype), sin.to(dtype)


def _features(x: Tensor, cos: Tensor, rotary: int | None) -> int:
    """How many features are turned. A table as wide as the head can only be a doubled one."""
    width = cos.shape[-1]
    if rotary is not None:
        return rotary
    return width if width == x.shape[3] else 2 * width


def _turns_pairs(x: Tensor, cos: Tensor, sin: Tensor, rotary: int | None, interleaved: bool) -> bool:
    """Check that both features of each pair are turned by one angle; of a doubled table by a look at it."""
    if cos.shape[-1] == _features(x, cos, rotary) // 2:
        return True
    return not torch.compiler.is_compiling() and all(_is_doubled(each, interleaved) for each in (cos, sin))


def _is_doubled(table: Tensor, interleaved: bool) -> bool:
    def look() -> bool:
        half = table.shape[-1] // 2
        pairs = (table[..., ::2], table[..., 1::2]) if interleaved else (table[..., :half], table[..., half:])
        return torch.equal(*pairs)

    return look() if table.is_inference() else kept(table, ("doubled", interleaved), look, unseen=True)


def _without_heads(table: Tensor) -> Tensor:
    """[batch or 1, tokens, pairs] of a table that has a dimension of one for the heads; any other as it is."""
    if table.dim() == 4:
        for place in (1, 2):
            if table.shape[place] == 1:
                return table.squeeze(place)
    return table


def _tables(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool,
    rotary: int | None,
    offset: int,
    positions: Tensor | None,
    whole: bool = False,
) -> tuple[Tensor, Tensor]:
    """Both as [batch or 1, 1, tokens, pairs], in the precision of the rotation; ``whole``: a doubled table as it is."""
    cos, sin = _without_heads(cos), _without_heads(sin)
    pairs = cos.shape[-1] if whole else _features(x, cos, rotary) // 2
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    cos, sin = (_table(each, pairs, interleaved, x.shape[2], offset, positions).to(wide) for each in (cos, sin))
    return cos, sin


def _table(table: Tensor, pairs: int, interleaved: bool, tokens: int, offset: int, positions: Tensor | None) -> Tensor:
    """[batch or 1, 1, tokens, pairs] of what the user gave."""
    if table.shape[-1] != pairs:
        table = table[..., ::2] if interleaved else table[..., :pairs]
    if table.dim() == 3:
        return table[:, None]
    if positions is None:
        return table[None, None, offset : offset + tokens]
    rows = table[positions]
    return rows[:, None] if positions.dim() == 2 else rows[None, None]


def _check(x: Tensor, cos: Tensor, sin: Tensor, rotary: int | None, offset: int, positions: Tensor | None) -> None:
    require_dtype(_NAME, "x", x)
    _check_dimensions(x)
    require_dtype(_NAME, "cos", cos)
    if cos.dim() not in (2, 3) or not cos.shape[-1]:
        refuse(_NAME, "cos", shape_text(cos), "[positions, pairs] or [batch, tokens, pairs]")
    if sin.shape != cos.shape or sin.dtype != cos.dtype:
        refuse(_NAME, "sin", f"{shape_text(sin)}, {dtype_text(sin.dtype)}", f"as cos: {tuple(cos.shape)}, {cos.dtype}")
    require_same_device(_NAME, ("x", x), cos=cos, sin=sin, positions=positions)
    turned, width = _features(x, cos, rotary), cos.shape[-1]
    if turned < 2 or turned % 2 or turned > x.shape[3]:
        if rotary is None:
            refuse(_NAME, "cos", shape_text(cos), f"at most {x.shape[3] // 2} pairs, for x {shape_text(x)}")
        refuse(_NAME, "rotary", rotary, f"an even number of features from 2 to {x.shape[3]}")
    if width not in (turned // 2, turned):
        refuse(
            _NAME,
            "cos",
            shape_text(cos),
            f"{turned // 2} pairs in its last dimension, or {turned} features of a doubled table",
        )
    _check_positions(x, cos, offset, positions)


def _check_dimensions(x: Tensor) -> None:
    if x.dim() != 4:
        refuse(_NAME, "x", shape_text(x), "[batch, heads, tokens, size]")


def _check_positions(x: Tensor, cos: Tensor, offset: int, positions: Tensor | None) -> None:
    batch, _, tokens, _ = x.shape
    if cos.dim() == 3:
        if (cos.shape[0] != 1 and cos.shape[0] != batch) or cos.shape[1] != tokens:
            refuse(_NAME, "cos", shape_text(cos), f"[{batch} or 1, {tokens}, pairs]")
        if offset or positions is not None:
            name = "offset" if positions is None else "positions"
            refuse(_NAME, name, "given with one table per sample", "a table of positions, [positions, pairs]")
    elif positions is None:
        if tokens > cos.shape[0]:
            refuse(_NAME, "cos", shape_text(cos), f"at least {tokens} positions, for x {shape_text(x)}")
        if offset < 0 or offset + tokens > cos.shape[0]:
            refuse(_NAME, "offset", offset, f"0 to {cos.shape[0] - tokens}: {tokens} tokens, {cos.shape[0]} positions")
    else:
        if offset:
            refuse(_NAME, "offset", offset, "0 where positions are given")
        if positions.dtype != torch.int64 or tuple(positions.shape) not in ((tokens,), (batch, tokens)):
            got = f"{shape_text(positions)}, {dtype_text(positions.dtype)}"
            refuse(_NAME, "positions", got, f"({tokens},) or ({batch}, {tokens}), int64")
