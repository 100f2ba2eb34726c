"""Puts rewritten methods on the modules that hold a site, and takes them off again."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterable, Iterator
from types import CellType, FunctionType, MethodType
from typing import Any, cast

import torch
from torch import nn

from gradscope import recipes
from gradscope.patching.edit.recompile import rebuilt
from gradscope.patching.edit.replacement import Refusal
from gradscope.patching.edit.rewrite import Edit
from gradscope.patching.edit.source import FunctionSource, SourceFile
from gradscope.patching.sites import Site, bound
from gradscope.patching.unchanged import Unchanged, unchanged


class Swap:
    """The rewritten methods of one module.

    The new method is an attribute of the instance, so that nothing but this module changes: not its class, not its
    parameters, buffers, hooks or state dict.
    """

    def __init__(self, module: nn.Module, sites: Iterable[Site], files: dict[str, SourceFile]) -> None:
        self.module = module
        self.sites = list(sites)
        self._plain = {site.chain[0].name for site in self.sites if not site.chain[0].bound}
        self.methods = {
            name: made if name in self._plain else _of_its_caller(made, name, unchanged(module, self.sites))
            for name, made in ((name, _built(sites, files)) for name, sites in _by_method(self.sites))
        }
        self._held: dict[str, Any] = {}  # what the module itself had under these names

    def put(self) -> None:
        """Make the module run the rewritten methods."""
        for name, function in self.methods.items():
            held = vars(self.module).get(name, function)
            if held is not function and getattr(held, "__func__", None) is not function:
                self._held[name] = held
            vars(self.module)[name] = function if name in self._plain else MethodType(function, self.module)

    def take_off(self) -> None:
        """Make the module run its own methods again; what somebody else put there since stays."""
        for name, function in self.methods.items():
            held = vars(self.module).get(name)
            if held is function or (isinstance(held, MethodType) and held.__func__ is function):
                if name in self._held:
                    vars(self.module)[name] = self._held.pop(name)
                else:
                    del vars(self.module)[name]


def swaps(sites: Iterable[Site], files: dict[str, SourceFile]) -> list[Swap]:
    """One swap for each module with a site; where its rewritten source does not compile, the sites get the reason."""
    by_module: dict[nn.Module, list[Site]] = {}
    for site in sites:
        assert site.module is not None
        by_module.setdefault(site.module, []).append(site)
    made = []
    for module, held in by_module.items():
        try:
            made.append(Swap(module, held, files))
        except Refusal as refusal:
            for site in held:
                site.reasons.append(str(refusal))
    return made


def _by_method(sites: list[Site]) -> Iterator[tuple[str, list[Site]]]:
    names = dict.fromkeys(site.chain[0].name for site in sites)
    for name in names:
        yield name, [site for site in sites if site.chain[0].name == name]


def _built(sites: list[Site], files: dict[str, SourceFile], depth: int = 0) -> FunctionType:
    """The function at ``depth`` of the sites' chains, with their edits, and those it calls rewritten likewise."""
    function, wrappers = sites[0].chain[depth].function, sites[0].chain[depth].wrappers
    edits: list[Edit] = []
    names: dict[str, Any] = {}
    deeper: dict[str, list[Site]] = {}
    for site in sites:
        if len(site.chain) > depth + 1:
            deeper.setdefault(site.chain[depth + 1].name, []).append(site)
        elif site.edit is not None:
            edits.append(site.edit)
            names |= {known: getattr(recipes, name) for name, known in site.edit.imports}
    for name, held in deeper.items():
        names[name] = _built(held, files, depth + 1)
    made = rebuilt(function, FunctionSource.of(function.__code__, files), edits, names)
    for wrapper, inner in reversed([*zip(wrappers, [*wrappers, function][1:], strict=True)]):
        made = _wrapped(wrapper, inner, made)
    return made


def _of_its_caller(function: FunctionType, name: str, asked: tuple[Unchanged, ...]) -> FunctionType:
    """``function`` as a method that an instance holds, and its shallow copies with it; where ``asked`` holds.

    A replica of DataParallel's and what ``copy.copy`` makes have the attributes of the original, and so its method,
    which is bound to that. Who calls it has the right module as its own first argument.
    """

    @functools.wraps(function)
    def method(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling():
            caller = sys._getframe(1)
            first = caller.f_locals.get(caller.f_code.co_varnames[0]) if caller.f_code.co_argcount else None
            if type(first) is type(self) and first is not self and vars(first).get(name) is vars(self).get(name):
                self = first
        if not all(each.holds(self) for each in asked):
            return getattr(type(self), name)(self, *args, **kwargs)
        return function(self, *args, **kwargs)

    return cast(FunctionType, method)


def _wrapped(wrapper: FunctionType, inner: FunctionType, new: FunctionType) -> FunctionType:
    """What a decorator made of ``inner``, made of ``new``: the same code with one free name bound anew."""
    cells = tuple(CellType(new) if inner in bound(cell) else cell for cell in wrapper.__closure__ or ())
    made = FunctionType(wrapper.__code__, wrapper.__globals__, wrapper.__name__, wrapper.__defaults__, cells)
    made.__kwdefaults__ = wrapper.__kwdefaults__
    functools.update_wrapper(made, new)
    return made
