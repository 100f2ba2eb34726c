"""gradscope: where a PyTorch model's backward pass loses time and memory, and what replaces that part.

Names are loaded when first used: ``import gradscope`` itself loads neither torch nor pandas.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from gradscope.api import profile, profiling
    from gradscope.compare import Diff, diff
    from gradscope.errors import (
        GradscopeError,
        NothingMeasuredError,
        OutputError,
        RunFileError,
        TargetError,
        UnsupportedTorchError,
        UsageError,
        WorkloadError,
    )
    from gradscope.fitting import FitReport, fit
    from gradscope.patching.patches import Patches, patch, patched
    from gradscope.patching.plan import Plan, plan
    from gradscope.report.report import Report
    from gradscope.report.report import load as load_report
    from gradscope.workload import Workload

__all__ = [
    "Diff",
    "FitReport",
    "GradscopeError",
    "NothingMeasuredError",
    "OutputError",
    "Patches",
    "Plan",
    "Report",
    "RunFileError",
    "TargetError",
    "UnsupportedTorchError",
    "UsageError",
    "Workload",
    "WorkloadError",
    "__version__",
    "diff",
    "fit",
    "load_report",
    "patch",
    "patched",
    "plan",
    "profile",
    "profiling",
]

_HOMES = {
    "Diff": ("gradscope.compare", "Diff"),
    "FitReport": ("gradscope.fitting", "FitReport"),
    "GradscopeError": ("gradscope.errors", "GradscopeError"),
    "NothingMeasuredError": ("gradscope.errors", "NothingMeasuredError"),
    "OutputError": ("gradscope.errors", "OutputError"),
    "Patches": ("gradscope.patching.patches", "Patches"),
    "Plan": ("gradscope.patching.plan", "Plan"),
    "Report": ("gradscope.report.report", "Report"),
    "RunFileError": ("gradscope.errors", "RunFileError"),
    "TargetError": ("gradscope.errors", "TargetError"),
    "UnsupportedTorchError": ("gradscope.errors", "UnsupportedTorchError"),
    "UsageError": ("gradscope.errors", "UsageError"),
    "Workload": ("gradscope.workload", "Workload"),
    "WorkloadError": ("gradscope.errors", "WorkloadError"),
    "diff": ("gradscope.compare", "diff"),
    "fit": ("gradscope.fitting", "fit"),
    "load_report": ("gradscope.report.report", "load"),
    "patch": ("gradscope.patching.patches", "patch"),
    "patched": ("gradscope.patching.patches", "patched"),
    "plan": ("gradscope.patching.plan", "plan"),
    "profile": ("gradscope.api", "profile"),
    "profiling": ("gradscope.api", "profiling"),
}


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'gradscope' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(home[0]), home[1])
    return value


def load_ipython_extension(shell: Any) -> None:
    """``%load_ext gradscope``: the magic ``%%gradscope``."""
    import_module("gradscope.integrations.ipython").register(shell)


def __dir__() -> list[str]:
    return sorted(__all__)
