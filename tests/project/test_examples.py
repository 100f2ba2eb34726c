"""The examples: each runs as plain Python, is a workload of the kind it says, and does what its docstring tells."""

from __future__ import annotations

import ast
import math
import re
import runpy
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from gradscope.workload import Script, Workload, call_model, file_kind, load_target, scalar_loss

FOLDER = Path(__file__).parents[2] / "examples"
FILES = sorted(path.name for path in FOLDER.glob("*.py"))
SCRIPTS = {"names.py"}
MODEL_FILES = [name for name in FILES if name not in SCRIPTS]

# Arguments that make a script's run short; the sizes of the others are short as they are.
SHORT = {
    "gpt.py": ["--steps", "2"],
    "names.py": ["--steps", "4", "--batch-size", "4", "--n-layer", "1", "--n-embd", "16", "--eval-every", "2"],
}

# The loss of a model that has learned nothing: every class equally likely.
UNTRAINED_LOSS = {"gpt.py": math.log(256), "recurrent.py": math.log(256)}


@pytest.fixture(autouse=True)
def forget_imports() -> Iterator[None]:
    """An example is imported afresh by each test, and two of them must not meet in ``sys.modules``."""
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if Path(getattr(sys.modules[name], "__file__", None) or "").parent == FOLDER:
            del sys.modules[name]


def load(target: str) -> Workload:
    loaded = load_target(str(FOLDER / target), device="cpu", seed=0)
    assert isinstance(loaded, Workload)
    return loaded


def step(workload: Workload) -> tuple[torch.Tensor, str]:
    """One forward and backward, as gradscope makes them."""
    output = call_model(workload.model, workload.batch)
    loss, kind = scalar_loss(output, workload.batch, workload.loss)
    loss.backward()
    return loss.detach(), kind


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    found = {}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        found[name] = parameter.grad.clone()
    return found


def commands() -> list[tuple[str, str]]:
    """Every (example, target) that a docstring tells the reader to profile."""
    found = []
    for name in FILES:
        docstring = ast.get_docstring(ast.parse((FOLDER / name).read_text())) or ""
        found += [(name, target) for target in re.findall(r"gradscope profile examples/(\S+)", docstring)]
    return found


# --------------------------------------------------------------------------------------------------------------------
# All of them
# --------------------------------------------------------------------------------------------------------------------


def run_as_main(name: str, args: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [name, *args])
    runpy.run_path(str(FOLDER / name), run_name="__main__")


