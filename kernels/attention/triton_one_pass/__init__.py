"""Gradients of q, k and v in one Triton kernel."""
