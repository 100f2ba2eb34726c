"""Gradient of the bias in a Triton kernel."""
