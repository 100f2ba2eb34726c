"""Dropout whose mask is computed from a seed whenever it is needed, and never kept."""
