"""Synthetic runs for the tests of the report: realistic, deterministic, and conserving to the nanosecond.

:class:`RunBuilder` takes one call of :meth:`~RunBuilder.add` a layer and works out totals, operations, lines and
ledger. On top of it: :func:`gpt`, :func:`mlp`, :func:`gan`, :func:`many_modules`, and :func:`random_run`.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gradscope.tables import (
    BucketRow,
    DeviceLedger,
    Finding,
    KernelRow,
    LayerRow,
    Ledger,
    LineRow,
    OpRow,
    RunData,
    Spread,
    StepTimes,
    WorkloadInfo,
)

CPU = {
    "torch": "2.13.0+cpu",
    "python": "3.12.4",
    "device": "cpu",
    "device_name": "AMD EPYC 7B13",
    "threads": 2,
    "dtype": "float32",
}
CUDA = {**CPU, "torch": "2.11.0+cu128", "triton": "3.6.0", "device": "cuda", "device_name": "NVIDIA H200"}

# Backward nodes of each class, with their share of the layer's own time.
NODES: Mapping[str, Sequence[tuple[str, float]]] = {
    "Linear": (("AddmmBackward0", 0.9), ("TBackward0", 0.06), ("ViewBackward0", 0.04)),
    "Attention": (
        ("BmmBackward0", 0.52),
        ("SoftmaxBackward0", 0.21),
        ("MaskedFillBackward0", 0.14),
        ("TransposeBackward0", 0.08),
        ("MulBackward0", 0.05),
    ),
    "LayerNorm": (("NativeLayerNormBackward0", 1.0),),
    "GELU": (("GeluBackward0", 1.0),),
    "Embedding": (("EmbeddingBackward0", 1.0),),
    "GPT": (("LogSoftmaxBackward0", 0.7), ("NllLossBackward0", 0.2), ("AddBackward0", 0.1)),
}
# Where each class spends its forward: (line, function, source, share of the layer's own backward).
SOURCE: Mapping[str, Sequence[tuple[int, str, str, float]]] = {
    "Attention": (
        (58, "forward", "att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))", 0.41),
        (59, "forward", "att = att.masked_fill(self.bias[:, :, :T, :T] == 0, float('-inf'))", 0.14),
        (60, "forward", "att = F.softmax(att, dim=-1)", 0.21),
        (61, "forward", "y = att @ v  # (B, nh, T, T) x (B, nh, T, hs) -> (B, nh, T, hs)", 0.24),
    ),
    "GELU": ((74, "forward", "x = self.c_proj(self.act(self.c_fc(x)))", 1.0),),
    "Linear": ((53, "forward", "q, k, v = self.c_attn(x).split(self.n_embd, dim=2)", 1.0),),
    "LayerNorm": ((91, "forward", "x = x + self.attn(self.ln_1(x))", 1.0),),
    "GPT": ((128, "forward", "loss = F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1))", 1.0),),
}
CLASS_LINES = {"GPT": 101, "Block": 84, "Attention": 45, "MLP": 66}


@dataclass
class _Layer:
    path: str
    class_name: str
    backward: int
    forward: int
    accumulate: int
    recompute: int
    gradient_sum: int
    parameters: int
    calls: float
    parent: str | None
    extra: dict[str, Any]

    @property
    def hook(self) -> int:
        return int(self.extra.get("hook_ns", 0))


@dataclass
class RunBuilder:
    """Collects layers in order and makes a :class:`RunData` of them; every time is in ns."""

    file: str = "examples/gpt.py"
    layers: list[_Layer] = field(default_factory=list)

    def add(
        self,
        path: str,
        class_name: str,
        backward: int = 0,
        forward: int = 0,
        *,
        accumulate: int = 0,
        recompute: int = 0,
        gradient_sum: int = 0,
        parameters: int = 0,
        calls: float = 1.0,
        parent: str | None = "?",
        **extra: Any,
    ) -> None:
        """One layer with its own (self) values; ``extra`` goes to :class:`LayerRow` as it is."""
        if parent == "?":
            parent = None if path == "" else path.rpartition(".")[0]
        self.layers.append(
            _Layer(
                path,
                class_name,
                backward,
                forward,
                accumulate,
                recompute,
                gradient_sum,
                parameters,
                calls,
                parent,
                extra,
            )
        )

    def build(
        self,
        *,
        outside: int = 0,
        engine: int = 0,
        unattributed: int = 0,
        communication: int = 0,
        optimizer: int = 0,
        other: int = 0,
        lines: bool = True,
        target: str = "examples/gpt.py",
        model: str = "GPT",
        mode: Any = "model",
        environment: Mapping[str, Any] = CPU,
        overhead: float | None = 1.03,
        **fields: Any,
    ) -> RunData:
        """The run: the ledger's other parts in ns; ``fields`` go to :class:`RunData` as they are."""
        rows = self._rows(outside + engine + unattributed + communication)
        ledger = _ledger(rows, outside, engine, unattributed, communication)
        forward = sum(layer.forward for layer in self.layers)
        wall = forward + ledger.backward_ns + optimizer + other
        steps = StepTimes(
            wall_ns=wall,
            forward_ns=forward,
            backward_ns=ledger.backward_ns,
            optimizer_ns=optimizer,
            other_ns=other,
            spread={k: _spread(v) for k, v in (("wall", wall), ("forward", forward), ("backward", ledger.backward_ns))},
            overhead=overhead,
            unprofiled_wall_ns=round(wall / overhead) if overhead else None,
        )
        workload = WorkloadInfo(
            target=target,
            mode=mode,
            steps=5,
            warmup=3,
            loss="output" if mode == "model" else None,
            model=model,
            parameters=sum(layer.parameters for layer in self.layers),
            events=40 * len(rows),
        )
        return RunData(
            gradscope="0.1.0",
            partial=fields.pop("partial", False),
            environment=environment,
            workload=workload,
            step=steps,
            ledger=ledger,
            layers=rows,
            lines=self._lines() if lines else (),
            ops=self._ops(outside, engine, unattributed, communication),
            **fields,
        )

    def _rows(self, rest: int) -> tuple[LayerRow, ...]:
        own = {x.path: x.backward + x.accumulate + x.recompute + x.gradient_sum + x.hook for x in self.layers}
        whole = sum(own.values()) + rest
        backward = self._totals(own)
        forward = self._totals({x.path: x.forward for x in self.layers})
        return tuple(
            LayerRow(
                path=x.path,
                class_name=x.class_name,
                parent=x.parent,
                calls=x.calls,
                parameters=x.parameters,
                source=f"{self.file}:{CLASS_LINES[x.class_name]}" if x.class_name in CLASS_LINES else None,
                forward_self_ns=x.forward,
                forward_total_ns=forward[x.path],
                backward_self_ns=x.backward,
                backward_total_ns=backward[x.path],
                recompute_ns=x.recompute,
                accumulate_ns=x.accumulate,
                gradient_sum_ns=x.gradient_sum,
                backward_share=backward[x.path] / whole if whole else 0.0,
                **{"backward_self_steps_ns": (x.backward, x.backward), **x.extra},
            )
            for x in self.layers
        )

    def _totals(self, own: Mapping[str, int]) -> dict[str, int]:
        totals = dict.fromkeys(own, 0)
        parents = {x.path: x.parent for x in self.layers}
        for path, value in own.items():
            at: str | None = path
            while at is not None and at in totals:
                totals[at] += value
                at = parents[at]
        return totals

    def _ops(self, outside: int, engine: int, unattributed: int, communication: int) -> tuple[OpRow, ...]:
        ops: list[OpRow] = []
        for x in self.layers:
            nodes = NODES.get(x.class_name, (("MulBackward0", 0.7), ("AddBackward0", 0.3)))
            for (name, _), part in zip(nodes, _shares(x.backward, [w for _, w in nodes]), strict=True):
                if part:
                    ops.append(OpRow(x.path, "backward", name, x.calls, part, "[8, 64, 256] [256, 768]"))
            for phase, name, value in (
                ("forward", "aten::addmm", x.forward),
                ("accumulate", "AccumulateGrad", x.accumulate),
                ("recompute", "aten::addmm", x.recompute),
                ("gradient_sum", "aten::add", x.gradient_sum),
                ("hook", "(python)", x.hook),
            ):
                if value:
                    ops.append(OpRow(x.path, phase, name, x.calls, value))
        for phase, name, value in (
            ("backward", "NllLossBackward0", outside),
            ("engine", "(engine)", engine),
            ("unattributed", "SomeBackward0", unattributed),
            ("communication", "nccl:all_reduce", communication),
        ):
            if value:
                ops.append(OpRow(None, phase, name, 1.0, value))
        return tuple(ops)

    def _lines(self) -> tuple[LineRow, ...]:
        times: dict[tuple[int, str, str], dict[str, tuple[int, int]]] = {}
        for x in self.layers:
            source = SOURCE.get(x.class_name, ())
            weights = [s[3] for s in source]
            backward, forward = _shares(x.backward, weights), _shares(x.forward, weights)
            for (line, function, text, _), b, f in zip(source, backward, forward, strict=True):
                times.setdefault((line, function, text), {})[x.path] = (b, f)
        rows = [
            LineRow(
                file=self.file,
                line=line,
                function=function,
                text=text,
                layer=max(owners, key=lambda p: owners[p]),
                forward_ns=sum(f for _, f in owners.values()),
                backward_ns=sum(b for b, _ in owners.values()),
            )
            for (line, function, text), owners in times.items()
        ]
        return tuple(sorted(rows, key=lambda row: -row.backward_ns))


