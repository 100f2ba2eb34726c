"""Loading what a TARGET names."""

from __future__ import annotations

import pickle
import random
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from gradscope.workload import Script, import_path, load_target, target
from tests.workload.workload_fixtures import load, model_folder, write  # noqa: F401 (a fixture is used by its name)

pytestmark = pytest.mark.usefixtures("model_folder")


def test_file_with_a_factory() -> None:
    made = load("model.py")
    assert type(made.model).__name__ == "Net"
    assert made.batch.shape == (3, 2)
    assert made.loss is None
    assert made.target == "model.py"
    assert made.folder == Path.cwd()


def test_named_function() -> None:
    made = load("model.py:with_loss")
    assert made.loss is not None
    assert made.loss(torch.ones(2), None) == 2
    assert made.target == "model.py:with_loss"


def test_dict() -> None:
    made = load("model.py:as_dict")
    assert isinstance(made.optimizer, torch.optim.SGD)
    assert isinstance(made.batch, tuple)


def test_workload_returned_or_named() -> None:
    write(
        "from gradscope import Workload\n"
        "ready = Workload(nn.Linear(2, 1), torch.ones(3, 2), target='mine')\n"
        "def workload():\n    return ready\n"
    )
    assert load("model.py").target == "mine"
    assert load("model.py:ready").target == "mine"


def test_module_and_function() -> None:
    write("def small():\n    return nn.Linear(2, 1), torch.ones(3, 2)\n", "models/zoo.py")
    made = load("models.zoo:small")
    assert made.target == "models.zoo:small"
    assert made.folder == Path.cwd()


def test_static_method_as_factory() -> None:
    write("class Zoo:\n    @staticmethod\n    def small():\n        return nn.Linear(2, 1), torch.ones(3, 2)\n")
    assert isinstance(load("model.py:Zoo.small").model, nn.Linear)


def test_module_level_model_and_batch() -> None:
    write(
        "model = nn.Linear(2, 1)\nbatch = {'input': torch.ones(3, 2)}\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "def loss(output, batch):\n    return output.sum()\n"
    )
    made = load("model.py")
    assert made.loss is not None
    assert made.optimizer is not None
    assert set(made.batch) == {"input"}


def test_a_loss_that_is_a_number_is_not_the_function() -> None:
    write("model = nn.Linear(2, 1)\nbatch = torch.ones(3, 2)\nloss = model(batch).sum()\noptimizer = 'sgd'\n")
    made = load("model.py")
    assert made.loss is None
    assert made.optimizer is None


def test_script_is_not_run() -> None:
    write("raise SystemExit('ran')\n", "train.py")
    made = load_target("train.py", ["--flag"])
    assert made == Script(Path("train.py"), None, ("--flag",), "train.py")


def test_module_script_is_not_run() -> None:
    write("raise SystemExit('ran')\n", "pkg/train.py")
    assert load_target("pkg.train", ["a"], module=True) == Script(None, "pkg.train", ("a",), "pkg.train")


def test_arguments_reach_the_factory_as_strings() -> None:
    assert load("model.py", "5").batch.shape == (3, 5)


def test_model_file_never_sees_our_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["gradscope", "profile", "model.py"])
    write(
        "import sys\nat_import = list(sys.argv)\n"
        "def workload(*args):\n    assert sys.argv == at_import == ['model.py', *args]\n"
        "    return nn.Linear(2, 1), torch.ones(3, 2)\n"
    )
    load("model.py", "--width", "8")
    monkeypatch.undo()


def test_neighbours_are_imported_from_the_files_own_folder() -> None:
    write(
        "from layers import Net\ndef workload():\n    import late\n    return Net(2, 1), late.batch\n", "zoo/model.py"
    )
    write("from torch.nn import Linear as Net\n", "zoo/layers.py")
    write("batch = torch.ones(3, 2)\n", "zoo/late.py")
    assert isinstance(load("zoo/model.py").model, nn.Linear)


def test_neighbours_that_the_forward_imports_are_found_while_running() -> None:
    write(
        "class Net(nn.Linear):\n    def forward(self, x):\n        import later\n        return super().forward(x)\n"
        "def workload():\n    return Net(2, 1), torch.ones(3, 2)\n",
        "zoo/model.py",
    )
    write("", "zoo/later.py")
    made = load("zoo/model.py")
    with pytest.raises(ModuleNotFoundError):
        made.model(made.batch)
    with import_path(made.folder):
        made.model(made.batch)


