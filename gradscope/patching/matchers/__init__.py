"""The patterns, one a file: each finds in a recording what its recipe replaces.

A matcher is a function from a recording to matches. It reads the graph of calls only: how the source spells them, and
whether the source allows the change, is the business of :mod:`gradscope.patching.edits`.
"""

from __future__ import annotations

from gradscope.patching.matchers import attention

# In the order of preference: where two overlap, the earlier one is taken.
MATCHERS = {
    attention.RECIPE: attention.matches,
}
