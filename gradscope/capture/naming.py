"""Gives every module that ran a path: in its model, under the name of the variable that holds it, or by its class."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace

import torch
from torch import nn

from gradscope.capture.registry import (
    NOBODYS,
    ModuleRegistry,
    RegisteredPath,
    inner_paths,
    own_parameters,
    shape_of,
    source_of,
)
from gradscope.compat import compiled_from
from gradscope.tables import ModuleInfo, ParameterInfo
from gradscope.tree import join, modules_of, parameters_of

__all__ = ["ModuleNames", "name_called", "name_modules"]


@dataclass(frozen=True, slots=True)
class ModuleNames:
    """The rows of the layer table, and which module each one is."""

    infos: tuple[ModuleInfo, ...]
    index: Mapping[int, int]  # id(module) -> row
    tops: tuple[nn.Module, ...]  # the models: modules that lie in no other
    modules: tuple[nn.Module, ...]  # keeps the ids valid
    rows: tuple[int, ...] = ()  # of each place of the registry; -1 for one without a row

    @property
    def models(self) -> list[nn.Module]:
        """The models, each as it was written where torch.compile has put another around it."""
        return [compiled_from(top) for top in self.tops]

    def labels(self, called: Sequence[nn.Module | None]) -> list[int]:
        """Row of each called module; -1 for one that no model holds, and for None."""
        return [self.index.get(id(module), -1) for module in called]

    def path_of(self, module: nn.Module) -> str:
        """Where a module lies; its class for one that no model holds."""
        row = self.index.get(id(module))
        return type(module).__name__ if row is None else self.infos[row].path

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

    def layers_by_parameter(self) -> dict[int, int]:
        """The row of the layer that holds a parameter, by the parameter's id; of several the first."""
        found: dict[int, int] = {}
        for module in self.modules:
            for parameter in module._parameters.values():
                if parameter is not None:
                    found.setdefault(id(parameter), self.index[id(module)])
        return found

    def parameters(
        self, tensors: Sequence[torch.Tensor | None], owners: Sequence[Sequence[int]] = ()
    ) -> tuple[ParameterInfo, ...]:
        """Name and owners of each leaf that received a gradient; none for one outside every module.

        Args:
            owners: of each tensor the labels of the places that held it; they count where no module holds it now.
        """
        holders = _holders(self.modules)
        found = []
        for number, tensor in enumerate(tensors):
            rows = [self.rows[label] for label in owners[number]] if number < len(owners) else []
            if id(tensor) not in holders and any(row >= 0 for row in rows):
                found.append(ParameterInfo("", tuple(row for row in rows if row >= 0)))
                continue
            held = [(self.index[id(module)], name) for module, name in holders.get(id(tensor), ())]
            full = [join(self.infos[row].path, name) for row, name in held]
            found.append(ParameterInfo(full[0] if full else "", tuple(row for row, _ in held)))
        return tuple(found)


def name_modules(
    roots: Sequence[nn.Module], known: Mapping[str, nn.Module], owners: Sequence[nn.Module] = ()
) -> ModuleNames:
    """Name all modules of the models that ran.

    Args:
        roots: modules that were called while no other module was, in order of first call.
        known: modules that the user has a name for; ``""`` for the model given to :func:`gradscope.profile`.
        owners: modules without a name that hold roots and are never called themselves.

    A model that holds a called root names it, also when the model itself was never called. One model with parameters
    gets the path ``""``; of several, each is a tree of its own under its name. Others (a loss module) get their name.
    """
    tops = _tops(roots, known, owners)
    names = _top_names(tops, known)
    infos: list[ModuleInfo] = []
    index: dict[int, int] = {}
    modules: list[nn.Module] = []
    for top, name in zip(tops, names, strict=True):
        for inner, module in inner_paths(top):
            if id(module) in index:
                continue
            path = join(name, inner)
            original = compiled_from(module)
            # One row for both: what torch.compile wraps has no name of its own.
            index[id(module)] = index.setdefault(id(original), len(infos))
            if index[id(module)] < len(infos):
                continue
            modules.append(original)
            infos.append(
                ModuleInfo(
                    path=path,
                    class_name=type(original).__name__,
                    parent=_parent(path, name),
                    parameters=own_parameters(original),
                    source=source_of(original),
                )
            )
    # A shared module can appear first below a path whose parents were named in another model: make parents exist.
    infos = _with_known_parents(infos)
    infos = _with_tied(infos, modules)
    return ModuleNames(tuple(infos), index, tuple(tops), tuple(modules))


