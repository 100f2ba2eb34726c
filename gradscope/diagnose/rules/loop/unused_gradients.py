"""Parameters that require a gradient but get none, or get one that no optimizer uses.

Example::

    self.old_head = nn.Linear(256, 10)  # never called any more
    optimizer = torch.optim.SGD(model.head.parameters())  # the backbone still gets gradients

Pattern: after the recorded step ``.grad`` is None, no backward pass of a measured step led to the parameter, no
optimizer keeps a state of it, no layer of it spent time writing a gradient, and other parameters do have one. Or: the
parameter has a gradient, an optimizer is known, and none holds it; where the optimizers hold none of the model's
parameters, they hold copies, and nothing is said. A parameter that took part in no step of this run may in another:
experts and branches that the batch did not need.

Evidence: how many parameters, of which layers, and the backward time of layers of which no parameter is trained.
Estimate: 0.9 of writing the gradients, and half of that backward (low: half of the writing; high: nearly all, where
nothing before these layers is trained either). The gradients that nobody uses stay in memory: they are freed.

Source: PyTorch, Autograd mechanics, "Locally disabling gradient computation" (requires_grad).
"""

from __future__ import annotations

from collections.abc import Iterator

from gradscope.diagnose.case import Case, Rule, below, first, layer_code, models_of, parameter_code
from gradscope.diagnose.findings import Estimate, make_finding, several
from gradscope.ops import item_bytes
from gradscope.tables import Finding, LayerRow, ParameterFact
from gradscope.units import count as counted
from gradscope.units import ns as time_text
from gradscope.units import size as size_text

# A longer line is not for copying.
_MOST_NAMES = 6

# Of the time of writing gradients.
_OF_WRITING = 0.9


def find(case: Case) -> Iterator[Finding]:
    """Yield at most one finding for parameters without a gradient, and one for gradients without an optimizer."""
    wanting = [each for each in case.facts.parameters if each.requires_grad]
    if not any(each.has_grad for each in wanting):
        return  # set to None before one could look
    unused = [each for each in wanting if not (each.has_grad or each.reached or _was_written(case, each))]
    if unused:
        yield _unused(case, unused)
    wasted = [each for each in wanting if each.has_grad and each.optimized is False]
    if wasted and case.facts.optimizers and any(each.optimized for each in case.facts.parameters):
        yield _wasted(case, wasted)


def _was_written(case: Case, parameter: ParameterFact) -> bool:
    """Check that the layer wrote gradients in a measured step, and none of its parameters has one now: set to None."""
    row = case.layers.get(parameter.layer)
    if row is None or not row.accumulate_ns:
        return False
    return not any(each.has_grad for each in case.facts.parameters if each.layer == parameter.layer)


def _never_ran(row: LayerRow) -> bool:
    """Check that a layer took no part; in compiled code no layer has calls."""
    return not row.calls and not row.forward_self_ns and (row.estimated_ns is None or row.flops == 0)


def _unused(case: Case, parameters: list[ParameterFact]) -> Finding:
    layers = _layers(parameters)
    idle = [path for path in layers if path in case.layers and _never_ran(case.layers[path])]
    never = f", {counted(len(idle))} of them never called" if idle else ""
    return make_finding(
        RULE.name,
        case,
        None,
        severity="info",
        layers=layers,
        line=None,
        message=(
            f"{_parameters(parameters)} no gradient in this step: the loss does not depend on "
            f"{'it' if len(parameters) == 1 else 'them'}"
        ),
        evidence=f"{_sum(parameters)} in {_count_layers(layers)}{never}",
        advice=(
            "Freeze parameters that are not trained, such as a target network; they cost no time "
            "here, but DistributedDataParallel fails on them or must search for them in every step."
        ),
        code=_code(case, parameters, "each.grad is not None"),
    )


