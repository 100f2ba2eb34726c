"""Rules about layers and functions that take too long: in backward, for this machine's limits, by their sizes."""