def _ledger(rows: Sequence[LayerRow], outside: int, engine: int, unattributed: int, communication: int) -> Ledger:
    layers = sum(r.backward_self_ns for r in rows)
    recompute = sum(r.recompute_ns for r in rows)
    sums = sum(r.gradient_sum_ns for r in rows)
    accumulate = sum(r.accumulate_ns for r in rows)
    hooks = sum(r.hook_ns for r in rows)
    return Ledger(
        backward_ns=layers + recompute + sums + accumulate + hooks + outside + engine + unattributed + communication,
        layers_ns=layers,
        recompute_ns=recompute,
        gradient_sum_ns=sums,
        accumulate_ns=accumulate,
        outside_modules_ns=outside,
        communication_ns=communication,
        engine_ns=engine,
        unattributed_ns=unattributed,
        hook_ns=hooks,
    )


def _spread(mean: int) -> Spread:
    return Spread(min_ns=mean * 98 // 100, median_ns=mean, max_ns=mean * 103 // 100, std_ns=mean * 14 // 1000)


def _shares(whole: int, weights: Sequence[float]) -> list[int]:
    """``whole`` split by weights into integers that add up to it."""
    parts = [int(whole * w) for w in weights]
    if parts:
        parts[0] += whole - sum(parts)
    return parts


def gpt(
    blocks: int = 12,
    *,
    cuda: bool = False,
    recompute: bool = False,
    slow_block: int | None = None,
    lines: bool = True,
    **build: Any,
) -> RunData:
    """A GPT-2 style decoder with hand-written attention, nanoGPT's names: 6 + 11 rows a block of them."""
    rng = random.Random(7)
    builder = RunBuilder()

    def jitter(value: float) -> int:
        return int(value * rng.uniform(0.97, 1.03))

    def layer(path: str, class_name: str, backward: float, forward: float, parameters: int = 0, **extra: Any) -> None:
        extra.setdefault("accumulate", jitter(backward * 0.02) if parameters else 0)
        if cuda:
            extra.update(device_ns=jitter((backward + forward) * 0.9), launch_ns=jitter(backward * 0.3))
        if parameters and class_name == "Linear":
            extra.update(forward_flops=parameters * 4096, backward_flops=parameters * 8192, flops=parameters * 12288)
        builder.add(path, class_name, jitter(backward), jitter(forward), parameters=parameters, **extra)

    ms, us = 1_000_000, 1_000
    layer("", "GPT", 31.2 * ms, 11.9 * ms)
    builder.add("transformer", "ModuleDict", calls=0.0)
    layer("transformer.wte", "Embedding", 1.4 * ms, 0.2 * ms, 131_072, tied=("lm_head.weight",))
    layer("transformer.wpe", "Embedding", 0.2 * ms, 0.03 * ms, 16_384)
    layer("transformer.drop", "Dropout", 0, 3 * us)
    builder.add("transformer.h", "ModuleList", calls=0.0)
    for i in range(blocks):
        path, slow = f"transformer.h.{i}", 1.9 if i == slow_block else 1.0
        layer(path, "Block", 0.02 * ms, 0.05 * ms, gradient_sum=jitter(0.3 * ms))
        layer(f"{path}.ln_1", "LayerNorm", 0.35 * ms, 0.12 * ms, 512)
        rerun = {"recompute": jitter(2.9 * ms)} if recompute else {}
        layer(f"{path}.attn", "Attention", 9.1 * ms * slow, 4.0 * ms, **rerun)
        layer(f"{path}.attn.c_attn", "Linear", 2.6 * ms, 1.3 * ms, 197_376)
        layer(f"{path}.attn.c_proj", "Linear", 0.9 * ms, 0.4 * ms, 65_792)
        layer(f"{path}.attn.drop", "Dropout", 0, 2 * us)
        layer(f"{path}.ln_2", "LayerNorm", 0.35 * ms, 0.12 * ms, 512)
        layer(f"{path}.mlp", "MLP", 0.01 * ms, 0.02 * ms)
        layer(f"{path}.mlp.c_fc", "Linear", 3.4 * ms, 1.7 * ms, 263_168)
        layer(f"{path}.mlp.act", "GELU", 1.9 * ms, 0.8 * ms)
        layer(f"{path}.mlp.c_proj", "Linear", 3.3 * ms, 1.6 * ms, 262_400)
    layer("transformer.ln_f", "LayerNorm", 0.35 * ms, 0.12 * ms, 512)
    layer("lm_head", "Linear", 9.5 * ms, 4.9 * ms, tied=("transformer.wte.weight",))
    kernels = (
        (
            KernelRow(
                "transformer.h.0.attn", "backward", "sm90_xmma_gemm_bf16bf16_bf16f32_f32_nt_n_tilesize128", 2.0, 3
            ),
            KernelRow(None, "backward", "void at::native::elementwise_kernel<128, 2, gpu_kernel_impl>", 1.0, 900_000),
        )
        if cuda
        else ()
    )
    settings = {"outside": 0, "engine": 3_100_000, "unattributed": 0, "optimizer": 12_400_000, "other": 2_210_000}
    settings["environment"] = CUDA if cuda else CPU
    return builder.build(**{**settings, "lines": lines, "kernels": kernels, **build})


def mlp(**build: Any) -> RunData:
    """A small classifier in microseconds whose loss is outside every module."""
    builder = RunBuilder(file="mlp.py")
    builder.add("", "Sequential", 1_000, 2_000)
    builder.add("0", "Linear", 120_300, 61_000, accumulate=4_100, parameters=4_160, backward_flops=532_480)
    builder.add("1", "ReLU", 8_200, 5_400)
    builder.add("2", "Linear", 40_100, 25_000, accumulate=2_000, parameters=650, backward_flops=83_200)
    settings = {"outside": 21_500, "engine": 30_200, "unattributed": 400, "optimizer": 90_000, "other": 15_000}
    return builder.build(**{**settings, "target": "mlp.py", "model": "Sequential", **build})


def gan(**build: Any) -> RunData:
    """Two roots, as a script with two models has."""
    builder = RunBuilder(file="gan.py")
    for root, scale in (("generator", 3), ("discriminator", 2)):
        builder.add(root, root.title(), 10_000 * scale, 9_000, parent=None, calls=2.0)
        builder.add(f"{root}.up", "Linear", 400_000 * scale, 150_000 * scale, parameters=70_000, calls=2.0)
        builder.add(f"{root}.act", "LeakyReLU", 50_000 * scale, 20_000 * scale, calls=2.0)
    settings: dict[str, Any] = {"outside": 80_000, "engine": 40_000, "mode": "script", "target": "gan.py"}
    return builder.build(**{**settings, "model": "Generator, Discriminator", **build})


def many_modules(count: int = 5_000) -> RunData:
    """``count`` modules and a root: stages of blocks of three layers, every stage of another width."""
    rng = random.Random(11)
    builder = RunBuilder(file="wide.py")
    builder.add("", "Wide", 10_000, 5_000)
    made = stage = 0
    while made < count:
        builder.add(f"stage{stage}", "Sequential", 900, 400)
        made += 1
        for block in range(min(24, (count - made) // 4)):
            path = f"stage{stage}.{block}"
            builder.add(path, "Residual", 1_000, 700, gradient_sum=300)
            for name, class_name in (("conv", "Conv2d"), ("norm", "BatchNorm2d"), ("act", "ReLU")):
                parameters = 0 if class_name == "ReLU" else 10 * (stage + 1)
                builder.add(
                    f"{path}.{name}", class_name, rng.randrange(20_000), rng.randrange(9_000), parameters=parameters
                )
                made += 1
            made += 1
        stage += 1
    return builder.build(engine=1_000_000, optimizer=1_000_000, target="wide.py", model="Wide")


CLASSES = ("Linear", "ReLU", "LayerNorm", "Block", "Attention", "ModuleList", "Sequential")


def random_run(seed: int) -> RunData:
    """Any tree at all: random shapes, numbered and named children, zeros, several roots, every ledger part."""
    rng = random.Random(seed)
    builder = RunBuilder(file="any.py")

    def value(most: int = 5_000_000) -> int:
        return rng.choice((0, rng.randrange(2_000), rng.randrange(most)))

    def grow(path: str, depth: int, parent: str | None, class_name: str) -> None:
        never_called = class_name == "ModuleList"
        times = {} if never_called else {"backward": value(), "forward": value(), "accumulate": value(9_000)}
        if rng.random() < 0.2 and times:
            times |= {"recompute": value(), "gradient_sum": value(9_000)}
        builder.add(
            path, class_name, parent=parent, calls=0.0 if never_called else rng.choice((1.0, 2.0, 0.4)), **times
        )
        if depth == 0:
            return
        child_class = rng.choice(CLASSES)
        numbered = rng.random() < 0.6
        for i in range(rng.randrange(5)):
            name = str(i) if numbered else rng.choice(("ln_", "block", "x")) + str(i)
            child = f"{path}.{name}" if path else name
            grow(child, depth - 1, path, child_class if rng.random() < 0.8 else rng.choice(CLASSES))

    roots = [""] if rng.random() < 0.7 else ["first", "second"]
    for root in roots:
        grow(root, rng.randrange(4), None, "Model")
    parts = {part: value() for part in ("outside", "engine", "unattributed", "communication", "optimizer", "other")}
    return builder.build(**parts, overhead=rng.choice((None, 1.2)), target="any.py", model="Model")


def device() -> DeviceLedger:
    """What a device did: a part of each kind."""
    parts = {name: 1_000_000 * (place + 1) for place, name in enumerate(DeviceLedger.PARTS)}
    return DeviceLedger(kernel_ns=sum(parts.values()), collectives_ns=9_000_000, exposed_ns=4_000_000, **parts)


def buckets() -> tuple[BucketRow, ...]:
    """Two buckets of DDP, the second of which is waited for."""
    row = BucketRow(
        model="",
        number=0,
        parameters=12,
        bytes=30_000_000,
        layers=("transformer.h.11.mlp", "transformer.h.11.attn", "transformer.h.10"),
        first_at_ns=2_000_000,
        mean_at_ns=6_000_000,
        last_at_ns=9_000_000,
        begun_at_ns=9_500_000,
        begun_by="transformer.h.10",
        pass_ns=40_000_000,
        exposed_ns=0,
    )
    return row, dataclasses.replace(row, number=1, layers=("transformer.wte",), exposed_ns=7_000_000)


def findings() -> tuple[Finding, ...]:
    """One finding of each severity."""
    return (
        Finding(
            rule="unfused-attention",
            severity="critical",
            layers=tuple(f"transformer.h.{i}.attn" for i in range(12)),
            line="examples/gpt.py:58",
            message="attention is computed by hand: 12 layers write the full score matrix",
            evidence="softmax, masked_fill and two bmm over [8, 12, 1024, 1024]",
            recipe="attention",
            predicted_saving_ns=61_000_000,
            predicted_saving_bytes=402_000_000,
        ),
        Finding("small-ops", "warning", ("transformer.drop",), None, "many small operations", "12 us each"),
        Finding("tied-weights", "info", ("lm_head",), None, "one weight, two owners", "lm_head.weight"),
    )
