"""What benchmarks/registers.py compiles: each Triton kernel with the settings of its launcher."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import triton.language as tl
from _resources import ALIGNED, Fixed

from gradscope.kernels.attention import triton_blocks
from gradscope.kernels.attention.triton_arguments import ADDED, NO_BIAS, Form, Heads, ScoreTerms
from gradscope.kernels.attention.triton_backward.triton_kernels import keys_and_values, queries_alone
from gradscope.kernels.attention.triton_bias.triton_kernels import bias_gradient
from gradscope.kernels.attention.triton_blocks import Tiling, padded
from gradscope.kernels.attention.triton_forward.triton_kernels import forward
from gradscope.kernels.attention.triton_one_pass.triton_kernels import all_gradients
from gradscope.kernels.embedding.rows import CHUNK
from gradscope.kernels.embedding.triton_kernels import add_sorted
from gradscope.kernels.norm.triton_kernels import backward as norm_backward
from gradscope.kernels.norm.triton_kernels import forward as norm_forward
from gradscope.kernels.norm.triton_launch import cut_of
from gradscope.kernels.rope.launch import HEADS, THREADS, block_of
from gradscope.kernels.rope.triton_kernels import rotate

SIZES = (32, 64, 128)
DTYPES = (torch.bfloat16, torch.float32)
_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
_TYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}
# The first runs only where deterministic algorithms are asked for. The second keeps two sums as long as its rows.
SPILLS = {
    ("keys_and_values", "attention d128 fp32 causal, dropout"),
    ("backward", "add_layer_norm C16384 bf16, dropout"),
}
_CONSUMERS = 89  # the smallest shared memory that the kernels are for


@dataclass(frozen=True, slots=True)
class KernelCase:
    """One kernel, and what it is compiled for."""

    kernel: str
    of: str
    tile: str
    function: Any
    given: dict[str, Any]
    warps: int
    stages: int


def all_cases(target: int) -> list[KernelCase]:
    """Every kernel of the table, as launched on a device of this compute capability (times ten)."""
    return [*_attention(target), *_norms(), *_rope(), *_embedding()]


def _attention(target: int) -> Iterator[KernelCase]:
    capability = divmod(target, 10)
    for dtype in DTYPES:
        for size in SIZES:
            for form in (_causal(size, dtype), _causal(size, dtype)._replace(dropout=True)):
                kind = (size, dtype, capability, form.dropout)
                for kernel, cut in (
                    (forward, triton_blocks.forward_blocks(*kind)),
                    (all_gradients, triton_blocks.one_pass_blocks(*kind)),
                    (keys_and_values, triton_blocks.keys_blocks(*kind)),
                    (queries_alone, triton_blocks.queries_blocks(*kind)),
                ):
                    if cut is not None:
                        yield _case(kernel, form, dtype, cut)


def _norms() -> Iterator[KernelCase]:
    """Layer normalisation with dropout, of bfloat16 rows."""
    for columns in (64, 768, 4096, 5120, 16384):
        cut = cut_of(8192, columns)
        given = {
            **dict.fromkeys(("x", "residual", "weight", "bias", "output", "stream", "upstream", "passed"), "*bf16"),
            **dict.fromkeys(("stream_gradient", "x_gradient"), "*bf16"),
            **dict.fromkeys(("means", "factors", "weight_sums", "bias_sums"), "*fp32"),
            **dict.fromkeys(("x_row", "residual_row", "upstream_row", "passed_row", "columns"), f"i32{ALIGNED}"),
            **dict.fromkeys(("rows", "per_group", "limit"), "i32"),
            **dict.fromkeys(("eps", "scale"), "fp32"),
            **dict.fromkeys(("CENTRED", "HAS_WEIGHT", "HAS_BIAS", "HAS_DROPOUT", "HAS_PASSED"), Fixed(True)),
            "seed": "*i64",
            "ROWS": Fixed(cut.rows),
            "FIRST": Fixed(cut.first),
            "SECOND": Fixed(cut.second),
        }
        tile = f"{cut.rows} x {cut.first}" + (f" + {cut.second}" if cut.second else "")
        for name, function in (("forward", norm_forward), ("backward", norm_backward)):
            yield KernelCase(name, f"add_layer_norm C{columns} bf16, dropout", tile, function, given, cut.warps(), 3)


def _rope() -> Iterator[KernelCase]:
    """Cases of rope on tensors that are contiguous in their last dimension."""
    for dtype in DTYPES:
        for size in (64, 128):
            for interleaved in (False, True):
                block = block_of(4096, size // 2, dtype.itemsize)
                strides = [
                    f"{tensor}_{axis}"
                    for tensor, last in (("x", "feature"), ("cos", "pair"), ("sin", "pair"), ("out", "feature"))
                    for axis in ("batch", "head", "token", last)
                ]
                given = {
                    **dict.fromkeys(strides, f"i32{ALIGNED}"),
                    **dict.fromkeys(("x_feature", "cos_pair", "sin_pair", "out_feature"), Fixed(1)),
                    **dict.fromkeys(("x", "out"), f"*{_NAMES[dtype]}"),
                    **dict.fromkeys(("cos", "sin"), "*fp32"),
                    **dict.fromkeys(("heads", "tokens"), "i32"),
                    **dict.fromkeys(("size", "pairs"), f"i32{ALIGNED}"),
                    "SIGN": Fixed(1),
                    "INTERLEAVED": Fixed(interleaved),
                    "COPY_REST": Fixed(False),
                    "WIDE": Fixed(False),
                    "BLOCK_TOKENS": Fixed(block),
                    "BLOCK_PAIRS": Fixed(size // 2),
                    "BLOCK_REST": Fixed(1),
                    "HEADS": Fixed(HEADS),
                }
                of = f"rope d{size} {_NAMES[dtype]}, {'interleaved' if interleaved else 'halves'}"
                yield KernelCase("rotate", of, f"{block} x {size}", rotate, given, THREADS // 32, 3)


def _embedding() -> Iterator[KernelCase]:
    given = {
        **dict.fromkeys(("into", "rows"), "*fp32"),
        **dict.fromkeys(("ids", "order"), "*i64"),
        **dict.fromkeys(("features", "into_row", "rows_row"), f"i32{ALIGNED}"),
        **dict.fromkeys(("into_feature", "rows_feature"), Fixed(1)),
        "count": "i32",
        "CHUNK": Fixed(CHUNK),
        "BLOCK": Fixed(512),
    }
    yield KernelCase("add_sorted", "embedding C768 fp32", f"{CHUNK} x 512", add_sorted, given, 4, 3)


def attention_limits() -> Iterator[KernelCase]:
    """The largest head size on a consumer's card; and every option at once, in a small tile."""
    largest = _causal(256, torch.bfloat16)
    kind = (256, torch.bfloat16, divmod(_CONSUMERS, 10), False)
    yield _case(forward, largest, torch.bfloat16, triton_blocks.forward_blocks(*kind))
    yield _case(keys_and_values, largest, torch.bfloat16, triton_blocks.keys_blocks(*kind))
    yield _case(queries_alone, largest, torch.bfloat16, triton_blocks.queries_blocks(*kind))
    half = (64, torch.bfloat16, divmod(_CONSUMERS, 10), False)
    cut = triton_blocks.one_pass_blocks(*half)
    if cut is not None:
        yield _case(all_gradients, _causal(64, torch.bfloat16), torch.bfloat16, cut)
    everything = Form(16, 24, True, ADDED, True, True, True, True, base_2=False, wide=True, late=False)
    for kernel in (forward, all_gradients, keys_and_values, queries_alone, bias_gradient):
        yield _case(kernel, everything, torch.bfloat16, Tiling(16, 16, 1, 2))


