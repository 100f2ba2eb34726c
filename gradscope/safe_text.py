"""Text from outside, made safe to show: names of files and layers, source lines, values of a file from a stranger."""

from __future__ import annotations

import os

# Of a value or a name in an error message; a path is longer than most of what else stands there.
_VALUE = 60
_PATH = 300


def visible(text: str) -> str:
    """``text`` on one line, with what a terminal would obey or not show (escape, bidirectional, surrogate) spelled out.

    Line ends and tabs become blanks; any other character that is not printable is ``\\x1b`` or ``\\u202e``.
    """
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else _spelled(char) for char in text)


def shown_path(path: str | os.PathLike[str]) -> str:
    """A path as messages name it."""
    return cut(visible(os.fspath(path)), _PATH)


def local_path(path: str | os.PathLike[str]) -> str:
    """Return a path from the working folder where it is below that, as given elsewhere; one file has one name so."""
    text = os.fspath(path)
    try:
        here = os.path.join(os.path.realpath(os.getcwd()), "")
        whole = os.path.join(os.path.realpath(os.path.dirname(text)), os.path.basename(text))
    except (OSError, ValueError):  # the working folder was removed, or a character that no path has
        return text
    return whole[len(here) :] if whole.startswith(here) and os.path.basename(text) not in {"", ".", ".."} else text


def shown_value(value: object) -> str:
    """A value that a file has where another was expected, short: ``'x'``, ``a list``, ``the number 1.5``."""
    if isinstance(value, str):
        return cut(repr(value) if value.isprintable() else f"'{visible(value)}'", _VALUE)
    return kind_of(value)


def shown_repr(value: object) -> str:
    """Any value of a settings file as it would be written, short."""
    try:
        return cut(visible(repr(value)), _VALUE)
    except (ValueError, RecursionError):  # a number of thousands of digits, thousands of brackets
        return "a very long value"


def kind_of(value: object) -> str:
    """Return what a value of JSON is: ``a list``, ``null``, ``the number 1.5``."""
    if isinstance(value, bool):
        return "true or false"
    if isinstance(value, int):
        # Python refuses to spell a number of thousands of digits.
        return f"the number {value}" if abs(value) < 10**20 else "a number of more than 20 digits"
    if isinstance(value, float):
        return f"the number {value}"
    return {dict: "an object", list: "a list", str: "a string", type(None): "null"}.get(type(value), "something else")


def cut(text: str, most: int) -> str:
    """``text`` in at most ``most`` characters, an ellipsis in its middle where it is longer."""
    if len(text) <= most:
        return text
    front = (most - 1) // 2
    return f"{text[:front]}…{text[len(text) - (most - 1 - front) :]}"


def _spelled(char: str) -> str:
    if char in "\t\n\r":
        return " "
    code = ord(char)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
