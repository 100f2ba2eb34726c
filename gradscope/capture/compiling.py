"""What torch.compile has done since the run began, for the rules: functions compiled again, lines that break graphs."""

from __future__ import annotations

import os
import re
from typing import Any

import torch

import gradscope
from gradscope.capture.registry import local_path
from gradscope.compat import CompileLog, GraphWatch, memory_budget

_TORCH, _OURS = (os.path.join(os.path.dirname(module.__file__ or ""), "") for module in (torch, gradscope))
# What Dynamo appends to a guard that failed: the line that it is of.
_COMMENT = re.compile(r"\s+# .*")


def breaks_in_models(log: CompileLog) -> bool:
    """Check that some graph is broken that is not of an optimizer's step."""
    return any(
        not any(file.startswith((_OURS, f"{_TORCH}optim{os.sep}")) for file, _ in each.frames) for each in log.breaks()
    )


def compile_facts(log: CompileLog, watch: GraphWatch) -> dict[str, Any]:
    """What the rules are told.

    ``again``: functions that were compiled again; ``breaks``: lines of the user's at which graphs are broken;
    ``graphs``: how many were noted; ``checkpointed``: whether the program checkpoints in one; ``budget``: of memory;
    ``recomputed_bytes``: what those that ran compute again in backward instead of saving it.
    """
    again = [
        {
            "function": each.function,
            "place": f"{local_path(each.file)}:{each.line}",
            "seconds": each.seconds,
            "reason": _COMMENT.sub("", re.sub(r"^\d+/\d+: ", "", each.reason)),
        }
        for each in log.compilations()
        if each.again and not each.file.startswith((_TORCH, _OURS))
    ]
    breaks = []
    for each in log.breaks():
        if any(file.startswith(_OURS) for file, _ in each.frames):
            continue
        users = [frame for frame in each.frames if not frame[0].startswith(_TORCH)]
        if users:
            file, line = users[-1]
            breaks.append({"place": f"{local_path(file)}:{line}", "reason": each.reason})
    return {
        "again": again,
        "breaks": breaks,
        "graphs": len(watch.graphs),
        "checkpointed": any(graph.is_checkpointed for graph in watch.graphs),
        "budget": memory_budget(),
        "recomputed_bytes": sum(watch.graphs[run.graph].recomputed_bytes() for run in watch.runs),
    }
