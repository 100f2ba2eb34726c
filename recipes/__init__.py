"""Recipes: custom autograd Functions that replace what the profiler found slow. Imported as ``gradscope.recipes``.

Each is one module: its autograd Function, its functional form, its drop-in Module. Functions take the arguments of
their namesake in ``torch.nn.functional``, and more by keyword; ``function.explain(...)`` takes the same arguments and
says what would run and why.
"""

# Each module is imported before the function of its name: afterwards the name here stays the function.
from gradscope.recipes.cross_entropy import CrossEntropyLoss, cross_entropy

__all__ = ["CrossEntropyLoss", "cross_entropy"]
