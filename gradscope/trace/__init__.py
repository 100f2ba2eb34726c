"""Raw profiler events -> :class:`~gradscope.tables.EventTable`; the only place that knows torch.profiler's names."""
