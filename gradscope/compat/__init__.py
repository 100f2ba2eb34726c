"""The private interfaces of torch that gradscope stands on, each named once, and checked before use.

Everything else in gradscope imports these names from here, none from the files below. :func:`check` runs each one on a
small graph and says whether it answers as on the versions of :mod:`gradscope.versions`; :func:`require` turns a wrong
answer into one clear error.
"""

from __future__ import annotations

from gradscope.compat.checks import (
    Check,
    check,
    require,
)
from gradscope.compat.dynamo import DYNAMO
from gradscope.compat.dynamo.entry import following_dynamo
from gradscope.compat.dynamo.left_alone import (
    CompiledSteps,
    keep_eager,
    keep_frame_eager,
    untraced,
    watching_dynamo,
)
from gradscope.compat.dynamo.log import CompileLog
from gradscope.compat.dynamo.versions import (
    compiler_stance,
    compiles_backward,
    compiles_nothing,
    dynamo_reads_hooks,
    hooks_made,
    is_switched_off,
    many_versions,
    may_compile,
    reads_hooks_of,
    recompile_limit,
)
from gradscope.compat.engine import (
    checkpoint_frame,
    current_node_number,
    goes_through_hooks,
    has_global_module_hooks,
    held_by_checkpoint,
    hook_dicts,
    keep_hooks_steady,
    marking_recompute,
    marking_waits,
    others_global_hooks,
    remove_global_hooks,
    saved_value,
    swap_engine_entry,
)
from gradscope.compat.flops import flop_formulas
from gradscope.compat.imports import once_imported
from gradscope.compat.inductor import GraphWatch, probe_graphs, watching_graphs
from gradscope.compat.private import (
    SavedTensor,
    default_device_mode,
    dispatch_depth,
    dispatch_modes,
    exports,
    function_modes,
    graph_task_id,
    reducer_log,
    sequence_number,
    tracing_state,
    transform_running,
    transforms_run,
)
from gradscope.compat.profilers import (
    TraceMarker,
    end_range,
    kineto_events,
    kineto_tree,
    live_device_blocks,
    new_profiler,
    open_range,
    quiet_kineto,
    release_profiler,
    require_no_profiler,
    start_memory_profiler,
    start_profiler,
    stop_profiler,
    watch_profilers,
    without_rows,
)

__all__ = [
    "DYNAMO",
    "Check",
    "CompileLog",
    "CompiledSteps",
    "GraphWatch",
    "SavedTensor",
    "TraceMarker",
    "check",
    "checkpoint_frame",
    "compiler_stance",
    "compiles_backward",
    "compiles_nothing",
    "current_node_number",
    "default_device_mode",
    "dynamo_reads_hooks",
    "dispatch_depth",
    "dispatch_modes",
    "end_range",
    "exports",
    "flop_formulas",
    "following_dynamo",
    "function_modes",
    "goes_through_hooks",
    "graph_task_id",
    "hook_dicts",
    "has_global_module_hooks",
    "held_by_checkpoint",
    "is_switched_off",
    "keep_eager",
    "keep_frame_eager",
    "keep_hooks_steady",
    "kineto_events",
    "kineto_tree",
    "live_device_blocks",
    "many_versions",
    "may_compile",
    "once_imported",
    "marking_recompute",
    "marking_waits",
    "new_profiler",
    "open_range",
    "others_global_hooks",
    "require_no_profiler",
    "probe_graphs",
    "quiet_kineto",
    "hooks_made",
    "reads_hooks_of",
    "remove_global_hooks",
    "recompile_limit",
    "reducer_log",
    "release_profiler",
    "require",
    "saved_value",
    "sequence_number",
    "start_memory_profiler",
    "start_profiler",
    "stop_profiler",
    "swap_engine_entry",
    "tracing_state",
    "transform_running",
    "transforms_run",
    "untraced",
    "watch_profilers",
    "watching_dynamo",
    "watching_graphs",
    "without_rows",
]
