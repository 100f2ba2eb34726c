"""The natural logarithm for Triton kernels, exact near 1 too."""
