"""An embedding of a large vocabulary, whose dense gradient is nearly all zeros.

Example::

    self.items = nn.Embedding(1_000_000, 64)  # a batch of 4096 touches at most 4096 rows
    self.tables = nn.ModuleList(nn.EmbeddingBag(100_000, 32, mode="sum") for _ in range(26))

Pattern: an embedding, or a bag of them, whose weight is read by nothing else (a tied weight's gradient is dense by its
nature) and whose rows are at least four times the batch's indices. Tables of one form on one line are one finding.
Evidence: measured time of its backward, which fills the whole table with zeros before it adds the rows, and the
optimizer's share for it. Estimate: 0.9 of what rows that are never touched take of that backward, and 0.8 of what they
take of the optimizer's time (half to 0.95 of both): a sparse gradient is sorted and added up as well. Measured on a CPU
with Adam: five tables, one of 200,000 rows of 16, 39 ms a step dense and 4.9 sparse; two of 50,000 rows of 100, 127 ms
and 16.

Source: https://pytorch.org/docs/stable/generated/torch.nn.Embedding.html (sparse=True, and the optimizers that take
sparse gradients: SGD, SparseAdam, Adagrad).
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from gradscope.diagnose.case import Case, Rule, first
from gradscope.diagnose.findings import Estimate, make_finding
from gradscope.diagnose.worth import ops_ns
from gradscope.recording.graph import Node, Value
from gradscope.tables import Finding
from gradscope.units import count as counted
from gradscope.units import ns as time_text
from gradscope.units import percent

_ROWS_AN_INDEX = 4
_FEWEST = 500_000  # numbers in the table: a smaller one is filled in no time

# A sparse gradient, and a sparse update, have a cost of their own.
_OF_BACKWARD, _OF_OPTIMIZER = 0.9, 0.8

_BACKWARD = frozenset(
    {"aten::embedding_backward", "aten::embedding_dense_backward", "EmbeddingBackward0"}
    | {"aten::_embedding_bag_backward", "aten::_embedding_bag_dense_backward", "EmbeddingBagBackward0"}
)
_SPARSE = {"embedding": 6, "embedding_bag": 7}  # the place of the argument


@dataclass(frozen=True, slots=True)
class _Table:
    """One embedding's weight, and who reads it."""

    path: str
    weight: Value
    calls: tuple[Node, ...]
    layers: tuple[str, ...]

    @property
    def indices(self) -> int:
        return sum(call.inputs[0].elements for call in self.calls if call.inputs)

    @property
    def source(self) -> str | None:
        return next((call.source for call in self.calls if call.source is not None), None)


def find(case: Case) -> Iterator[Finding]:
    """Yield one finding for each table, or for several of the same shape that one line reads."""
    uses: defaultdict[str, list[Node]] = defaultdict(list)
    for call in case.facts.calls:
        weight = call.argument(1, "weight")
        if call.op in _SPARSE and isinstance(weight, Value) and weight.parameter is not None:
            uses[weight.parameter].append(call)
    found: defaultdict[tuple[str, str | None, tuple[int, ...]], list[_Table]] = defaultdict(list)
    for path, calls in uses.items():
        weight = calls[0].argument(1, "weight")
        table = _Table(path, weight, tuple(calls), _layers(path, calls))
        if _alone(case, path, calls) and _is_mostly_zeros(table):
            found[calls[0].op, table.source, weight.shape].append(table)
    for tables in found.values():
        yield _finding(case, tables)


def _alone(case: Case, path: str, calls: list[Node]) -> bool:
    """Check that the table has a dense gradient, which these calls alone make."""
    for call in calls:
        weight = call.argument(1, "weight")
        if not call.grad or not weight.requires_grad or call.argument(_SPARSE[call.op], "sparse", False):
            return False
        if call.op == "embedding_bag" and call.argument(6, "mode", "mean") == "max":
            return False
        # Both read or write the whole gradient or table: torch has no sparse way.
        if call.argument(3, "max_norm") is not None or call.argument(5, "scale_grad_by_freq", False):
            return False
    for layer in _layers(path, calls):
        row = case.layers.get(layer)
        if row is not None and any(name.endswith(path) for name in row.tied):
            return False
    own = {call.index for call in calls}
    if any(place.recipe == "embedding" and own & set(place.calls) for place in case.facts.places):
        return False
    return not any(
        call.grad and call.index not in own and not call.op.startswith("__")
        for call in case.facts.calls
        if any(tensor.parameter == path for tensor in call.inputs)
    )


