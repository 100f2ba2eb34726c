"""A gradient that forward left behind, times the gradient that backward is given."""
