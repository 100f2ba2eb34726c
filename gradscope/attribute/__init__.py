"""Events -> owners: every nanosecond of a trace gets a step, a category, a layer and a source line."""
