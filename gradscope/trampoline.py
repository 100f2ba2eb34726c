"""Tells of the calls of a Python function, which stays the object that it is: its code alone is another meanwhile.

A wrapper in its place would be seen by a program that compares functions, keeps one under another name, counts in its
attributes, sets its defaults, replaces that of a base class, or pickles it by value.
"""

from __future__ import annotations

import ast
import inspect
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from keyword import iskeyword
from types import CodeType, FunctionType
from typing import Any, TypeGuard

_LATER = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR  # of which a call runs nothing
_HERE = "gradscope: what is told, what is called, what is told of the end"  # a constant of the code that is made
_codes: set[int] = set()  # ids of the codes that functions have from here, now


def can_be_told_of(function: Any) -> TypeGuard[FunctionType]:
    """Check that it is a function of Python whose call runs it, with arguments that a statement names."""
    if type(function) is not FunctionType or function.__code__.co_flags & _LATER:
        return False
    code = function.__code__
    names = (*code.co_varnames[: code.co_argcount + code.co_kwonlyargcount], *code.co_freevars)
    return all(name.isidentifier() and not iskeyword(name) for name in names)


def is_told_of(function: FunctionType) -> bool:
    """Check that its calls are told of now."""
    return is_made_here(function.__code__)


def is_made_here(code: CodeType) -> bool:
    """Check that it is such a function's code, which goes on to the function as it was."""
    return id(code) in _codes


def tell(function: FunctionType, enter: Callable[..., bool], leave: Callable[..., Any]) -> Callable[[], None]:
    """Tell of each call of ``function``, of whichever class or name it is called by.

    A call takes one more frame of the interpreter's stack, which has the function's file, name and first line.

    Args:
        function: one that :func:`can_be_told_of`, and that is not told of.
        enter: given the positional arguments; answers whether the end is to be told of too.
        leave: given the first of them, if any, whether the call returned or raised.

    Returns:
        What puts the code back, unless the function has been given another one meanwhile.
    """
    code = function.__code__
    told = _Told(enter)
    made = _code(code, (told, _as_it_was(function), _Told(leave)))
    _codes.add(id(made))

    def undo() -> None:
        told.end()  # also for copies of the code; of a call that runs the end is told of
        if function.__code__ is made:
            function.__code__ = code
        _codes.discard(id(made))

    function.__code__ = made
    return undo


def surround(function: FunctionType, make: Callable[[], AbstractContextManager[Any]]) -> Callable[[], None]:
    """Have each call of ``function`` in a context, which is not told of what the call raises.

    Args:
        function: as of :func:`tell`.

    Returns:
        As of :func:`tell`.
    """
    open_now = _Open()

    def enter(*_: Any) -> bool:
        context = make()
        context.__enter__()
        open_now.contexts.append(context)
        return True

    def leave(*_: Any) -> None:
        open_now.contexts.pop().__exit__(None, None, None)

    return tell(function, enter, leave)


class _Open(threading.local):
    def __init__(self) -> None:
        self.contexts: list[AbstractContextManager[Any]] = []


class _Told:
    """Calls a function, until its end. Its copy in another process does nothing, whatever it is given."""

    __slots__ = ("_function",)

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __call__(self, *args: Any) -> Any:
        return self._function(*args)

    def end(self) -> None:
        """Let go of the function: Python's collector does not look into code, which may be kept by somebody."""
        self._function = "".format

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, ("", "format")  # returns that text, as here behind the end


def _as_it_was(function: FunctionType) -> FunctionType:
    """The function that has the code: without defaults, since it is given all arguments."""
    code = function.__code__
    called = FunctionType(code, function.__globals__, function.__name__, None, function.__closure__)
    called.__qualname__ = function.__qualname__
    return called


def _takes(code: CodeType, called: str) -> tuple[str, str, str, str]:
    """The arguments as a definition takes them, a call that gives them away, those by position alone, and the first."""
    names = iter(code.co_varnames)
    plain = [next(names) for _ in range(code.co_argcount)]
    by_name = [next(names) for _ in range(code.co_kwonlyargcount)]
    rest = [f"*{next(names)}"] if code.co_flags & inspect.CO_VARARGS else []
    named = [f"**{next(names)}"] if code.co_flags & inspect.CO_VARKEYWORDS else []
    only = plain[: code.co_posonlyargcount]
    takes = [*only, *(["/"] if only else []), *plain[len(only) :], *(rest or ["*"] * bool(by_name)), *by_name, *named]
    # The frame of ours does not keep what the call may let go of, but for the first one; with stars Python keeps it.
    given, given_by_name = [*plain[:1], *map(_given, plain[1:])], [f"{each}={_given(each)}" for each in by_name]
    call = f"{called}({', '.join((*given, *given_by_name))})"
    if starred := " or ".join(each.lstrip("*") for each in (*rest, *named)):
        call = f"{called}({', '.join((*given, *rest, *given_by_name, *named))}) if {starred} else {call}"
    first = plain[0] if plain else f"{rest[0]}[:1]" if rest else ""
    return ", ".join(takes), call, ", ".join((*plain, *rest)), first


def _given(name: str) -> str:
    return f"[{name}, {name} := None][0]"


def _code(code: CodeType, parts: tuple[Any, ...]) -> CodeType:
    """Code with the arguments of ``code``, its names and its place, which calls the parts."""
    name = "told"
    while name in {*code.co_varnames, *code.co_freevars}:
        name += "_"
    takes, call, given, first = _takes(code, f"{name}[1]")
    # What is named behind the return never runs: it makes a function that has the same cells.
    text = f"""def make({", ".join(code.co_freevars)}):
 def call({takes}):
  {name} = {_HERE!r}
  if not {name}[0]({given}): return {call}
  try: return {call}
  finally: {name}[2]({first})
  {", ".join(code.co_freevars) or None}
"""
    tree = ast.parse(text)
    for each in ast.walk(tree):  # a traceback shows this line
        for line in {"lineno", "end_lineno"} & set(each._attributes):
            setattr(each, line, code.co_firstlineno)
    made: CodeType = compile(tree, code.co_filename, "exec", dont_inherit=True)
    for _ in range(2):  # the definition within the definition
        made = next(each for each in made.co_consts if isinstance(each, CodeType))
    return made.replace(
        co_name=code.co_name,
        co_qualname=code.co_qualname,
        co_consts=tuple(parts if each == _HERE else each for each in made.co_consts),
    )
