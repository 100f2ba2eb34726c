"""Every kind of row is told by its name."""

from __future__ import annotations

import pytest

from gradscope.tables import RowKind
from gradscope.trace.names import classify_name


@pytest.mark.parametrize(
    ("text", "scope", "expected"),
    [
        ("aten::mm", 0, (RowKind.OP, -1, "aten::mm")),
        ("aten::add", 0, (RowKind.ADD, -1, "aten::add")),
        ("aten::add_", 0, (RowKind.ADD, -1, "aten::add_")),
        ("aten::addmm", 0, (RowKind.OP, -1, "aten::addmm")),
        ("autograd::engine::evaluate_function: MulBackward0", 0, (RowKind.NODE, -1, "MulBackward0")),
        (
            "autograd::engine::evaluate_function: torch::autograd::AccumulateGrad",
            0,
            (RowKind.ACCUMULATE, -1, "AccumulateGrad"),
        ),
        ("autograd::engine::evaluate_function: torch::autograd::CopySlices", 0, (RowKind.NODE, -1, "CopySlices")),
        ("torch::autograd::CopySlices", 1, (RowKind.OP, -1, "CopySlices")),
        ("Optimizer.step#AdamW.step", 7, (RowKind.OPTIMIZER, -1, "Optimizer.step#AdamW.step")),
        ("Optimizer.zero_grad#SGD.zero_grad", 7, (RowKind.OPTIMIZER, -1, "Optimizer.zero_grad#SGD.zero_grad")),
        ("c10d::allreduce_", 0, (RowKind.COMMUNICATION, -1, "c10d::allreduce_")),
        ("my epoch", 7, (RowKind.ANNOTATION, -1, "my epoch")),
        ("my epoch", 0, (RowKind.OP, -1, "my epoch")),
        ("gradscope:call:17", 0, (RowKind.CALL, 17, "gradscope:call")),
        ("gradscope:backward:3", 0, (RowKind.BACKWARD, 3, "gradscope:backward")),
        ("gradscope:mine:3", 7, (RowKind.ANNOTATION, -1, "gradscope:mine:3")),
    ],
)
def test_classify(text: str, scope: int, expected: tuple[RowKind, int, str]) -> None:
    assert classify_name(text, scope) == expected