def roots_of_models(
    registry: ModuleRegistry, roots: Iterable[int], reached: Set[int], known: Mapping[str, nn.Module]
) -> list[int]:
    """The labels among ``roots`` that are layers: what backward reached, what has parameters, and the given model.

    A transform of a dataset and a metric are modules too, but no part of the model.
    """
    trained = {place.root for place in registry.places if place.parameters}
    given = known.get("")
    return [
        label
        for label in roots
        if label in reached
        or registry.places[label].root in trained
        or (given is not None and registry.places[label].module() is given)
    ]


def name_called(registry: ModuleRegistry, roots: Sequence[int], known: Mapping[str, nn.Module]) -> ModuleNames:
    """Name all modules of the models that ran, also those that are gone by now.

    Args:
        roots: labels of the places that were called while no other module was, in order of first call.
        known: see :func:`name_modules`.

    A copy of a model that lived for one step (a replica, a deepcopy) counts for the model that it is a copy of, if
    that can be no other.
    """
    originals = _uncalled_originals(registry, known)
    merged = _copies(registry, known, originals)
    living = [
        module
        for label in dict.fromkeys(merged.get(label, label) for label in roots)
        if (module := registry.places[label].module()) is not None
    ]
    owners = []
    if "" not in known:  # the user said what the root is
        owners = [module for place in registry.places if place.is_owner and (module := place.module()) is not None]
    return _Rows(registry, merged, name_modules(living, known, owners)).names(roots)


def _uncalled_originals(registry: ModuleRegistry, known: Mapping[str, nn.Module]) -> set[int]:
    """Labels of the named models that were not called, but are of the shape of a root that is gone: as in MAML."""
    gone = {
        _layers_of(registry, label)
        for label, place in enumerate(registry.places)
        if place.root == label and place.last_step >= 0 and place.module() is None
    }
    found = set()
    for module in {id(module): module for module in known.values()}.values() if gone else ():
        label = registry.get(module)
        called = label not in {None, NOBODYS} and registry.places[label or 0].last_step >= 0
        if not called and tuple(sorted(shape_of(module))) in gone:
            found.add(registry.add_root(module))
    return found


def _layers_of(registry: ModuleRegistry, root: int) -> tuple[tuple[str, str], ...]:
    return tuple(sorted((place.path, place.class_name) for place in registry.places if place.root == root))


def _copies(registry: ModuleRegistry, known: Mapping[str, nn.Module], originals: set[int]) -> dict[int, int]:
    """label of each root that was a short-lived copy -> label of what it was a copy of."""
    shapes = _shapes(registry)
    alike: dict[tuple[tuple[str, str], ...], list[int]] = defaultdict(list)
    for label, place in enumerate(registry.places):
        if place.root == label and (place.last_step >= 0 or label in originals):
            alike[shapes[label][0]].append(label)
    variables = {id(module) for module in known.values()}
    found: dict[int, int] = {}
    for labels in alike.values():
        brief = [label for label in labels if _was_brief(registry.places[label], variables)]
        if not any(registry.places[label].module() is None for label in brief):
            continue
        for label in brief:
            sizes = shapes[label][1]
            # A replica of DataParallel's has no parameters of its own.
            same = [other for other in labels if shapes[other][1] == sizes or not any(sizes)]
            # Modules that stood at one place of a model one after the other are one.
            lasting = {registry.places[other].inside or other: other for other in same if other not in brief}
            target = [*lasting.values()][-1] if len(lasting) == 1 else [other for other in same if other in brief][-1]
            if target != label:
                found[label] = target
    return found


def _shapes(registry: ModuleRegistry) -> dict[int, tuple[tuple[tuple[str, str], ...], tuple[int, ...]]]:
    """Of each root the paths and classes of all that lies in it, and the sizes of their own parameters."""
    inner: dict[int, list[tuple[str, str, int]]] = defaultdict(list)
    for place in registry.places:
        inner[place.root].append((place.path, place.class_name, place.parameters))
    return {
        root: (tuple(each[:2] for each in sorted(found)), tuple(each[2] for each in sorted(found)))
        for root, found in inner.items()
    }


def _was_brief(place: RegisteredPath, variables: set[int]) -> bool:
    """Check that a root was called in one step only, lay in no model, and has no name in the user's code."""
    module = place.module()
    return (
        place.inside is None and place.first_step == place.last_step and (module is None or id(module) not in variables)
    )


