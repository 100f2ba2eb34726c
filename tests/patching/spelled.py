"""A model around one formula, in a file of its own: for spellings that the corpus has not."""

from __future__ import annotations

import importlib.util
import textwrap
from pathlib import Path

import torch
from torch import nn

from tests.patching.corpus.entry import Entry

WIDTH = 24

_HEAD = """
import math
import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

C, K = 24, math.sqrt(2 / math.pi)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp, self.up, self.out = nn.Linear(C, C), nn.Linear(C, C), nn.Linear(C, C)
        self.w, self.b = nn.Parameter(torch.rand(C) + 0.5), nn.Parameter(torch.randn(C))
        self.drop, self.norm, self.rms = nn.Dropout(0.1), nn.LayerNorm(C), nn.RMSNorm(C)
        self.eps, self.beta, self.flag = 1e-3, 1.0, False

    def forward(self, x):
        u, x = self.up(x), self.inp(x)
"""


def entry(folder: Path, body: str, name: str) -> Entry:
    """A model that computes ``y`` by the lines ``body`` of ``x`` and ``u``, [2, 5, C] both."""
    if "\n" not in body and not body.startswith("y ="):
        body = f"y = {body}"
    path = folder / f"spelled_{name}.py"
    path.write_text(
        _HEAD + textwrap.indent(f"{body}\nreturn self.out(y) + self.w.sum() + self.b.sum()", " " * 8) + "\n"
    )
    return loaded(path)


def loaded(path: Path) -> Entry:
    """The model of such a file."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    def build() -> tuple[nn.Module, torch.Tensor]:
        return module.Model(), torch.randn(2, 5, WIDTH)

    return Entry(path.stem, build)
