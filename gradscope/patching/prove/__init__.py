"""Whether a replacement is right and pays: run against the original in float64, predicted, measured in turns."""
