"""Graph networks: sparse matmuls, attention over edges, a custom autograd function."""

from __future__ import annotations

from field_programs.data import cora
from field_programs.program import Program

_GAT = ("Diego999/pyGAT", "3664f2dc90cbf971564c0bf186dc794f12446d0c")
_CORA = cora("data/cora", 1600)
_NO_DATA = ("data/cora/*",)

PROGRAMS: tuple[Program, ...] = (
    Program(
        "pygcn",
        "tkipf/pygcn",
        "1600b5b748b3976413d1e307540ccc62605b4d6d",
        "train.py --epochs 24",
        folder="pygcn",
        without=_NO_DATA,
        data=cora("../data/cora", 1600),
        needs=("scipy",),
        environment={"PYTHONPATH": ".."},
    ),
    Program(
        "pygat", *_GAT, "train.py --epochs 22 --nb_heads 2", without=_NO_DATA, data=_CORA, needs=("scipy",), limit_s=600
    ),
    # With two threads the sums of its sparse products differ in their last bits from run to run.
    Program(
        "pygat-sparse",
        *_GAT,
        "train.py --epochs 22 --sparse",
        without=_NO_DATA,
        data=_CORA,
        needs=("scipy",),
        environment={"OMP_NUM_THREADS": "1"},
    ),
)
