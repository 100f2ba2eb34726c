"""GELU, and GELU of a sum with a bias: what is kept for backward is one tensor of the input's size."""

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
from gradscope.kernels.gelu import cpu, triton_launch
from gradscope.kernels.once import first_derivative_only
from gradscope.kernels.retained import needed_again
from gradscope.kernels.support import why_no_triton
from gradscope.recipes.recipe import Recipe

ABOUT = Recipe(
    name="gelu",
    title="GELU, exact or tanh, alone or with a bias added first",
    functions=("gelu", "bias_gelu"),
    modules=("GELU", "BiasGELU"),
    replaces=(
        "0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x ** 3)))",
        "x * 0.5 * (1 + torch.erf(x / math.sqrt(2)))",
        "F.gelu(x + bias)",
    ),
    saves=(
        "Unfused GELU saves four tensors for backward, this one. bias_gelu computes the bias "
        "gradient in the same pass on a GPU, and on a CPU writes the input gradient over the "
        "saved sum."
    ),
    limits=(
        "gelu is torch's own on every device, which is already one pass.",
        "bias_gelu does not support second derivatives.",
        'On a CPU, auto uses F.gelu(x + bias); backend="cpu" saves memory in backward and takes about as long.',
    ),
    backends=(
        ("triton", "bias_gelu on a GPU"),
        ("cpu", "bias_gelu on a CPU"),
        ("torch", "gelu on any device; bias_gelu in float64 on a GPU, or without Triton"),
    ),
    sources=(
        "D. Hendrycks and K. Gimpel, Gaussian Error Linear Units (GELUs), 2016, arXiv:1606.08415",
        "M. Shoeybi et al., Megatron-LM, 2019, arXiv:1909.08053 (bias and GELU in one kernel)",
    ),
)

_APPROXIMATE = ("none", "tanh")


def _explain_gelu(input: Tensor, approximate: str = "none", *, backend: str = "auto") -> BackendChoice:
    """What :func:`gelu` would do with these arguments, and why."""
    require_dtype("gelu", "input", input)
    require_one_of("gelu", "approximate", approximate, _APPROXIMATE)
    reason = "torch.nn.functional.gelu reads and writes once, and saves only the input for backward"
    return choose("gelu", backend, {"torch": reason}, {})


def _plain_gelu(input: Tensor, approximate: str = "none", *, backend: str = "auto") -> Tensor:
    return functional.gelu(input, approximate=approximate)


@explained_by(_explain_gelu, _plain_gelu, ("torch",))
def gelu(input: Tensor, approximate: str = "none", *, backend: str = "auto") -> None:
    """Call :func:`torch.nn.functional.gelu`: the cure for units written out by hand.

    Args:
        input: any shape; float16, bfloat16, float32 or float64.
        approximate: "none" for ``x Φ(x)``, "tanh" for ``x/2 · (1 + tanh(√(2/π) (x + 0.044715 x³)))``.
        backend: "auto" or "torch".

    Returns:
        The input's shape and dtype.

    Raises:
        ValueError: a dtype or setting does not fit.
    """
    _explain_gelu(input, approximate, backend=backend)
    return


_BIAS_REASONS = {
    "triton": "one kernel reads the input once; backward computes both gradients in one pass",
    "cpu": "torch's own operations, with the gradient written over the saved sum",
    "torch": "torch.nn.functional.gelu(input + bias)",
}


def _explain_bias_gelu(
    input: Tensor, bias: Tensor, approximate: str = "none", *, promote: bool = False, backend: str = "auto"
) -> BackendChoice:
    """What :func:`bias_gelu` would do with these arguments, and why."""
    name = "bias_gelu"
    if promote and bias.dtype != input.dtype:
        return choose(name, backend, {"torch": "the sum's dtype differs from the input's"}, {})
    require_dtype(name, "input", input)
    if not input.dim():
        refuse(name, "input", "a scalar", "[..., features]")
    if tuple(bias.shape) != (input.shape[-1],):
        refuse(name, "bias", shape_text(bias), f"({input.shape[-1]},) for input {shape_text(input)}")
    if bias.dtype not in (input.dtype, torch.float32) or input.dtype == torch.float64 != bias.dtype:
        expected = "float64" if input.dtype == torch.float64 else f"{dtype_text(input.dtype)}, as input, or float32"
        refuse(name, "bias", f"of dtype {dtype_text(bias.dtype)}", expected)
    require_same_device(name, ("input", input), bias=bias)
    require_one_of(name, "approximate", approximate, _APPROXIMATE)
    double = "only the other backends support float64" if input.dtype == torch.float64 else None
    on_cpu = None if input.device.type == "cpu" else f"the tensors are on {input.device}"
    few = pays.against(name, elements=input.numel()) if on_cpu is None and backend == "auto" else None
    against = {"triton": double or why_no_triton(input.device), "cpu": on_cpu or few}
    return choose(name, backend, _BIAS_REASONS, against)


