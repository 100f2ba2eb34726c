"""Runs a program as ``python`` would, after seeding Python, NumPy and torch as ``gradscope profile --seed`` does.

python _field_start.py SEED SCRIPT [ARGUMENTS]
python _field_start.py SEED -m MODULE [ARGUMENTS]
"""

from __future__ import annotations

import random
import runpy
import sys
from pathlib import Path


def seed_generators(seed: int) -> None:
    import numpy as np
    import torch

    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def main() -> None:
    seed, *arguments = sys.argv[1:]
    seed_generators(int(seed))
    if arguments[0] == "-m":
        sys.argv = arguments[1:]
        sys.path[0] = str(Path.cwd())
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = arguments
        sys.path[0] = str(Path(arguments[0]).resolve().parent)
        runpy.run_path(arguments[0], run_name="__main__")


if __name__ == "__main__":
    main()
