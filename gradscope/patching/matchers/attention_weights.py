"""The weights of an attention that are returned or stored: the recipe gives them beside its result."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from gradscope.patching.graph import COPIES, cast_source
from gradscope.patching.match import Argument, Beside
from gradscope.patching.matchers.products import Operand
from gradscope.recording.graph import Node, Value


def weights_of(weights: Value, softmax: Node, query: Operand, dropped: Node | None) -> Iterator[Beside]:
    """What becomes of the softmax until it is the operand ``weights`` of the product with the values, step by step.

    What is there before ``dropped`` takes the sinks' column off is not among it.
    """
    steps: list[Node] = []
    while weights.producer is not None and weights.producer is not softmax:
        steps.insert(0, weights.producer)
        weights = weights.producer.inputs[0]
    casts = [step for step in steps if cast_source(step.output) is not None]
    if any(step.changed or not (step in casts or step is dropped or step.op in {"dropout", *COPIES}) for step in steps):
        return  # a view of another form
    drops = [step for step in steps if step.op == "dropout"]
    for count in range(len(steps) + 1):
        made, left = steps[:count], steps[count:]
        if dropped in left:
            continue
        before = [step for step in casts if step in made]
        value = made[-1].output if made else softmax.output
        mixed = not before and softmax.autocast and softmax.output.dtype == torch.float32
        wanted = torch.float32 if mixed else query.value.dtype
        own_dtype = not before and softmax.argument(2, "dtype") is not None
        if any(step in casts for step in left) or own_dtype or value.dtype != wanted:
            continue
        after = any(step in drops for step in left)
        arguments = (Argument("after_dropout", ("False",)),) if after else ()
        yield Beside(value, "attention_with_weights", arguments, before[-1] if before else None)
