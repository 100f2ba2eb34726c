"""Both passes by either path; each is one node of a compiled graph."""

from __future__ import annotations

from torch import Tensor

from gradscope.kernels.gated import cpu
from gradscope.kernels.gated.halves import as_rows, output_shape
from gradscope.kernels.on_device import on_device
from gradscope.kernels.opaque import opaque

_BLOCK = 1024


def _fake_forward(gate: Tensor, up: Tensor | None, backend: str, activation: str) -> Tensor:
    return gate.new_empty(output_shape(gate, up))


@opaque("gated", _fake_forward)
def forward(gate: Tensor, up: Tensor | None, backend: str, activation: str) -> Tensor:
    """``activation(gate) * up``, contiguous.

    Args:
        gate, up: see halves.py.
        backend: "cpu" or "triton".
        activation: "silu", "gelu" or "gelu_tanh".
    """
    output = gate.new_empty(output_shape(gate, up))
    if not output.numel():
        return output
    rows = as_rows(gate, up)
    into = output.view(-1, output.shape[-1])
    if backend == "cpu":
        cpu.forward(*rows, into, activation)
        return output
    from gradscope.kernels.gated.triton_kernels import forward as kernel

    first, second = (_side_by_side(tensor) for tensor in rows)
    count, columns = into.shape
    with on_device(gate):
        kernel[(count, -(-columns // _BLOCK))](
            first,
            second,
            into,
            columns,
            first.stride(0),
            second.stride(0),
            into.stride(0),
            **_constants(activation),
        )
    return output


def _fake_backward(
    upstream: Tensor, gate: Tensor, up: Tensor | None, backend: str, activation: str
) -> tuple[Tensor, Tensor]:
    return gate.new_empty(gate.shape), gate.new_empty(0 if up is None else up.shape)


@opaque("gated_backward", _fake_backward)
def backward(upstream: Tensor, gate: Tensor, up: Tensor | None, backend: str, activation: str) -> tuple[Tensor, Tensor]:
    """Gradients of ``gate`` and ``up``; where the latter is None the first holds both, and the second nothing."""
    found = gate.new_empty(gate.shape)
    other = gate.new_empty(0 if up is None else up.shape)
    if not upstream.numel():
        return found, other
    first, second = as_rows(gate, up)
    of_first, of_second = as_rows(found, None if up is None else other)
    given = upstream.flatten(0, -2) if upstream.dim() > 1 else upstream[None]
    if backend == "cpu":
        cpu.backward(given, first, second, of_first, of_second, activation)
        return found, other
    from gradscope.kernels.gated.triton_kernels import backward as kernel

    given, first, second = (_side_by_side(tensor) for tensor in (given, first, second))
    count, columns = given.shape
    with on_device(gate):
        kernel[(count, -(-columns // _BLOCK))](
            given,
            first,
            second,
            of_first,
            of_second,
            columns,
            given.stride(0),
            first.stride(0),
            second.stride(0),
            of_first.stride(0),
            of_second.stride(0),
            **_constants(activation),
        )
    return found, other


def _constants(activation: str) -> dict[str, bool | int]:
    return {"SILU": activation == "silu", "TANH": activation == "gelu_tanh", "BLOCK": _BLOCK}


def _side_by_side(rows: Tensor) -> Tensor:
    """With the elements of a row next to each other."""
    return rows if rows.stride(1) == 1 else rows.contiguous()
