"""Compiles attention's Triton kernels for NVIDIA GPUs, which needs none; prints the shared memory of each as JSON.

Run by test_attention_triton_compiles.py in a process of its own, for in that of the tests kernels are interpreted.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from gradscope.kernels.attention import triton_blocks
from gradscope.kernels.attention.triton_arguments import ADDED, NO_BIAS, Form, Heads, Terms
from gradscope.kernels.attention.triton_backward.triton_kernels import deltas, keys_and_values, queries_alone
from gradscope.kernels.attention.triton_bias.triton_kernels import bias_gradient
from gradscope.kernels.attention.triton_blocks import Blocks, padded
from gradscope.kernels.attention.triton_forward.triton_kernels import forward

_ALIGNED = [["tt.divisibility", 16]]


def shared_memory(kernel: Any, form: Form, blocks: Blocks, target: int) -> int:
    """Bytes of shared memory of a kernel for bfloat16 tensors that are contiguous in their last dimension."""
    settings = {
        "FORM": form,
        "PRECISION": "ieee",
        "OPERAND": tl.bfloat16,
        "ONE_ROW": False,
        "ONE_COLUMN": False,
        "SIZE": form.value_size,
        "BLOCK_M": blocks.m,
        "BLOCK_N": blocks.n,
        "BLOCK_D": padded(form.size),
        "BLOCK_V": padded(form.value_size),
    }
    signature: dict[str, Any] = {}
    constants: dict[tuple[int, ...], Any] = {}
    attributes: dict[tuple[int, ...], Any] = {}
    for index, name in enumerate(kernel.arg_names):
        if name in settings:
            signature[name] = "constexpr"
            constants[(index,)] = settings[name]
        elif name == "terms":
            signature[name] = Terms(*(["i32"] * 4 + ["fp32"] * 4 + ["i32"] * 3 + ["fp32"]))
        elif name in ("logsumexp", "delta", "seed"):
            signature[name] = "*i64" if name == "seed" else "*fp32"
        elif name in ("own_heads", "sharing_batches", "sharing_heads", "heads", "queries"):
            signature[name] = "i32"
        else:
            pointer = "*fp32" if name in ("alibi", "into") else "*bf16"
            signature[name] = Heads(pointer, "i32", "i32", "i32", "constexpr")
            constants[(index, 4)] = 1
            attributes |= {(index, field): _ALIGNED for field in range(4)}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    options = {"num_warps": blocks.warps, "num_stages": blocks.stages}
    return int(triton.compile(source, target=GPUTarget("cuda", target, 32), options=options).metadata.shared)


def main() -> None:
    causal = Form(
        256, 256, softcap=False, bias=NO_BIAS, alibi=False, left=False, right=True, dropout=False, base_2=True
    )
    everything = Form(16, 24, softcap=True, bias=ADDED, alibi=True, left=True, right=True, dropout=True, base_2=False)
    found = {}
    for name, kernel, blocks_of in (
        ("forward", forward, triton_blocks.forward_blocks),
        ("keys_and_values", keys_and_values, triton_blocks.keys_blocks),
        ("queries_alone", queries_alone, triton_blocks.queries_blocks),
    ):
        found[f"{name} of size 256"] = shared_memory(kernel, causal, blocks_of(256, tl.bfloat16, (8, 9), False), 89)
    for kernel in (forward, deltas, keys_and_values, queries_alone, bias_gradient):
        found[f"{kernel.__name__} with every option"] = shared_memory(kernel, everything, Blocks(16, 16, 1, 2), 90)
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
