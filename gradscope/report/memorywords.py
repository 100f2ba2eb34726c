"""The sentences on memory: when it peaked, what a tensor is, and what the device holds beyond torch's tensors."""

from __future__ import annotations

import re

from gradscope import units
from gradscope.tables import LEAK_SHARE, MemoryInfo

_PHASES = {
    "forward": "in forward",
    "backward": "in backward",
    "recompute": "in recompute",
    "optimizer": "in the optimizer",
    "other": "outside forward, backward and optimizer",
}
_NODE = re.compile(r"(.*)Backward\d+$")
_HUMP = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")
_NAMES = {"self": "input", "result": "output"}  # what torch's documentation calls them


def phase_words(phase: str) -> str:
    """``in backward``, ``in the optimizer``."""
    return _PHASES.get(phase, f"in {phase}")


def peak_place(memory: MemoryInfo, model: str) -> str:
    """``in backward (transformer.h.3.attn)``; the phase alone where nothing of the model's ran."""
    layer = _layer_at_peak(memory, model)
    return phase_words(memory.peak_phase) + (f" ({layer})" if layer else "")


def end_ns(memory: MemoryInfo) -> int:
    """Where the step that measured memory ends."""
    return max([memory.peak_ns, *(point.ns for point in memory.timeline), *(span.end_ns for span in memory.phases)])


def peak_words(memory: MemoryInfo, model: str) -> str:
    """``22.4 GB in backward, at 5.75 s of 16.8 s, while transformer.h.3.attn ran SoftmaxBackward0``."""
    text = f"{units.size(memory.peak_bytes)} {phase_words(memory.peak_phase)}"
    text += f", at {units.ns(memory.peak_ns)} of {units.ns(end_ns(memory))}"
    layer = _layer_at_peak(memory, model)
    if layer:
        return f"{text}, while {layer} ran" + (f" {memory.peak_op}" if memory.peak_op else "")
    return f"{text}, while {memory.peak_op} ran" if memory.peak_op else text


def leaked_bytes(memory: MemoryInfo) -> int:
    """What each step leaves behind for good; 0 where it is so little that it may be kept on purpose: a loss, say."""
    leaked = sum(row.bytes for row in memory.retained if row.grows)
    return leaked if leaked >= LEAK_SHARE * memory.peak_bytes else 0


def tensor_words(node: str, what: str, shape: str, dtype: str) -> str:
    """``softmax output 8x12x1024x1024 float32`` for what ``SoftmaxBackward0`` keeps as ``output``.

    A custom autograd Function keeps the name that its author gave it.
    """
    match = _NODE.match(node)
    op = _HUMP.sub(" ", match[1]).replace("_", " ").strip().lower() if match else node.removesuffix("Backward")
    return " ".join(part for part in (op, _NAMES.get(what, what), shape, dtype) if part)


def allocator_words(memory: MemoryInfo) -> str:
    """The allocator's own figures at the peak; ``""`` where the device has none."""
    parts = []
    allocated, reserved = memory.allocated_bytes, memory.reserved_bytes
    if allocated is not None:
        # The allocator counts whole blocks; what was traced should come within a percent of it.
        apart = abs(allocated - memory.peak_bytes) * 100 > memory.peak_bytes
        traced = f" ({units.size(memory.peak_bytes)} traced)" if apart else ""
        parts.append(f"allocated {units.size(allocated)}{traced}")
    if reserved is not None:
        unused = reserved - (memory.peak_bytes if allocated is None else allocated)
        idle = f", {units.size(unused)} of it unused (cached or fragmented)" if unused > 0 else ""
        parts.append(f"reserved {units.size(reserved)}{idle}")
    if memory.outside_allocator_bytes is not None:
        parts.append(f"outside the allocator {units.size(memory.outside_allocator_bytes)}")
    if memory.device_total_bytes is not None:
        parts.append(f"the device has {units.size(memory.device_total_bytes)}")
    return " · ".join(parts)


def outside_words(memory: MemoryInfo) -> str:
    """Why nvidia-smi shows more than the peak; ``""`` where there is no allocator that reserves."""
    reserved, outside = memory.reserved_bytes, memory.outside_allocator_bytes
    if reserved is None:
        return ""
    amount = "more" if outside is None else f"about {units.size(reserved + outside)}"
    return (
        f"nvidia-smi shows {amount}: it counts all that torch has reserved, in use or not, and also the CUDA context, "
        "libraries such as NCCL, and other processes."
    )


def _layer_at_peak(memory: MemoryInfo, model: str) -> str:
    if memory.peak_layer is None:
        return ""
    return memory.peak_layer or model or "the model"
