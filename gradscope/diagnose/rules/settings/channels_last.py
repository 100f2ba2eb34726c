"""Convolutions on a GPU run in NCHW, and their kernels convert the layout internally.

Example::

    model = ResNet().cuda()  # convolutions of images under torch.autocast

Pattern: on CUDA, 2-D convolutions whose input is in NCHW, and kernels of cuDNN that convert NCHW to NHWC or back in the
same layers. Evidence: the measured time of these kernels. Estimate: 0.8 of it (0.5 to 0.95): what comes from and goes
to other layouts is still converted. On the CPU the rule is silent: there channels_last took 0.4 to 1.4 times as long.

Source: PyTorch tutorial, "Channels Last Memory Format in PyTorch"; performance tuning guide, "Use channels_last memory
format for computer vision models"; NVIDIA, Convolutional layers user's guide, "Tensor layouts".
"""

from __future__ import annotations

from collections.abc import Iterator

from gradscope.diagnose.case import Case, Rule
from gradscope.diagnose.findings import make_finding, only, parts_of, several
from gradscope.recording.graph import Node, Value
from gradscope.tables import Finding
from gradscope.units import calls as calls_text
from gradscope.units import ns as time_text

_CALLS = {"conv2d", "conv_transpose2d"}
# Of the time of these kernels: low, likely, high.
_OF_TURNS = (0.5, 0.8, 0.95)

_TURNS = ("nchwtonhwc", "nhwctonchw")


def find(case: Case) -> Iterator[Finding]:
    """Yield one finding for all layers."""
    if not case.on_cuda:
        return
    calls = [call for call in case.facts.calls if call.op in _CALLS and _channel_by_channel(call)]
    layers = tuple(dict.fromkeys(call.layer for call in calls if call.layer is not None))
    turns = [
        row
        for row in case.run.kernels
        if row.layer in layers and any(name in row.name.lower().replace("_", "") for name in _TURNS)
    ]
    spent = sum(row.device_ns if row.busy_ns is None else row.busy_ns for row in turns)
    if not spent:
        return
    turned = tuple(path for path in layers if any(row.layer == path for row in turns))
    yield make_finding(
        RULE.name,
        case,
        parts_of(spent, _OF_TURNS),
        layers=turned,
        line=only(call.source for call in calls if call.layer in turned),
        message="Convolutions run in NCHW and transpose internally",
        evidence=(
            f"{calls_text(sum(row.calls for row in turns))} layout-conversion kernels in "
            f"{several(len(turned), 'layer')}, {time_text(spent)} per step"
        ),
        advice="Convert the model and its images to channels_last; replace a view that flattens them by reshape.",
        code="model = model.to(memory_format=torch.channels_last)  # and images.to(memory_format=torch.channels_last)",
        cost_ns=spent,
    )


def _channel_by_channel(call: Node) -> bool:
    images = call.inputs[0] if call.inputs else None
    return images is not None and images.device.type == "cuda" and _is_nchw(images)


def _is_nchw(tensor: Value) -> bool:
    """A single channel, or images of one pixel, lie both ways."""
    if len(tensor.shape) != 4 or tensor.strides is None:
        return False
    _, channels, height, width = tensor.shape
    return channels > 1 and height * width > 1 and tensor.strides[1] == height * width and tensor.strides[3] == 1


RULE = Rule("channels-last", "convolutions that convert the memory layout", find)
