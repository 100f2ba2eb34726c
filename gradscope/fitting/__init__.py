"""Will my batch fit: the peak memory of a training step as a function of the batch size.

``run`` has the order of things. ``sources`` gives the workload of each size, by ``scaling`` the batch or by the user's
own function; ``measure`` runs the small ones; ``align`` finds the same block in all of them, ``polynomial`` says how it
grows, and ``predict`` replays the step; ``check`` and ``fake`` look at sizes that are not run; ``judge`` puts all of it
together, and ``report``, ``show`` and ``words`` say it.
"""

from gradscope.fitting.report import FitReport
from gradscope.fitting.run import fit

__all__ = ["FitReport", "fit"]
