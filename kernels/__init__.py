"""Kernels under the recipes: one folder an op, with a reference, a path for the CPU, Triton kernels and their launcher.

Imported as ``gradscope.kernels``; a bare ``kernels`` is another package. Importing it loads no triton: the first call
with a tensor on a GPU does.
"""
