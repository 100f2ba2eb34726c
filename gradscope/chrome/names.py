"""What the modules of a trace are called: by who called them, or by the model that they are.

The profiler names a module by its class and a number, ``Linear_3``: the fourth Linear that was called.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from gradscope.chrome.table import CalledModule
from gradscope.errors import TraceFileError
from gradscope.tables import ModuleInfo
from gradscope.tree import named_modules_of, parameters_of
from gradscope.workload import Workload, call_model, to_device

_SHARDED = "FSDP"  # fully_shard makes a class of its own of each: FSDPLinear


@dataclass(frozen=True, slots=True)
class LayerNames:
    """The layers of the report, and which of them each module of the trace is."""

    infos: tuple[ModuleInfo, ...]  # parents before children
    label: tuple[int, ...]  # of each module of the trace; -1 for none
    parents: tuple[int, ...]  # of each layer the nearest above it that is called itself; -1 for none
    parameters: int = 0  # elements of the model's, each shared parameter once; 0: not known
    notes: tuple[str, ...] = ()  # what may make the names wrong


def by_calls(modules: Sequence[CalledModule]) -> LayerNames:
    """Name each module below the one that called it first: ``Block_0.Linear_3``; a single root has no name."""
    roots = [module for module in modules if module.parent < 0]
    paths: dict[int, str] = {}
    infos: dict[int, ModuleInfo] = {}

    def name(number: int) -> str:
        module = modules[number]
        if number not in paths:
            if module.parent < 0:
                paths[number] = "" if len(roots) == 1 else module.instance
            else:
                above = name(module.parent)
                paths[number] = f"{above}.{module.instance}" if above else module.instance
            parent = None if module.parent < 0 else paths[module.parent]
            infos[number] = ModuleInfo(paths[number], module.class_name, parent, 0, None)
        return paths[number]

    for number in range(len(modules)):
        name(number)
    order = list(infos)  # a parent is named before its children
    row = {number: place for place, number in enumerate(order)}
    return LayerNames(
        tuple(infos.values()),
        tuple(row[number] for number in range(len(modules))),
        tuple(row.get(modules[number].parent, -1) for number in order),
    )


def by_model(modules: Sequence[CalledModule], workload: Workload, trace: str) -> LayerNames:
    """Name the modules of the trace as the model names them: of each class, in the order of their first calls.

    The model is run forward once, without gradients, for that order. What wraps it in the trace, and a loss that it
    does not hold, are no layers. What is also called outside of the model is the layer that it is inside.

    Raises:
        TraceFileError: the model calls another number of modules of some class, or one with another weight.
        BaseException: what the model raises.
    """
    held = dict(named_modules_of(workload.model))
    paths = {id(module): path for path, module in held.items()}
    mine: dict[str, list[str]] = defaultdict(list)
    for each in _first_calls(workload):
        if id(each) in paths:
            mine[type(each).__name__].append(paths[id(each)])
    inside = _inside(modules, type(workload.model).__name__, mine)
    seen = Counter(_class_name(modules[number], mine) for number in inside)
    for class_name, known in mine.items():
        if seen[class_name] != len(known):
            raise TraceFileError(
                f"{trace} is not of this model: it calls {seen[class_name]} modules of class {class_name}, and "
                f"{type(workload.model).__name__} calls {len(known)}.\nGive --model the model that was traced."
            )
    infos = _infos(workload.model)
    row = {info.path: number for number, info in enumerate(infos)}
    given: Counter[str] = Counter()
    label = [-1] * len(modules)
    named: dict[str, set[int]] = defaultdict(set)
    for number in inside:
        class_name = _class_name(modules[number], mine)
        if class_name in mine:
            path = mine[class_name][given[class_name]]
            _check_weight(modules[number], path, held[path], trace)
            label[number] = row[path]
            named[modules[number].instance].add(label[number])
        given[class_name] += 1
    for number in set(range(len(modules))) - set(inside):
        if len(found := named[modules[number].instance]) == 1:
            label[number] = next(iter(found))
    is_called = {number for number in label if number >= 0}
    parents = []
    for info in infos:
        above = info.parent
        while above is not None and row[above] not in is_called:
            above = infos[row[above]].parent
        parents.append(-1 if above is None else row[above])
    elements = sum({id(each): each.numel() for each in parameters_of(workload.model)}.values())
    return LayerNames(tuple(infos), tuple(label), tuple(parents), elements, _called_in_part(infos, mine))


_WEIGHTED = (nn.Linear, nn.modules.conv._ConvNd, nn.Embedding, nn.EmbeddingBag)


def _check_weight(module: CalledModule, path: str, paired: nn.Module, trace: str) -> None:
    """Refuse a name that the shapes of the trace contradict.

    A subclass with a forward of its own may use a part of its weight, or another one.
    """
    plain = isinstance(paired, _WEIGHTED) and type(paired).forward.__module__.startswith("torch.nn.")
    weight = paired._parameters.get("weight") if plain else None
    if weight is None or not module.weights or str(list(weight.shape)) in module.weights:
        return
    used = ", ".join(sorted(module.weights))
    raise TraceFileError(
        f"{trace} is not of this model and batch: {module.instance} has a weight of {used}, and {path}, which the "
        f"model calls in its place, one of {list(weight.shape)}.\n"
        "Give --model the model that was traced, with a batch for which it calls its modules in the same order."
    )


def _called_in_part(infos: Sequence[ModuleInfo], called: dict[str, list[str]]) -> tuple[str, ...]:
    """Say of which classes the batch calls some modules and leaves others."""
    notes = []
    for class_name, paths in called.items():
        more = sum(info.class_name == class_name for info in infos) - len(set(paths))
        if more:
            modules = f"{more} more module{'s' * (more > 1)} of class {class_name}"
            notes.append(
                f"the model has {modules} that this batch does not call: if another batch was traced, names of this "
                "class may be wrong"
            )
    return tuple(notes)


def _inside(modules: Sequence[CalledModule], model: str, known: dict[str, list[str]]) -> list[int]:
    """The modules that are the model or below it; all where no module is of its class."""
    found: list[bool] = []  # whoever calls a module comes before it
    for module in modules:
        found.append(_class_name(module, known) == model or (module.parent >= 0 and found[module.parent]))
    return [number for number, is_inside in enumerate(found) if is_inside] or list(range(len(modules)))


def called_by_several(modules: Sequence[CalledModule]) -> list[str]:
    """Names under which several modules call one: it may be shared, or one of two classes of one name."""
    counts = Counter(module.instance for module in modules)
    return [name for name, count in counts.items() if count > 1]


def _class_name(module: CalledModule, known: dict[str, list[str]]) -> str:
    plain = module.class_name.removeprefix(_SHARDED)
    return plain if module.class_name not in known and plain in known else module.class_name


def _first_calls(workload: Workload) -> list[nn.Module]:
    """The modules that the model calls, in order; one that several modules call is there for each of these."""
    found: dict[tuple[int, int], nn.Module] = {}
    places: dict[tuple[int, int], int] = {}
    stack = [-1]

    def enter(module: nn.Module, args: object) -> None:
        place = id(module), stack[-1]
        found.setdefault(place, module)
        stack.append(places.setdefault(place, len(places)))

    def leave(module: nn.Module, args: object, output: object) -> None:
        stack.pop()

    device = next((each.device for each in parameters_of(workload.model) if not each.is_meta), torch.device("cpu"))
    batch = to_device(workload.batch, device)
    hooks = (
        nn.modules.module.register_module_forward_pre_hook(enter),
        nn.modules.module.register_module_forward_hook(leave),
    )
    try:
        with torch.no_grad():
            call_model(workload.model, batch)
    finally:
        for hook in hooks:
            hook.remove()
    return list(found.values())


def _infos(model: nn.Module) -> list[ModuleInfo]:
    infos: dict[str, ModuleInfo] = {}
    for path, module in named_modules_of(model):
        above = path.rpartition(".")[0] if path else None
        while above and above not in infos:
            above = above.rpartition(".")[0]
        own = sum(each.numel() for each in module._parameters.values() if each is not None)
        infos[path] = ModuleInfo(path, type(module).__name__, above, own, None)
    return list(infos.values())
