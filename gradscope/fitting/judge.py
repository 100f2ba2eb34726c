"""From measured steps to the answer: peaks, what fits, and what grows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import combinations

import torch

import gradscope
from gradscope.capture.environment import describe_environment
from gradscope.fitting.document import UNSTEADY
from gradscope.fitting.fake import FakeCheck, UncheckedError
from gradscope.fitting.measure import MeasuredRuns
from gradscope.fitting.options import FitOptions, trained
from gradscope.fitting.predict import Forecast, Peak
from gradscope.fitting.result import FitData, FitRow, MeasuredRow, layer_growth
from gradscope.tree import parameters_of

LIMIT = 2**20  # nobody asks for more samples in one step


def largest_that(fits: Callable[[int], bool], start: int = 1) -> int:
    """The largest batch size for which ``fits`` holds, up to :data:`LIMIT`; 0 where not even 1 does.

    Memory is taken to grow with the batch: found by doubling from ``start`` and then halving between.
    """
    low, high = 0, max(start, 1)
    while fits(high):
        if high >= LIMIT:
            return LIMIT
        low, high = high, min(2 * high, LIMIT)
    while high - low > 1:
        middle = (low + high) // 2
        if fits(middle):
            low = middle
        else:
            high = middle
    return low


# CUDA's caching allocator gives out multiples of this.
_CUDA_ROUNDING = 512


def judge(measured: MeasuredRuns, settings: FitOptions) -> FitData:
    """Everything that a report of the fit says."""
    predictor = Predictor(measured, settings)
    memory, memory_text = _device_memory(settings, measured.device)
    reserve = None if memory is None else settings.reserve.of(memory)
    budget = None if memory is None or reserve is None else memory - reserve
    rows = [predictor.row(size, budget) for size in settings.batch_sizes]
    largest = None if budget is None else predictor.largest(budget)
    growth_at = settings.batch_sizes[-1]
    growth = predictor.forecast.saved_growth(growth_at)
    model, optimizer = measured.workload.model, measured.workload.optimizer
    parameters = list(parameters_of(model))
    trained_bytes = sum(parameter.numel() * parameter.element_size() for parameter in trained(model))
    dtypes = {parameter.dtype for parameter in parameters}
    return FitData(
        gradscope=gradscope.__version__,
        target=measured.target,
        environment=describe_environment(measured.device, dtypes.pop() if len(dtypes) == 1 else None),
        model=type(model).__name__,
        parameters=sum(parameter.numel() for parameter in parameters),
        optimizer=None if optimizer is None else type(optimizer).__name__,
        measured=predictor.measured_rows(),
        deviation=predictor.deviation,
        unmatched_bytes=predictor.forecast.peak(growth_at).unmatched_bytes,
        rows=rows,
        layers=layer_growth(measured.infos, growth),
        outside_bytes_per_sample=growth.get(None, 0),
        growth_at=growth_at,
        adam_bytes=2 * trained_bytes if optimizer is None else None,
        gradient_bytes=trained_bytes if optimizer is None else None,
        device_memory_bytes=memory,
        device_memory=memory_text,
        reserve_bytes=reserve,
        reserve=None if reserve is None else settings.reserve.text,
        largest=largest or None,
        largest_peak_bytes=predictor.row(largest, budget).peak_bytes if largest else None,
        unlimited=largest == LIMIT,
        smallest_peak_bytes=predictor.row(1, budget).peak_bytes if largest == 0 else None,
        unchecked=predictor.check.unchecked,
        notes=measured.notes,
    )


def _device_memory(settings: FitOptions, device: torch.device) -> tuple[int | None, str | None]:
    if settings.device_memory is not None:
        return settings.device_memory, settings.device_memory_text
    if device.type != "cuda":
        return None, None
    found = torch.cuda.get_device_properties(device)
    return int(found.total_memory), str(found.name)


class Predictor:
    """The forecast, with what is known of its truth.

    Attributes:
        forecast: from the runs that it is made from.
        check: on fake tensors.
        deviation: of the forecast at the run that it does not know, over what was measured; None without that run.
    """

    def __init__(self, measured: MeasuredRuns, settings: FitOptions) -> None:
        runs = measured.runs
        slack = _CUDA_ROUNDING if measured.device.type == "cuda" else 0
        self.forecast = Forecast([runs[size] for size in settings.measured], slack)
        self.check = FakeCheck(measured.workload, measured.shapes, settings.measured, measured.device)
        self.deviation: float | None = None
        self._runs, self._settings = runs, settings
        self._others: Sequence[Forecast] = ()
        known = runs.get(settings.check)
        if known is not None:
            actual = known.peak_bytes
            self.deviation = (self.forecast.peak(settings.check).peak_bytes - actual) / actual
            if abs(self.deviation) > UNSTEADY:
                self._others = [Forecast(three, slack) for three in combinations(runs.values(), 3)]

    def measured_rows(self) -> tuple[MeasuredRow, ...]:
        """Rows of the batch sizes that were run: measured beside forecast."""
        return tuple(
            MeasuredRow(
                batch_size=size,
                peak_bytes=run.peak_bytes,
                predicted_bytes=self.forecast.peak(size).peak_bytes,
                use="check" if size == self._settings.check else "prediction",
            )
            for size, run in self._runs.items()
        )

    def row(self, size: int, budget: int | None) -> FitRow:
        """The prediction for one batch size, checked, and judged if there is a budget."""
        try:
            correction = 0 if self.check.agrees(size) else self.check.difference(size)
            found = "corrected" if correction else "agrees"
        except UncheckedError:
            correction, found = 0, "unchecked"
        peak, low, high = self._peaks(size, correction)
        return FitRow(
            batch_size=size,
            peak_bytes=peak.peak_bytes,
            saved_bytes=peak.saved_bytes,
            model_bytes=peak.model_bytes,
            rest_bytes=peak.rest_bytes,
            check=found,
            correction_bytes=correction,
            fits=None if budget is None else "yes" if high <= budget else "no" if low > budget else "unsure",
            low_bytes=low if self._others else None,
            high_bytes=high if self._others else None,
        )

    def largest(self, budget: int) -> int:
        """The largest batch size whose peak, at the upper end of its range, is within ``budget``; 0 for none."""
        plain = largest_that(lambda size: self._peaks(size, 0)[2] <= budget)
        # Where nothing unexpected happens at that size, a run on fake tensors for each step of the search is spared.
        if plain in (0, LIMIT) or self.row(plain, budget).check != "corrected":
            return plain
        return largest_that(lambda size: self.row(size, budget).fits == "yes", start=plain)

    def _peaks(self, size: int, correction: int) -> tuple[Peak, int, int]:
        """The peak, and the lowest and highest that the other choices of measured sizes lead to."""
        peak = self.forecast.peak(size, correction)
        others = [other.peak(size, correction).peak_bytes for other in self._others]
        return peak, min([peak.peak_bytes, *others]), max([peak.peak_bytes, *others])
