"""SwiGLU and GeGLU that keep their operands alone, and make both gradients in one pass."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from gradscope.kernels import pays
from gradscope.kernels.check import (
    dtype_text,
    refuse,
    require_dtype,
    require_one_of,
    require_same_device,
    shape_text,
)
from gradscope.kernels.choice import BackendChoice, choose, explained_by
from gradscope.kernels.gated import launch
from gradscope.kernels.once import first_derivative_only
from gradscope.kernels.support import why_no_triton
from gradscope.recipes.recipe import Recipe

ABOUT = Recipe(
    name="swiglu",
    title="SwiGLU, silu(gate) * up, from two tensors or one packed; GeGLU, gelu(gate) * up",
    functions=("swiglu", "geglu"),
    modules=("SwiGLU", "GeGLU"),
    replaces=(
        "F.silu(gate) * up",
        "gate, up = x.chunk(2, dim=-1); F.silu(gate) * up",
        "F.gelu(gate) * up",
    ),
    saves=(
        "silu(gate) or gelu(gate), which torch saves for backward in addition to gate and up: a "
        "third of the saved memory. For a packed tensor, swiglu also avoids concatenating the "
        "two gradients: they are written into one buffer."
    ),
    limits=(
        "Second derivatives are not supported.",
        'On a CPU, auto uses F.gelu(gate) * up for geglu; backend="cpu" saves a quarter of the peak but takes longer.',
        "Compiled graphs on a CPU fall back to torch: the compiler fuses them too.",
        "float64 on a GPU falls back to torch.",
    ),
    backends=(("triton", "a GPU"), ("cpu", "a CPU"), ("torch", "any device")),
    sources=(
        "N. Shazeer, GLU Variants Improve Transformer, 2020, arXiv:2002.05202",
        "P. Hsu et al., Liger Kernel, 2024, arXiv:2410.10989 (silu recomputed in backward)",
    ),
)

_PACKED = "swiglu of a packed tensor"  # in the table of kernels/pays.py
_REASONS = {
    "triton": "one kernel per pass; silu is recomputed in backward",
    "cpu": "a few rows at a time in the cache; silu is recomputed in backward",
    "torch": "torch.nn.functional.silu(gate) * up",
}
_GELU_REASONS = {backend: reason.replace("silu", "gelu") for backend, reason in _REASONS.items()}
_ACTIVATIONS = {"none": "gelu", "tanh": "gelu_tanh"}


def _explain(gate: Tensor, up: Tensor | None = None, *, backend: str = "auto") -> BackendChoice:
    """What :func:`swiglu` would do with these arguments, and why."""
    require_dtype("swiglu", "gate", gate)
    if not gate.dim():
        refuse("swiglu", "gate", "a scalar", "[..., features]")
    if up is not None:
        return _choose("swiglu", gate, up, backend, _REASONS)
    if gate.shape[-1] % 2:
        refuse(
            "swiglu",
            "gate",
            shape_text(gate),
            ("an even last dimension, because up is None and gate contains both halves"),
        )
    few = pays.against(_PACKED, elements=gate.numel() // 2) if backend == "auto" else None
    against = {"triton": _double(gate) or why_no_triton(gate.device), "cpu": _not_cpu(gate) or few}
    return choose("swiglu", backend, _REASONS, against)


def _explain_geglu(gate: Tensor, up: Tensor, approximate: str = "none", *, backend: str = "auto") -> BackendChoice:
    """What :func:`geglu` would do with these arguments, and why."""
    require_dtype("geglu", "gate", gate)
    if not gate.dim():
        refuse("geglu", "gate", "a scalar", "[..., features]")
    require_one_of("geglu", "approximate", approximate, tuple(_ACTIVATIONS))
    return _choose("geglu", gate, up, backend, _GELU_REASONS)


def _choose(name: str, gate: Tensor, up: Tensor, backend: str, reasons: dict[str, str]) -> BackendChoice:
    """Choose a backend for two operands apart."""
    if not _fit(gate, up):
        refuse(name, "up", shape_text(up), f"{tuple(gate.shape)}, as gate, or a shape that broadcasts with it")
    require_dtype(name, "up", up)
    require_same_device(name, ("gate", gate), up=up)
    mixed = None
    if up.shape != gate.shape:
        mixed = f"torch broadcasts gate {shape_text(gate)} and up {shape_text(up)}"
    elif up.dtype != gate.dtype:
        mixed = f"torch promotes {dtype_text(gate.dtype)} and {dtype_text(up.dtype)}"
    few = pays.against(name, elements=gate.numel()) if backend == "auto" else None
    against = {"triton": mixed or _double(gate) or why_no_triton(gate.device), "cpu": mixed or _not_cpu(gate) or few}
    return choose(name, backend, reasons, against)


def _double(gate: Tensor) -> str | None:
    return "only the other backends support float64" if gate.dtype == torch.float64 else None


def _not_cpu(gate: Tensor) -> str | None:
    if gate.device.type != "cpu":
        return f"the tensors are on {gate.device}"
    return "inside a compiled graph the compiler fuses it" if torch.compiler.is_compiling() else None


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
    return _Gated.apply(gate, up, choice.backend, "silu")  # type: ignore[no-untyped-call]


def _plain_geglu(gate: Tensor, up: Tensor, approximate: str = "none", *, backend: str = "auto") -> Tensor:
    return functional.gelu(gate, approximate=approximate) * up


@explained_by(_explain_geglu, _plain_geglu, _GELU_REASONS)
def geglu(gate: Tensor, up: Tensor, approximate: str = "none", *, backend: str = "auto") -> Tensor | None:
    """``gelu(gate) * up``, keeping nothing but its operands for backward.

    A second derivative raises ``RuntimeError``, save with ``backend="torch"``.

    Args:
        gate: [..., features]; float16, bfloat16, float32 or float64.
        up: of the gate's shape; of one that broadcasts with it, or of another dtype, as under autocast, it goes to
            torch.
        approximate: "none" or "tanh", as for :func:`torch.nn.functional.gelu`.
        backend: "auto", "triton", "cpu" or "torch"; ``geglu.explain`` tells what "auto" takes.

    Returns:
        [..., features], of the shape and dtype of ``gate * up``.

    Raises:
        ValueError: a shape, dtype, device or setting does not fit.
    """
    choice = _explain_geglu(gate, up, approximate, backend=backend)
    if choice.backend == "torch":
        return None
    return _Gated.apply(gate, up, choice.backend, _ACTIVATIONS[approximate])  # type: ignore[no-untyped-call]


def _fit(gate: Tensor, up: Tensor) -> bool:
    """Return whether one product has both shapes."""
    sizes = zip(reversed(gate.shape), reversed(up.shape), strict=False)
    return all(one == other or 1 in {one, other} for one, other in sizes)


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor | None, backend: str, activation: str) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.backend, ctx.activation = backend, activation
        return launch.forward(gate, up, backend, activation)

    @staticmethod
    @first_derivative_only("swiglu or geglu", 'backend="torch" supports second derivatives')
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        gate, up = ctx.saved_tensors
        of_gate, of_up = launch.backward(upstream, gate, up, ctx.backend, ctx.activation)
        wanted = ctx.needs_input_grad
        return of_gate if wanted[0] else None, of_up if wanted[1] else None, None, None


class SwiGLU(nn.Module):
    """:func:`swiglu` as a module without parameters; called with one packed tensor, or with two."""

    def forward(self, gate: Tensor, up: Tensor | None = None) -> Tensor:
        """``silu(gate) * up``."""
        return swiglu(gate, up)


class GeGLU(nn.Module):
    """:func:`geglu` as a module without parameters; called with gate and up.

    Args:
        approximate: "none" or "tanh".
    """

    def __init__(self, approximate: str = "none") -> None:
        super().__init__()
        self.approximate = approximate

    def forward(self, gate: Tensor, up: Tensor) -> Tensor:
        """``gelu(gate) * up``."""
        return geglu(gate, up, self.approximate)

    def extra_repr(self) -> str:
        """The setting."""
        return f"approximate={self.approximate!r}"
