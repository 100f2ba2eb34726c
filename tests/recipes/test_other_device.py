"""Edge case 10, of every recipe: tensors on another GPU than the current one."""

from __future__ import annotations

import ast
import contextlib
import importlib
import pkgutil
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import gradscope.kernels
from gradscope import recipes
from gradscope.kernels.attention import triton_launch as attention
from gradscope.kernels.attention.options import AttentionOptions
from gradscope.kernels.on_device import on_device

from .test_once import CASES

KERNELS = Path(gradscope.kernels.__file__).parent
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")  # numpy, of hashes that wrap


def biased_of(q: Tensor, bias: Tensor, **options: Any) -> Any:
    return recipes.attention(q, q, q, bias, **options)


RUNS: dict[str, tuple[tuple[tuple[int, ...], ...], Callable[..., Any]]] = {
    **{case.name: (case.shapes, case.run) for case in CASES if "triton" in case.backends},
    "attention with a bias": (((1, 2, 5, 4), (5, 5)), biased_of),
}


def both_passes(name: str, device: torch.device, **options: Any) -> list[Tensor]:
    shapes, run = RUNS[name]
    torch.manual_seed(0)
    inputs = [torch.randn(shape).to(device).requires_grad_() for shape in shapes]
    found = run(*inputs, **options)
    out = found if isinstance(found, tuple) else (found,)
    return [*out, *torch.autograd.grad(out, inputs, [torch.ones_like(y) for y in out])]


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("name", RUNS)
def test_on_another_gpu(name: str) -> None:
    """Not yet run on a GPU."""
    with torch.cuda.device(0):
        here, there = (both_passes(name, torch.device("cuda", index), backend="triton") for index in (0, 1))
        assert torch.cuda.current_device() == 0
    for ours, expected in zip(there, here, strict=True):
        assert ours.device == torch.device("cuda", 1)
        torch.testing.assert_close(ours.cpu(), expected.cpu())


class Watched:
    """Which devices are entered, by on_device; how many kernels were launched."""

    def __init__(self) -> None:
        self.inside: list[torch.device] = []
        self.launched = 0
        self.fails = False

    @contextlib.contextmanager
    def on_device(self, tensor: Tensor) -> Iterator[None]:
        """In place of the real one."""
        self.inside.append(tensor.device)
        try:
            yield
        finally:
            self.inside.pop()


@pytest.fixture
def watched(triton_device: torch.device, monkeypatch: pytest.MonkeyPatch) -> Watched:
    if triton_device.type == "cuda":
        pytest.skip("kernels are watched through triton's interpreter, which is not used where there is a GPU")
    from triton.runtime.interpreter import GridExecutor

    found, run = Watched(), GridExecutor.__call__
    for module in pkgutil.walk_packages([str(KERNELS)], "gradscope.kernels."):
        if not module.name.endswith("triton_kernels"):
            loaded = importlib.import_module(module.name)
            if getattr(loaded, "on_device", None) is on_device:
                monkeypatch.setattr(loaded, "on_device", found.on_device)

    def launch(executor: Any, *args: Any, **kwargs: Any) -> None:
        assert found.inside == [triton_device]
        found.launched += 1
        if found.fails:
            raise KeyError("a kernel that cannot be compiled")
        run(executor, *args, **kwargs)

    monkeypatch.setattr(GridExecutor, "__call__", launch)
    return found


@pytest.mark.parametrize("name", RUNS)
def test_kernels_are_launched_on_the_device_of_their_tensors(
    name: str, watched: Watched, triton_device: torch.device
) -> None:
    both_passes(name, triton_device, backend="triton")
    # cross_entropy's gradient is left by forward; scaling it is the second.
    assert watched.launched >= 2 or name == "linear_cross_entropy_and_logits"
    assert watched.launched
    assert not watched.inside


@pytest.mark.parametrize("name", RUNS)
def test_the_device_is_left_on_error(name: str, watched: Watched, triton_device: torch.device) -> None:
    watched.fails = True
    with pytest.raises(KeyError, match="cannot be compiled"):
        both_passes(name, triton_device, backend="triton")
    assert not watched.inside


def test_the_mask_of_dropout(watched: Watched) -> None:
    q = torch.zeros(1, 1, 3, 8)
    attention.kept(q, q, AttentionOptions(1.0, 1, dropout_p=0.5), torch.tensor(1))
    assert watched.launched == 1 and not watched.inside


def unguarded(source: str) -> list[int]:
    """The lines of launches, ``kernel[grid](...)``, that stand in no ``with on_device(...)``."""
    tree = ast.parse(source)
    guarded: set[ast.AST] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.With):
            calls = [item.context_expr for item in node.items]
            if any(isinstance(call, ast.Call) and ast.unparse(call.func) == "on_device" for call in calls):
                guarded.update(inner for statement in node.body for inner in ast.walk(statement))
    return [
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Subscript)
        and ast.unparse(node.func.value).split(".")[-1].islower()
        and node not in guarded
    ]


def test_every_launch_is_guarded() -> None:
    """Also those of kernels that no test here runs."""
    assert unguarded("with on_device(x):\n    kernel[(1,)](x)\nkernel[(2,)](x)\n") == [3]
    files = [path for path in KERNELS.rglob("*.py") if path.name != "triton_kernels.py"]
    launching = [path for path in files if "triton_kernels import" in path.read_text(encoding="utf-8")]
    assert len(launching) >= 7
    assert {path.parent.name: found for path in files if (found := unguarded(path.read_text(encoding="utf-8")))} == {}


def test_on_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU's tensor makes it the current one; another needs nothing."""
    entered: list[torch.device] = []

    def device(index: torch.device) -> contextlib.AbstractContextManager[object]:
        entered.append(index)
        return contextlib.nullcontext()

    monkeypatch.setattr(torch.cuda, "device", device)
    other: Any = SimpleNamespace(device=torch.device("cuda", 1))
    with on_device(other), on_device(torch.zeros(1)):
        assert entered == [torch.device("cuda", 1)]