def _plain_bias_gelu(
    input: Tensor, bias: Tensor, approximate: str = "none", *, promote: bool = False, backend: str = "auto"
) -> Tensor:
    total = input + bias
    return functional.gelu(total if promote else total.to(input.dtype), approximate=approximate)


@explained_by(_explain_bias_gelu, _plain_bias_gelu, _BIAS_REASONS)
def bias_gelu(
    input: Tensor, bias: Tensor, approximate: str = "none", *, promote: bool = False, backend: str = "auto"
) -> Tensor | None:
    """``gelu(input + bias)``, keeping one tensor of the input's size for backward.

    On a GPU that is the input, and backward makes the gradients of input and bias in one pass. On a CPU it is the sum,
    and the input's gradient is written over it unless the graph is retained. A second derivative raises
    ``RuntimeError``, save with ``backend="torch"``.

    Args:
        input: [..., features]; float16, bfloat16, float32 or float64. Of a Linear without its bias, for instance.
        bias: [features], of the input's dtype, or float32: under autocast the bias is a parameter in float32.
        approximate: "none" or "tanh", as for :func:`gelu`.
        promote: a bias of another dtype promotes the result, as in plain operations: bfloat16 by float32 is float32.
        backend: "auto", "triton", "cpu" or "torch"; ``bias_gelu.explain`` tells what "auto" takes.

    Returns:
        The input's shape, and its dtype unless ``promote``.

    Raises:
        ValueError: a shape, dtype, device or setting does not fit.
    """
    choice = _explain_bias_gelu(input, bias, approximate, promote=promote, backend=backend)
    if choice.backend == "torch":
        return None
    wanted = torch.is_grad_enabled() and (input.requires_grad or bias.requires_grad)
    found: Tensor
    found, _ = _BiasGELU.apply(input, bias, approximate, choice.backend, wanted)  # type: ignore[no-untyped-call]
    return found


class _BiasGELU(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, input: Tensor, bias: Tensor, approximate: str, backend: str, wanted: bool
    ) -> tuple[Tensor, Tensor | None]:
        ctx.set_materialize_grads(False)
        pre = None
        if backend == "triton":
            output = triton_launch.forward(input, bias, approximate)
            kept: tuple[Tensor, ...] = (input, bias)
        else:
            output, pre = cpu.forward(input, bias, approximate)
            kept = (pre,)
        if wanted:
            ctx.save_for_backward(*kept)
        ctx.approximate, ctx.backend, ctx.bias_dtype = approximate, backend, bias.dtype
        return output, pre  # pre is returned for first_derivative_only, which needs an output or the inputs saved

    @staticmethod
    @first_derivative_only("bias_gelu", 'backend="torch" supports second derivatives')
    def backward(ctx: Any, upstream: Tensor | None, _: None) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        if upstream is None:
            return None, None, None, None, None
        if ctx.backend == "triton":
            x, bias = ctx.saved_tensors
            found, of_bias = triton_launch.backward(upstream, x, bias, ctx.approximate)
            return found, of_bias, None, None, None
        (pre,) = ctx.saved_tensors
        found = cpu.backward(upstream, pre.detach(), ctx.approximate, in_place=not needed_again())
        summed = None
        if ctx.needs_input_grad[1]:
            rows = found.flatten(0, -2) if found.dim() > 1 else found[None]
            summed = rows.sum(0, dtype=ctx.bias_dtype)
        return found if ctx.needs_input_grad[0] else None, summed, None, None, None


class GELU(nn.Module):
    """:func:`gelu` as a module, with the argument of :class:`torch.nn.GELU`."""

    def __init__(self, approximate: str = "none") -> None:
        super().__init__()
        self.approximate = approximate

    def forward(self, input: Tensor) -> Tensor:
        """The unit, element by element."""
        return gelu(input, self.approximate)

    def extra_repr(self) -> str:
        """The setting."""
        return f"approximate={self.approximate!r}"


class BiasGELU(nn.Module):
    """:func:`bias_gelu` as a module that owns the bias, which begins as zeros.

    Args:
        features: size of the last dimension.
        approximate: "none" or "tanh".
        device, dtype: of the bias.
    """

    def __init__(
        self,
        features: int,
        approximate: str = "none",
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.features, self.approximate = features, approximate
        self.bias = nn.Parameter(torch.zeros(features, device=device, dtype=dtype))

    def forward(self, input: Tensor) -> Tensor:
        """The unit of ``input + bias``."""
        return bias_gelu(input, self.bias, self.approximate)

    def extra_repr(self) -> str:
        """Size and setting."""
        return f"{self.features}, approximate={self.approximate!r}"
