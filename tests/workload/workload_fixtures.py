"""A folder with a model file in it, and how to load from it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gradscope.errors import GradscopeError
from gradscope.workload import Workload, load_target

FACTORY = """
import torch
from torch import nn

class Net(nn.Linear):
    pass

def workload(width="2", *rest):
    return Net(int(width), 1), torch.ones(3, int(width))

def with_loss():
    return Net(2, 1), torch.ones(3, 2), lambda output, batch: output.sum()

def as_dict():
    model = Net(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return {"model": model, "batch": (torch.ones(3, 2),), "optimizer": optimizer}

def plain():
    return Net(2, 1), torch.ones(3, 2)
"""


@pytest.fixture
def model_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Work in a folder with model.py; fail a test that changes sys.path or sys.argv; forget what it imported."""
    modules, path, argv = set(sys.modules), list(sys.path), list(sys.argv)
    monkeypatch.chdir(tmp_path)
    Path("model.py").write_text(FACTORY)
    yield
    for name in set(sys.modules) - modules:
        places = [getattr(sys.modules[name], "__file__", None), *getattr(sys.modules[name], "__path__", [])]
        if any(str(place).startswith(str(tmp_path)) for place in places):
            del sys.modules[name]
    assert sys.path == path
    assert sys.argv == argv


def load(target: str, *args: str, **options: Any) -> Workload:
    loaded = load_target(target, args, device="cpu", **options)
    assert isinstance(loaded, Workload)
    return loaded


def message(kind: type[GradscopeError], target: str, *args: str, **options: Any) -> str:
    with pytest.raises(kind) as raised:
        load_target(target, args, **options)
    assert 1 <= len(str(raised.value).splitlines()) <= 3
    return str(raised.value)


def write(text: str, name: str = "model.py") -> None:
    Path(name).parent.mkdir(parents=True, exist_ok=True)
    Path(name).write_text("import torch\nfrom torch import nn\n" + text)