def _causal(size: int, dtype: torch.dtype) -> Form:
    return Form(
        size,
        size,
        softcap=False,
        bias=NO_BIAS,
        alibi=False,
        left=False,
        right=True,
        dropout=False,
        base_2=dtype != torch.float32,
        wide=False,
        late=True,
    )


def _case(kernel: Any, form: Form, dtype: torch.dtype, cut: Tiling) -> KernelCase:
    every = form.softcap and form.alibi
    of = f"attention d{form.size} {_NAMES[dtype]}"
    of += ", every option" if every else " causal, dropout" if form.dropout else " causal"
    given = _given(form, dtype, cut, kernel is all_gradients)
    return KernelCase(kernel.fn.__name__, of, f"{cut.m} x {cut.n}", kernel, given, cut.warps, cut.stages)


def _given(form: Form, dtype: torch.dtype, cut: Tiling, one_pass: bool) -> dict[str, Any]:
    """Arguments of any of attention's kernels: tensors are contiguous in their last dimension."""
    stride = f"i32{ALIGNED}"
    heads = Heads(f"*{_NAMES[dtype]}", stride, stride, stride, Fixed(1))  # type: ignore[arg-type]
    summed = heads._replace(pointer="*fp32")  # type: ignore[arg-type]
    return {
        **dict.fromkeys(("q", "k", "v", "bias", "grad_out", "out", "dk", "dv"), heads),
        "dq": summed if one_pass else heads,
        **dict.fromkeys(("alibi", "into"), summed),
        **dict.fromkeys(("logsumexp", "delta"), "*fp32"),
        **dict.fromkeys(("own_heads", "sharing_batches", "sharing_heads"), "i32"),
        "seed": "*i64",
        "terms": ScoreTerms(*["i32"] * 4, *["fp32"] * 6, *["i32"] * 3, "fp32"),  # type: ignore[arg-type]
        "FORM": Fixed(form),
        "PRECISION": Fixed("ieee"),
        "OPERAND": Fixed(_TYPES[dtype]),
        "WHOLE": Fixed(False),
        "ONE_ROW": Fixed(False),
        "ONE_COLUMN": Fixed(False),
        "BLOCK_M": Fixed(cut.m),
        "BLOCK_N": Fixed(cut.n),
        "BLOCK_D": Fixed(padded(form.size)),
        "BLOCK_V": Fixed(padded(form.value_size)),
    }
