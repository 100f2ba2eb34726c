"""From which sizes on a recipe's own code for the CPU pays: one rule a recipe, in shapes and threads.

``backend="auto"`` goes by it, and ``gradscope.patch`` leaves alone what would go to torch. Own code pays where it is at
least 1.1 times faster than torch's composition, or at equal time (0.95) takes at most 0.8 of its memory, forward and
backward, with AVX2 and with AVX-512.

By ``benchmarks/crossover.py`` with one thread and with two, see ``benchmarks/results/crossover.jsonl``; by its rule
torch's where AVX2 and AVX-512, or two kinds of CPU, gave different answers.
"""

from __future__ import annotations

import sys

import torch

NEVER = sys.maxsize

# Recipe -> unit -> the fewest with one thread, and with more.
FEWEST: dict[str, dict[str, tuple[int, int]]] = {
    "attention with dropout": {"scores": (1_000_000, 1_000_000)},
    "attention with dropout and a mask": {"scores": (1_500_000, 1_500_000)},
    "attention with a learnt bias": {"scores": (8_000_000, 8_000_000)},
    "attention with a learnt bias and dropout": {"scores": (4_000_000, 1_500_000)},
    "attention with a soft-cap": {"scores": (2_000_000, 2_000_000)},
    "attention with a narrow window": {"scores": (2_000_000, 2_000_000)},
    "attention with a combined mask": {"scores": (8_000_000, 16_000_000)},
    # Never sooner in the grid; but from here on torch's mask alone would be 256 MB.
    "attention with ALiBi": {"scores": (64_000_000, 64_000_000)},
    "attention with wide values": {"scores": (1_000_000, 2_000_000)},
    "packed_attention": {"tokens": (512, 512)},
    "packed_attention with held scores": {"scores": (NEVER, NEVER)},
    "cross_entropy": {"logits": (5_000_000, 5_000_000)},
    "linear_cross_entropy": {"logits": (3_000_000, 3_000_000), "rows": (1_000, 512)},
    "rms_norm": {"elements": (250_000, 500_000)},
    "add_layer_norm": {"elements": (NEVER, NEVER)},
    "add_layer_norm with dropout": {"elements": (NEVER, 3_000_000)},
    "add_rms_norm": {"elements": (500_000, 500_000)},
    "add_rms_norm with dropout": {"elements": (1_500_000, 250_000)},
    "dropout": {"elements": (NEVER, 1_000_000)},
    "swiglu": {"elements": (4_000_000, 4_000_000)},
    "swiglu of a packed tensor": {"elements": (2_000_000, 4_000_000)},
    "geglu": {"elements": (NEVER, NEVER)},
    "bias_gelu": {"elements": (NEVER, NEVER)},
    "rope": {"features": (90_000, 90_000)},
    "rope, interleaved": {"features": (NEVER, NEVER)},
}
# Recipe -> unit -> the most, with any number of threads.
MOST: dict[str, dict[str, int]] = {
    "packed_attention": {"tokens": 768},
}


def against(recipe: str, **amounts: int) -> str | None:
    """Why torch's own operations are the better choice at these sizes, in words; None where they are not.

    The same in compiled graphs, where the compiler fuses torch's operations besides.

    Args:
        recipe: one of ``FEWEST``; of others None.
        amounts: how many of each unit that the recipe's rule has.
    """
    rule = FEWEST.get(recipe)
    if rule is None:
        return None
    # A compiler cannot trace the number, and that of torch 2.11 no bool as an index.
    several = 1 if torch.compiler.is_compiling() or torch.get_num_threads() > 1 else 0
    for unit, fewest in rule.items():
        if amounts[unit] < fewest[several]:
            return _WORDS.get((unit, fewest, several)) or _why(unit, fewest, several)
    for unit, most in MOST.get(recipe, {}).items():
        if amounts[unit] > most:
            return f"more than {most:,} {unit}: torch's own is as fast"
    return None


def _why(unit: str, fewest: tuple[int, int], several: int) -> str:
    threads = "" if fewest[0] == fewest[1] else f" with {'several threads' if several else 'one thread'}"
    if fewest[several] == NEVER:
        return f"torch's own is as fast{threads}"
    return f"fewer than {fewest[several]:,} {unit}: torch's own is faster{threads}"


# Made once, for they take longer than the rule.
_WORDS = {
    (unit, fewest, several): _why(unit, fewest, several)
    for rule in FEWEST.values()
    for unit, fewest in rule.items()
    for several in (0, 1)
}
