"""Sees module calls that torch's hooks do not: ``module.forward(x)``, and classes with a ``__call__`` of their own.

Torch calls hooks in ``nn.Module.__call__``. Where a step went through models with modules that were never called that
way, or whose parts were called while they were not, the classes of these get a wrapper around ``forward``, and around
``__call__`` where that is the class's own, while steps are recorded. Programs that call all of their modules as usual
are not touched.
"""

from __future__ import annotations

import ast
import functools
import inspect
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from keyword import iskeyword
from types import CellType, CodeType, FunctionType
from typing import Any, cast

import torch
from torch import nn

from gradscope.compat import DYNAMO
from gradscope.tree import children_of, modules_of

BY_HAND = "detecting modules that are called directly"  # under which the guard notes an error

_MISSING = object()
_LATER = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR  # of which a call runs nothing
_UNIMPLEMENTED = nn.Module.forward
TORCHS_CALL: Any = nn.Module.__call__


def classes_to_watch(
    modules: Collection[nn.Module], leaves: Collection[int], called: Callable[[nn.Module], bool]
) -> set[type[nn.Module]]:
    """The classes of modules with calls that no hook told of, in models of which something was called or trained.

    Args:
        modules: of the whole process.
        leaves: ids of the parameters that backward passes have led to.
        called: whether hooks have told of all calls of that module, as far as is known.
    """
    children = {id(child) for module in modules for child in children_of(module)}
    found: set[type[nn.Module]] = set()
    for top in modules:
        if id(top) in children:
            continue
        inside = list(modules_of(top))
        silent = [module for module in inside if not called(module)]
        held = (tensor for module in silent for tensor in module._parameters.values())
        if len(silent) < len(inside) or any(id(tensor) in leaves for tensor in held):
            found |= {type(module) for module in silent}
    return {kind for kind in found if _names_of(kind)}


def _names_of(kind: type[nn.Module]) -> list[str]:
    """The methods by which modules of this class may be called without a hook."""
    if issubclass(kind, torch.jit.ScriptModule) or kind.__module__.startswith(DYNAMO):
        return []
    own = {"forward": _UNIMPLEMENTED, "__call__": TORCHS_CALL}
    return [
        name
        for name, torchs in own.items()
        if type(function := _attribute(kind, name)) is FunctionType
        and function is not torchs
        and not function.__code__.co_flags & _LATER
        and not _knows_itself(function)
    ]


def _attribute(kind: type[nn.Module], name: str) -> Any:
    """What the class or the first of its bases that has the name holds under it; static methods are not unpacked."""
    return next((vars(base)[name] for base in kind.__mro__ if name in vars(base)), None)


def _knows_itself(function: FunctionType) -> bool:
    """Check that it can ask whether the class still has it, as layers of transformers do before they checkpoint."""
    for cell in function.__closure__ or ():
        with suppress(ValueError):  # an empty cell
            if cell.cell_contents is function:
                return True
    return False


@contextmanager
def watching(
    kinds: Collection[type[nn.Module]], enter: Callable[[nn.Module, Any], bool], leave: Callable[[nn.Module], None]
) -> Iterator[None]:
    """Tell of the calls of modules of these classes until the block is left.

    Args:
        enter: told of a module and its positional arguments; answers whether :obj:`leave` is to be told of the end.
    """
    with ExitStack() as stack:
        for kind in kinds:
            for name in _names_of(kind):
                _wrap(kind, name, enter, leave, stack)
        yield


@contextmanager
def watching_compiled(
    modules: Iterable[nn.Module], enter: Callable[[nn.Module, Any], bool], leave: Callable[[nn.Module], None]
) -> Iterator[None]:
    """Tell of the calls of modules that ``module.compile()`` compiled, inside of which no hook tells of anything.

    Args:
        enter: as of :func:`watching`.
    """
    undo = [_wrap_compiled(module, enter, leave) for module in modules if module._compiled_call_impl is not None]
    del modules  # no module is kept alive
    try:
        yield
    finally:
        for each in undo:
            each()


