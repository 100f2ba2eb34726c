"""Normalisation over features, alone or after dropout and the addition to a residual stream."""
