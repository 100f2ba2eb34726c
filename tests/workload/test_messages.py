"""What a TARGET may name by mistake: the message for each, word for word."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from gradscope.errors import TargetError, UsageError, WorkloadError
from gradscope.workload import Script, Workload, load_target
from tests.workload.workload_fixtures import message, model_folder, write  # noqa: F401 (a fixture is used by its name)

pytestmark = pytest.mark.usefixtures("model_folder")


def test_missing_file() -> None:
    assert message(TargetError, "train.py") == (
        "there is no file train.py.\nGive a file, file.py:function, package.module:function, or -m package.module."
    )


def test_missing_file_with_a_close_name() -> None:
    assert message(TargetError, "modle.py:small") == "there is no file modle.py.\nDid you mean model.py?"
    assert message(TargetError, "model") == "there is no file model.\nDid you mean model.py?"


def test_names_longer_than_a_file_can_have() -> None:
    long = "x" * 5_000
    head = "there is no file " + "x" * 149 + "…" + "x" * 147
    give = "Give a file, file.py:function, package.module:function, or -m package.module."
    assert message(TargetError, long + ".py") == f"{head}.py.\n{give}"
    assert message(TargetError, f"{long}.py:small") == f"{head}.py.\n{give}"


def test_missing_folder(tmp_path: Path) -> None:
    assert message(TargetError, "zoo/model.py") == (
        f"there is no file zoo/model.py.\nIts folder does not exist either: {tmp_path}/zoo"
    )


def test_module_without_m() -> None:
    write("", "zoo/train.py")
    assert message(TargetError, "zoo.train") == (
        "there is no file zoo.train.\n"
        "To run the module zoo.train as a script: -m zoo.train. To profile a model of it: zoo.train:function"
    )


def test_folder() -> None:
    assert message(TargetError, ".") == ". is a folder.\nName a file in it: model.py"
    Path("empty").mkdir()
    assert message(TargetError, "empty").startswith("empty is a folder without Python files.\nGive a file, ")


def test_syntax_error() -> None:
    Path("model.py").write_text("def workload(:\n    pass\n")
    expected = "model.py:1: invalid syntax\n    def workload(:\n                 ^"
    assert message(TargetError, "model.py") == expected
    assert message(TargetError, "model.py:small") == expected


def test_syntax_error_in_a_module(tmp_path: Path) -> None:
    Path("zoo.py").write_text("x = = 1\n")
    expected = f"{tmp_path}/zoo.py:1: invalid syntax\n    x = = 1\n        ^"
    assert message(TargetError, "zoo:small") == expected
    assert message(TargetError, "zoo", module=True) == expected


def test_no_such_function() -> None:
    assert message(TargetError, "model.py:with_los") == (
        "model.py has no function with_los. Did you mean with_loss?\nIts functions: workload, with_loss, as_dict, plain"
    )
    write("x = 1\n", "empty.py")
    assert message(TargetError, "empty.py:small") == "empty.py has no function small, and no other function either."


def test_no_name_after_the_colon() -> None:
    assert message(TargetError, "model.py:").startswith("model.py: has no name after the colon.\nGive a file, ")
    assert message(TargetError, ":small").startswith(":small has no name before the colon.\nGive a file, ")


def test_missing_module(tmp_path: Path) -> None:
    assert message(TargetError, "zoo.model:small") == (
        f"no module named zoo.model in {tmp_path} or on Python's path.\n"
        "Start gradscope in the folder that contains the package, or give the file: path/to/file.py:function"
    )
    assert message(TargetError, "zoo.train", module=True) == (
        f"no module named zoo.train in {tmp_path} or on Python's path.\n"
        "Start gradscope in the folder that contains the package, or give the file itself."
    )


def test_package_without_main() -> None:
    write("", "zoo/__init__.py")
    assert message(TargetError, "zoo", module=True) == (
        "zoo is a package without __main__.py.\nName one of its modules: -m zoo.train"
    )


def test_m_with_something_else_than_a_module() -> None:
    assert message(UsageError, "zoo:small", module=True) == (
        "-m runs a whole module as a script.\nTo profile one of its functions, omit -m: zoo:small"
    )
    assert message(UsageError, "zoo/train.py", module=True) == (
        "-m takes a dotted module name, not zoo/train.py.\nTo run a file, omit -m."
    )


ACCEPTED = "Return (model, batch), (model, batch, loss), a dict with 'model' and 'batch', or a gradscope.Workload."
NONSENSE = {
    "None": ("None", f"returned None (is a return missing?).\n{ACCEPTED}"),
    "a model alone": ("nn.Linear(2, 1)", f"returned a Linear.\n{ACCEPTED}"),
    "a list": ("[nn.Linear(2, 1), torch.ones(3, 2)]", f"returned a list of 2.\n{ACCEPTED}"),
    "four things": ("(1, 2, 3, 4)", f"returned a tuple of 4.\n{ACCEPTED}"),
    "a dict without batch": ("{'model': nn.Linear(2, 1)}", f"returned a dict of 1.\n{ACCEPTED}"),
    "a dict with more": (
        "{'model': nn.Linear(2, 1), 'batch': torch.ones(3, 2), 'lr': 1}",
        "returned a dict with the unknown key 'lr'.\nKnown keys: model, batch, loss, optimizer.",
    ),
}


@pytest.mark.parametrize(("value", "expected"), NONSENSE.values(), ids=NONSENSE)
def test_factory_returns_nonsense(value: str, expected: str) -> None:
    write(f"def workload():\n    return {value}\n")
    assert message(WorkloadError, "model.py") == f"model.py: workload() {expected}"


BATCH = "A batch is a tensor, a tuple (positional), a dict (keyword), or an iterator of these."
PARTS = {
    "model": ("'net', 1", "model is a str; it must be a torch.nn.Module."),
    "class": ("nn.Linear, 1", "model is the class Linear; it must be a torch.nn.Module. Create it: Net(), not Net."),
    "meta": (
        "nn.Linear(2, 1, device='meta'), torch.ones(3, 2)",
        "model has parameters on the meta device (such as weight), which have no data.\n"
        "Allocate them with model.to_empty(device=...) and initialize them.",
    ),
    "swapped": ("torch.ones(3, 2), nn.Linear(2, 1)", "model is a float32 tensor of shape (3, 2) with "
                "requires_grad=False; it must be a torch.nn.Module."),
    "number": ("nn.Linear(2, 1), 8", f"batch is an int.\n{BATCH}"),
    "text": ("nn.Linear(2, 1), 'abc'", f"batch is a str.\n{BATCH}"),
    "array": ("nn.Linear(2, 1), torch.ones(2).numpy()", f"batch is a ndarray.\n{BATCH}"),
    "list": (
        "nn.Linear(2, 1), [torch.ones(2)]",
        "batch is a list of 1, which may be one batch or several.\n"
        "Give tuple(batch) for the positional arguments of one call, or iter(batch) for one batch per step.",
    ),
    "loss": (
        "nn.Linear(2, 1), torch.ones(2), 0.5",
        "loss is a float, which is not callable.\nGive a function loss(output, batch), or omit it.",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("value", "expected"), PARTS.values(), ids=PARTS)
def test_part_that_cannot_be_used(value: str, expected: str) -> None:
    write(f"def workload():\n    return {value}\n")
    assert message(WorkloadError, "model.py") == f"model.py: workload(): {expected}"


def test_optimizer_that_is_none_of_torchs() -> None:
    with pytest.raises(WorkloadError, match=r"^optimizer is a str; it must be a torch\.optim\.Optimizer\.$"):
        Workload(nn.Linear(2, 1), torch.ones(2), optimizer="sgd")  # type: ignore[arg-type]


def test_workload_built_wrongly_by_the_user() -> None:
    write("from gradscope import Workload\ndef workload():\n    return Workload(nn.Linear(2, 1), 3)\n")
    assert message(WorkloadError, "model.py") == f"model.py: workload(): batch is an int.\n{BATCH}"


def test_module_level_name_that_is_not_left_behind() -> None:
    write("model = nn.Linear(2, 1)\nif False:\n    batch = 1\n")
    assert message(WorkloadError, "model.py") == (
        "model.py was loaded as a model file, but importing it defined no 'batch'."
    )


def test_module_level_batch_that_is_a_number() -> None:
    write("model = nn.Linear(2, 1)\nbatch = 32\n")
    assert message(WorkloadError, "model.py") == f"model.py: batch is an int.\n{BATCH}"


def test_name_that_is_no_factory() -> None:
    write("class Net(nn.Linear): ...\nnet = nn.Linear(2, 1)\nsize = 3\n")
    assert message(WorkloadError, "model.py:Net") == (
        "model.py: Net is a model class, which has no batch.\nName a function that returns (model, batch)."
    )
    assert message(WorkloadError, "model.py:net") == (
        "model.py: net is a Linear, not a function.\nName a function that returns (model, batch)."
    )
    assert message(WorkloadError, "model.py:size") == (
        "model.py: size is an int, not a function.\nName a function that returns (model, batch)."
    )


def test_arguments_that_do_not_fit() -> None:
    assert message(UsageError, "model.py:plain", "--width", "8") == (
        "model.py: plain() takes no arguments, but was given: --width 8"
    )
    write("def workload(width, depth='2'):\n    return nn.Linear(2, 1), torch.ones(3, 2)\n")
    assert message(UsageError, "model.py") == (
        "the arguments do not match model.py: workload(width, depth='2'): missing a required argument: 'width'; "
        "none were given after '--'."
    )
    assert message(UsageError, "model.py", "1", "2", "3") == (
        "the arguments do not match model.py: workload(width, depth='2'): too many positional arguments; given: 1 2 3."
    )


# --------------------------------------------------------------------------------------------------------------------
# Device
# --------------------------------------------------------------------------------------------------------------------


def test_cuda_where_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    write("raise SystemExit('the model was built first')\ndef workload(): ...\n")
    expected = (
        f"--device cuda: torch {torch.__version__} finds no CUDA device on this machine.\n"
        "Use --device cpu; 'gradscope doctor' shows what can be measured here."
    )
    assert message(UsageError, "model.py", device="cuda") == expected
    write("", "train.py")
    assert message(UsageError, "train.py", device="cuda") == expected


def test_unknown_device() -> None:
    assert message(UsageError, "model.py", device="tpu") == "--device tpu is not known; it is auto, cpu or cuda."
    assert message(UsageError, "model.py", device="meta") == "--device meta is not known; it is auto, cpu or cuda."


def test_script_chooses_its_own_device(monkeypatch: pytest.MonkeyPatch) -> None:
    write("", "train.py")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert isinstance(load_target("train.py", device="cpu"), Script)  # there is nothing else
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert isinstance(load_target("train.py"), Script)
    assert message(UsageError, "train.py", device="cpu") == (
        "--device cpu is for model files; train.py is a training script and chooses its own device.\n"
        "Omit it, or pass the script's own option after '--'."
    )