class _Rows:
    """Finds the row of each place, and makes rows for those that nothing stands at any more."""

    def __init__(self, registry: ModuleRegistry, merged: Mapping[int, int], names: ModuleNames) -> None:
        self._places, self._merged, self._names = registry.places, merged, names
        self._infos = list(names.infos)
        self._row_of = {info.path: row for row, info in enumerate(names.infos)}
        self._found: dict[int, int] = {}
        self._asked: set[int] = set()  # what torch.compile puts around a model is at its place, and the model in it
        self._wanted: set[int] = set()

    def names(self, roots: Sequence[int]) -> ModuleNames:
        """The names with a row for every place below one of ``roots``."""
        self._wanted = {self._merged.get(root, root) for root in roots}
        # Another phase may have seen another module at a place of a model.
        stood_at = {self._places[root].inside for root in self._wanted} - {None}
        self._wanted |= {label for label, place in enumerate(self._places) if place.inside in stood_at}
        rows = tuple(
            self._row(label) if self._merged.get(place.root, place.root) in self._wanted else self._living(place)
            for label, place in enumerate(self._places)
        )
        return replace(self._names, infos=tuple(self._infos), rows=rows)

    def _living(self, place: RegisteredPath) -> int:
        module = place.module()
        return -1 if module is None else self._names.index.get(id(module), -1)

    def _row(self, label: int) -> int:
        label = self._merged.get(label, label)
        row = self._found.get(label)
        if row is None:
            self._asked.add(label)
            row = self._found[label] = self._find(label, self._places[label])
        return row

    def _find(self, label: int, place: RegisteredPath) -> int:
        row = self._living(place)
        if row >= 0:
            return row
        if place.root != label:
            return self._at(place, self._row(place.root), place.path)
        if place.inside is not None and not self._is_being_found(place.inside[0]):
            return self._at(place, self._row(place.inside[0]), place.inside[1])
        return self._add(place, self._free_name(label, place), None)

    def _is_being_found(self, label: int) -> bool:
        label = self._merged.get(label, label)
        return label in self._asked and label not in self._found

    def _at(self, place: RegisteredPath, above: int, path: str) -> int:
        full = join(self._infos[above].path, path)
        if full in self._row_of:
            return self._row_of[full]
        parent = full.rpartition(".")[0]
        while parent not in self._row_of and parent:
            parent = parent.rpartition(".")[0]
        return self._add(place, full, parent if parent in self._row_of else self._infos[above].path)

    def _add(self, place: RegisteredPath, path: str, parent: str | None) -> int:
        row = self._row_of[path] = len(self._infos)
        self._infos.append(ModuleInfo(path, place.class_name, parent, place.parameters, place.source))
        return row

    def _free_name(self, label: int, place: RegisteredPath) -> str:
        """The root path where nothing else can be meant, else the class, numbered."""
        has_parameters = {self._merged.get(other.root, other.root) for other in self._places if other.parameters}
        if "" not in self._row_of and has_parameters & self._wanted == {label}:
            return ""
        name, number = place.class_name, 2
        while name in self._row_of:
            name, number = f"{place.class_name}#{number}", number + 1
        return name


def _tops(roots: Sequence[nn.Module], known: Mapping[str, nn.Module], owners: Sequence[nn.Module]) -> list[nn.Module]:
    holders = list(known.values())
    contents = {id(holder): {id(module) for module in modules_of(holder)} for holder in holders}
    outermost = [
        holder
        for holder in holders
        if not any(id(holder) in contents[id(other)] for other in holders if other is not holder)
    ]
    tops: dict[int, nn.Module] = {}
    for root in roots:
        holder = next((holder for holder in outermost if id(root) in contents[id(holder)]), None)
        if holder is None:
            holder = next((owner for owner in owners if any(inner is root for inner in modules_of(owner))), root)
        tops.setdefault(id(holder), holder)
    inside = {id(inner) for top in tops.values() for inner in modules_of(top) if inner is not top}
    found = [top for top in tops.values() if id(top) not in inside]
    given = known.get("")
    if given is not None and all(given is not top for top in found):
        found.insert(0, given)
    return found


def _top_names(tops: Sequence[nn.Module], known: Mapping[str, nn.Module]) -> list[str]:
    with_parameters = [top for top in tops if any(True for _ in parameters_of(top))]
    given = known.get("")
    main = given if given is not None else with_parameters[0] if len(with_parameters) == 1 else None
    if main is None and len(tops) == 1:
        main = tops[0]
    # What torch.compile makes of a model is known by the names of both: so layers are called the same without it.
    variables = {id(compiled_from(module)): name for name, module in reversed(list(known.items())) if name}
    taken: set[str] = set() if main is None else {name for name, _ in main.named_children()}
    names = []
    for top in tops:
        if top is main:
            names.append("")
            continue
        model = compiled_from(top)
        wanted = variables.get(id(model), type(model).__name__)
        name, number = wanted, 2
        while name in taken:
            name, number = f"{wanted}#{number}", number + 1
        taken.add(name)
        names.append(name)
    return names


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
        names = [join(infos[row_of[id(module)]].path, name) for module, name in held]
        for (module, _), own in zip(held, names, strict=True):
            tied[row_of[id(module)]].extend(other for other in names if other != own)
    return [
        ModuleInfo(info.path, info.class_name, info.parent, info.parameters, info.source, tuple(tied[row]))
        if row in tied
        else info
        for row, info in enumerate(infos)
    ]
