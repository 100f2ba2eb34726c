"""Full logits of a large vocabulary are materialized just for the loss: many passes over the largest tensor.

Example::

    logits = self.head(x)  # tokens · vocabulary
    loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())

Pattern: a matmul with the vocabulary's weight whose result only a loss reads; or a loss over logits that others need
too. Evidence: time of the lines, and logits, their logarithmic softmax and its gradient at the peak. Estimate: both
ways run alone at the recorded shapes; where that would take too long, the loss's own passes.

Source: PyTorch issue 124480 (a chunked linear cross-entropy); P.-L. Hsu et al., Liger Kernel (arXiv:2410.10989);
E. Wijmans et al., Cut your losses (arXiv:2411.09009).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from gradscope.diagnose.case import Case, Rule
from gradscope.diagnose.findings import Estimate
from gradscope.diagnose.rules.recipes.places import found_places
from gradscope.diagnose.worth import ops_ns
from gradscope.ops import LOSSES
from gradscope.recording.graph import Node
from gradscope.tables import Finding, PlaceFact

# Fewer numbers are no matter: a classifier's loss over some classes.
_FEWEST = 1_000_000

# At the peak: the logarithmic softmax, and a gradient of the same size.
_HELD = 2


_LOSSES = ("log_softmax", "LogSoftmax", "nll_loss", "NllLoss")


def find(case: Case) -> Iterator[Finding]:
    """Yield one finding for each head, or loss, of large logits."""
    recipes = {"linear_cross_entropy", "cross_entropy"}
    yield from found_places(case, RULE.name, recipes, _message, wanted=_is_large, otherwise=_passes)


def _is_large(case: Case, place: PlaceFact) -> bool:
    return any(tensor.elements >= _FEWEST for call in _calls(case, place) for tensor in (*call.inputs, *call.outputs))


def _message(place: PlaceFact) -> str:
    if place.recipe == "linear_cross_entropy":
        return "Full logits are materialized just for the loss"
    return "The loss saves a second copy of the logits for backward and creates a third there"


def _calls(case: Case, place: PlaceFact) -> list[Node]:
    return [case.call(index) for index in place.calls]


def _passes(case: Case, places: Sequence[PlaceFact]) -> Estimate | None:
    """The loss's own: the recipes make one over each block of logits instead, while it is in the cache."""
    layers = {call.layer for call in case.facts.calls if call.op in LOSSES | {"log_softmax"}}
    found = ops_ns(case, layers, lambda name: any(each in name for each in _LOSSES))
    logits = max(output.elements for place in places for call in _calls(case, place) for output in call.outputs)
    memory = _HELD * logits * _calls(case, places[0])[0].outputs[0].dtype.itemsize
    return Estimate(found, round(found * 0.5), round(found * 1.6), memory) if found else None


RULE = Rule("logits-materialised", "logits of a large vocabulary, materialized just for the loss", find)