@pytest.mark.parametrize("name", FILES)
def test_runs_as_plain_python(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    run_as_main(name, SHORT.get(name, []), monkeypatch)
    numbers = re.findall(r"\d+\.\d+(?:e[+-]\d+)?", capsys.readouterr().out)
    assert numbers and all(math.isfinite(float(number)) for number in numbers)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", FILES)
def test_knows_nothing_of_gradscope(name: str) -> None:
    tree = ast.parse((FOLDER / name).read_text())
    imported = [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    imported += [node.module or "." for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    assert {module.partition(".")[0] for module in imported} <= {*sys.stdlib_module_names, "torch"}


@pytest.mark.parametrize("name", FILES)
def test_is_the_kind_of_file_that_it_says(name: str) -> None:
    assert file_kind(FOLDER / name) == ("script" if name in SCRIPTS else "workload")


@pytest.mark.parametrize("name", FILES)
def test_docstring_gives_commands_that_exist(name: str) -> None:
    mine = [target for owner, target in commands() if owner == name]
    assert name in [target.partition(":")[0] for target in mine]
    defined = {node.name for node in ast.parse((FOLDER / name).read_text()).body if isinstance(node, ast.FunctionDef)}
    for target in mine:
        file, _, factory = target.partition(":")
        assert file == name and (not factory or factory in defined), target


@pytest.mark.parametrize("target", sorted({target for _, target in commands()} - SCRIPTS - {"gpt.py:full"}))
def test_workload_makes_one_step(target: str) -> None:
    workload = load(target)
    loss, kind = step(workload)
    assert kind == ("given" if workload.loss else "output")
    grads = gradients(workload.model)
    assert all(grad.isfinite().all() for grad in grads.values())
    # A bias before a BatchNorm or of the keys has none but rounding; every matrix has one.
    assert all(grad.any() for name, grad in grads.items() if grad.dim() > 1), "a weight that nothing depends on"
    expected = UNTRAINED_LOSS.get(target)
    assert expected is None or loss.item() == pytest.approx(expected, rel=0.1)


@pytest.mark.parametrize("name", MODEL_FILES)
def test_workload_is_the_same_each_time(name: str) -> None:
    losses = [step(load(name))[0] for _ in range(2)]
    assert losses[0].equal(losses[1])


# --------------------------------------------------------------------------------------------------------------------
# gpt.py
# --------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def gpt() -> ModuleType:
    return sys.modules[type(load("gpt.py").model).__module__]


def tiny(gpt: ModuleType, **sizes: Any) -> Any:
    defaults = {"n_layer": 2, "n_head": 2, "n_embd": 16, "block_size": 24, "batch_size": 3}
    return gpt.Config(**{**defaults, **sizes})


def test_gpt_has_the_names_of_gpt_2_and_a_tied_head(gpt: ModuleType) -> None:
    model = gpt.GPT(tiny(gpt))
    names = {name for name, _ in model.named_modules()}
    block = ("ln_1", "attn", "attn.c_attn", "attn.c_proj", "ln_2", "mlp", "mlp.c_fc", "mlp.c_proj")
    assert {"transformer.wte", "transformer.wpe", "transformer.ln_f", "lm_head"} <= names
    assert {f"transformer.h.{layer}.{part}" for layer in range(2) for part in block} <= names
    assert model.lm_head.weight is model.transformer["wte"].weight


def test_gpt_attention_is_the_fused_one(gpt: ModuleType) -> None:
    config = tiny(gpt, dropout=0.0)
    attention = gpt.CausalSelfAttention(config).double()
    x = torch.randn(3, 24, 16, dtype=torch.float64)
    heads = [part.view(3, 24, 2, 8).transpose(1, 2) for part in attention.c_attn(x).split(16, dim=2)]
    fused = F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).reshape(3, 24, 16)
    torch.testing.assert_close(attention(x), attention.c_proj(fused))


def test_gpt_sees_no_later_token(gpt: ModuleType) -> None:
    model = gpt.GPT(tiny(gpt)).eval()
    idx = torch.randint(256, (1, 24))
    changed = idx.clone()
    changed[0, 12] = (idx[0, 12] + 1) % 256
    before, after = model(idx), model(changed)
    assert before.shape == (1, 24, 256)
    assert before[:, :12].equal(after[:, :12]) and not before[:, 12:].equal(after[:, 12:])


def test_gpt_learns(gpt: ModuleType) -> None:
    torch.manual_seed(0)
    config = tiny(gpt)
    model, batch = gpt.make(config)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses = []
    for _ in range(30):
        optimizer.zero_grad()
        loss = model(**batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 1


def test_gpt_reads_real_text_and_predicts_the_next_byte(gpt: ModuleType) -> None:
    config = tiny(gpt)
    data = gpt.encode(config)
    assert "assert" in bytes(data.tolist()).decode()
    batch = gpt.get_batch(data, config)
    assert batch["idx"].shape == batch["targets"].shape == (3, 24)
    assert batch["idx"][:, 1:].equal(batch["targets"][:, :-1])


def test_gpt_full_is_gpt_2_small(gpt: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    def without_memory(config: Any, build: Callable[[Any], nn.Module] = gpt.GPT) -> nn.Module:
        with torch.device("meta"):
            return build(config)

    monkeypatch.setattr(gpt, "GPT", without_memory)
    model, batch = gpt.full()
    assert sum(parameter.numel() for parameter in model.parameters()) == 124_439_808
    assert len(model.transformer["h"]) == 12 and model.transformer["h"][0].attn.n_head == 12
    assert batch["idx"].shape == batch["targets"].shape == (8, 1024)
    assert batch["idx"].max() < model.lm_head.out_features == 50257
    assert batch["idx"].unique().numel() > 500, "words, not bytes"


# --------------------------------------------------------------------------------------------------------------------
# names.py
# --------------------------------------------------------------------------------------------------------------------


def test_names_learns_as_a_script_of_its_own(tmp_path: Path) -> None:
    """In a fresh interpreter, from another folder, with warnings as errors."""
    command = [sys.executable, "-I", "-W", "error", str(FOLDER / "names.py"), "--n-layer", "1", "--n-embd", "32"]
    command += ["--steps", "61", "--eval-every", "20", "--learning-rate", "5e-3"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=600)  # a hang
    assert done.returncode == 0, done.stderr
    training = [float(loss) for loss in re.findall(r"training loss (\S+),", done.stdout)]
    testing = [float(loss) for loss in re.findall(r"test loss (\S+)", done.stdout)]
    assert len(training) == len(testing) == 4
    assert training[0] == pytest.approx(math.log(27), rel=0.1)
    assert training[-1] < training[0] - 0.5 and testing[-1] < testing[0] - 0.5
    assert re.search(r"^\d+ words, \d+ parameters$", done.stdout, re.MULTILINE)
    assert re.search(r"^made up: ", done.stdout, re.MULTILINE)


def test_names_is_loaded_as_a_script_and_not_run(capsys: pytest.CaptureFixture[str]) -> None:
    script = load_target(str(FOLDER / "names.py"), ["--steps", "3"], device="cpu")
    assert isinstance(script, Script)
    assert capsys.readouterr().out == ""


def test_names_rows_are_words() -> None:
    script = runpy.run_path(str(FOLDER / "names.py"), run_name="names")
    x, y = script["make_data"]()
    assert len(x) > 2000
    words = {"".join(chr(96 + letter) for letter in row if letter) for row in x.tolist()}
    assert len(words) == len(x) and {"class", "import", "yield"} <= words
    for row, target in zip(x[:50].tolist(), y[:50].tolist(), strict=True):
        length = sum(letter > 0 for letter in row)
        assert target == [*row[1 : length + 1], 0, *[-1] * (len(row) - length - 1)]


# --------------------------------------------------------------------------------------------------------------------
# attention.py
# --------------------------------------------------------------------------------------------------------------------


class Allocated(TorchDispatchMode):
    """Bytes of the new memory that operations give out, views and in-place ones left out."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0
        self._kept: dict[int, Any] = {}  # keeps storages alive, so that no address is used twice

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for tensor in tree_leaves((args, kwargs)):
            self._see(tensor)
        result = func(*args, **(kwargs or {}))
        self.bytes += sum(self._see(tensor) for tensor in tree_leaves(result))
        return result

    def _see(self, tensor: Any) -> int:
        if not isinstance(tensor, torch.Tensor):
            return 0
        storage = tensor.untyped_storage()
        if storage._cdata in self._kept:
            return 0
        self._kept[storage._cdata] = storage
        return storage.nbytes()


def allocations(workload: Workload) -> tuple[int, int]:
    """Bytes allocated in forward with the loss, and in backward."""
    with Allocated() as forward:
        loss, _ = scalar_loss(call_model(workload.model, workload.batch), workload.batch, workload.loss)
    with Allocated() as backward:
        loss.backward()
    return forward.bytes, backward.bytes


def saved_bytes(workload: Workload) -> int:
    storages: dict[int, Any] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        storages[storage._cdata] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        call_model(workload.model, workload.batch)
    return sum(storage.nbytes() for storage in storages.values())


def test_attention_variants_are_equal() -> None:
    copying, non_copying = load("attention.py:copying"), load("attention.py:non_copying")
    assert type(copying.model[0]) is not type(non_copying.model[0])
    assert copying.batch.equal(non_copying.batch)
    assert step(copying)[0].item() == pytest.approx(step(non_copying)[0].item(), rel=1e-6)
    grads, others = gradients(copying.model), gradients(non_copying.model)
    assert grads.keys() == others.keys()
    for name, grad in grads.items():
        # The bound is float32's: the sums over 1024 tokens are the same, their order need not be.
        torch.testing.assert_close(grad, others[name], rtol=1e-4, atol=1e-6 * grad.abs().max().item(), msg=name)


def test_attention_is_causal() -> None:
    for target in ("attention.py:copying", "attention.py:non_copying"):
        model, x = load(target).model, torch.randn(1, 16, 256)
        changed = x.clone()
        changed[0, 8] += 1
        before, after = model(x), model(changed)
        torch.testing.assert_close(before[:, :8], after[:, :8])
        assert (before[:, 8:] - after[:, 8:]).abs().max() > 1e-3


def test_attention_differs_where_its_docstring_says() -> None:
    """The slices' backward allocates; forward and what is saved are the same, since the product copies views itself."""
    copying, non_copying = load("attention.py:copying"), load("attention.py:non_copying")
    assert saved_bytes(copying) == saved_bytes(non_copying)
    (forward, backward), (other_forward, other_backward) = allocations(copying), allocations(non_copying)
    assert forward == other_forward
    # Two layers, each three slices and two sums of a whole qkv of float32 instead of one concatenation.
    assert backward - other_backward == 2 * (3 + 2 - 1) * copying.batch.numel() * 3 * 4


# --------------------------------------------------------------------------------------------------------------------
# convnet.py, recurrent.py, checkpoint.py
# --------------------------------------------------------------------------------------------------------------------


def test_convnet_is_one_that_backward_hooks_break() -> None:
    workload = load("convnet.py")
    kinds = [type(module) for module in workload.model.modules()]
    assert nn.BatchNorm2d in kinds and nn.Conv2d in kinds
    assert all(module.inplace for module in workload.model.modules() if isinstance(module, nn.ReLU))
    for module in workload.model.modules():
        module.register_full_backward_hook(lambda *_: None)
    with pytest.raises(RuntimeError, match="is a view and is being modified inplace"):
        step(workload)


def test_convnet_learns_with_its_optimizer() -> None:
    workload = load("convnet.py")
    assert workload.optimizer is not None
    losses = []
    for _ in range(6):
        workload.optimizer.zero_grad()
        losses.append(step(workload)[0].item())
        workload.optimizer.step()
    assert min(losses[1:]) < losses[0] - 0.1


def count_calls(model: nn.Module) -> dict[str, int]:
    """Counts that grow as the modules of ``model`` are called."""
    calls = dict.fromkeys((name for name, _ in model.named_modules()), 0)

    def count(name: str) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            calls[name] += 1

        return hook

    for name, module in model.named_modules():
        module.register_forward_pre_hook(count(name))
    return calls


def test_recurrent_calls_its_cell_once_a_step_in_time() -> None:
    workload = load("recurrent.py")
    calls = count_calls(workload.model)
    step(workload)
    assert calls == {"": 1, "embed": 1, "cell": 32, "lstm": 1, "head": 1}


def test_checkpoint_variants_are_equal() -> None:
    plain = load("checkpoint.py:plain")
    loss, _ = step(plain)
    expected = gradients(plain.model)
    for target in ("checkpoint.py", "checkpoint.py:reentrant"):
        workload = load(target)
        assert step(workload)[0].equal(loss)
        for name, grad in gradients(workload.model).items():
            torch.testing.assert_close(grad, expected[name], rtol=1e-5, atol=1e-9, msg=name)


@pytest.mark.parametrize(("factory", "times"), [("workload", 2), ("reentrant", 2), ("plain", 1)])
def test_checkpoint_runs_its_blocks_again(factory: str, times: int) -> None:
    workload = load(f"checkpoint.py:{factory}")
    calls = count_calls(workload.model)
    step(workload)
    assert calls.pop("") == calls.pop("embed") == 1
    calls.pop("blocks")
    assert set(calls.values()) == {times}


def test_checkpoint_saves_memory() -> None:
    sizes = [saved_bytes(load(f"checkpoint.py:{factory}")) for factory in ("workload", "reentrant", "plain")]
    assert max(sizes[:2]) < 0.5 * sizes[2]
