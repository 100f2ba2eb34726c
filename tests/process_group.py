"""torch.distributed with this process alone."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def alone() -> Iterator[None]:
    """A gloo group of one process for the length of the block; the excepthook that torch puts in place is taken off.

    What its threads did last may hold Python objects for a moment. Were the group let go of in that moment, by whoever
    holds the interpreter's lock, both would wait for each other for ever.
    """
    hook = sys.excepthook
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        torch.distributed.barrier()
        time.sleep(0.1)
        torch.distributed.destroy_process_group()
        sys.excepthook = hook
