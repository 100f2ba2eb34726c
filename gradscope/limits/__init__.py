"""This machine's ceilings: measured once by ``gradscope doctor --calibrate``, kept in the user's cache folder."""

from gradscope.limits.store import Kept, Store, keep, kept, limits_file, read, require_writable

__all__ = ["Kept", "Store", "keep", "kept", "limits_file", "read", "require_writable"]
