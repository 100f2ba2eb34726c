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
    "hand that value out only where it is wanted: keep it out of what is returned and stored, or put that under a "
    "condition, as `if return_weights:`": (
        "the result of {} is kept after the run: it is returned or stored",
        "{} is {} on line {}",
        "line {} also makes what {} reads",
        "{} is read again in the next round of the loop",
        "baddbmm adds a tensor that is used elsewhere",
    ),
    "do without that value there, or read it only where it is wanted, under a condition": (
        "the result of {} is also read by {}",
        "line {} uses {} on another path",
    ),
    "read the loss alone, or make the logits once more where they are read": (
        "the logits are also read by {}",
        "two losses read the logits, for each of which they would be computed",
    ),
    "take the hooks off for the fix, or hook the module around it": (
        "the {} has hooks, which would no longer be called",
        "{} has hooks, which would no longer be called",
        "{} has hooks, which need its output",
    ),
    "write the number there, or keep it in an attribute of this module that the method does not assign to": (
        "line {}: {} may be another number next time",
        "line {}: {} is not a number",
        "line {}: {} may not be what it is on line {}",
        "{} gets its number in {}",
        "{} is bound anew",
        "how {} spells its {} is not understood",
        "how many {} are folded into the batch is not spelled out",
        "a size of {} is not written where it can be read",
        "line {}: which of the sizes it is is not understood",
        "line {}: a size of {} is left to torch",
        "line {}: {} cannot be read again",
    ),
    "ask an operand, as the query, for its shape or dtype, and not what is made on the way": (
        "line {} asks for the form of {}, which is not made any more",
        "a condition asks for {}, which is not made any more",
        "{} asks for the form of what {} makes, which goes",
        "line {} reads {}, which would not be made any more",
    ),
    "write the whole pattern under one condition, or none of it": (
        "line {}: both sides of a condition ran",
        "line {}: which side of the condition ran is not known",
        "line {}: whether the condition held is not known",
        "line {}: a condition held in the pattern",
        "line {}: the condition cannot be asked earlier",
        "line {} holds a condition",
        "line {} runs under a condition of its own",
        "line {} uses {} under a condition",
        "line {} does not always follow line {}",
        "the same line does different things in one run",
        "the same line also ran without the pattern",
        "{} may do something else another time, on line {}",
    ),
    "write each step of it as a statement `name = ...` on a line of its own": (
        "line {} holds several statements",
        "line {} holds a lambda, a comprehension or an assignment inside",
        "line {} holds a condition, a lambda or a comprehension",
        "line {} stands in a lambda or a comprehension",
        "line {} uses the pattern's parts twice",
        "line {} evaluates an operand that cannot be moved",
        "line {} assigns to more than a name",
        "line {} does not assign the sum to a name",
        "line {} binds {} anew",
        "line {}: {} would be made twice",
        "line {}: the same call also runs {}",
        "line {} normalises something else than {}",
        "{} stands in another expression",
        "{} stands in no expression of {}",
        "no expression in {} is the tensor that {} reads",
        "a lambda has no body to edit",
        "the module that makes the logits also calls {}",
    ),
    "move that call above or below the pattern": ("line {} also calls {}",),
    "write the text of several lines above the pattern": ("line {}: a text of several lines cannot be indented",),
    "write the whole pattern in one block: in a single round of the loop, or inside the `with` or `try`": (
        "line {} stands behind the result: the pattern spans two rounds of a loop",
        "line {} runs in a loop, a with or a try of its own",
        "line {} stands outside of the block in which the result is made",
    ),
    "write the pattern in the module's `forward` itself, or in a plain function of its file, called by its name": (
        "the pattern is spread over several functions",
        "the code belongs to no module of the model",
        "the result of {} is made in {}",
        "{} is called neither by its own name nor as an attribute of the module",
        "{} is called by two names",
        "{} is another function's name",
        "{} is decorated, or not a method of {}",
        "{} is decorated in a way that cannot be repeated",
        "{}, which makes a part of the pattern, is decorated",
        "{} was replaced on this module already",
        "{} is called as the class's, and not as the module's own",
        "{} is a static method, which is given no module",
        "{} is that of {}, which {} has another for",
        "a generator or coroutine is not edited",
        "{}() may read any name",
        "{} is also a name inside a nested function",
        "{} is not a local name",
    ),
    "make that module a part of the model: an attribute of one of its modules, or in an nn.ModuleList": (
        "{} is that of {}, which is no part of the model",
    ),
    "call it by its own name and with its arguments written out, as `F.silu(x)`, or call a module of torch's that the "
    "model holds, as `self.act(x)` of an nn.SiLU": (
        "{} is called with *",
        "{} is called with **",
        "{} is not called by its own name",
        "{} is not called by a module",
        "how {} is called is not understood",
        "line {}: the arguments of {} are not understood",
        "line {}: which module is called there is not understood",
        "{} is another module when the result is made",
    ),
    "give the file a name for that class, as `from torch import nn`": (
        "line {}: {} may be a module of another class next time",
    ),
    "write down which modules it holds where the class makes it, as `nn.Sequential(nn.SiLU())`": (
        "line {}: {} may hold other modules next time",
    ),
    "use torch's own module there": (
        "{} holds modules of its own",
        "{} is no module of torch: what it does with its settings is not known",
        "the module that makes the logits is a {}",
        "it is called by {}",
    ),
    "run it from a file that is not changed meanwhile": (
        "no source: {}",
        "source of {} cannot be read: {}",
        "the source of {} changed since it was imported, or was made by other code",
        "the definition of {} was not found in {}",
    ),
    "use the operation that makes a new tensor, as masked_fill for masked_fill_": (
        "{} changes a tensor in place that was there before",
        "{} changes in place what {} read",
        "{} changes in place what {} reads",
        "{} changes in place what the head reads",
        "it works in place",
        "{} changes the result in place, which the backward of attention reads",
        "line {} changes the result in place, which the backward of attention reads",
        "a part of it is computed in place",
        "dropout changes its input in place",
        "scores are assigned to by index",
        "scores are assigned to by index, at places that are not known to be causal",
    ),
    "call it with use_reentrant=False, which gives the same gradients": (
        "it calls a checkpoint with use_reentrant=True, through which the proof gets no gradients",
    ),
    "begin and end torch.no_grad() outside the pattern": ("gradients are switched off for a part of the pattern",),
    "nothing to do: recipes have no second derivative": (
        "the step takes a second derivative, which recipes do not have",
    ),
    "nothing to do: that recipe has this code in it": (
        "it is a part of {} on line {}",
        "two patterns overlap in the source",
    ),
    "compute it in its input's dtype, or in a larger one, up to the result": (
        "it is rounded on the way, to a dtype smaller than the input's",
    ),
    "read the tensor by one name all over": ("line {}: {} may be another tensor than the rest of the pattern reads",),
    "put it into a name of its own before": ("line {}: {} may have another form next time, and has no name to ask",),
    "nothing to do: the place keeps its code; please report it with this line": (
        "{} was not found in the edited source",
        "the edit adds or removes a function",
        "the edited source does not compile: {}",
        "the rewritten code fails: {}",
        "with it the step fails: {}",
        "it could not be run again for the proof: {}",
        "another output than the recorded one",
        "a fault planted in the recipe's result was not seen: the proof says nothing",
        "{} is off by {} of its size, where the original is off by {} and {} is allowed",
        "{} exists on one side only",
        "{} is {}, it was {}",
        "{} does not exist in higher precision",
    ),
    "fix it on an idle machine, with the batch and the threads of your training: there it may": (
        "the step is neither faster nor leaner with it, beyond noise",
        "it shows no gain together with the others",
    ),
    "fix the program without torch.compile, then compile it": ("it runs under torch.compile",),
    "call the module in every step, or leave the place as it is": ("the module was not called in the second run",),
    _NO_GAIN: (
        "the step is slower with it",
        "the step needs more memory with it",
        "on a CPU the recipe is the product of complex numbers that stands here",
        "fewer than {} logits are sooner made at once on the CPU",
        "a gradient of {} rows for {} tokens is sooner made and added whole on the CPU",
        "the embedding has {}, which its own kernel must do",
    ),
    "bring all its tensors to one floating dtype beforehand": (
        "the result has another dtype than the input",
        "the result has a dtype of its own, whatever the input's is, and the file has no name for torch",
        "a part of it has a dtype of its own, whatever the input's is",
        "the result has another dtype than the tensor that is turned",
        "the weight has another dtype than the input",
        "weight or bias has another dtype than the input",
        "the residual has another dtype than what is added",
        "the bias has another dtype than what it is added to",
        "the gate has another dtype than what it gates",
        "queries, keys and values have different dtypes",
        "the scores are multiplied with a tensor of another dtype",
        "the logarithmic softmax changes the dtype",
        "the head's input is {}",
        "what is added to the scores is {}",
    ),
    "compute the softmax in float32": ("the softmax is computed in float64",),
    "give targets of int64": ("the targets are {}",),
    "nothing to do: the recipe takes class numbers as targets": ("the targets are probabilities",),
    "nothing to do: the recipe has no gradient for it": ("the classes' weights get a gradient",),
    "give `reduction`, which stands for both": ("size_average and reduce are not taken",),
    "nothing to do: torch's autocast chooses the dtype here": (
        "under autocast torch's normalisation gives another dtype",
    ),
    "move its tensors to one device": ("the operands are on different devices",),
    "scale the queries by a number, and add what depends on the place as a mask": (
        "the scores are multiplied with a tensor",
        "folded scores are multiplied with a tensor",
        "baddbmm scales what it adds",
    ),
    "scale the scores first, then mask them": (
        "a mask is added before the scores are scaled",
        "a mask is applied before the scores are multiplied with a tensor",
        "a mask is applied before the scores are capped",
        "the scores are scaled or capped after they were capped",
    ),
    "cap them as `cap * torch.tanh(scores / cap)`, by a number": (
        "the scores go through a tanh that does not cap them by one positive number",
    ),
    "mask with minus infinity": (
        "masked scores become {}, which does not hide them",
        "two masks hide by different numbers",
        "a mask is added, and another hides by a finite number",
    ),
    "give the mask the shape [batch, heads, queries, keys], or one that expands to it": (
        "the mask has a single dimension",
        "the mask has more dimensions than the scores",
    ),
    "join sinks as `torch.cat([scores, sinks.reshape(1, -1, 1, 1).expand(batch, -1, queries, 1)], -1)`, after masks "
    "and scale, and drop them as `weights[..., :-1]`": (
        "a column is joined to the scores, and changed with them before the softmax",
        "a column is joined to the scores, and is not dropped after the softmax",
        "the column joined to the scores is not one number for each of several heads",
        "the weights lose a column that is not joined to the scores just before the softmax",
        "heads or windows are folded into the batch beside sinks",
    ),
    "lay all masks over one view of the scores, as [batch, windows, heads, tokens, tokens]": (
        "{} takes the scores apart otherwise than by heads or windows in the batch",
        "both heads and windows are folded into the batch",
        "the windows are taken out of the batch more than once",
    ),
    "give query, key and value as [batch, heads, tokens, size], and take the softmax over the keys, the last": (
        "queries, keys and values have different numbers of dimensions",
        "queries, keys and values have different batches",
        "queries, keys and values have different heads",
        "the softmax is not over the last dimension",
        "the weights are transposed before the product with the values",
        "{} changes the scores' shape",
    ),
    "normalise the last dimension alone, with one number for eps added to the mean square": (
        "more than the last dimension is normalised",
        "eps is not one number that is added to the mean square or the variance",
        "it is divided by another number than the count of features: unbiased, or scaled",
    ),
    "give both the same shape": ("the residual has another shape than what is added",),
    "put the classes into the last dimension": (
        "the softmax is over another dimension than the loss",
        "the loss has its classes in another dimension than the head",
    ),
    "apply nn.Dropout once, with a share below 1 that is a number": (
        "dropout is applied twice",
        "the share dropped is a tensor",
        "dropout drops everything, or a share that is a tensor",
    ),
    "give the recipe another tensor in evaluation than what dropout was given, or leave the place as it is": (
        "in evaluation what is dropped and the residual are the same tensor",
        "in evaluation an operand is the same tensor before and after dropout",
    ),
    "use `reshape` for `view` on the result": (
        "the result is viewed in a form that depends on how it lies in memory",
        "the result lies in memory in another order than the recipe's",
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
