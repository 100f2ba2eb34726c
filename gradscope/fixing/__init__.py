"""``gradscope fix``: finds what recipes can replace, proves it, measures it, and writes it into the user's source.

``run`` is the order of things for a model file and ``script`` for a training script; ``result`` is what they give,
``fixfile`` its FIX.json, ``show`` and ``messages`` what is printed of it; ``writing`` changes the user's files.
"""

from gradscope.fixing.report import FixReport
from gradscope.fixing.result import FixData, load_fix

__all__ = ["FixData", "FixReport", "load_fix"]
