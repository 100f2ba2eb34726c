"""Gradients of q, k, v and the bias in Triton kernels."""
