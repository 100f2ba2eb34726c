"""How many versions of a function Dynamo compiles, whether it compiles at all, and what it guards of hooks."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from gradscope.compat.dynamo import DYNAMO
from gradscope.compat.dynamo.compiled import compiled_frames
from gradscope.compat.engine import has_hooks

# Beyond torch's own limit, 8, Dynamo runs a function as it is: each way to do a step is one version of it, or several.
_VERSIONS = 1_000
_EXCEEDS = "exceeds_recompile_limit"
_TORCH = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])


@contextmanager
def many_versions() -> Iterator[None]:
    """Let Dynamo compile as many versions of a function as are asked for, and forget its code before and afterwards.

    What a profile has had compiled tells of its kernels, and takes longer; the versions would count against the user's
    own limit.
    """
    config: Any = sys.modules.get(f"{DYNAMO}.config")
    if config is None:
        yield
        return
    wanted = {"recompile_limit": _VERSIONS, "accumulated_recompile_limit": _VERSIONS, "error_on_recompile": False}
    held = {name: getattr(config, name) for name in wanted if hasattr(config, name)}
    frames: Any = sys.modules.get(f"{DYNAMO}.convert_frame")
    asked = getattr(frames, _EXCEEDS, None)  # also for the limit of torch.compile's own, which goes before the config's
    torch.compiler.reset()
    try:
        for name in held:
            setattr(config, name, wanted[name])
        if asked is not None:
            setattr(frames, _EXCEEDS, lambda *_: (False, ""))
        yield
    finally:
        if asked is not None:
            setattr(frames, _EXCEEDS, asked)
        for name, value in held.items():
            setattr(config, name, value)
        torch.compiler.reset()


def recompile_limit() -> int:
    """The versions of a function from which on Dynamo runs it as it is."""
    return int(getattr(sys.modules.get(f"{DYNAMO}.config"), "recompile_limit", _VERSIONS))


def compiler_stance() -> str:
    """What the program has told ``torch.compiler.set_stance``."""
    return str(getattr(getattr(sys.modules.get(f"{DYNAMO}.eval_frame"), "_stance", None), "stance", "default"))


def may_compile() -> bool:
    """Check that the program has not forbidden to compile anything new."""
    return compiler_stance() not in {"fail_on_recompile", "eager_on_recompile"}


def compiles_nothing() -> bool:
    """Check that the program has code that is not compiled yet run as it stands."""
    return is_forced_eager() or _is_disabled()


def is_forced_eager() -> bool:
    """Check that the program has compiled code run as it stands."""
    return compiler_stance() == "force_eager"


def is_switched_off() -> bool:
    """Check that torch.compile was told to do nothing, by ``TORCH_COMPILE_DISABLE=1`` say, and has done nothing yet.

    What is compiled by then runs on.
    """
    if not _is_disabled():
        return False
    utils = sys.modules.get(f"{DYNAMO}.utils")
    return utils is None or not (compiled_frames() or utils.get_compilation_metrics())


def _is_disabled() -> bool:
    return bool(getattr(sys.modules.get(f"{DYNAMO}.config"), "disable", False))


def compiles_backward() -> bool:
    """Check that compiled autograd makes one graph of the backward pass that runs, hooks and all."""
    return bool(getattr(sys.modules.get(f"{DYNAMO}.compiled_autograd"), "compiled_autograd_enabled", False))


def dynamo_reads_hooks() -> bool:
    """Check that Dynamo may guard which hooks all modules have.

    But for torch 2.13 it traces through torch's ``__call__``, which asks for them, where a class calls that from one of
    its own, as Hugging Face's checkpointed layers do (seen with 2.11, 2.12 and 2.14).
    """
    return _TORCH != (2, 13) and _has_own_call(torch.nn.Module)


def _has_own_call(kind: Any) -> bool:
    for each in kind.__subclasses__():
        if each.__call__ is not torch.nn.Module.__call__ and not each.__module__.startswith("torch."):
            return True
        if _has_own_call(each):
            return True
    return False


def hooks_made() -> int | None:
    """A number that grows with each hook that is registered; None where others than those that have hooks are read."""
    return RemovableHandle.next_id if _TORCH == (2, 13) else None


def reads_hooks_of(module: torch.nn.Module) -> bool:
    """Check that Dynamo may guard which hooks all modules have where it compiles this one.

    It has hooks of its own; or it is one of torch's own, which but for torch 2.13 is compiled together with the call.
    """
    compiled = module.__dict__.get("_compiled_call_impl") is not None
    return has_hooks(module) or (compiled and _TORCH != (2, 13) and type(module).__module__.startswith("torch."))
