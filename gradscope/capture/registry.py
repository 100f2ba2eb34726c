"""Knows modules by their places, the paths inside their roots; objects that were seen, and none kept alive.

A place outlives the modules that stand at it: a head that the user replaces keeps its row. No module is kept alive.

A step may make modules and leaves of its own: a head that is replaced, a copy, the points of a gradient penalty. Held
here they would live on, and count in the memory that is measured.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from gradscope.capture.callers import Callers
from gradscope.compat import COMPILED_FROM, compiled_from
from gradscope.process import objects_of
from gradscope.tensor_refs import tensor_ref
from gradscope.tree import children_of, join, modules_of, named_modules_of, parameters_of


def inner_paths(top: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """``top.named_modules()`` without the name under which torch.compile keeps what it wraps."""
    return named_modules_of(top, _path_below)


def _path_below(module: nn.Module, path: str, name: str) -> str:
    return path if name == COMPILED_FROM and compiled_from(module) is not module else join(path, name)


def shape_of(module: nn.Module) -> tuple[tuple[str, str], ...]:
    """Paths and classes of a module and all that lies in it: equal for a module and its copy."""
    return tuple((path, type(inner).__name__) for path, inner in inner_paths(module))


def sizes_of(module: nn.Module) -> list[tuple[str, tuple[int, ...] | None]]:
    """Names and shapes of the parameters of a module and of all that lies in it; None for a lazy one's."""
    return [
        (join(path, name), None if is_lazy(held) else tuple(held.shape))
        for path, inner in inner_paths(module)
        for name, held in inner._parameters.items()
        if held is not None
    ]


def own_parameters(module: nn.Module) -> int:
    """Elements of its own parameters."""
    with torch._C.DisableTorchFunction():  # a mode of the user's sees the user's calls alone
        return sum(parameter.numel() for parameter in module._parameters.values() if parameter is not None)


def source_of(module: nn.Module) -> str | None:
    """``file:line`` of the class's forward, for classes that are not torch's own."""
    code = getattr(getattr(type(module), "forward", None), "__code__", None)
    if code is None or type(module).__module__.partition(".")[0] == "torch":
        return None
    return f"{local_path(code.co_filename)}:{code.co_firstlineno}"


def local_path(file: str) -> str:
    """``file`` relative to the working folder where it lies below it; as it is where that folder is gone."""
    try:
        folder = os.path.join(os.getcwd(), "")  # of every call: pathlib takes ten times as long
    except FileNotFoundError:  # a script may remove the folder that it works in
        return file
    edited = "<gradscope "  # what a patch has made of a file, see gradscope.patching.swap
    return edited + file[len(edited) :].removeprefix(folder) if file.startswith(edited) else file.removeprefix(folder)


def _held_by(module: nn.Module) -> Iterator[Any]:
    """Its own parameters, and the one that FSDP has made of those below it: with use_orig_params it is no parameter."""
    yield from module._parameters.values()
    yield getattr(vars(module).get("_handle"), "flat_param", None)


NOBODYS = -1  # label of a module that no root holds


@dataclass(slots=True)
class RegisteredPath:
    """One path in one root, and what stands there."""

    root: int  # label of the root; its own where it is one
    path: str
    class_name: str
    source: str | None
    parameters: int  # elements of its own parameters
    module: weakref.ref[nn.Module]
    first_step: int  # of the run, in which a module was first and last called as a root there; -1 for never
    last_step: int
    inside: tuple[int, str] | None = None  # of a root: the model that it lay in when it was called, and the path in it
    is_owner: bool = False


