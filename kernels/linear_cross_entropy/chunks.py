"""How many rows of logits are held at once."""

from __future__ import annotations

CPU_BUDGET = 128 << 20  # 512 of 2048 rows at GPT-2's vocabulary in float32: the time is that of one chunk
GPU_SMALL = 64 << 20  # logits that are not worth cutting
# Each chunk reads and writes the whole float32 gradient of the weight: below 2048 rows that shows beside its products.
GPU_ROWS, GPU_FEWEST, GPU_MOST = 2048, 4, 8


def chunk_rows(rows: int, classes: int, itemsize: int, device_type: str, memory_budget: int | None) -> int:
    """Rows of logits in one chunk; all chunks but the last have as many.

    Args:
        rows, classes: of all logits.
        itemsize: bytes of a logit.
        device_type: "cpu" or that of a GPU.
        memory_budget: bytes of the logits held at once, of which one row is the least. None: 128 MiB on the CPU,
            elsewhere 4 to 8 chunks, or one where the logits take 64 MiB or less.
    """
    whole = rows * classes * itemsize
    if memory_budget is None and device_type != "cpu":
        chunks = 1 if whole <= GPU_SMALL else min(max(rows // GPU_ROWS, GPU_FEWEST), GPU_MOST)
    else:
        budget = CPU_BUDGET if memory_budget is None else memory_budget
        most = max(1, budget // max(1, classes * itemsize))
        chunks = _ceil(rows, most)
    return max(1, _ceil(rows, max(1, chunks)))


def _ceil(amount: int, by: int) -> int:
    return -(-amount // by)
