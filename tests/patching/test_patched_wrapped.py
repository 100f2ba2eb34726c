"""A patched model under other types, transforms, wrappers and compilers."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import gradscope
from tests.patching.exactness import TOLERANCE, check_exact, difference, patched, results
from tests.patching.gpt_block import Model, x
from tests.process_group import alone


def _under(name: str, found: dict[str, Tensor]) -> dict[str, Tensor]:
    """Gradients as a wrapper names them."""
    return {each if each in {"loss", "output"} else f"{name}.{each}": value for each, value in found.items()}


# ----------------------------------------------------------------------------------------------------------------------
# Other types
# ----------------------------------------------------------------------------------------------------------------------


def test_double_after_patching():
    # float64 throughout: the recipe holds no float32
    check_exact(Model(), x(), nn.Module.double, x(dtype=torch.float64), tolerance=1e-12)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 2e-2), (torch.float16, 2e-3)])
def test_half_after_patching(dtype, tolerance):  # 8 and 11 bits: a few roundings of the largest number
    check_exact(Model(), x(), lambda model: model.to(dtype), x(dtype=dtype), tolerance=tolerance)


@pytest.mark.parametrize("recorded", [False, True])
def test_autocast(recorded):
    model, original = Model(), Model()
    with torch.autocast("cpu", torch.bfloat16, enabled=recorded):
        patches = patched(model, x())
    assert patches.table.supported.all()
    with torch.autocast("cpu", torch.bfloat16):
        assert model(x()).dtype == original(x()).dtype == torch.bfloat16
        assert difference(results(original, x()), results(model, x())) <= 3e-2  # bfloat16 holds 8 bits


# ----------------------------------------------------------------------------------------------------------------------
# Transforms and wrappers
# ----------------------------------------------------------------------------------------------------------------------


def test_functional_call_takes_other_parameters():
    model, original = Model(), Model()
    patched(model, x())
    others = {name: each.detach() * 0.5 for name, each in model.named_parameters()}
    assert torch.allclose(functional_call(model, others, x()), functional_call(original, others, x()), atol=1e-6)


def test_gradient_by_torch_func():
    model, original = Model(), Model()
    patched(model, x())
    given = {name: each.detach() for name, each in model.named_parameters()}
    found = [grad(lambda p, m=m: functional_call(m, p, x()).square().mean())(given) for m in (original, model)]
    top = max(float(each.abs().max()) for each in found[0].values())
    for name, each in found[0].items():
        assert float((each - found[1][name]).abs().max()) <= TOLERANCE * top, name


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoint(reentrant):
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = Model()

        def forward(self, x):
            return checkpoint(self.model, x.requires_grad_(), use_reentrant=reentrant)

    check_exact(Checkpointed(), x())


@pytest.fixture
def one_process():
    with alone():
        yield


def test_distributed_data_parallel(one_process):
    model, original = Model(), Model()
    patched(model, x())
    wrapped = results(DistributedDataParallel(model), x())
    assert difference(_under("module", results(original, x())), wrapped) <= TOLERANCE


def test_a_wrapped_model_is_patched_inside(one_process):
    model = DistributedDataParallel(Model())
    assert patched(model, x()).table.path.tolist() == ["module.attn"]


def test_compiled_as_a_whole():
    model, original = Model(), Model()
    patched(model, x())
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    found = results(compiled, x())
    assert difference(_under("_orig_mod", results(original, x())), found) <= TOLERANCE


@pytest.mark.parametrize("made_by", ["DataParallel", "copy.copy"])
def test_shallow_copies_run_on_their_own_parameters(made_by: str) -> None:
    """Both have the attributes of the original, and so its method."""
    model = Model()
    patched(model, x())
    other = Model()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(0.5)
    found = []
    for original, weights in ((model, other), (Model(), other)):
        replicas = {
            each: each._replicate_for_data_parallel() if made_by == "DataParallel" else copy.copy(each)
            for each in original.modules()
        }
        for each, replica in replicas.items():
            path = next(path for path, inner in original.named_modules() if inner is each)
            replica._modules = {name: replicas.get(child) for name, child in each._modules.items()}
            replica._parameters = {}
            for name, _ in each.named_parameters(recurse=False):
                setattr(replica, name, weights.get_submodule(path).get_parameter(name).detach())
        found.append(replicas[original].eval()(x()).detach())
    torch.testing.assert_close(*found)


class Classifies(nn.Module):
    def __init__(self, head: nn.Module) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(8, 16), head

    def forward(self, x: Tensor) -> Tensor:
        return F.log_softmax(self.head(self.body(x).relu()), dim=1)


@pytest.mark.filterwarnings("ignore:FSDP is switching to use `NO_SHARD`:UserWarning")
@pytest.mark.filterwarnings("ignore:The `NO_SHARD` sharding strategy is deprecated:FutureWarning")
def test_a_head_that_fsdp_wraps_by_itself_is_looked_at() -> None:
    """The last call of the wrapping module puts a hook on the result, and makes nothing."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    def loss(out: Tensor, _batch: Tensor) -> Tensor:
        return F.nll_loss(out, torch.zeros(4, dtype=torch.long))

    with alone():
        head = FullyShardedDataParallel(nn.Linear(16, 10), device_id=torch.device("cpu"))
        report = gradscope.profile(Classifies(head), torch.randn(4, 8), loss=loss, steps=1)
    assert not any("recorded step could not be read" in note for note in report.data.notes), report.data.notes
