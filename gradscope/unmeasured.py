"""What to say of a run in which nothing was measured: what happened, and what to do next."""

from __future__ import annotations

from gradscope.capture.engine import STEP_ENDS
from gradscope.capture.phases import steps_to_first_result
from gradscope.capture.phases.timed import Timed
from gradscope.capture.result import Capture
from gradscope.capture.session import Session
from gradscope.capture.training import StepFinder
from gradscope.tables import Options

_WORKED_S = 0.1  # of processor time: a process that only looks something up takes less, one that trains takes more


def why_no_steps(target: str, session: Session, finder: StepFinder, children_s: float) -> str | None:
    """Why no training steps were found in a script that ran to its end; None where some were.

    Args:
        children_s: processor time of the processes that the script started, in seconds.
    """
    capture = session.capture
    if not capture.steps_done and STEP_ENDS in capture.failed:
        return f"{target} could not be measured: {capture.failed[STEP_ENDS]}.\nRun 'gradscope doctor' to see why."
    if not finder.backwards:
        return (
            f"{target} ran to its end without a backward pass{_that_returned(session.backward.raised)}: "
            "there is nothing to measure.\n"
            f"{_without_backward(children_s)}"
        )
    if not capture.steps_done and finder.stepped:
        return (
            f"{target} ended before its optimizers had stepped twice: "
            "a training step cannot be told from that.\n"
            "Let it run longer."
        )
    if not capture.steps_done:
        return (
            f"{target} went backward {finder.backwards} times, and no optimizer stepped: "
            "gradscope cannot tell where its training steps end. "
            "It has built an optimizer, whose step() ends a training step.\n"
            "For another kind of loop: with gradscope.profiling() as prof, and prof.step() where a step ends."
        )
    return None


def _that_returned(raised: int) -> str:
    if not raised:
        return ""
    return f" that returned ({raised} raised an error, which the script caught)"


def _without_backward(children: float) -> str:
    """What to do next, where processes that the script started took so many seconds of processor time."""
    advice = "Profile a script that trains, or a file that defines workload() -> (model, batch)."
    if children < _WORKED_S:
        return advice
    return (
        f"Processes that it started worked for {children:.1f} s: only the script's own process is measured.\n"
        "Let it train there, or profile a file that defines workload() -> (model, batch)."
    )


def why_no_result(target: str, capture: Capture) -> str:
    """Why none of the steps that ran was measured."""
    if capture.given_way:
        return (
            f"{target} ran a torch.profiler of its own in {capture.given_way} of its {capture.steps_done} steps; "
            "gradscope gave way to it, and measured nothing.\n"
            "Turn that profiler off, or let it end earlier: PyTorch has one for a whole process."
        )
    if Timed.name in capture.failed:
        return f"{target} could not be measured: {capture.failed[Timed.name]}.\nRun 'gradscope doctor' to see why."
    return _too_short(target, capture)


def _too_short(target: str, capture: Capture) -> str:
    passed, options = capture.passed_over, capture.options
    ran = passed + capture.steps_done
    steps = f"{ran} training step{'' if ran == 1 else 's'}"
    needed = passed + steps_to_first_result(options)
    least = passed + steps_to_first_result(Options(steps=1, warmup=1))
    less = f", or measure less: --warmup 1 --steps 1 needs {least}" if least < needed else ""
    return (
        f"{target} ended after {steps}; nothing is measured before step {needed} "
        f"with --warmup {options.warmup} --steps {options.steps}, "
        f"and a whole report takes {passed + capture.steps_needed}.\n"
        f"Let it run longer{less}."
    )
