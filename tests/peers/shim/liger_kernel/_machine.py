"""What Liger-Kernel's tests ask of the machine: it is a CPU."""

from __future__ import annotations

from typing import Any


def dispatch(
    _version: str,
    _before: Any,
    after: Any,
    before_args: tuple[Any, ...] = (),
    after_args: tuple[Any, ...] = (),
    before_kwargs: dict[str, Any] | None = None,
    after_kwargs: dict[str, Any] | None = None,
) -> Any:
    """Call ``after``, for transformers is newer than every version asked for; today's no longer asks for a device."""
    return after(*after_args, **{name: value for name, value in (after_kwargs or {}).items() if name != "device"})


NAMES: dict[str, object] = {
    "infer_comm_backend": lambda: "gloo",
    "infer_device": lambda: "cpu",
    "is_npu_available": lambda: False,
    "transformers_version_dispatch": dispatch,
}
