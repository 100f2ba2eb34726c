"""Gives every module that ran a path: in its model, under the name of the variable that holds it, or by its class."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from gradscope.tables import ModuleInfo, ParameterInfo


@dataclass(frozen=True, slots=True)
class ModuleNames:
    """The rows of the layer table, and which module each one is."""

    infos: tuple[ModuleInfo, ...]
    index: Mapping[int, int]  # id(module) -> row
    tops: tuple[nn.Module, ...]  # the models: modules that lie in no other
    modules: tuple[nn.Module, ...]  # keeps the ids valid

    def labels(self, called: Sequence[nn.Module | None]) -> list[int]:
        """Row of each called module; -1 for one that no model holds, and for None."""
        return [self.index.get(id(module), -1) for module in called]

    def calling_parents(self, called: Sequence[int]) -> list[int]:
        """Of each row the nearest parent that is called itself (a ModuleList never is); -1 where there is none.

        Args:
            called: rows of the modules that were called.
        """
        row_of = {info.path: row for row, info in enumerate(self.infos)}
        callers = set(called)
        found: list[int] = []
        for info in self.infos:
            parent = row_of[info.parent] if info.parent is not None else -1
            # Parents come before their children: a parent that is never called hands on its own.
            found.append(parent if parent in callers or parent < 0 else found[parent])
        return found

    def parameters(self, tensors: Sequence[torch.Tensor | None]) -> tuple[ParameterInfo, ...]:
        """Name and owners of each leaf that received a gradient; none for one outside every module."""
        holders = _holders(self.modules)
        found = []
        for tensor in tensors:
            held = [(self.index[id(module)], name) for module, name in holders.get(id(tensor), ())]
            full = [_join(self.infos[row].path, name) for row, name in held]
            found.append(ParameterInfo(full[0] if full else "", tuple(row for row, _ in held)))
        return tuple(found)


def name_modules(roots: Sequence[nn.Module], known: Mapping[str, nn.Module]) -> ModuleNames:
    """Name all modules of the models that ran.

    Args:
        roots: modules that were called while no other module was, in order of first call.
        known: modules that the user has a name for; ``""`` for the model given to :func:`gradscope.profile`.

    A model that holds a called root names it, also when the model itself was never called. One model with parameters
    gets the path ``""``; of several, each is a tree of its own under its name. Others (a loss module) get their name.
    """
    tops = _tops(roots, known)
    names = _top_names(tops, known)
    infos: list[ModuleInfo] = []
    index: dict[int, int] = {}
    modules: list[nn.Module] = []
    for top, name in zip(tops, names, strict=True):
        for inner, module in top.named_modules():
            if id(module) in index:
                continue
            path = _join(name, inner)
            index[id(module)] = len(infos)
            modules.append(module)
            infos.append(
                ModuleInfo(
                    path=path,
                    class_name=type(module).__name__,
                    parent=_parent(path, name),
                    parameters=sum(p.numel() for p in module._parameters.values() if p is not None),
                    source=_source(module),
                )
            )
    # A shared module can appear first below a path whose parents were named in another model: make parents exist.
    infos = _with_known_parents(infos)
    infos = _with_tied(infos, modules)
    return ModuleNames(tuple(infos), index, tuple(tops), tuple(modules))


def _tops(roots: Sequence[nn.Module], known: Mapping[str, nn.Module]) -> list[nn.Module]:
    holders = list(known.values())
    contents = {id(holder): {id(module) for module in holder.modules()} for holder in holders}
    outermost = [
        holder
        for holder in holders
        if not any(id(holder) in contents[id(other)] for other in holders if other is not holder)
    ]
    tops: dict[int, nn.Module] = {}
    for root in roots:
        holder = next((holder for holder in outermost if id(root) in contents[id(holder)]), root)
        tops.setdefault(id(holder), holder)
    inside = {id(inner) for top in tops.values() for inner in top.modules() if inner is not top}
    found = [top for top in tops.values() if id(top) not in inside]
    given = known.get("")
    if given is not None and all(given is not top for top in found):
        found.insert(0, given)
    return found


def _top_names(tops: Sequence[nn.Module], known: Mapping[str, nn.Module]) -> list[str]:
    with_parameters = [top for top in tops if any(True for _ in top.parameters())]
    given = known.get("")
    main = given if given is not None else with_parameters[0] if len(with_parameters) == 1 else None
    if main is None and len(tops) == 1:
        main = tops[0]
    variables = {id(module): name for name, module in reversed(list(known.items())) if name}
    taken: set[str] = set() if main is None else {name for name, _ in main.named_children()}
    names = []
    for top in tops:
        if top is main:
            names.append("")
            continue
        wanted = variables.get(id(top), type(top).__name__)
        name, number = wanted, 2
        while name in taken:
            name, number = f"{wanted}#{number}", number + 1
        taken.add(name)
        names.append(name)
    return names


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix and name else prefix or name


def _parent(path: str, top: str) -> str | None:
    if path == top:
        return None
    parent, _, _ = path.rpartition(".")
    return parent


def _with_known_parents(infos: list[ModuleInfo]) -> list[ModuleInfo]:
    paths = {info.path for info in infos}
    result = []
    for info in infos:
        parent = info.parent
        while parent is not None and parent not in paths:
            parent = parent.rpartition(".")[0] if parent else None
        result.append(info if parent == info.parent else _replace_parent(info, parent))
    return result


def _replace_parent(info: ModuleInfo, parent: str | None) -> ModuleInfo:
    return ModuleInfo(info.path, info.class_name, parent, info.parameters, info.source, info.tied)


def _holders(modules: Iterable[nn.Module]) -> dict[int, list[tuple[nn.Module, str]]]:
    found: dict[int, list[tuple[nn.Module, str]]] = defaultdict(list)
    for module in modules:
        for name, parameter in module._parameters.items():
            if parameter is not None:
                found[id(parameter)].append((module, name))
    return found


def _with_tied(infos: list[ModuleInfo], modules: Sequence[nn.Module]) -> list[ModuleInfo]:
    row_of = {id(module): row for row, module in enumerate(modules)}
    tied: dict[int, list[str]] = defaultdict(list)
    for held in _holders(modules).values():
        if len(held) < 2:
            continue
        names = [_join(infos[row_of[id(module)]].path, name) for module, name in held]
        for (module, _), own in zip(held, names, strict=True):
            tied[row_of[id(module)]].extend(other for other in names if other != own)
    return [
        ModuleInfo(info.path, info.class_name, info.parent, info.parameters, info.source, tuple(tied[row]))
        if row in tied
        else info
        for row, info in enumerate(infos)
    ]


def _source(module: nn.Module) -> str | None:
    """``file:line`` of the class's forward, for classes that are not torch's own."""
    forward = getattr(type(module), "forward", None)
    code = getattr(forward, "__code__", None)
    if code is None or type(module).__module__.partition(".")[0] == "torch":
        return None
    return f"{shown_path(code.co_filename)}:{code.co_firstlineno}"


def shown_path(file: str) -> str:
    """``file`` relative to the working folder where it lies below it."""
    folder = os.path.join(os.getcwd(), "")  # of every call: pathlib takes ten times as long
    return file.removeprefix(folder)