def _wrap_compiled(
    module: nn.Module, enter: Callable[[nn.Module, Any], bool], leave: Callable[[nn.Module], None]
) -> Callable[[], None]:
    reference, function = weakref.ref(module), cast(Callable[..., Any], module._compiled_call_impl)

    @functools.wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        module = reference()
        if torch.compiler.is_compiling() or module is None or not enter(module, args):
            return function(*args, **kwargs)
        try:
            return function(*args, **kwargs)
        finally:
            leave(module)

    def undo() -> None:
        module = reference()
        if module is not None and vars(module).get("_compiled_call_impl") is called:
            vars(module)["_compiled_call_impl"] = function

    vars(module)["_compiled_call_impl"] = called
    return undo


def unwrapped(function: Any) -> Any:
    """What a wrapper of this file's stands for; anything else as it is."""
    while getattr(function, "__code__", None) is not None and function.__code__.co_filename == __file__:
        function = function.__wrapped__
    return function


def _wrap(
    kind: type[nn.Module],
    name: str,
    enter: Callable[[nn.Module, Any], bool],
    leave: Callable[[nn.Module], None],
    stack: ExitStack,
) -> None:
    before = kind.__dict__.get(name, _MISSING)
    function = cast(FunctionType, _attribute(kind, name))
    on = True

    is_compiling = torch.compiler.is_compiling

    def call(self: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        if is_compiling() or not on or not enter(self, args):
            return function(self, *args, **kwargs)
        try:
            return function(self, *args, **kwargs)
        finally:
            leave(self)

    called = _in_the_place_of(function, cast(FunctionType, call))
    defaults = {each: getattr(called, each) for each in ("__defaults__", "__kwdefaults__")}
    state = dict(vars(called))

    def undo() -> None:
        nonlocal on
        on = False
        for each, value in defaults.items():
            if getattr(called, each) is not value:  # the program has set others of the method
                setattr(function, each, getattr(called, each))
        for each, value in vars(called).items():  # what it counts there, say
            if state.get(each, _MISSING) is not value:
                vars(function)[each] = value
        # Somebody who wrapped ours in the meantime keeps their wrapper; ours passes through.
        if kind.__dict__.get(name) is called:
            if before is _MISSING:
                type.__delattr__(kind, name)
            else:
                type.__setattr__(kind, name, before)

    stack.callback(undo)  # first: a signal's handler may raise
    # A metaclass of the user's is not asked: it may refuse, or do more than to set a name.
    type.__setattr__(kind, name, called)


def _in_the_place_of(function: FunctionType, call: FunctionType) -> FunctionType:
    """``call`` with all that may be asked of ``function``: its arguments, their defaults, and its globals.

    Some read these: ``inspect.getfullargspec`` the arguments, and torch.fx the globals, for what it is not to trace.
    """
    code = function.__code__
    places = iter(code.co_varnames)
    plain = [next(places) for _ in range(code.co_argcount)]
    by_name = [next(places) for _ in range(code.co_kwonlyargcount)]
    rest = [f"*{next(places)}"] if code.co_flags & inspect.CO_VARARGS else []
    named = [f"**{next(places)}"] if code.co_flags & inspect.CO_VARKEYWORDS else []
    only = plain[: code.co_posonlyargcount]
    takes = [*only, *(["/"] if only else []), *plain[len(only) :], *(rest or ["*"] * bool(by_name)), *by_name, *named]
    gives = [*plain, *rest, *(f"{each}={each}" for each in by_name), *named]
    made = call.__code__, call.__closure__
    defaults: tuple[Any, Any] = None, None
    if all(each.isidentifier() and not iskeyword(each) for each in (*plain, *by_name)):  # else no statement made it
        ours = next(each for each in ("call", "_call", "_gradscope_call") if each not in code.co_varnames)
        define = f"def forward({', '.join(takes)}): return {ours}({', '.join(gives)})"
        tree = ast.parse(f"def make({ours}):\n {define}\n return forward")
        for each in ast.walk(tree):  # a traceback shows the line of this file that they say
            for name in {"lineno", "end_lineno"} & set(each._attributes):
                setattr(each, name, call.__code__.co_firstlineno)
        (make,) = _codes(compile(tree, __file__, "exec"))
        made = next(iter(_codes(make))), (CellType(call),)
        defaults = function.__defaults__, function.__kwdefaults__
    called = FunctionType(made[0], function.__globals__, function.__name__, defaults[0], made[1])
    called.__kwdefaults__ = defaults[1]
    functools.update_wrapper(called, function)
    return called


def _codes(code: CodeType) -> list[CodeType]:
    """What is defined in a piece of code."""
    return [each for each in code.co_consts if isinstance(each, CodeType)]