class ModuleRegistry:
    """Labels modules by place, once each, when they are first called."""

    def __init__(self) -> None:
        self.places: list[RegisteredPath] = []  # by label
        self.callers = Callers()  # of the modules
        self.step = 0  # told by the session: how many steps have ended
        self.models: Callable[[], Iterable[nn.Module]] = tuple  # those that the user has named
        self._labels: dict[int, int] = {}  # id of a living module -> label
        self._guards: dict[int, weakref.ref[nn.Module]] = {}  # take the id out when the module dies
        self._copies: dict[int, int] = {}  # id of what was taken for a copy -> the step in which it was
        self._known: dict[tuple[int, str], int] = {}  # (root, path) -> label
        self._walked: tuple[int, int] | None = None  # (root, step) of the last walk that found nothing new
        self.called_by_hand: set[type[nn.Module]] = set()  # classes, see byhand.py
        self._compiled: list[weakref.ref[nn.Module]] = []  # each stands at the place of the module that it wraps
        self.inside: dict[int, int] = {}  # id of what torch.compile made -> id of the module that it wraps
        self._lock = threading.RLock()
        self._owners: list[weakref.ref[nn.Module]] | None = None  # that the last look found; None before the first
        self._nowhere: set[int] = set()  # ids of parameters that no module holds
        self._holders: dict[int, list[int]] = {}  # id of a parameter -> labels of the modules that hold it

    def get(self, module: nn.Module) -> int | None:
        """Label of a module that was seen before; None where it was taken for a copy in another step than this one."""
        return None if self._copies and self._outlived(module) else self._labels.get(id(module))

    def label_of(self, number: int) -> int | None:
        """Label of the living module with that id."""
        return self._labels.get(number)

    def living(self, number: int) -> nn.Module | None:
        """The module with that id; None where it is gone."""
        guard = self._guards.get(number)
        return None if guard is None else guard()

    def label(self, module: nn.Module, callers: list[nn.Module | None]) -> int:
        """Label of a module that is called now.

        Args:
            callers: the modules whose calls are open on this thread, outermost first.
        """
        with self._lock:
            found = self._labels.get(id(module))
            if self._outlived(module):
                found = self._nobodys(module)
            if found is not None and (found != NOBODYS or callers or self._stands_for_another(module)):
                return found
            if not callers:
                # DataParallel calls its replicas in threads of their own.
                original = self._original_of(module) if getattr(module, "_is_replica", False) else None
                return self._add_root(module) if original is None else original
            return self._label_inner(module, [caller for caller in callers if caller is not None])

    def _stands_for_another(self, module: nn.Module) -> bool:
        """Check that torch.compile made it of a module with a place, as a checkpoint calls it again in backward."""
        shown = compiled_from(module)
        return shown is not module and self._labels.get(id(shown), NOBODYS) != NOBODYS

    def _outlived(self, module: nn.Module) -> bool:
        """A copy is made for one step. What is called in the next as well its holder keeps, in a plain list or dict."""
        return self._copies.get(id(module), self.step) != self.step

    def add_root(self, module: nn.Module) -> int:
        """Label of a model that was never called itself, as its copies were."""
        with self._lock:
            found = self._labels.get(id(module), NOBODYS)
            return self._add_root(module) if found == NOBODYS else found

    def note_root_call(self, label: int) -> None:
        """A module was called while no other was."""
        place = self.places[label]
        if place.first_step < 0:
            place.first_step = self.step
        place.last_step = self.step

    def alive(self) -> list[nn.Module]:
        """The modules of all places that live now, and what torch.compile made of some; let go of the list soon."""
        found = (reference() for reference in (*(place.module for place in self.places), *self._compiled))
        return [module for module in found if module is not None]

    def owners_of(self, tensor: Any) -> tuple[int, ...]:
        """Labels of the modules that hold a parameter now, in the order of the places; none for a loose tensor."""
        with self._lock:
            if id(tensor) not in self._holders:
                self._holders = {}
                for label, place in enumerate(self.places):
                    module = place.module()
                    for held in _held_by(module) if module is not None else ():
                        if held is not None:
                            self._holders.setdefault(id(held), []).append(label)
            return tuple(
                label
                for label in self._holders.get(id(tensor), ())
                if (module := self.places[label].module()) is not None
                and any(held is tensor for held in _held_by(module))
            )

    def roots_with(self, parameters: Iterable[torch.Tensor]) -> list[int]:
        """Labels of the models that hold these parameters: of those that are not known the outermost module."""
        with self._lock:
            owners = {id(each): self.owners_of(each) for each in parameters}
            missing = {number for number, labels in owners.items() if not labels} - self._nowhere
            if missing:
                modules = all_modules()
                inside = {id(child) for module in modules for child in children_of(module)}
                for top in modules:
                    if issubclass(type(top), torch.fx.GraphModule):  # what Dynamo has made of one
                        continue
                    held = (id(tensor) for inner in modules_of(top) for tensor in inner._parameters.values())
                    if id(top) not in inside and not missing.isdisjoint(held):
                        self.add_root(top)
                owners = {id(each): self.owners_of(each) for each in parameters}
                self._nowhere |= {number for number, labels in owners.items() if not labels}
            return sorted({self.places[label].root for labels in owners.values() for label in labels})

    def find_owners(self) -> None:
        """Look for modules that hold a called root and are never called themselves, as Lightning's are."""
        with self._lock:
            roots = [label for label, place in enumerate(self.places) if place.root == label and place.last_step >= 0]
            wanted = {id(module): label for label in roots if (module := self.places[label].module()) is not None}
            if not wanted:
                return
            holding = {}
            for module in all_modules():
                if id(module) in wanted:
                    continue
                held = [id(inner) for inner in modules_of(module) if id(inner) in wanted]
                if held:
                    holding[id(module)] = (module, held)
            inside = {
                id(inner) for module, _ in holding.values() for inner in modules_of(module) if inner is not module
            }
            outermost = [(module, held) for number, (module, held) in holding.items() if number not in inside]
            # One of several that hold the same: a wrapper that the program makes anew in each step.
            alike = Counter((type(module), *held) for module, held in outermost)
            outermost = [(module, held) for module, held in outermost if alike[(type(module), *held)] == 1]
            outermost = self._staying(outermost)
            for module, _ in sorted(outermost, key=lambda item: -len(item[1])):
                owner = self._holder(module)
                self.places[owner].is_owner = True
                for path, inner in inner_paths(module):
                    root = wanted.get(id(inner))
                    if root is not None and self.places[root].inside is None:
                        self.places[root].inside = (owner, path)

    def _staying(self, found: list[tuple[nn.Module, list[int]]]) -> list[tuple[nn.Module, list[int]]]:
        """Those that an earlier look found too, where there was one; no others are owners any more.

        A wrapper of one step may be there alone when it is looked for: the garbage collector has taken the others.
        """
        if self._owners is not None:
            before = [reference() for reference in self._owners]
            found = [(module, held) for module, held in found if any(module is each for each in before)]
            for label, place in enumerate(self.places):
                if place.is_owner and not any(module is place.module() for module, _ in found):
                    place.is_owner = False
                    for inner in self.places:
                        if inner.inside is not None and inner.inside[0] == label:
                            inner.inside = None
        self._owners = [weakref.ref(module) for module, _ in found]
        return found

    # -- places ------------------------------------------------------------------------------------------------------

    def _add_root(self, module: nn.Module) -> int:
        label = self._place(module, len(self.places), "")
        self._walk(module, label)
        self.places[label].inside = self._inside_model(module)
        return label

    def _inside_model(self, module: nn.Module) -> tuple[int, str] | None:
        """The model that a root lies in now, and the path: what stands there in the next step may be another module."""
        owners = [place.module() for place in self.places if place.is_owner]
        for model in (*self.models(), *owners):
            if model is None or model is module:
                continue
            path = next((path for path, inner in inner_paths(model) if inner is module), None)
            if path is not None:
                return self._holder(model), path
        return None

    def _holder(self, model: nn.Module) -> int:
        """Label of a model whose parts are called and not itself: those that are get places of their own."""
        found = self._labels.get(id(model), NOBODYS)
        return self._place(model, len(self.places), "") if found == NOBODYS else found

    def _label_inner(self, module: nn.Module, callers: list[nn.Module]) -> int:
        root = self._labels.get(id(callers[0]), NOBODYS) if callers else NOBODYS
        if root == NOBODYS:
            return self._nobodys(module)
        root_place = self.places[root]
        if self._walked != (root, self.step):
            self._walk(callers[0], root_place.root, root_place.path)
            self._walked = (root, self.step)
        found = self._labels.get(id(module))
        if found is not None and found != NOBODYS:
            return found
        found = self._in_callers(module, callers)
        if found is None:
            found = self._original_of(module, root_place.root)
        return self._nobodys(module) if found is None else found

    def _in_callers(self, module: nn.Module, callers: list[nn.Module]) -> int | None:
        """A module that a caller was given after the walk."""
        for caller in reversed(callers):
            label = self._labels.get(id(caller), NOBODYS)
            if label == NOBODYS:
                continue
            for name, inner in inner_paths(caller):
                if inner is module:
                    place = self.places[label]
                    return self._place(module, place.root, join(place.path, name))
        return None

    def _original_of(self, module: nn.Module, root: int | None = None) -> int | None:
        """The one module (of the root) that it can be a copy of: the only one of the class, with the same inside."""
        replica = getattr(module, "_is_replica", False)
        own = shape_of(module)
        if not any(True for _ in parameters_of(module)) and not replica:
            return None  # a fresh ReLU is nobody's copy; a replica of DataParallel's has no parameters of its own
        alike = [
            label
            for label, place in enumerate(self.places)
            if (root is None or place.root == root)
            and place.class_name == type(module).__name__
            and (other := place.module()) is not None
            and shape_of(other) == own
        ]
        if len(alike) != 1:
            return None
        place = self.places[alike[0]]
        original = place.module()
        if original is None or not (replica or sizes_of(original) == sizes_of(module)):
            return None
        for name, inner in inner_paths(module):
            label = self._known.get((place.root, join(place.path, name)))
            if label is not None:
                self._note(inner, label)
                if not replica:
                    self._copies[id(inner)] = self.step
        return alike[0]

    def _walk(self, top: nn.Module, root: int, prefix: str = "") -> None:
        for name, inner in inner_paths(top):
            if self._labels.get(id(inner), NOBODYS) == NOBODYS:
                self._place(inner, root, join(prefix, name))

    def _place(self, module: nn.Module, root: int, path: str) -> int:
        label = self._known.get((root, path))
        shown = compiled_from(module)
        if shown is not module:
            self._compiled.append(weakref.ref(module))
            self.inside[id(module)] = id(shown)
        if label is None:
            label = self._known[root, path] = len(self.places)
            reference = weakref.ref(module)
            self.places.append(
                RegisteredPath(
                    root, path, type(shown).__name__, source_of(shown), own_parameters(shown), reference, -1, -1
                )
            )
        else:  # another one stands there now
            place = self.places[label]
            if place.module() is None or shown is module:
                place.class_name, place.source = type(shown).__name__, source_of(shown)
                place.parameters, place.module = own_parameters(shown), weakref.ref(module)
        self._note(module, label)
        return label

    def _nobodys(self, module: nn.Module) -> int:
        self._note(module, NOBODYS)
        return NOBODYS

    def _note(self, module: nn.Module, label: int) -> None:
        number = id(module)
        self._labels[number] = label
        self._copies.pop(number, None)
        labels, guards, copies, inside = self._labels, self._guards, self._copies, self.inside

        def gone(reference: Any) -> None:
            if guards.get(number) is reference:
                for known in (guards, labels, copies, inside):
                    known.pop(number, None)  # type: ignore[attr-defined]

        guards[number] = weakref.ref(module, gone)


