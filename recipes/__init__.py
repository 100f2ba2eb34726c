"""Recipes: custom autograd Functions that replace what the profiler found slow. Imported as ``gradscope.recipes``.

Each recipe will be one module: what it matches, its autograd Function, its functional form and its drop-in Module.
"""
