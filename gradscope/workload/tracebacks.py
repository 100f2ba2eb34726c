"""Tracebacks as the user would see them without gradscope."""

from __future__ import annotations

import os
from types import TracebackType
from typing import TypeVar

_E = TypeVar("_E", bound=BaseException)

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
# Replacement ops and kernels live inside the package when installed, but run in the user's model: shown.
_SHOWN = (_PACKAGE + "recipes" + os.sep, _PACKAGE + "kernels" + os.sep)
_IMPORTLIB = os.path.dirname(os.path.abspath(os.__file__)) + os.sep + "importlib" + os.sep


def cut_own_frames(error: _E) -> _E:
    """Take gradscope's frames out of the tracebacks of ``error`` and of all it was raised from; returns ``error``.

    A traceback that *ends* in gradscope is left whole: that error is a defect of ours, and hiding where it happened
    would help nobody.
    """
    pending: list[BaseException | None] = [error]
    seen: set[int] = set()
    while pending:
        current = pending.pop()
        if current is None or id(current) in seen:
            continue
        seen.add(id(current))
        current.__traceback__ = _cut(current.__traceback__)
        pending += [current.__cause__, current.__context__]
        if isinstance(current, BaseExceptionGroup):
            pending += current.exceptions
    return error


def _cut(traceback: TracebackType | None) -> TracebackType | None:
    entries: list[TracebackType] = []
    while traceback is not None:
        entries.append(traceback)
        traceback = traceback.tb_next
    if entries and _is_own(entries[-1]):
        return entries[0]
    result: TracebackType | None = None
    for entry in reversed(_kept(entries)):
        result = TracebackType(result, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
    return result


def _kept(entries: list[TracebackType]) -> list[TracebackType]:
    kept: list[TracebackType] = []
    after_own = False
    for entry in entries:
        if _is_own(entry):
            after_own = True
        elif not (after_own and _is_import_machinery(entry)):  # an import that gradscope began, not one of the user's
            after_own = False
            kept.append(entry)
    return kept


def _is_own(entry: TracebackType) -> bool:
    file = entry.tb_frame.f_code.co_filename
    return file.startswith(_PACKAGE) and not file.startswith(_SHOWN)


def _is_import_machinery(entry: TracebackType) -> bool:
    file = entry.tb_frame.f_code.co_filename
    return file.startswith(("<frozen importlib", _IMPORTLIB))
