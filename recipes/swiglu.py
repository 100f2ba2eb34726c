"""SwiGLU that keeps its operands alone, and makes both gradients in one pass."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from gradscope.kernels import pays
from gradscope.kernels.check import dtype_text, refuse, require_dtype, require_same_device, shape_text
from gradscope.kernels.choice import BackendChoice, choose, explained_by
from gradscope.kernels.once import first_derivative_only
from gradscope.kernels.support import why_no_triton
from gradscope.kernels.swiglu import launch
from gradscope.recipes.recipe import Recipe

ABOUT = Recipe(
    name="swiglu",
    title="SwiGLU, silu(gate) * up, from two tensors or one packed",
    functions=("swiglu",),
    modules=("SwiGLU",),
    replaces=(
        "F.silu(gate) * up",
        "gate, up = x.chunk(2, dim=-1); F.silu(gate) * up",
    ),
    saves=(
        "silu(gate), which torch keeps for backward beside gate and up: a third of what is kept. From a packed tensor "
        "also the concatenation of the two gradients: they are written into one buffer."
    ),
    limits=(
        "No second derivative.",
        "Compiled graphs on a CPU go to torch: the compiler fuses them as well.",
        "float64 on a GPU goes to torch.",
    ),
    backends=(("triton", "a GPU; not yet run on one"), ("cpu", "a CPU"), ("torch", "any device")),
    sources=(
        "N. Shazeer, GLU Variants Improve Transformer, 2020, arXiv:2002.05202",
        "P. Hsu et al., Liger Kernel, 2024, arXiv:2410.10989 (silu computed again in backward)",
    ),
)

_NAME = "swiglu"
_PACKED = "swiglu of a packed tensor"  # in the table of kernels/pays.py
_REASONS = {
    "triton": "one kernel a pass; silu is computed again in backward",
    "cpu": "a few rows at a time in the cache; silu is computed again in backward",
    "torch": "torch.nn.functional.silu(gate) * up",
}


def _explain(gate: Tensor, up: Tensor | None = None, *, backend: str = "auto") -> BackendChoice:
    """What :func:`swiglu` would do with these arguments, and why."""
    require_dtype(_NAME, "gate", gate)
    if not gate.dim():
        refuse(_NAME, "gate", "a scalar", "[..., features]")
    if up is None and gate.shape[-1] % 2:
        refuse(_NAME, "gate", shape_text(gate), "an even last dimension, for up is None and so its second half")
    if up is not None:
        if not _fit(gate, up):
            refuse(_NAME, "up", shape_text(up), f"{tuple(gate.shape)}, as gate, or what broadcasts with it")
        require_dtype(_NAME, "up", up)
        require_same_device(_NAME, ("gate", gate), up=up)
    double = "float64 is computed by the other backends" if gate.dtype == torch.float64 else None
    not_cpu = None
    if gate.device.type != "cpu":
        not_cpu = f"the tensors are on {gate.device}"
    elif torch.compiler.is_compiling():
        not_cpu = "inside a compiled graph the compiler fuses it"
    mixed = None
    if up is not None and up.shape != gate.shape:
        mixed = f"torch broadcasts gate {shape_text(gate)} and up {shape_text(up)}"
    elif up is not None and up.dtype != gate.dtype:
        mixed = f"torch promotes {dtype_text(gate.dtype)} and {dtype_text(up.dtype)}"
    few = _against_size(gate, up) if backend == "auto" else None
    against = {"triton": mixed or double or why_no_triton(gate.device), "cpu": mixed or not_cpu or few}
    return choose(_NAME, backend, _REASONS, against)


def _plain(gate: Tensor, up: Tensor | None = None, *, backend: str = "auto") -> Tensor:
    if up is None:
        gate, up = gate.chunk(2, dim=-1)
    return functional.silu(gate) * up


@explained_by(_explain, _plain, _REASONS)
def swiglu(gate: Tensor, up: Tensor | None = None, *, backend: str = "auto") -> Tensor | None:
    """``silu(gate) * up``, keeping nothing but its operands for backward.

    A second derivative raises ``RuntimeError``, save with ``backend="torch"``.

    Args:
        gate: [..., features]; float16, bfloat16, float32 or float64. Without ``up`` [..., 2 features]: the gate, then
            what it gates, as a Linear of twice the width gives them; their gradient is one tensor then.
        up: of the gate's shape; of one that broadcasts with it, or of another dtype, as under autocast, it goes to
            torch.
        backend: "auto", "triton", "cpu" or "torch"; ``swiglu.explain`` tells what "auto" takes.

    Returns:
        [..., features], of the shape and dtype of ``gate * up``.

    Raises:
        ValueError: a shape, dtype, device or setting does not fit.
    """
    choice = _explain(gate, up, backend=backend)
    if choice.backend == "torch":
        return None
    return _SwiGLU.apply(gate, up, choice.backend)  # type: ignore[no-untyped-call]


def _fit(gate: Tensor, up: Tensor) -> bool:
    """Return whether one product has both shapes."""
    sizes = zip(reversed(gate.shape), reversed(up.shape), strict=False)
    return all(one == other or 1 in {one, other} for one, other in sizes)


def _against_size(gate: Tensor, up: Tensor | None) -> str | None:
    name, elements = (_PACKED, gate.numel() // 2) if up is None else (_NAME, gate.numel())
    return pays.against(name, elements=elements)


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor | None, backend: str) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.backend = backend
        return launch.forward(gate, up, backend)

    @staticmethod
    @first_derivative_only(_NAME, 'backend="torch" has a second derivative')
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        gate, up = ctx.saved_tensors
        of_gate, of_up = launch.backward(upstream, gate, up, ctx.backend)
        wanted = ctx.needs_input_grad
        return of_gate if wanted[0] else None, of_up if wanted[1] else None, None


class SwiGLU(nn.Module):
    """:func:`swiglu` as a module without parameters; called with one packed tensor, or with two."""

    def forward(self, gate: Tensor, up: Tensor | None = None) -> Tensor:
        """``silu(gate) * up``."""
        return swiglu(gate, up)
