"""Models of known costs in several processes: python costs.py FOLDER RANK RANKS CASE...

Each rank writes FOLDER/CASE.rankN.json. Layer 1 takes 40 ms more in the backward pass of the last rank. CASE.idle is
the same case without any of these costs: what is left of a layer there is its own operators.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

WIDTH = 64
COSTS = (4, 6, 3)
MORE = 40
BIG = 1024
IDLE = ".idle"
NETWORK = ThreadPoolExecutor(1)


class Takes(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ms: float) -> Tensor:
        ctx.ms = ms
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        if ctx.ms:
            time.sleep(ctx.ms / 1e3)  # for there may be fewer cores than ranks
        return grad, None


class Layer(nn.Module):
    def __init__(self, ms: float, unused: bool = False) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.unused = nn.Linear(WIDTH, WIDTH) if unused else None
        self.ms = ms

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(Takes.apply(self.up(x).relu(), self.ms))
        return out


def network(unused: bool = False) -> nn.Sequential:
    torch.manual_seed(0)
    last = dist.get_rank() == dist.get_world_size() - 1
    more = (0, MORE if last else 0, 0)
    return nn.Sequential(*(Layer(ms + extra, unused) for ms, extra in zip(COSTS, more, strict=True)))


def idle(model: nn.Module) -> nn.Module:
    for module in model.modules():
        if isinstance(module, Layer):
            module.ms = 0
    return model


def ddp(**options: Any) -> nn.Module:
    return nn.parallel.DistributedDataParallel(network(bool(options)), bucket_cap_mb=1, **options)


class Big(nn.Module):
    """Layers of 4 MiB and of 20 ms in backward, registered as forward calls them or the other way round."""

    def __init__(self, *, turned: bool) -> None:
        super().__init__()
        self.names = [f"layer{number}" for number in range(4)]
        for name in sorted(self.names, reverse=turned):
            self.add_module(name, nn.Linear(BIG, BIG))

    def forward(self, x: Tensor) -> Tensor:
        for name in self.names:
            x = getattr(self, name)(Takes.apply(x, 20))
        return x


def buckets(*, turned: bool = False, hook: Callable[..., Any] | None = None, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(Big(turned=turned), **options)
    model.register_comm_hook(None, hook or slow_network)
    return model


def mixed_up(_, bucket):  # type: ignore[no-untyped-def]  # as below
    """Of two buckets it sends the first with the second, and the third twice."""
    if bucket.index() == 0:
        done: torch.futures.Future[Tensor] = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done
    again = dist.all_reduce(torch.zeros(1), async_op=True) if bucket.index() == 2 else None
    reduced = slow_network(_, bucket)
    if again is not None:
        again.wait()
    return reduced


def slow_network(_, bucket):  # type: ignore[no-untyped-def]  # DDP takes no text for an annotation
    """An all-reduce that takes 2 ms a MiB longer than here: one after the other, and beside the program."""
    buffer = bucket.buffer()
    work = dist.all_reduce(buffer, async_op=True)
    reduced: torch.futures.Future[Tensor] = torch.futures.Future()

    def send() -> None:
        work.wait()
        time.sleep(2 * buffer.nbytes / 2**20 / 1e3)
        reduced.set_result(buffer.div_(dist.get_world_size()))

    NETWORK.submit(send)
    return reduced


def fsdp() -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    model = network()
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    return model


def fsdp_wrapped(**options: Any) -> nn.Module:
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    wrap = ModuleWrapPolicy({Layer})
    return FullyShardedDataParallel(network(), auto_wrap_policy=wrap, device_id=torch.device("cpu"), **options)


class Averages(nn.Module):
    """A network whose gradients the loop averages by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = network()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x)
        return out

    def average(self) -> None:
        for parameter in self.parameters():
            dist.all_reduce(parameter.grad)


class Exchanges(nn.Module):
    """Tensors go from rank to rank behind the layer that takes longer on the last: in forward, and back in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = network()

    def forward(self, x: Tensor) -> Tensor:
        from torch.distributed.nn.functional import all_to_all_single

        first, *others = self.inner
        x = first(x)
        x = all_to_all_single(torch.empty_like(x), x)
        for layer in others:
            x = layer(x)
        return x


class Normed(nn.Module):
    """With buffers, which DDP sends before forward: the first rank comes later to that."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.inner = nn.BatchNorm1d(WIDTH), nn.Sequential(*(Layer(ms) for ms in COSTS))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(self.norm(x))
        return out


def tensor_parallel() -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    plan = {
        f"{i}.{name}": style
        for i in range(3)
        for name, style in (("up", ColwiseParallel()), ("down", RowwiseParallel()))
    }
    return parallelize_module(network(), mesh, plan)


OF_BUCKETS: dict[str, Callable[[], nn.Module]] = {
    "one_bucket": lambda: buckets(bucket_cap_mb=500),
    "buckets": lambda: buckets(bucket_cap_mb=4),
    "bucket_views": lambda: buckets(bucket_cap_mb=4, gradient_as_bucket_view=True),
    "turned": lambda: buckets(bucket_cap_mb=4, turned=True, find_unused_parameters=True),
}
OF_WAITS: dict[str, Callable[[], nn.Module]] = {
    "averages": Averages,
    "exchanges": Exchanges,
    "buffers": lambda: nn.parallel.DistributedDataParallel(Normed()),
}
CASES: dict[str, Callable[[], nn.Module]] = {
    **OF_WAITS,
    "ddp": ddp,
    "ddp_views": lambda: ddp(gradient_as_bucket_view=True, find_unused_parameters=True),
    "no_sync": ddp,
    "fsdp": fsdp,
    "fsdp_wrapped": fsdp_wrapped,
    "fsdp_original": lambda: fsdp_wrapped(use_orig_params=True),
    "tensor_parallel": tensor_parallel,
    "mixed_up": lambda: buckets(bucket_cap_mb=4, hook=mixed_up),
    **OF_BUCKETS,
}


def run(case: str, folder: str) -> None:
    import gradscope

    name = case
    case = case.removesuffix(IDLE)
    model = CASES[case]() if case == name else idle(CASES[case]())
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    x = torch.randn(8, BIG if case in (*OF_BUCKETS, "mixed_up") else WIDTH)
    with gradscope.profiling(model, steps=12, warmup=2, memory=False, lines=False) as prof:
        ended = False
        while not ended:
            if case == "buffers" and dist.get_rank() == 0:
                time.sleep(MORE / 1e3)
            with model.no_sync() if case == "no_sync" else nullcontext():  # type: ignore[operator]
                model(x).square().mean().backward()
            if case == "no_sync":
                model(x).square().mean().backward()
            if isinstance(model, Averages):
                model.average()
            optimizer.step()
            optimizer.zero_grad()
            # All ranks take as many steps: one that measures a step again would be waited for.
            left = torch.tensor([0 if prof.step() else 1])
            dist.all_reduce(left, op=dist.ReduceOp.MAX)
            ended = not left.item()
    prof.report.save(f"{folder}/{name}.rank{dist.get_rank()}.json", force=True)


def main() -> None:
    folder, rank, ranks, *cases = sys.argv[1:]
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=int(rank), world_size=int(ranks))
    for case in cases:
        run(case, folder)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
