"""Traces that ``torch.profiler`` exported (Chrome's JSON) -> the run data of a report: ``gradscope trace``."""