def _is_mostly_zeros(table: _Table) -> bool:
    weight = table.weight
    if not table.indices or len(weight.shape) != 2:
        return False
    return weight.shape[0] >= _ROWS_AN_INDEX * table.indices and weight.elements >= _FEWEST


def _finding(case: Case, tables: list[_Table]) -> Finding:
    one = tables[0]
    rows, width = one.weight.shape
    indices = max(table.indices for table in tables)
    layers = [layer for table in tables for layer in table.layers]
    spent = _backward_ns(case, layers)
    optimizing = _optimizer_ns(case, sum(table.weight.elements for table in tables))
    untouched = 1 - indices / rows
    most = (spent + optimizing) * untouched
    several = len(tables) > 1
    saving = round((_OF_BACKWARD * spent + _OF_OPTIMIZER * optimizing) * untouched)
    evidence = f"a batch uses at most {counted(indices)} of {counted(rows)} rows ({percent(indices / rows)})"
    if several:
        evidence += f" of each of {len(tables)} tables"
    if spent:
        evidence += f"; {'their' if several else 'its'} backward takes {time_text(spent)} per step"
    if optimizing:
        evidence += f", {'their' if several else 'its'} share of the optimizer step about {time_text(optimizing)}"
    paths = first([table.path for table in tables], 2)
    kind = "EmbeddingBag" if one.calls[0].op == "embedding_bag" else "Embedding"
    mode = f', mode="{one.calls[0].argument(6, "mode", "mean")}"' if kind == "EmbeddingBag" else ""
    return make_finding(
        RULE.name,
        case,
        Estimate(saving, round(most / 2), round(most)),
        layers=layers,
        line=one.source,
        message=(
            f"The gradients of {paths} are dense but almost entirely zero"
            if several
            else f"The gradient of {paths} is dense but almost entirely zero"
        ),
        evidence=evidence,
        advice=(
            (
                "Create the embeddings with `sparse=True` and give their weights a separate optimizer "
                "that supports sparse gradients, without weight decay; it updates only the batch's rows."
            )
            if several
            else (
                "Create the embedding with `sparse=True` and give its weight a separate optimizer that "
                "supports sparse gradients, without weight decay; it updates only the batch's rows."
            )
        ),
        code=f"nn.{kind}({rows}, {width}{mode}, sparse=True); torch.optim.SparseAdam({_weights(case, tables, kind)})",
        cost_ns=spent + optimizing,
    )


def _weights(case: Case, tables: list[_Table], kind: str) -> str:
    """A list of these, in Python."""
    if len(tables) > 1:
        return f"[part.weight for part in model.modules() if isinstance(part, nn.{kind}) and part.sparse]"
    path = re.sub(r"(?:^|\.)(\d+)(?=\.|$)", r"[\1]", tables[0].path)
    return f"[model{'' if path.startswith('[') else '.'}{path}]" if "" in case.layers else f"[{path}]"


def _layers(path: str, calls: list[Node]) -> tuple[str, ...]:
    """Return where the table is read: by its own module, or by a function."""
    known = (path.rpartition(".")[0] if call.module is not None else call.layer for call in calls)
    return tuple(dict.fromkeys(layer for layer in known if layer is not None))


def _backward_ns(case: Case, layers: Sequence[str]) -> int:
    return ops_ns(case, layers, _BACKWARD.__contains__, phases=("backward",))


def _optimizer_ns(case: Case, elements: int) -> int:
    """Estimate the optimizer's time by the table's share of what it updates; 0 where none is known."""
    updated = sum(optimizer.elements for optimizer in case.facts.optimizers)
    return round(case.run.step.optimizer_ns * elements / updated) if updated >= elements else 0


RULE = Rule(
    "embedding-dense-gradient", "a large embedding whose dense gradient is almost entirely zero", find, edits=True
)
