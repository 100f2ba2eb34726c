"""One step that notes what would disturb the timing: source lines, FLOPs, parameters, the graph."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from gradscope.capture.backward import Around
from gradscope.capture.budget import SurveyPlan
from gradscope.capture.compiling import breaks_in_models, left_alone
from gradscope.capture.modules import MODULE_CALLS, CallRecorder
from gradscope.capture.phases.base import Phase, Run
from gradscope.capture.phases.timed import read_timed
from gradscope.capture.result import SurveyStep
from gradscope.capture.storages import sizes_text, tensors_in
from gradscope.capture.survey import FLOPS, FlopMode, GraphTracer, LineTracer
from gradscope.compat import new_profiler, release_profiler
from gradscope.tensor_refs import before_swaps, swaps_seen

_NOT_FOLLOWED = (
    "the program uses torch.compile: source lines and FLOPs are those of the compiled graphs, and what runs outside of "
    "them has none"
)
_BROKEN = (
    "inside of functions whose graphs break (see graph-break), what runs between the graphs has no source lines and no "
    "FLOPs"
)
_BROKEN_BESIDE_HOOKS = (
    "inside of functions whose graphs break (see graph-break), what runs between the graphs has no layers, no source "
    "lines and no FLOPs: the program has hooks on modules, so torch.compile would notice gradscope's"
)
_FAILED = (
    "inside of functions on which torch.compile fails (see compile-failed), which run as they were written, there are "
    "no source lines and no FLOPs"
)
_LEFT_ALONE = (
    "inside of layers of torch's own of which .compile() compiles nothing (see compile-failed), there are no source "
    "lines and no FLOPs"
)
_WITHOUT_GRAPHS = (
    "the program uses torch.compile, but gradscope saw Inductor compile nothing: it was compiled before, or by another "
    "backend, or ahead of time. Its graphs are a row each, and source lines and FLOPs were not measured"
)

_NO_SHAPES = (
    "input shapes are not measured: this program may swap tensors (torch.utils.swap_tensors, "
    "set_swap_module_params_on_conversion, or parameters of a class of tensors of their own), which torch "
    "refuses to where its profiler has noted the shape"
)
_SWAPPED = (
    "source lines, FLOPs and input shapes are not measured: the program swapped tensors (torch.utils.swap_tensors) in "
    "the one step that was to tell them, for the first time since the measurement began"
)


class Survey(Phase):
    """See :mod:`gradscope.capture.survey` for what it notes and how."""

    name = "survey"

    def __init__(self, run: Run, steps: int) -> None:
        super().__init__(run, steps)
        self._recorder = CallRecorder(run.guard, run.capture.registry, run.hooks_aside)
        self._graph = GraphTracer(run.capture.registry)
        self._tracer = LineTracer(run.line_mode, run.guard)
        self._profiler: Any = None
        self._compiled = False
        self._has_flops = False
        self._plan, self._shapes, self._swaps, self._swapped_before = SurveyPlan(), True, False, swaps_seen()
        self._batches: dict[bool, dict[int, str]] = {True: {}, False: {}}  # by whether gradients were on

    def fits(self) -> bool:
        self._read_timed()
        planned = self.run.budget.survey()
        if not planned.takes_place:
            self.run.leave_out(planned.left_out)
        return planned.takes_place

    def _read_timed(self) -> None:
        """Now, and not before the unprofiled steps that follow them: these are to find memory as those before did."""
        timed = self.run.capture.timed
        if timed is not None:
            with self.run.guard.over("reading the profiled steps"):
                read_timed(self.run, timed, timed.last_steps)

    def enter(self, exits: ExitStack) -> None:
        run = self.run
        self._plan = run.budget.survey()
        # Torch refuses to swap a tensor that its profiler has noted the shape of.
        self._swaps = (
            swaps_seen() > self._swapped_before
            or torch.__future__.get_swap_module_params_on_conversion()
            or any(
                is_traceable_wrapper_subclass(held)
                for module in run.capture.registry.alive()
                for held in module._parameters.values()
                if held is not None
            )
        )
        self._shapes = self._plan.shapes and not self._swaps
        self._compiled, traced = run.uses_compile(), run.may_trace()
        with_lines = run.capture.options.lines and traced
        self._recorder.on_root_call = run.guard.hook(self.name, self._note_batch)
        exits.callback(setattr, self._recorder, "on_root_call", None)  # else the run would hold itself alive
        exits.enter_context(self._recorder.recording())
        around = _around(self._graph, self._tracer if with_lines else None)
        exits.enter_context(run.marking_backward(around))
        self._profiler = new_profiler(shapes=self._shapes)
        exits.enter_context(run.profiling(self._profiler))
        if self._shapes:
            exits.enter_context(before_swaps(run.guard.hook(self.name, self._let_go)))
        exits.enter_context(run.beside_graphs())
        if self._plan.flops and traced:
            with run.guard.over(FLOPS):
                exits.enter_context(FlopMode(run.guard, run.aside).counting())
                self._has_flops = True
        if with_lines:
            exits.enter_context(run.leaving_fast_paths())
            exits.enter_context(self._tracer.recording())

    def _let_go(self) -> None:
        """Torch is about to swap tensors: it refuses to where the profiler has noted shapes. The step is lost."""
        if self._profiler is not None:
            self.run.stop_profiling()
            release_profiler(self._profiler)
            self._profiler = None

    def begin_step(self) -> None:
        self._recorder.begin_step()

    def end_step(self) -> None:
        self._recorder.end_step()

    def _untold(self) -> list[str]:
        """What the report must say of a compiled program."""
        if not self.run.may_trace():
            return [_NOT_FOLLOWED if self.run.capture.compiled.graphs else _WITHOUT_GRAPHS]
        log = self.run.compile_log
        found = [_FAILED] if any(log.failures()) else []
        found += [_LEFT_ALONE] if self._recorder.called().intersection(left_alone(self.run.capture.registry)) else []
        if breaks_in_models(log):
            found.append(_BROKEN_BESIDE_HOOKS if self.run.hooks_aside.is_guarded else _BROKEN)
        return found

    def _note_batch(self, args: Any) -> None:
        """Of the arguments, or where all are keywords of the batch that they come from.

        Calls that training may follow come first: in reinforcement learning a root is also called to act.
        """
        root, batches = self._recorder.root, self._batches[torch.is_grad_enabled()]
        if root not in batches:
            batch = self.run.surroundings.batch
            batches[root] = sizes_text(tensors_in(args)) or sizes_text(tensors_in(batch))
            trained, other = self._batches[True], self._batches[False]
            self.run.capture.batches = {**trained, **{key: text for key, text in other.items() if key not in trained}}

    def keep(self) -> None:
        if self.done:
            self.run.take_census()
        if self._compiled:
            self.run.capture.notes += self._untold()
        if self.done < self.steps or self.run.guard.failed.keys() & {self.name, MODULE_CALLS}:
            return
        if self._profiler is None:
            self.run.capture.notes.append(_SWAPPED)
            return
        self.run.leave_out(self._plan.left_out)
        if self._swaps:
            self.run.capture.notes.append(_NO_SHAPES)
        survey = self.run.capture.survey = SurveyStep(
            profiler=self._profiler,
            recorder=self._recorder,
            line_spans=self._tracer.spans.table(),
            lines=self._tracer.lines,
            graphs=self._graph.graphs,
            parameters=self._graph.parameters,
            owners=self._graph.owners,
            has_flops=self._has_flops,
            has_shapes=self._shapes,
            compiles=self.run.uses_compile(),
        )
        if self.run.reader is not None:
            survey.table = self.run.reader.surveyed(self._profiler, shapes=survey.has_shapes, flops=survey.has_flops)
            survey.profiler = None


def _around(graph: GraphTracer, tracer: LineTracer | None) -> Around:
    @contextmanager
    def around(roots: Any) -> Iterator[None]:
        with graph.tracing(roots), tracer.inside_backward() if tracer is not None else nullcontext():
            yield

    return around
