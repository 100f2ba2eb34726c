"""A plugin for the pytest that runs cut-cross-entropy's tests, which ask for a GPU: they get the CPU in its place."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode


class OnCPU(TorchFunctionMode):
    """Make on the CPU what is to be made on "cuda"."""

    def __torch_function__(
        self, function: Any, types: Any, arguments: tuple[Any, ...] = (), options: dict[str, Any] | None = None
    ) -> Any:
        """Call the function, with its device replaced."""
        options = dict(options or {})
        if options.get("device") == "cuda":
            options["device"] = "cpu"
        return function(*arguments, **options)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[Any]) -> None:
    """No test is skipped for want of a GPU."""
    for item in items:
        item.own_markers[:] = [mark for mark in item.own_markers if mark.name != "skipif"]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: Any) -> Iterator[None]:
    """Run a test on the CPU, with numbers of its own, and with bfloat16, for which it looks for a GPU as well."""
    torch.manual_seed(0)
    available = torch.cuda.is_available
    torch.cuda.is_available = lambda: True
    try:
        with OnCPU():
            return (yield)
    finally:
        torch.cuda.is_available = available
