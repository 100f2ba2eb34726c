"""An embedding tied to the head creates a full-vocabulary gradient for a few tokens, to add it to the head's.

Example::

    self.head.weight = self.embedding.weight

Pattern: an embedding by a parameter that a matmul reads too, with many more rows than the batch has tokens. Evidence:
the dense gradient's size. Estimate: both ways run alone at the recorded shapes where that does not take too long; else
0.8 of the measured time of making it and of adding it up (0.5 to 0.95). The recipe adds the rows of the batch's tokens
into the head's gradient.

Source: PyTorch, torch.nn.Embedding (the gradient is dense unless ``sparse``); O. Press and L. Wolf, Using the output
embedding to improve language models (arXiv:1608.05859).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from gradscope.diagnose.case import Case, Rule
from gradscope.diagnose.findings import Estimate
from gradscope.diagnose.rules.recipes.places import found_places
from gradscope.diagnose.worth import ops_ns
from gradscope.recording.graph import Node
from gradscope.tables import Finding, PlaceFact
from gradscope.units import count as counted
from gradscope.units import size as size_text

# Of making the dense gradient and adding it up: low, likely, high.
_OF_DENSE = (0.5, 0.8, 0.95)


def find(case: Case) -> Iterator[Finding]:
    """Yield one finding for each line with a tied embedding."""
    places = {place.source: place for place in case.facts.places if place.recipe == "embedding"}
    for finding in found_places(case, RULE.name, {"embedding"}, _message, otherwise=_dense):
        call = _call(case, places[str(finding.line)])
        ids, weight = call.inputs[:2]
        rows, tokens = counted(weight.shape[0]), counted(ids.elements)
        whole = weight.bytes
        evidence = f"a gradient of {rows} rows ({size_text(whole)}) is zero-filled and added for only {tokens} tokens"
        yield replace(finding, evidence=evidence)


def _message(place: PlaceFact) -> str:
    return "The tied embedding creates a full-vocabulary gradient, which is then added to the head's"


def _call(case: Case, place: PlaceFact) -> Node:
    return next(call for call in map(case.call, place.calls) if call.op == "embedding")


def _dense(case: Case, places: Sequence[PlaceFact]) -> Estimate | None:
    """The gradient's own operations, and its sum with the head's."""
    layers = {_call(case, place).layer for place in places}
    found = ops_ns(case, layers, lambda name: "embedding_dense_backward" in name or "EmbeddingBackward" in name)
    for layer in layers:
        row = case.layers.get(layer) if layer is not None else None
        # Only a layer of its own: sums of another's are of its activations too.
        if row is not None and row.class_name == "Embedding":
            found += row.gradient_sum_ns
    low, likely, high = (round(found * part) for part in _OF_DENSE)
    return Estimate(likely, low, high) if found else None


RULE = Rule("tied-embedding", "a tied embedding with a full-vocabulary gradient", find)
