"""This machine's ceilings: measured once by ``gradscope doctor --calibrate``, kept in the user's cache folder."""

from gradscope.limits.store import KeptLimits, Store, keep, kept, limits_file, read, require_writable

__all__ = ["KeptLimits", "Store", "keep", "kept", "limits_file", "read", "require_writable"]
