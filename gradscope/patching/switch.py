"""The attention that Hugging Face's transformers can be told to take, for models whose own is left alone."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from types import FunctionType
from typing import Any

from torch import nn

from gradscope.patching.match import Match
from gradscope.recording.graph import Frame

_LIBRARY = "transformers"
# What its attention modules look the implementation up in, or ask for its name.
_CHOICES = frozenset({"ALL_ATTENTION_FUNCTIONS", "_attn_implementation"})
NOTHING = "nothing to do: "


def attention_switch(match: Match, frame: Frame, owner: nn.Module | None, paths: Mapping[nn.Module, str]) -> str:
    """What to do instead of editing the library's attention, or why nothing; empty for other code.

    ``paths`` are all modules of the model, by their path; ``owner`` is the one that runs the attention.
    """
    library = str(frame.globals.get("__name__", "")).partition(".")[0]
    if library != _LIBRARY or match.recipe not in {"attention", "packed_attention"} or owner is None:
        return ""
    models: list[Any] = [each for each in _around(owner, paths) if hasattr(type(each), "_supports_sdpa")]
    if not models:
        return f"{NOTHING}it stands in no PreTrainedModel, which could be told to take another attention"
    refusing = next((each for each in models if not each._supports_sdpa), None)
    if refusing is not None:
        return f"{NOTHING}this version of {_LIBRARY} has no other attention for {type(refusing).__name__}"
    if not _looks_up(owner):
        return f"{NOTHING}this version of {_LIBRARY} has no other attention for {type(owner).__name__}"
    frames = {place.frame for node in match.nodes for place in node.places}
    if any(each.settings.get("softcap") is not None for each in frames):
        return f"{NOTHING}it caps the scores, which torch's scaled_dot_product_attention does not"
    config = getattr(models[0], "config", None)
    if getattr(config, "_attn_implementation", "eager") != "eager":
        return f"{NOTHING}{type(owner).__name__} takes this attention under every implementation"
    first = "set output_attentions=False and " if getattr(config, "output_attentions", False) else ""
    return f"{first}load the model with attn_implementation='sdpa'"


def _around(owner: nn.Module, paths: Mapping[nn.Module, str]) -> list[nn.Module]:
    """The modules that hold ``owner``, itself first."""
    own = paths[owner]
    found = [each for each, path in paths.items() if not path or own == path or own.startswith(f"{path}.")]
    return sorted(found, key=lambda each: -len(paths[each]))


def _looks_up(owner: nn.Module) -> bool:
    """Return whether the module takes the implementation that its configuration names, or has a class for each."""
    forward = getattr(type(owner).forward, "__wrapped__", type(owner).forward)
    if isinstance(forward, FunctionType) and _CHOICES & set(forward.__code__.co_names):
        return True
    name = type(owner).__name__
    classes = vars(sys.modules.get(type(owner).__module__, object))
    return name.endswith("Attention") and f"{name.removesuffix('Attention')}SdpaAttention" in classes
