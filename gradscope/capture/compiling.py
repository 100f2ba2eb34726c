"""What torch.compile has done since the run began, for the rules: functions compiled again, lines that break graphs."""

from __future__ import annotations

import linecache
import os
import re
from collections import defaultdict
from collections.abc import Sequence
from types import FunctionType
from typing import Any

import torch
from torch import nn

import gradscope
from gradscope.capture.callers import is_standard, is_users
from gradscope.capture.registry import ModuleRegistry, local_path
from gradscope.compat import CompileLog, GraphWatch, compiles_own_layers, is_compiled, is_switched_off, recompile_limit
from gradscope.ops import OF_TORCH
from gradscope.tree import children_of, modules_of

_TORCH, _OURS = (os.path.join(os.path.dirname(module.__file__ or ""), "") for module in (torch, gradscope))
_LAYERS = os.path.join(_TORCH, "nn", "modules", "")  # a model may be one of torch's own, a Sequential say
# What Dynamo compiles of a model whose ``forward`` is torch's own: a function that calls it.
_CALLS_LAYERS = os.path.join(_TORCH, "_dynamo", "external_utils.py")
# What Dynamo appends to a guard that failed: the line that it is of.
_COMMENT = re.compile(r"\s{2,}# .*")


def breaks_in_models(log: CompileLog) -> bool:
    """Check that some graph is broken that is not of an optimizer's step."""
    return any(
        not any(file.startswith((_OURS, f"{_TORCH}optim{os.sep}")) for file, _ in each.frames) for each in log.breaks()
    )


def _named(function: str, file: str, line: int) -> str:
    return f"{function} ({_short(file)}:{line})"


def _short(file: str) -> str:
    """The path of a library's file, from its package on."""
    for folder in ("site-packages", "dist-packages"):
        _, found, rest = file.rpartition(f"{os.sep}{folder}{os.sep}")
        if found:
            return rest
    return local_path(file)


def _is_users(file: str) -> bool:
    """Check that a function is of the program's, or calls a layer of torch's for it."""
    return file.startswith((_LAYERS, _CALLS_LAYERS)) or not file.startswith((_TORCH, _OURS))


def _is_of_one(again: Any) -> bool:
    """Check that it is the function that was compiled before: all that call one of torch's are one code."""
    return again.file != _CALLS_LAYERS or "size mismatch" in again.reason


def _whose(function: str, file: str, line: int) -> dict[str, str]:
    if file == _CALLS_LAYERS:
        return {"function": OF_TORCH, "place": ""}
    return {"function": function, "place": f"{local_path(file)}:{line}"}


def left_alone(registry: ModuleRegistry) -> list[int]:
    """Labels of layers on which ``compile()`` was called, or that are in one, and of which torch compiles nothing.

    But for recurrent ones, of which it compiles nothing in whatever way.
    """
    if compiles_own_layers() or is_switched_off():
        return []
    alone = {id(each) for module in registry.alive() for each in parts_left_alone(module)}
    return [label for label, place in enumerate(registry.places) if id(place.module()) in alone]


def parts_left_alone(module: nn.Module) -> list[nn.Module]:
    """Of a module on which ``compile()`` was called what is torch's own throughout: itself, or parts of it."""
    found, looked, left = [], set[int](), [module] if is_compiled(module._compiled_call_impl) else []
    while left:
        each = left.pop()
        if id(each) in looked:
            continue
        looked.add(id(each))
        if all(map(_is_torchs, modules_of(each))):
            found.append(each)
        elif _is_torchs(each):
            left += children_of(each)
    return found


def _is_torchs(module: nn.Module) -> bool:
    """Check that a call of the module, those in it apart, runs no function of the program's: a hook, an activation."""
    own = vars(module)
    functions = [getattr(type(module), "forward", None), *(each for each in own.values() if type(each) is FunctionType)]
    return (
        not issubclass(type(module), nn.RNNBase)
        and all(str(getattr(each, "__module__", "")).startswith("torch.") for each in functions)
        and "forward" not in own
        and not (module._forward_hooks or module._forward_pre_hooks)
    )


def compile_facts(log: CompileLog, watch: GraphWatch, alone: Sequence[int] = ()) -> dict[str, Any]:
    """What the rules are told.

    ``left_alone``: those of :func:`left_alone`;

    ``again``: functions that were compiled again, and in which step; a model of torch's own has no place;
    ``failed``: functions that could not be compiled, likewise;
    ``limit``: versions of one from which on it runs as it is;
    ``breaks``: lines of the user's at which graphs are broken, their text, the line of a library's that does it there,
    the numbers of the frames that begin behind them, and the function that is not compiled for it;
    ``graphs``: how many were noted; ``checkpointed``: whether the program checkpoints in one; ``budget``: of memory,
    the least;
    ``recomputed_bytes``: what those that ran compute again in backward instead of saving it.
    """
    again = [
        {
            **_whose(each.function, each.file, each.line),
            "seconds": each.seconds,
            "step": each.step,
            "reason": _COMMENT.sub("", re.sub(r"^\d+/\d+: ", "", each.reason)),
        }
        for each in log.compilations()
        if each.again and _is_users(each.file) and _is_of_one(each)
    ]
    failed = [
        {**_whose(each.function, each.file, each.line), "reason": each.reason}
        for each in log.failures()
        if _is_users(each.file)
    ]
    breaks = []
    behind = defaultdict[tuple[str, int | None], set[str]](set)
    for part in log.compilations():
        behind[part.file, part.behind].add(part.frame)
    for each in log.breaks():
        if any(file.startswith(_OURS) for file, _ in each.frames):
            continue
        # Of a library's line that the user's code calls the user's: that is one that can be changed.
        others = [frame for frame in each.frames if not frame[0].startswith(_TORCH) and not is_standard(frame[0])]
        found = [frame for frame in others if is_users(frame[0])] or others
        if found:
            file, line = found[-1]
            frames = set().union(*[behind.get(frame, ()) for frame in each.frames])
            inner, inner_line = each.frames[-1]
            breaks.append(
                {
                    "place": f"{local_path(file)}:{line}",
                    "inside": "" if inner == file else f"{_short(inner)}:{inner_line}",
                    "text": linecache.getline(file, line).strip(),
                    "reason": each.reason,
                    "skipped": "" if each.skipped is None else _named(*each.skipped),
                    "frames": sorted(frames),
                }
            )
    return {
        "again": again,
        "failed": failed,
        "limit": recompile_limit(),
        "breaks": breaks,
        "left_alone": list(alone),
        "graphs": len(watch.graphs),
        "checkpointed": any(graph.is_checkpointed for graph in watch.graphs),
        "budget": min((watch.graphs[run.graph].budget for run in watch.runs), default=1.0),
        "recomputed_bytes": sum(watch.graphs[run.graph].recomputed_bytes() for run in watch.runs),
    }
