"""Kernels under the recipes: one folder an op, with reference, Triton kernels and launcher.

Imported as ``gradscope.kernels``; a bare ``kernels`` is another package.
"""
