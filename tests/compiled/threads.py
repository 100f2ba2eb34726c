"""What tests need of this torch that compile in another thread than the main one."""

from __future__ import annotations

import pytest
import torch

# torch 2.11 alone: a thread that has compiled a function whose graph breaks has ended, and what is compiled next is a
# segmentation fault.
threads_may_compile = pytest.mark.skipif(
    torch.__version__ < (2, 12), reason="this torch ends the process where it compiles behind a thread that has"
)
