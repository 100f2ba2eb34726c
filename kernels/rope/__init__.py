"""Rotary position embedding: pairs of features turned by an angle that grows with the position."""
