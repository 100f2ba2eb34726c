"""Unfused normalization makes five or more passes over its input and saves most results for backward.

Example::

    x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * self.weight

Pattern: formulas that are an RMS or a layer normalisation, in any spelling; torch's rms_norm on a CPU, which is made of
plain operations there; and a residual sum after dropout with its normalisation. Evidence: time of the lines, and what
they hold. Estimate: both ways run alone at the recorded shapes.

Source: B. Zhang and R. Sennrich, Root mean square layer normalization (arXiv:1910.07467); P.-L. Hsu et al., Liger
Kernel (arXiv:2410.10989), RMSNorm and LayerNorm: one kernel each way, the statistics kept.
"""

from __future__ import annotations

from collections.abc import Iterator

from gradscope.diagnose.case import Case, Rule
from gradscope.diagnose.rules.recipes.places import found_places
from gradscope.tables import Finding, PlaceFact


def find(case: Case) -> Iterator[Finding]:
    """Yield one finding for each line with a normalisation of plain operations."""
    recipes = {"rms_norm", "layer_norm", "add_norm"}
    yield from found_places(case, RULE.name, recipes, lambda place: _message(case, place))


def _message(case: Case, place: PlaceFact) -> str:
    if place.recipe == "add_norm":
        dropped = "dropout, " if any(case.call(index).op == "dropout" for index in place.calls) else ""
        return f"Unfused {dropped}residual add and normalization: each passes over the same tensor"
    kind = "RMS" if place.recipe == "rms_norm" else "layer"
    if all(case.call(index).op == place.recipe for index in place.calls):
        return f"PyTorch runs {kind} norm unfused on the CPU: every operation saves a tensor for backward"
    return f"Unfused {kind} norm: every operation creates a new tensor"


RULE = Rule("norm-by-hand", "unfused normalization", find)