def test_relative_imports_in_a_package() -> None:
    write("from ..base import Net\ndef workload():\n    return Net(2, 1), torch.ones(3, 2)\n", "zoo/small/model.py")
    write("from torch.nn import Linear as Net\n", "zoo/base.py")
    write("", "zoo/__init__.py")
    write("", "zoo/small/__init__.py")
    made = load("zoo/small/model.py")
    assert isinstance(made.model, nn.Linear)
    assert "zoo.small.model" in sys.modules


def test_classes_of_the_file_pickle_and_dataclasses_work() -> None:
    write(
        "import dataclasses, pickle\n"
        "@dataclasses.dataclass\nclass Config:\n    width: 'int' = 2\n"
        "class Net(nn.Linear): ...\n"
        "assert pickle.loads(pickle.dumps(Config(3))) == Config(3)\n"
        "def workload():\n    return Net(Config().width, 1), torch.ones(3, 2)\n"
    )
    made = load("model.py")
    assert type(pickle.loads(pickle.dumps(made.model))) is type(made.model)
    assert type(made.model).__module__ == "model"


@pytest.mark.parametrize("name", ["json.py", "my-model.py", "model.v2.py"])
def test_file_names_that_no_import_would_find(name: str) -> None:
    write("def workload():\n    return nn.Linear(2, 1), torch.ones(3, 2)\n", name)
    import json

    load(name)
    assert sys.modules["json"] is json


def test_file_is_read_anew_each_time() -> None:
    assert load("model.py").batch.shape == (3, 2)
    write("def workload():\n    return nn.Linear(7, 1), torch.ones(3, 7)\n")
    assert load("model.py").batch.shape == (3, 7)
    assert not Path("__pycache__").exists()


def test_seed_covers_all_generators() -> None:
    write(
        "import random\nimport numpy as np\n"
        "def workload():\n    model = nn.Linear(2, 1)\n    model.seen = random.random(), np.random.rand()\n"
        "    return model, torch.rand(3, 2)\n"
    )
    state = random.getstate(), torch.get_rng_state()
    first, again, other = load("model.py", seed=3), load("model.py", seed=3), load("model.py", seed=4)
    random.setstate(state[0])
    torch.set_rng_state(state[1])
    assert torch.equal(first.batch, again.batch)
    assert first.model.seen == again.model.seen
    assert torch.equal(first.model.weight, again.model.weight)  # type: ignore[arg-type]
    assert first.model.seen != other.model.seen
    assert not torch.equal(first.batch, other.batch)


def test_users_own_error_goes_out_as_it_is() -> None:
    write("def workload():\n    raise KeyError('mine')\n")
    with pytest.raises(KeyError, match="mine"):
        load("model.py")


def test_a_file_that_failed_to_import_is_forgotten() -> None:
    write("import not_there\ndef workload(): ...\n")
    with pytest.raises(ModuleNotFoundError, match="not_there"):
        load("model.py")
    assert "model" not in sys.modules


def test_missing_import_of_a_module_is_the_users_error() -> None:
    write("import not_there\n", "zoo/model.py")
    with pytest.raises(ModuleNotFoundError, match="not_there"):
        load("zoo.model:small")


def test_model_and_loss_are_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(target, "resolve_device", lambda name: torch.device("meta"))
    write("def workload():\n    return nn.Linear(2, 1), torch.ones(3, 2), nn.Bilinear(1, 2, 1)\n")
    made = load("model.py")
    assert isinstance(made.loss, nn.Module)
    assert {p.device.type for p in [*made.model.parameters(), *made.loss.parameters()]} == {"meta"}


def test_a_model_that_the_user_has_placed_stays() -> None:
    write(
        "class Net(nn.Linear):\n    def to(self, *args):\n        raise AssertionError('moved')\n"
        "def workload():\n    net = Net(2, 1)\n    net.register_buffer('cache', torch.ones(2, device='meta'))\n"
        "    return net, torch.ones(3, 2)\n"
    )
    load_target("model.py", device="auto")
