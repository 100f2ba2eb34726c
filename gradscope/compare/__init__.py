"""Two runs beside each other: what changed, and whether it is more than noise.

``build`` has the order of things. ``mismatches`` says why the runs may not be comparable; ``measured`` gives each value
its spread, ``noise`` the limit that a difference must exceed; ``layers`` matches by path, ``groups`` folds repeated
blocks; ``document``, ``page``, ``figures`` and ``difffile`` say what came of it. ``budgets`` holds a run against
limits, which ``check_config`` reads from pyproject.toml; ``checkdocument`` says the outcome.
"""

from gradscope.compare.report import Diff, diff

__all__ = ["Diff", "diff"]
