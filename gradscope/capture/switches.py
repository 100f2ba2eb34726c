"""Torch's debugging switches while a step runs: a ``with`` block inside of it turns them on and off again."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn

from gradscope.capture.guard import Guard
from gradscope.capture.modules import no_compile_warning
from gradscope.capture.torch_flags import current_settings

_DEBUGGING = ("anomaly", "deterministic", "validate_args")


class SwitchWatch:
    """Looks at the switches where the step's first module is called, and where each backward pass begins."""

    def __init__(self) -> None:
        self._seen: list[dict[str, Any]] = []

    @contextmanager
    def watching(self, guard: Guard) -> Iterator[None]:
        """Look at the first module call until the block is left."""

        def first(module: nn.Module, args: Any) -> None:
            if not self._seen:
                self.look()

        hook = nn.modules.module.register_module_forward_pre_hook(guard.hook("looking at torch's switches", first))
        try:
            with no_compile_warning():
                yield
        finally:
            hook.remove()

    def look(self) -> None:
        """Note how the switches are now."""
        self._seen.append(current_settings())

    def with_seen(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """``settings``, those between two steps, with what was on inside of the step.

        ``inside_step``: names of the switches that were on there only.
        """
        found = dict(settings)
        inside = []
        for name in _DEBUGGING:
            on = [seen for seen in self._seen if seen.get(name)]
            if on and not settings.get(name):
                inside.append(name)
                found[name] = True
                if name == "anomaly":
                    found["anomaly_nan"] = any(seen.get("anomaly_nan") for seen in on)
        if inside:
            found["inside_step"] = inside
        return found
