"""Well-made programs, small and of many kinds: what is found in them must be true.

Each declares the rules that are right on it, with the reason. Any other finding is a false one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Made = dict[str, Any]


@dataclass(frozen=True)
class Program:
    """One training program.

    Args:
        make: the keyword arguments of ``findings_of``.
        true: rules that may speak of it, each with the reason why that is right.
    """

    name: str
    make: Callable[[], Made]
    true: Mapping[str, str] = field(default_factory=dict)


def loop(model: nn.Module, loss_of: Callable[[], Tensor], optimizer: torch.optim.Optimizer, **options: Any) -> Made:
    """A loop's step: forward, loss, backward, step."""

    def step() -> None:
        optimizer.zero_grad()
        loss_of().backward()
        optimizer.step()

    return {"model": model, "step": step, **options}


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), 0.01)


class Residual(nn.Module):
    """A block of a ResNet."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.one, self.two = (nn.Conv2d(width, width, 3, padding=1, bias=False) for _ in range(2))
        self.first, self.second = nn.BatchNorm2d(width), nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.second(self.two(F.relu(self.first(self.one(x))))))


def conv_net() -> Made:
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), *(Residual(16) for _ in range(3)),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10),
    )  # fmt: skip
    return {
        "model": model,
        "batch": torch.randn(16, 3, 32, 32),
        "loss": lambda y, _: F.cross_entropy(y, torch.arange(16) % 10),
    }


def lstm() -> Made:
    class Tagger(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.lstm, self.head = (
                nn.Embedding(500, 32),
                nn.LSTM(32, 64, batch_first=True),
                nn.Linear(64, 500),
            )

        def forward(self, ids: Tensor) -> Tensor:
            return self.head(self.lstm(self.words(ids))[0])

    model, ids = Tagger(), torch.randint(500, (16, 24))
    return {"model": model, "batch": ids, "loss": lambda y, x: F.cross_entropy(y.flatten(0, 1), x.flatten())}


def gan() -> Made:
    maker = nn.Sequential(nn.Linear(32, 128), nn.ReLU(), nn.Linear(128, 256))
    judge = nn.Sequential(nn.Linear(256, 128), nn.LeakyReLU(0.2), nn.Linear(128, 1))
    both = nn.ModuleDict({"maker": maker, "judge": judge})
    first, second = _sgd(maker), _sgd(judge)
    real = torch.randn(256, 256)

    def step() -> None:
        fake = maker(torch.randn(256, 32))
        second.zero_grad()
        (F.softplus(judge(fake.detach())).mean() + F.softplus(-judge(real)).mean()).backward()
        second.step()
        first.zero_grad()
        F.softplus(-judge(fake)).mean().backward()
        first.step()

    return {"model": both, "step": step}


def experts() -> Made:
    class Mixture(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate = nn.Linear(64, 4)
            self.experts = nn.ModuleList(
                nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64)) for _ in range(4)
            )

        def forward(self, x: Tensor) -> Tensor:
            weights = self.gate(x).softmax(-1)
            best = weights.argmax(-1)
            y = torch.zeros_like(x)
            for index, expert in enumerate(self.experts):
                chosen = (best == index).nonzero(as_tuple=True)[0]
                y = y.index_add(0, chosen, expert(x[chosen]) * weights[chosen, index, None])
            return y

    return {"model": Mixture(), "batch": torch.randn(512, 64)}


def physics() -> Made:
    model = nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))

    def loss() -> Tensor:
        points = torch.rand(2048, 2, requires_grad=True)
        u = model(points)
        (first,) = torch.autograd.grad(u.sum(), points, create_graph=True)
        (second,) = torch.autograd.grad(first[:, 0].sum(), points, create_graph=True)
        inside = (first[:, 1] - second[:, 0]).square().mean()
        return inside + model(torch.zeros(128, 2)).square().mean()

    return loop(model, loss, _sgd(model))


def _hugging(config: Any, batch: Callable[[Any], Made]) -> Callable[[], Made]:
    def make() -> Made:
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_config(config(), attn_implementation="sdpa").train()
        return {"model": model, "batch": batch(model)}

    return make


def _ids(model: Any) -> Made:
    ids = torch.randint(model.config.vocab_size, (4, 48))
    return {"input_ids": ids, "labels": ids}


def _gpt2_config() -> Any:
    from transformers import GPT2Config

    return GPT2Config(
        vocab_size=1024, n_embd=64, n_layer=2, n_head=4, n_positions=64, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0
    )


def _llama_config() -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=1024, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64,
    )  # fmt: skip


def bert() -> Made:
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        vocab_size=1024, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    model = BertForSequenceClassification(config).train()
    ids = torch.randint(1024, (8, 32))
    return {"model": model, "batch": {"input_ids": ids, "labels": torch.zeros(8, dtype=torch.long)}}


def vit() -> Made:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128, image_size=32, patch_size=8
    )
    batch = {"pixel_values": torch.randn(8, 3, 32, 32), "labels": torch.zeros(8, dtype=torch.long)}
    return {"model": ViTForImageClassification(config).train(), "batch": batch}


def t5() -> Made:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=512, d_model=64, d_kv=16, d_ff=128, num_layers=2, num_heads=4, dropout_rate=0.0,
        decoder_start_token_id=0,
    )  # fmt: skip
    ids = torch.randint(512, (4, 24))
    return {"model": T5ForConditionalGeneration(config).train(), "batch": {"input_ids": ids, "labels": ids}}


def contrastive() -> Made:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.image = nn.Sequential(nn.Linear(256, 128), nn.GELU(), nn.Linear(128, 64))
            self.text = nn.Sequential(nn.Linear(128, 128), nn.GELU(), nn.Linear(128, 64))
            self.scale = nn.Parameter(torch.tensor(2.0))

        def forward(self, image: Tensor, text: Tensor) -> Tensor:
            one, other = F.normalize(self.image(image), dim=-1), F.normalize(self.text(text), dim=-1)
            scores = self.scale.exp() * one @ other.T
            targets = torch.arange(len(scores))
            return (F.cross_entropy(scores, targets) + F.cross_entropy(scores.T, targets)) / 2

    return {"model": Pair(), "batch": (torch.randn(128, 256), torch.randn(128, 128))}


class Level(nn.Module):
    """A level of a small UNet, with the time's embedding."""

    def __init__(self, given: int, width: int) -> None:
        super().__init__()
        self.norm, self.conv = nn.GroupNorm(4, given), nn.Conv2d(given, width, 3, padding=1)
        self.time = nn.Linear(32, width)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        return self.conv(F.silu(self.norm(x))) + self.time(time)[:, :, None, None]


