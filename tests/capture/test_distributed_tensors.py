"""FSDP2 and tensor parallelism, on one process: the user's steps run as they do alone, and bytes are their layers'."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from gradscope.capture.environment import describe_environment, mesh_of
from gradscope.pipeline import profile_script
from gradscope.tables import Options, RunData
from gradscope.workload import Script, load_target
from tests.memory.measuring import at_peak, check_sums, in_a_loop
from tests.process_group import alone


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(19, 33), nn.Linear(33, 7)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(torch.relu(self.up(x)))
        return out


UP, DOWN = 4 * (19 * 33 + 33), 4 * (33 * 7 + 7)  # bytes of the parameters


def sharded(model: nn.Module) -> None:
    for each in (model.up, model.down, model):
        fully_shard(each)


def parallel(model: nn.Module) -> None:
    mesh = torch.distributed.init_device_mesh("cpu", (1,))
    parallelize_module(model, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})


def assert_owners(data: RunData) -> None:
    """AdamW keeps two numbers for each parameter, and one for each of the two tensors of a layer."""
    held = at_peak(data)
    assert held["up", "parameters"] == UP and held["down", "parameters"] == DOWN
    assert held["up", "optimizer state"] == 2 * UP + 8 and held["down", "optimizer state"] == 2 * DOWN + 8
    assert not [note for note in data.notes if "is not known" in note]


@pytest.mark.parametrize("spread", [sharded, parallel])
def test_loop(spread: object) -> None:
    assert callable(spread)
    torch.manual_seed(0)
    with alone():
        model, x, losses = Block(), torch.randn(21, 19), []
        spread(model)
        optimizer = torch.optim.AdamW(model.parameters(), foreach=False)

        def step() -> None:
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())

        data = in_a_loop(model, step)
        assert losses[-1] < losses[0]
        assert_owners(data)


SCRIPT = """
import torch
from tests.capture.test_distributed_tensors import Block, parallel, sharded
from tests.process_group import alone

def main():
    torch.manual_seed(0)
    model, x = Block(), torch.randn(21, 19)
    {spread}(model)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    for _ in range(50):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

with alone():
    main()
"""


@pytest.mark.parametrize("spread", ["sharded", "parallel"])
def test_script(spread: str, tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT.format(spread=spread))
    script = load_target(str(path), ())
    assert isinstance(script, Script)
    outcome = profile_script(script, Options(steps=1, warmup=1))
    assert outcome.error is None and outcome.report is not None
    data = outcome.report.data
    check_sums(data)
    assert_owners(data)


def test_mesh() -> None:
    """Read after the group is gone, as at the end of a script; the part of a mesh is not said beside the whole."""
    with alone():
        mesh = torch.distributed.init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "tp"))
        one, both = Block(), nn.Sequential(nn.Linear(19, 33), nn.LayerNorm(33))
        plain = [parameter.detach() for parameter in one.parameters()]
        fully_shard(one)
        parallelize_module(both, mesh["tp"], {"0": ColwiseParallel()})
        only = mesh_of(both.parameters())
        fully_shard(both, mesh=mesh["dp"])  # the norm lies on "dp" alone
    assert mesh_of(plain) is None and mesh_of([]) is None
    assert mesh_of(one.parameters()) == "1" and only == "1 tp" and mesh_of(both.parameters()) == "1 dp x 1 tp"
    assert mesh_of([*one.parameters(), *both.parameters()]) == "1 dp x 1 tp, 1"
    device = torch.device("cpu")
    assert "mesh" not in describe_environment(device, None)
    assert describe_environment(device, None, (0, 2), "2")["mesh"] == "2"
