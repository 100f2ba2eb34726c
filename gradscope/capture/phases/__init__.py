"""The phases of a run: one object each, which :mod:`gradscope.capture.session` enters and leaves in turn."""

from gradscope.capture.phases.base import EventReader, Phase, Run, StepRecorder
from gradscope.capture.phases.plan import SETTLING_STEPS, plan, steps_to_first_result

__all__ = ["Phase", "EventReader", "Run", "SETTLING_STEPS", "StepRecorder", "plan", "steps_to_first_result"]