class UNet(nn.Module):
    """Down, middle, up, with a skip."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 3, 3, padding=1)
        self.down, self.middle, self.up = Level(16, 32), Level(32, 32), Level(64, 16)
        self.time = nn.Sequential(nn.Linear(1, 32), nn.SiLU())

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        time = self.time(time[:, None])
        one = self.down(self.first(x), time)
        two = F.interpolate(self.middle(F.avg_pool2d(one, 2), time), scale_factor=2.0)
        return self.last(self.up(torch.cat([one, two], 1), time))


def diffusion() -> Made:
    model, images = UNet(), torch.randn(8, 3, 32, 32)

    def loss() -> Tensor:
        time, noise = torch.rand(8), torch.randn_like(images)
        keep = time[:, None, None, None]
        return F.mse_loss(model(images * (1 - keep) + noise * keep, time), noise)

    return loop(model, loss, _sgd(model))


def _mlp(width: int = 256) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10))


def accumulation() -> Made:
    model, x, y = _mlp(), torch.randn(4, 64, 256), torch.randint(10, (4, 64))
    optimizer = _sgd(model)

    def step() -> None:
        optimizer.zero_grad()
        for given, wanted in zip(x, y, strict=True):
            (F.cross_entropy(model(given), wanted) / 4).backward()
        optimizer.step()

    return {"model": model, "step": step}


def batches_by_hand() -> Made:
    model, data, order = _mlp(), torch.randn(4096, 256), iter(range(10_000))

    def loss() -> Tensor:
        start = next(order) * 128 % 4096
        return model(data[start : start + 128]).square().mean()

    return loop(model, loss, _sgd(model))


def with_loader() -> Made:
    from torch.utils.data import DataLoader, TensorDataset

    model = _mlp()
    loader = DataLoader(TensorDataset(torch.randn(4096, 256)), batch_size=32, shuffle=True)

    def batches() -> Any:
        while True:
            yield from loader

    source = batches()
    return loop(model, lambda: model(next(source)[0]).square().mean(), _sgd(model))


def amp_on_cpu() -> Made:
    model, x = _mlp(), torch.randn(256, 256)

    def loss() -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = model(x)
        return y.float().square().mean()

    return loop(model, loss, _sgd(model))


def transformer() -> Made:
    class Block(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.one, self.two = nn.LayerNorm(width), nn.LayerNorm(width)
            self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
            self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = (each.unflatten(-1, (4, -1)).transpose(1, 2) for each in self.qkv(self.one(x)).chunk(3, -1))
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
            x = x + self.out(y)
            return x + self.mlp(self.two(x))

    return {"model": nn.Sequential(*(Block(64) for _ in range(3))), "batch": torch.randn(4, 64, 64)}


def autoencoder() -> Made:
    class Variational(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encode, self.decode = nn.Linear(256, 128), nn.Linear(32, 256)
            self.mean, self.spread = nn.Linear(128, 32), nn.Linear(128, 32)

        def forward(self, x: Tensor) -> Tensor:
            h = self.encode(x).relu()
            mean, spread = self.mean(h), self.spread(h)
            made = self.decode(mean + torch.randn_like(mean) * (spread / 2).exp())
            return F.mse_loss(made, x) - (1 + spread - mean.square() - spread.exp()).mean() / 2

    return {"model": Variational(), "batch": torch.randn(256, 256)}


def graph_network() -> Made:
    class Convolution(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(64, 64), nn.Linear(64, 8)
            self.register_buffer("edges", torch.randint(512, (2, 4096)))

        def forward(self, x: Tensor) -> Tensor:
            for layer in (self.one, self.two):
                x = layer(x)
                sent = x.index_select(0, self.edges[0])
                x = torch.zeros_like(x).index_add(0, self.edges[1], sent).relu()
            return x

    return {"model": Convolution(), "batch": torch.randn(512, 64)}


def policy() -> Made:
    model = nn.Sequential(nn.Linear(32, 128), nn.Tanh(), nn.Linear(128, 8))
    states, rewards = torch.randn(512, 32), torch.randn(512)

    def loss() -> Tensor:
        chances = torch.distributions.Categorical(logits=model(states))
        actions = chances.sample()
        return -(chances.log_prob(actions) * rewards).mean() - 0.01 * chances.entropy().mean()

    return loop(model, loss, _sgd(model))


def distillation() -> Made:
    teacher, student, x = _mlp().requires_grad_(False), _mlp(), torch.randn(256, 256)

    def loss() -> Tensor:
        with torch.no_grad():
            wanted = teacher(x).softmax(-1)
        return F.kl_div(student(x).log_softmax(-1), wanted, reduction="batchmean")

    return loop(student, loss, _sgd(student))


def fine_tuning() -> Made:
    body, head = _mlp().requires_grad_(False), nn.Linear(10, 2)
    model = nn.Sequential(body, head)
    optimizer = torch.optim.SGD(head.parameters(), 0.01)
    return loop(model, lambda: model(torch.ones(256, 256)).square().mean(), optimizer)


def recommender() -> Made:
    class Factors(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.users, self.items = nn.Embedding(300, 32), nn.Embedding(200, 32)

        def forward(self, users: Tensor, items: Tensor) -> Tensor:
            return (self.users(users) * self.items(items)).sum(-1)

    return {"model": Factors(), "batch": (torch.randint(300, (1024,)), torch.randint(200, (1024,)))}


def fused_adam() -> Made:
    model = _mlp()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    return loop(model, lambda: model(torch.ones(128, 256)).square().mean(), optimizer)


def logged_loss() -> Made:
    model, x, losses = _mlp(), torch.randn(128, 256), []
    optimizer = _sgd(model)

    def step() -> None:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())

    return {"model": model, "step": step}


def meta_learning() -> Made:
    model, x = nn.Linear(64, 64), torch.randn(128, 64)

    def loss() -> Tensor:
        weights = dict(model.named_parameters())
        inner = torch.func.functional_call(model, weights, (x,)).square().mean()
        moved = torch.autograd.grad(inner, list(weights.values()), create_graph=True)
        fast = {name: each - 0.1 * by for (name, each), by in zip(weights.items(), moved, strict=True)}
        return torch.func.functional_call(model, fast, (x,)).square().mean()

    return loop(model, loss, _sgd(model))


LIBRARYS_GELU = {"activation-by-hand": "transformers' NewGELUActivation is GELU of plain operations"}
LLAMA = {
    "activation-by-hand": "transformers multiplies silu of the gate in two passes",
    "rope-by-hand": "transformers turns halves with a cat and two products",
    "norm-by-hand": "LlamaRMSNorm is made of plain operations",
}
PACKED = {"heads-copied": "query, key and value are of one projection, and their gradients joined by a copy"}

PROGRAMS = [
    Program("convolutions", conv_net),
    Program("LSTM", lstm),
    Program("GAN", gan),
    Program("mixture of experts", experts),
    Program("physics-informed", physics),
    Program("GPT-2 of transformers", _hugging(_gpt2_config, _ids), LIBRARYS_GELU),
    Program("Llama of transformers", _hugging(_llama_config, _ids), LLAMA),
    Program(
        "BERT of transformers",
        bert,
        {"norm-by-hand": "BertSelfOutput and BertOutput drop out, add and normalize one by one"},
    ),
    Program("ViT of transformers", vit, {"norm-by-hand": "ViT adds the residual, then normalizes"}),
    Program("T5 of transformers", t5, {"norm-by-hand": "T5LayerNorm is an RMS norm of plain operations"}),
    Program("contrastive", contrastive),
    Program("diffusion UNet", diffusion),
    Program("gradient accumulation", accumulation),
    Program("batches by hand", batches_by_hand),
    Program("a quick DataLoader", with_loader),
    Program(
        "autocast on a CPU",
        amp_on_cpu,
        {"backward-ratio": "a CPU without bfloat16 instructions: its matmuls of gradients are slow"},
    ),
    Program("transformer with torch's attention", transformer, PACKED),
    Program("variational autoencoder", autoencoder),
    Program("graph network", graph_network),
    Program("policy gradient", policy),
    Program("distillation", distillation),
    Program("fine-tuning of a frozen body", fine_tuning),
    Program("recommender", recommender),
    Program("fused AdamW", fused_adam),
    Program("losses logged as numbers", logged_loss),
    Program("meta-learning", meta_learning),
]
