"""What a user can do where a recipe is not put in: an answer to every reason, and a library's own switch.

A reason's figures and names are ``{}``. An answer that begins with "nothing" says why.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from functools import cache
from types import FunctionType
from typing import Any

from torch import nn

from gradscope.patching.match.match import Match
from gradscope.recording.graph import Frame

_NO_GAIN = "nothing to do"

_TODO: dict[str, tuple[str, ...]] = {
    "do not return or store that value, or do so only under a condition such as `if return_weights:`": (
        "the result of {} is returned or stored",
        "{} is {} on line {}",
        "line {} also creates what {} reads",
        "{} is read again in the next loop iteration",
        "baddbmm adds a tensor that is used elsewhere",
    ),
    "do not read that value there, or read it only under a condition": (
        "the result of {} is also read by {}",
        "line {} uses {} on another path",
    ),
    "read only the loss, or recompute the logits where they are read": (
        "the logits are also read by {}",
        "two losses read the logits, so they would be computed twice",
    ),
    "remove the hooks for the fix, or hook the enclosing module instead": (
        "the {} has hooks, which would no longer be called",
        "{} has hooks, which would no longer be called",
        "{} has hooks, which need its output",
    ),
    "write the number as a literal, or store it in a module attribute that the method does not assign": (
        "line {}: the value of {} may change between calls",
        "line {}: {} is not a number",
        "line {}: {} may differ from its value on line {}",
        "the number that {} uses is set in {}",
        "{} is reassigned",
        "cannot tell how the call of {} specifies its {}",
        "the number of {} folded into the batch is not in the code",
        "a size of {} cannot be found in the code",
        "line {}: cannot tell which size this is",
        "line {}: torch infers a size of {}",
        "line {}: {} cannot be evaluated again",
    ),
    "read the shape or dtype from an operand, such as the query, not from an intermediate tensor": (
        "line {} reads the shape of {}, which would no longer exist",
        "a condition reads {}, which would no longer exist",
        "{} reads the shape of the result of {}, which is removed",
        "line {} reads {}, which would no longer exist",
    ),
    "put the whole pattern under one condition, or none of it": (
        "line {}: both branches of a condition ran",
        "line {}: cannot tell which branch of the condition ran",
        "line {}: cannot tell whether the condition was true",
        "line {}: a condition inside the pattern was true",
        "line {}: the condition cannot be evaluated earlier",
        "line {} contains a condition",
        "line {} runs under a separate condition",
        "line {} uses {} under a condition",
        "line {} does not always run after line {}",
        "the same line does different things within one step",
        "the same line also ran without the pattern",
        "{} may behave differently in another call, on line {}",
    ),
    "write each operation as its own statement `name = ...` on its own line": (
        "line {} contains several statements",
        "line {} contains a lambda, a comprehension or an assignment expression",
        "line {} contains a condition, a lambda or a comprehension",
        "line {} is in a lambda or a comprehension",
        "line {} uses an intermediate result of the pattern twice",
        "line {} evaluates an operand that cannot be moved",
        "line {} assigns to more than one plain name",
        "line {} does not assign the sum to a variable",
        "line {} reassigns {}",
        "line {}: {} would be computed twice",
        "line {}: the same call also runs {}",
        "line {} normalizes a tensor other than {}",
        "{} is part of another expression",
        "{} appears in no expression of {}",
        "no expression in {} is the tensor that {} reads",
        "a lambda cannot be edited",
        "the module that computes the logits also calls {}",
    ),
    "move that call before or after the pattern": ("line {} also calls {}",),
    "move the multi-line string above the pattern": ("line {}: a multi-line string cannot be re-indented",),
    "put the whole pattern in one block: in one loop iteration, or inside the same `with` or `try`": (
        "line {} comes after the result: the pattern spans two loop iterations",
        "line {} is in a separate loop, with or try block",
        "line {} is outside the block that computes the result",
    ),
    "put the pattern in the module's `forward`, or in a plain function of the same file that is called by its name": (
        "the pattern is spread over several functions",
        "the code does not belong to any module of the model",
        "the result of {} is computed in {}",
        "{} is called neither by its own name nor as an attribute of the module",
        "{} is called by two names",
        "{} is the name of another function",
        "{} is decorated, or not a method of {}",
        "{} has a decorator that cannot be reapplied",
        "{}, which contains part of the pattern, is decorated",
        "{} was already replaced on this module",
        "{} is called through the class, not through the module",
        "{} is a static method, so it does not receive the module",
        "{} is defined in {}, but overridden in {}",
        "generators and coroutines are not edited",
        "{}() can read any variable",
        "{} is also a variable of a nested function",
        "{} is not a local variable",
    ),
    "register that module in the model: as an attribute of one of its modules, or in an nn.ModuleList": (
        "{} belongs to {}, which is not part of the model",
    ),
    (
        "call it by its own name with explicit arguments, such as `F.silu(x)`, or call a torch "
        "module that the model holds, such as `self.act(x)` for an nn.SiLU"
    ): (
        "{} is called with *",
        "{} is called with **",
        "{} is not called by its own name",
        "{} is not called by a module",
        "cannot tell how {} is called",
        "line {}: cannot interpret the arguments of {}",
        "line {}: cannot tell which module is called",
        "{} refers to a different module where the result is computed",
    ),
    "import that class in the file, for example with `from torch import nn`": (
        "line {}: {} may be a module of a different class in another call",
    ),
    "list its modules where the class creates it, such as `nn.Sequential(nn.SiLU())`": (
        "line {}: {} may contain different modules in another call",
    ),
    "use torch's own module there": (
        "{} contains submodules",
        "{} is not a torch module, so its behavior is not known",
        "the module that computes the logits is a {}",
        "it is called by {}",
    ),
    "run it from a source file that does not change meanwhile": (
        "no source code: {}",
        "cannot read the source of {}: {}",
        "the source of {} changed after import, or was generated by other code",
        "the definition of {} was not found in {}",
    ),
    "use the out-of-place operation, such as masked_fill instead of masked_fill_": (
        "{} modifies an existing tensor in place",
        "{} modifies in place a tensor that {} read",
        "{} modifies in place a tensor that {} reads",
        "{} modifies the head's input in place",
        "it works in place",
        "{} modifies the result in place, but attention's backward reads it",
        "line {} modifies the result in place, but attention's backward reads it",
        "part of it is computed in place",
        "dropout modifies its input in place",
        "scores are assigned by index",
        "scores are assigned by index at positions that may not be causal",
    ),
    "call it with use_reentrant=False, which gives the same gradients": (
        "it calls a checkpoint with use_reentrant=True, which hides gradients from the verification",
    ),
    "enter and leave torch.no_grad() outside the pattern": ("gradients are disabled for part of the pattern",),
    "nothing to do: recipes do not support second derivatives": (
        "the step computes a second derivative, which recipes do not support",
    ),
    "nothing to do: that recipe already covers this code": (
        "it is part of {} on line {}",
        "two patterns overlap in the source",
    ),
    "compute it in the input's dtype or a wider one": (
        "an intermediate result is rounded to a narrower dtype than the input",
    ),
    ("use the same name for the tensor everywhere"): (
        ("line {}: {} may be a different tensor than the rest of the pattern reads"),
    ),
    "assign it to its own variable first": (
        ("line {}: {} may have a different shape in another call, and has no variable to check"),
    ),
    "nothing to do: the code stays as it is. Please report this with the line": (
        "{} was not found in the edited source",
        "the edit adds or removes a function",
        "the edited source does not compile: {}",
        "the rewritten code raises an error: {}",
        "the step raises an error with it: {}",
        "it could not be rerun for verification: {}",
        "the output differs from the recorded one",
        "an error injected into the recipe's result was not detected, so the verification is inconclusive",
        "{} is off by {} (relative), where the original is off by {} and {} is allowed",
        "{} exists in only one version",
        "{} is {} instead of {}",
        "{} does not exist in the higher-precision reference",
    ),
    "run the fix on an idle machine with your training's batch and thread count: it may gain there": (
        "neither time nor memory improves beyond noise",
        "it brings no improvement in combination with the others",
    ),
    "compile the module instead: module.compile(), or torch.compile(module)": (
        "torch.compile was applied to a function or layer in it, not to the module whose code would change",
    ),
    "call the module in every step, or leave the code as it is": ("the module was not called in the second run",),
    _NO_GAIN: (
        "the step is slower with it",
        "the step needs more memory with it",
        "on a CPU the recipe uses the same complex multiplication as this code",
        "with fewer than {} logits, computing them at once is faster on the CPU",
        "a dense gradient of {} rows for {} tokens is faster on the CPU",
        "the embedding uses {}, which only its own kernel supports",
    ),
    "convert all its tensors to one floating-point dtype first": (
        "the result's dtype differs from the input's",
        "the result has a fixed dtype, whatever the input's, and the file does not import torch",
        "part of it has a fixed dtype, whatever the input's",
        "the result's dtype differs from that of the rotated tensor",
        "the weight's dtype differs from the input's",
        "the dtype of weight or bias differs from the input's",
        "the residual's dtype differs from that of the added tensor",
        "the bias's dtype differs from that of the tensor it is added to",
        "the gate's dtype differs from that of the gated tensor",
        "queries, keys and values have different dtypes",
        "the scores are multiplied by a tensor of another dtype",
        "log_softmax changes the dtype",
        "the head's input is {}",
        "the tensor added to the scores is {}",
    ),
    "compute the softmax in float32": ("the softmax is computed in float64",),
    "use int64 targets": ("the targets are {}",),
    "nothing to do: the recipe takes class indices as targets": ("the targets are probabilities",),
    "nothing to do: the recipe computes no gradient for them": ("the class weights require a gradient",),
    "use `reduction`, which replaces both": ("size_average and reduce are not supported",),
    "nothing to do: torch's autocast chooses the dtype here": (
        "under autocast, torch's normalization returns another dtype",
    ),
    "move all its tensors to one device": ("the operands are on different devices",),
    "scale the queries by a number, and add position-dependent terms as a mask": (
        "the scores are multiplied by a tensor",
        "scores with heads or windows folded into the batch are multiplied by a tensor",
        "baddbmm scales the tensor it adds",
    ),
    "scale the scores first, then mask them": (
        "a mask is added before the scores are scaled",
        "a mask is applied before the scores are multiplied by a tensor",
        "a mask is applied before the soft-cap",
        "the scores are scaled or soft-capped again after the soft-cap",
    ),
    "write the soft-cap as `cap * torch.tanh(scores / cap)` with a number": (
        "the scores go through a tanh that is not a soft-cap with one positive number",
    ),
    "mask with -inf": (
        "masked scores become {}, which does not mask them out",
        "two masks use different fill values",
        "one mask is added, and another uses a finite fill value",
    ),
    "give the mask the shape [batch, heads, queries, keys], or one that broadcasts to it": (
        "the mask has only one dimension",
        "the mask has more dimensions than the scores",
    ),
    (
        "concatenate sinks as `torch.cat([scores, sinks.reshape(1, -1, 1, 1).expand(batch, -1, "
        "queries, 1)], -1)`, after masking and scaling, and drop them with `weights[..., :-1]`"
    ): (
        "a column is concatenated to the scores and modified with them before the softmax",
        "a column is concatenated to the scores but not dropped after the softmax",
        "the column concatenated to the scores is not one number per head",
        "the attention weights drop a column that was not concatenated to the scores just before the softmax",
        "sinks are combined with heads or windows folded into the batch",
    ),
    "apply all masks to the same view of the scores, such as [batch, windows, heads, tokens, tokens]": (
        "{} reshapes the scores other than by unfolding heads or windows from the batch",
        "both heads and windows are folded into the batch",
        "the windows are unfolded from the batch more than once",
    ),
    (
        "use query, key and value of shape [batch, heads, tokens, size], and take the softmax "
        "over the last dimension (the keys)"
    ): (
        "queries, keys and values have different numbers of dimensions",
        "queries, keys and values have different batch sizes",
        "queries, keys and values have different numbers of heads",
        "the softmax is not over the last dimension",
        "the weights are transposed before the matmul with the values",
        "{} changes the scores' shape",
    ),
    "normalize only the last dimension, with a single number eps added to the mean square": (
        "more than the last dimension is normalized",
        "eps is not a single number added to the mean square or the variance",
        "the divisor is not the number of features (unbiased variance, or scaled)",
    ),
    "give both the same shape": ("the residual's shape differs from that of the added tensor",),
    "put the classes in the last dimension": (
        "the softmax and the loss use different dimensions",
        "the loss and the head have the classes in different dimensions",
    ),
    "apply nn.Dropout once, with a probability below 1 that is a number": (
        "dropout is applied twice",
        "the dropout probability is a tensor",
        "the dropout probability is 1 or a tensor",
    ),
    "give the recipe a tensor that is not the input of dropout in evaluation mode, or leave the code as it is": (
        "in evaluation mode the dropout output and the residual are the same tensor",
        "in evaluation mode an operand is the same tensor before and after dropout",
    ),
    "use `reshape` instead of `view` on the result": (
        "the result is viewed in a shape that depends on its memory layout",
        "the result's memory layout differs from the recipe's",
    ),
}


def what_to_do(reason: str) -> str:
    """Return what can be done about the first of the reasons for leaving a place alone, which "; " parts.

    Empty for a text that is no reason of the patching's, that has its answer in it already, or that leaves none.
    """
    first, _, rest = reason.partition("; ")
    answer = answer_of(first)
    answered = rest and answer_of(rest.partition("; ")[0]) is None
    return "" if answer is None or answered or answer == _NO_GAIN else answer


def answer_of(reason: str) -> str | None:
    """Return the answer to one reason; None where there is none."""
    return next((answer for known, answer in _patterns() if known.fullmatch(reason)), None)


@cache
def _patterns() -> list[tuple[re.Pattern[str], str]]:
    """Return the patterns, those with fewer places to fill first."""
    pairs = [(reason, answer) for answer, reasons in _TODO.items() for reason in reasons]
    pairs.sort(key=lambda pair: -len(pair[0].replace("{}", "")))
    return [(re.compile(".+".join(map(re.escape, reason.split("{}"))), re.DOTALL), answer) for reason, answer in pairs]


# The attention that Hugging Face's transformers can be told to take, for models whose own is left alone.


_LIBRARY = "transformers"
# What its attention modules look the implementation up in, or ask for its name.
_CHOICES = frozenset({"ALL_ATTENTION_FUNCTIONS", "_attn_implementation"})
NOTHING = "nothing to do: "


def attention_switch(match: Match, frame: Frame, owner: nn.Module | None, paths: Mapping[nn.Module, str]) -> str:
    """Return what to do instead of editing the library's attention, or why nothing; empty for other code.

    ``paths`` are all modules of the model, by their path; ``owner`` is the one that runs the attention.
    """
    library = str(frame.globals.get("__name__", "")).partition(".")[0]
    if library != _LIBRARY or match.recipe not in {"attention", "packed_attention"} or owner is None:
        return ""
    models: list[Any] = [each for each in _around(owner, paths) if hasattr(type(each), "_supports_sdpa")]
    if not models:
        return f"{NOTHING}it is not part of a PreTrainedModel, which could be switched to another attention"
    refusing = next((each for each in models if not each._supports_sdpa), None)
    if refusing is not None:
        return f"{NOTHING}this version of {_LIBRARY} has no other attention for {type(refusing).__name__}"
    if not _looks_up(owner):
        return f"{NOTHING}this version of {_LIBRARY} has no other attention for {type(owner).__name__}"
    frames = {place.frame for node in match.nodes for place in node.places}
    if any(each.settings.get("softcap") is not None for each in frames):
        return f"{NOTHING}it soft-caps the scores, which torch's scaled_dot_product_attention cannot do"
    config = getattr(models[0], "config", None)
    if getattr(config, "_attn_implementation", "eager") != "eager":
        return f"{NOTHING}{type(owner).__name__} uses this attention with every implementation"
    first = "set output_attentions=False and " if getattr(config, "output_attentions", False) else ""
    return f"{first}load the model with attn_implementation='sdpa'"


def _around(owner: nn.Module, paths: Mapping[nn.Module, str]) -> list[nn.Module]:
    """Return the modules that hold ``owner``, itself first."""
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
