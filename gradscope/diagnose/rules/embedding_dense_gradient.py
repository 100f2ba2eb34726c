"""An embedding of a large vocabulary, whose dense gradient is nearly all zeros.

Example::

    self.items = nn.Embedding(1_000_000, 64)  # a batch of 4096 touches at most 4096 rows

Pattern: an embedding whose weight is read by nothing else (a tied weight's gradient is dense by its nature) and whose
rows are at least four times the batch's indices. Evidence: measured time of its backward, which fills the whole table
with zeros before it adds the rows, and the optimizer's share for it. Estimate: the part of that backward that rows
never touched take; the upper end adds their part of the optimizer's time.

Source: https://pytorch.org/docs/stable/generated/torch.nn.Embedding.html (sparse=True, and the optimizers that take
sparse gradients: SGD, SparseAdam, Adagrad).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from gradscope.diagnose.case import Case, Rule, severity_of
from gradscope.tables import CallFact, Finding, TensorFact
from gradscope.units import count as counted
from gradscope.units import ns as time_text
from gradscope.units import percent

_ROWS_AN_INDEX = 4
_FEWEST = 500_000  # numbers in the table: a smaller one is filled in no time

_BACKWARD = frozenset({"aten::embedding_backward", "aten::embedding_dense_backward", "EmbeddingBackward0"})


def find(case: Case) -> Iterator[Finding]:
    """One for each table."""
    uses: defaultdict[str, list[CallFact]] = defaultdict(list)
    for call in case.facts.calls:
        weight = call.argument(1, "weight")
        if call.op == "embedding" and isinstance(weight, TensorFact) and weight.parameter is not None:
            uses[weight.parameter].append(call)
    for path, calls in uses.items():
        if not _alone(case, path, calls):
            continue
        found = _finding(case, path, calls)
        if found is not None:
            yield found


def _alone(case: Case, path: str, calls: list[CallFact]) -> bool:
    """Whether the table has a dense gradient that these calls alone make."""
    for call in calls:
        weight = call.argument(1, "weight")
        if not call.grad or not weight.requires_grad or call.argument(6, "sparse", False):
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


def _finding(case: Case, path: str, calls: list[CallFact]) -> Finding | None:
    weight = calls[0].argument(1, "weight")
    indices = sum(call.inputs[0].elements for call in calls if call.inputs)
    if not indices or len(weight.shape) != 2:
        return None
    rows = weight.shape[0]
    if rows < _ROWS_AN_INDEX * indices or weight.elements < _FEWEST:
        return None
    layers = _layers(path, calls)
    spent = _backward_ns(case, layers)
    optimizing = _optimizer_ns(case, weight.elements)
    untouched = 1 - indices / rows
    name = f"model.{path}" if "" in case.layers else path
    saving = round(spent * untouched)
    evidence = f"a batch touches at most {counted(indices)} of {counted(rows)} rows ({percent(indices / rows)})"
    if spent:
        evidence += f"; its backward takes {time_text(spent)} of a step"
    if optimizing:
        evidence += f", its part of the optimizer about {time_text(optimizing)}"
    return Finding(
        rule=RULE.name,
        severity=severity_of(saving, case),
        layers=layers,
        line=next((call.source for call in calls if call.source is not None), None),
        message=f"the gradient of {path} is dense, and nearly all of it is zeros",
        evidence=evidence,
        predicted_saving_ns=saving or None,
        advice=(
            "Make the embedding with sparse=True and give its weight an optimizer of its own that takes sparse "
            "gradients and no weight decay; it updates only the rows of the batch."
        ),
        code=f"nn.Embedding({rows}, {weight.shape[1]}, sparse=True); torch.optim.SparseAdam([{name}])",
        predicted_low_ns=round(saving / 2) or None,
        predicted_high_ns=round((spent + optimizing) * untouched) or None,
    )


def _layers(path: str, calls: list[CallFact]) -> tuple[str, ...]:
    """Where the table is read: by its own module, or by a function."""
    known = (path.rpartition(".")[0] if call.module is not None else call.layer for call in calls)
    return tuple(dict.fromkeys(layer for layer in known if layer is not None))


def _backward_ns(case: Case, layers: tuple[str, ...]) -> int:
    rows = [row for layer in layers for row in case.ops.get((layer, "backward"), ()) if row.name in _BACKWARD]
    return sum(row.self_ns for row in rows)


def _optimizer_ns(case: Case, elements: int) -> int:
    """By the table's share of what is updated; 0 where no optimizer is known."""
    updated = sum(optimizer.elements for optimizer in case.facts.optimizers)
    return round(case.run.step.optimizer_ns * elements / updated) if updated >= elements else 0


RULE = Rule("embedding-dense-gradient", "a large embedding whose dense gradient is nearly all zeros", find)