def all_modules() -> list[nn.Module]:
    """Every module of the process."""
    return objects_of(nn.Module)


T = TypeVar("T")


class Seen(Generic[T]):
    """Numbers objects in the order in which they are first seen; iterates over those that are alive.

    Objects are told apart by identity. An address is used again once an object is gone: what lies there then is
    another object, with a number of its own.
    """

    def __init__(self, items: Iterable[T] = ()) -> None:
        self._references: list[Callable[[], T | None]] = []
        self._numbers: dict[int, int] = {}  # by id; of the latest object there
        self._lock = threading.Lock()
        self._held: list[T] = []
        for item in items:
            self.number(item)

    def number(self, item: T) -> int:
        """The number of ``item``, a new one where it was not seen before."""
        number = self._numbers.get(id(item))
        if number is not None and self._references[number]() is item:
            return number
        with self._lock:
            number = self._numbers.get(id(item))  # another thread may have been faster
            if number is None or self._references[number]() is not item:
                number = len(self._references)
                self._references.append(_reference(item))
                self._numbers[id(item)] = number
            return number

    def __getitem__(self, number: int) -> T | None:
        """The object of that number; None where it is gone."""
        return self._references[number]()

    def __len__(self) -> int:
        """How many were seen."""
        return len(self._references)

    def __iter__(self) -> Iterator[T]:
        """Those that are alive, in the order of their numbers."""
        return (item for item in self.by_number() if item is not None)

    def by_number(self) -> list[T | None]:
        """All that were seen; None for each that is gone."""
        return [reference() for reference in self._references]

    def hold(self) -> None:
        """Keep what is alive now: nothing is measured any more, and the report needs their names.

        A script's function may be left, and with it its model, before the report is made.
        """
        self._held = list(self)

    def clear(self) -> None:
        """Forget all."""
        self._references.clear()
        self._numbers.clear()
        self._held.clear()


def _reference(item: Any) -> Callable[[], Any]:
    return tensor_ref(item) if isinstance(item, torch.Tensor) else weakref.ref(item)
