"""Knows every module that was called by its place, the path inside the root that it was called in.

A place outlives the modules that stand at it: a head that the user replaces keeps its row. No module is kept alive.
"""

from __future__ import annotations

import gc
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from torch import nn

from gradscope.capture.callers import Callers
from gradscope.capture.paths import inner_paths, own_parameters, shape_of, sizes_of, source_of, wrapped
from gradscope.tree import join, modules_of, parameters_of

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
        self._lock = threading.RLock()
        self._owners: list[weakref.ref[nn.Module]] | None = None  # that the last look found; None before the first
        self._holders: dict[int, list[int]] = {}  # id of a parameter -> labels of the modules that hold it

    def get(self, module: nn.Module) -> int | None:
        """Label of a module that was seen before; None where it was taken for a copy in another step than this one."""
        return None if self._copies and self._outlived(module) else self._labels.get(id(module))

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
            if found is not None and (found != NOBODYS or callers):
                return found
            if not callers:
                # DataParallel calls its replicas in threads of their own.
                original = self._original_of(module) if getattr(module, "_is_replica", False) else None
                return self._add_root(module) if original is None else original
            return self._label_inner(module, [caller for caller in callers if caller is not None])

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
                    for held in module._parameters.values() if module is not None else ():
                        if held is not None:
                            self._holders.setdefault(id(held), []).append(label)
            return tuple(
                label
                for label in self._holders.get(id(tensor), ())
                if (module := self.places[label].module()) is not None
                and any(held is tensor for held in module._parameters.values())
            )

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
        shown = wrapped(module)
        if shown is not module:
            self._compiled.append(weakref.ref(module))
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
        labels, guards, copies = self._labels, self._guards, self._copies

        def gone(reference: Any) -> None:
            if guards.get(number) is reference:
                guards.pop(number, None)
                labels.pop(number, None)
                copies.pop(number, None)

        guards[number] = weakref.ref(module, gone)


def all_modules() -> list[nn.Module]:
    """Every module of the process."""
    # type(), never isinstance: a proxy may answer for its class by importing or computing something.
    return [item for item in gc.get_objects() if issubclass(type(item), nn.Module)]
