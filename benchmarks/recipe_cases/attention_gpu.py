"""Attention on a GPU at the shapes of GPT-2 and Llama-8B, in bfloat16. Not yet run on a GPU.

Without CUDA there are no cases. For achieved TFLOP/s of every way beside each other:

    python benchmarks/recipe_cases/attention_gpu.py [--rounds 20]
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from gradscope.recipes.attention import attention
from recipe_cases.case import Case, Step

PEAK = 790e12  # FLOP/s: a large bfloat16 product on an H200, measured
Attend = Callable[..., Tensor]  # (problem, query, key, value, bias)


@dataclass(frozen=True)
class Problem:
    """Causal attention of one layer."""

    name: str
    batch: int
    heads: int
    kv_heads: int
    length: int
    size: int
    dropout_p: float = 0.0
    softcap: float | None = None
    biased: bool = False  # [1, heads, length, length], with a gradient

    @property
    def flop(self) -> float:
        """Of forward and backward: two products and five, of which a causal mask needs half.

        What a kernel computes twice does not count.
        """
        return 7 * 2 * self.batch * self.heads * self.length**2 * self.size / 2

    def tensors(self, device: str) -> list[Tensor]:
        """Query, key, value as a packed projection gives them, and the bias if there is one."""
        wide = self.heads + 2 * self.kv_heads
        options: dict[str, Any] = {"device": device, "dtype": torch.bfloat16}
        packed = torch.randn(self.batch, self.length, wide, self.size, **options)
        parts = packed.split([self.heads, self.kv_heads, self.kv_heads], dim=2)
        found = [part.transpose(1, 2).requires_grad_() for part in parts]
        if self.biased:
            found.append(torch.randn(1, self.heads, self.length, self.length, **options).requires_grad_())
        return found


GPT_2 = Problem("GPT-2: B8 H12 T1024 d64", 8, 12, 12, 1024, 64)
LLAMA = Problem("Llama-8B: B1 H32 KV8 T4096 d128", 1, 32, 8, 4096, 128)
DROPOUT = Problem("GPT-2 with dropout 0.1", 8, 12, 12, 1024, 64, dropout_p=0.1)
SOFTCAP = Problem("Llama-8B with soft-cap 50", 1, 32, 8, 4096, 128, softcap=50.0)
BIAS = Problem("GPT-2 with a learnt bias", 8, 12, 12, 1024, 64, biased=True)


def by_hand(problem: Problem, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None = None) -> Tensor:
    """As nanoGPT writes it."""
    group = problem.heads // problem.kv_heads
    key, value = (tensor.repeat_interleave(group, 1) if group > 1 else tensor for tensor in (key, value))
    scores = (query @ key.transpose(-2, -1)) * problem.size**-0.5
    if problem.softcap is not None:
        scores = torch.tanh(scores / problem.softcap) * problem.softcap
    if bias is not None:
        scores = scores + bias
    later = torch.ones(problem.length, problem.length, dtype=torch.bool, device=query.device).triu(1)
    weights = scores.masked_fill(later, float("-inf")).softmax(-1)
    return F.dropout(weights, problem.dropout_p) @ value


def by_sdpa(
    problem: Problem, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None = None, *, backend: SDPBackend
) -> Tensor:
    """One of SDPA's backends; key and value are expanded for the one that shares no heads."""
    shares = problem.kv_heads != problem.heads
    if shares and backend == SDPBackend.EFFICIENT_ATTENTION:
        key, value = (tensor.repeat_interleave(problem.heads // problem.kv_heads, 1) for tensor in (key, value))
        shares = False
    if bias is not None:  # SDPA takes no mask beside is_causal
        later = torch.ones(problem.length, problem.length, dtype=torch.bool, device=query.device).triu(1)
        bias = bias.masked_fill(later, float("-inf"))
    with sdpa_kernel(backend):
        return F.scaled_dot_product_attention(
            query, key, value, bias, problem.dropout_p, is_causal=bias is None, enable_gqa=shares
        )


def by_recipe(
    problem: Problem,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None = None,
    *,
    backend: str = "auto",
) -> Tensor:
    return attention(
        query,
        key,
        value,
        bias,
        problem.dropout_p,
        is_causal=True,
        enable_gqa=problem.kv_heads != problem.heads,
        softcap=problem.softcap,
        backend=backend,
    )


def compiled() -> Attend:
    """What the compiler makes of it: it may find SDPA in it."""
    return torch.compile(by_hand)


FLASH = partial(by_sdpa, backend=SDPBackend.FLASH_ATTENTION)
EFFICIENT = partial(by_sdpa, backend=SDPBackend.EFFICIENT_ATTENTION)
CUDNN = partial(by_sdpa, backend=SDPBackend.CUDNN_ATTENTION)
TRITON = partial(by_recipe, backend="triton")

# Which ways can do what; the first list of a problem's rows are baselines of the recipe's own choice.
WAYS: dict[Problem, dict[str, Callable[[], Attend]]] = {
    GPT_2: {"by hand": lambda: by_hand, "SDPA flash": lambda: FLASH, "SDPA efficient": lambda: EFFICIENT},
    LLAMA: {"by hand": lambda: by_hand, "SDPA flash": lambda: FLASH, "SDPA efficient": lambda: EFFICIENT},
    DROPOUT: {"by hand": lambda: by_hand, "SDPA flash": lambda: FLASH, "SDPA efficient": lambda: EFFICIENT},
    SOFTCAP: {"by hand": lambda: by_hand},
    BIAS: {"by hand": lambda: by_hand, "SDPA efficient": lambda: EFFICIENT},
}
for _problem, _ways in WAYS.items():
    if _problem in (GPT_2, LLAMA):
        _ways["SDPA cuDNN"] = lambda: CUDNN
    _ways["torch.compile by hand"] = compiled


def step_of(attend: Attend, problem: Problem, tensors: list[Tensor]) -> Step:
    """Forward and backward once."""
    upstream = torch.randn_like(tensors[0]).contiguous()

    def step() -> None:
        torch.autograd.grad(attend(problem, *tensors), tensors, upstream)

    return step


def beside(way: Callable[[], Attend], problem: Problem, device: str = "cuda") -> tuple[Step, Step]:
    """A way and the recipe, on the same tensors."""
    tensors = problem.tensors(device)
    return step_of(way(), problem, tensors), step_of(by_recipe, problem, tensors)


CASES = [
    Case(
        "attention",
        f"{problem.name} causal bfloat16, {problem.flop / 1e9:.0f} GFLOP",
        name,
        partial(beside, way, problem),
        faster=1.0,
    )
    for problem, ways in WAYS.items()
    for name, way in ways.items()
    if torch.cuda.is_available()
]


def main() -> int:
    """Time, TFLOP/s and share of the device's of every way, interleaved."""
    from _common import median, parser, timed

    made = parser(__doc__ or "")
    made.add_argument("--rounds", type=int, default=20)
    options = made.parse_args()
    if not torch.cuda.is_available():
        sys.exit("this machine has no CUDA device that torch can use")
    flush = torch.empty(1 << 28, dtype=torch.uint8, device="cuda")  # five times a Hopper's second-level cache
    for problem, ways in WAYS.items():
        tensors = problem.tensors("cuda")
        print(f"\n{problem.name}, causal, bfloat16, forward and backward, {problem.flop / 1e9:.0f} GFLOP")
        all_ways = {**ways, "recipe": lambda: by_recipe, "recipe, triton": lambda: TRITON}
        steps: dict[str, Step] = {}
        for name, way in all_ways.items():
            steps[name] = step_of(way(), problem, tensors)
            try:
                timed(steps[name], "cuda")
            except (RuntimeError, ValueError) as refused:  # a backend that this build lacks, or out of memory
                del steps[name]
                print(f"  {name:<24} cannot run here: {str(refused).splitlines()[0][:90]}")
        times: dict[str, list[float]] = {name: [] for name in steps}
        for _ in range(options.rounds):
            for name, step in steps.items():
                flush.zero_()
                times[name].append(timed(step, "cuda"))
        for name, found in times.items():
            rate = problem.flop / median(found) * 1e3
            share = f"{rate / PEAK:6.1%} of {PEAK / 1e12:.0f}"
            print(f"  {name:<24} {median(found):8.3f} ms {rate / 1e12:7.1f} TFLOP/s {share}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
