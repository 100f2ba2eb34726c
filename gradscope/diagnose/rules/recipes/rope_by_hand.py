"""Unfused rotary embedding splits, negates and concatenates tensors that one pass could rotate.

Example::

    q = q * cos + torch.cat((-q[..., half:], q[..., :half]), dim=-1) * sin

Pattern: calls between a tensor and its rotated version, by tables of cosines and sines, in any spelling: halves, pairs
or complex numbers. Evidence: time of the lines, and what they hold. Estimate: both ways run alone at the recorded
shapes.

Source: J. Su et al., RoFormer (arXiv:2104.09864); P.-L. Hsu et al., Liger Kernel (arXiv:2410.10989), RoPE: backward is
the same pass with the sines negated.
"""

from __future__ import annotations

from collections.abc import Iterator

from gradscope.diagnose.case import Case, Rule
from gradscope.diagnose.rules.recipes.places import found_places
from gradscope.tables import Finding, PlaceFact


def find(case: Case) -> Iterator[Finding]:
    """Yield one finding for each line with a rotation of plain operations."""
    yield from found_places(case, RULE.name, {"rope"}, _message)


def _message(place: PlaceFact) -> str:
    return "Unfused rotary embedding: halves are copied, negated and concatenated"


RULE = Rule("rope-by-hand", "unfused rotary position embedding", find)
