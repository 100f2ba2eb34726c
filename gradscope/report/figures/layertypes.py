"""What kind of layer a class is, from its name: what the colours of a flame mean.

The rules and colours are those of the page, whose copy is in ``page/web/src/layertypes.js`` and ``style.css``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

ALL = "all"
OTHER = "other"
OUTSIDE = "outside"


@dataclass(frozen=True, slots=True)
class LayerType:
    """One kind of layer."""

    words: str
    colour: str  # light enough for dark text
    pattern: re.Pattern[str] | None = None
    encloses: bool = False  # the layers below count as this type too


def _type(words: str, colour: str, pattern: str, encloses: bool = False) -> LayerType:
    return LayerType(words, colour, re.compile(pattern, re.IGNORECASE), encloses)


# In the order in which they claim a class.
LAYER_TYPES: Mapping[str, LayerType] = {
    "attention": _type("attention", "#7aabe0", "attention|attn", encloses=True),
    "mlp": _type("MLP", "#f08b68", "mlp|feed_?forward|ffn|swiglu|geglu|experts?$", encloses=True),
    "norm": _type("norm", "#48bd98", "norm"),
    "embedding": _type("embedding", "#f0dc82", "embed"),
    "loss": _type("loss", "#b9cc34", "loss|criterion"),
    "conv": _type("convolution", "#b59ae0", "conv"),
    "recurrent": _type("recurrent", "#7fc8cf", "rnn|lstm|gru", encloses=True),
    "linear": _type("linear", "#ffa5b9", "linear|dense|head|proj"),
    "activation": _type(
        "activation, dropout, pooling",
        "#d6b48a",
        "elu|gelu|relu|silu|mish|sigmoid|tanh|softmax|activation|dropout|droppath|pool",
    ),
    OTHER: LayerType("other layers", "#c8ccd4"),
    OUTSIDE: LayerType("outside the layers", "#a9b0bc"),
    ALL: LayerType("all", "#dfe2e8"),
}


def type_of_class(class_name: str) -> str:
    """A key of :data:`LAYER_TYPES`."""
    found = (key for key, kind in LAYER_TYPES.items() if kind.pattern and kind.pattern.search(class_name))
    return next(found, OTHER)


def type_of_layer(class_name: str, name: str, above: str = OTHER) -> str:
    """The type of a layer by its class, by the type ``above`` it, and of a container by its ``name``.

    What is inside attention counts as attention, and a Sequential named ``mlp`` as MLP.
    """
    if above in LAYER_TYPES and LAYER_TYPES[above].encloses:
        return above
    by_class = type_of_class(class_name)
    if by_class != OTHER:
        return by_class
    by_name = type_of_class(name)
    return by_name if LAYER_TYPES[by_name].encloses else OTHER


def mixed(colour: str, other: str, part: float) -> str:
    """``colour`` with ``part``, 0..1, of ``other``; both as ``#rrggbb``."""
    pairs = zip(_channels(colour), _channels(other), strict=True)
    return "#" + "".join(f"{round(one + (two - one) * part):02x}" for one, two in pairs)


def _channels(colour: str) -> list[int]:
    return [int(colour[i : i + 2], 16) for i in (1, 3, 5)]