def _wasted(case: Case, parameters: list[ParameterFact]) -> Finding:
    layers = _layers(parameters)
    trained = {each.layer for each in case.facts.parameters if each.requires_grad and each.optimized}
    rows = [case.layers[path] for path in layers if path in case.layers and path not in trained]
    writing = sum(row.accumulate_ns for row in rows)
    backward = sum(row.backward_self_ns for row in rows)
    low, high = round(writing * _OF_WRITING / 2), writing + backward
    saving = round(writing * _OF_WRITING) + backward // 2
    evidence = f"{_sum(parameters)} in {_count_layers(layers)}, in no optimizer"
    if backward:
        evidence += f"; the backward of these layers takes {time_text(high)} per step"
    size = sum(_elements(each) * item_bytes(each.dtype) for each in parameters)
    evidence += f"; their gradients are {size_text(size)}"
    return make_finding(
        RULE.name,
        case,
        Estimate(saving, low, high, size),
        layers=layers,
        line=None,
        message=f"{_parameters(parameters)} a gradient that no optimizer uses",
        evidence=evidence,
        cost_ns=high,
        advice="Freeze what is not trained before the first step, or give it to the optimizer.",
        code=_code(
            case, parameters, 'any(each is held for group in optimizer.param_groups for held in group["params"])'
        ),
    )


def _layers(parameters: list[ParameterFact]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(each.layer for each in parameters))


def _parameters(parameters: list[ParameterFact]) -> str:
    if len(parameters) == 1:
        return f"{parameters[0].path} gets"
    return f"{counted(len(parameters))} parameters get"


def _sum(parameters: list[ParameterFact]) -> str:
    return f"{first([each.path for each in parameters])}: {counted(sum(map(_elements, parameters)))} elements"


def _count_layers(layers: tuple[str, ...]) -> str:
    return several(len(layers), "layer")


def _elements(parameter: ParameterFact) -> int:
    found = 1
    for size in parameter.shape:
        found *= size
    return found


def _code(case: Case, parameters: list[ParameterFact], wanted: str) -> str:
    """Write the code that freezes these and no others.

    Args:
        wanted: what holds of each that stays, after a step; used where there are too many to name.
    """
    freeze = "requires_grad_(False)"
    names = {each.path for each in parameters}
    models = models_of(case, sorted(names))
    if "" in models:
        return ""
    if len(names) == 1:
        return f"{parameter_code(case, parameters[0].path)}.{freeze}"
    modules, single = _cover(case, names)
    if len(modules) == 1 and not single:
        return f"{layer_code(case, modules[0])}.{freeze}"
    if len(modules) + len(single) > _MOST_NAMES:
        every = [f"{model}.parameters()" for model in models]
        among = every[0] if len(every) == 1 else f"[{', '.join(f'*{each}' for each in every)}]"
        return f"for each in {among}: each.requires_grad_(each.requires_grad and {wanted})"
    if len(models) == 1 and not (modules and single):
        getter = "get_submodule" if modules else "get_parameter"
        inner = [below(case, path) for path in modules or single]
        if all(inner):
            return f"for name in {inner!r}: {models[0]}.{getter}(name).{freeze}"
    parts = [layer_code(case, path) for path in modules] + [parameter_code(case, path) for path in single]
    return f"for part in [{', '.join(parts)}]: part.{freeze}"


def _cover(case: Case, names: set[str]) -> tuple[list[str], list[str]]:
    """The highest modules all of whose parameters are among ``names``, and the names that are in none of them."""
    others = {each.path for each in case.facts.parameters if each.requires_grad} - names
    mixed = {above for path in others for above in _above(path)} | {""}
    modules: dict[str, None] = {}
    single = []
    for path in sorted(names):
        top = next((above for above in _above(path) if above not in mixed), None)
        if top is None:
            single.append(path)
        else:
            modules[top] = None
    return list(modules), single


def _above(path: str) -> list[str]:
    """The modules that a parameter is in, the highest first."""
    parts = path.split(".")[:-1]
    return [".".join(parts[:count]) for count in range(len(parts) + 1)]


RULE = Rule("unused-gradients", "parameters without a gradient, or with one that no optimizer uses", find)
