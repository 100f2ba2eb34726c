"""Models for compiled.py and compiled_split.py, at sizes of which both passes take a part of a second on two cores.

Each factory returns a model and its batch. On a device they are larger: kernels of a few microseconds say nothing.
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

Made = tuple[nn.Module, dict[str, Tensor]]
ON_DEVICE = torch.cuda.is_available()
WIDTH, ROWS, LENGTH, VOCABULARY = (512, 16, 512, 32_000) if ON_DEVICE else (256, 4, 256, 4096)


def nanogpt() -> Made:
    """Of a clone of karpathy/nanoGPT, by the variable NANOGPT."""
    path = Path(os.environ["NANOGPT"]) / "model.py"
    spec = importlib.util.spec_from_file_location("nanogpt_model", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    config = module.GPTConfig(
        block_size=LENGTH, vocab_size=VOCABULARY, n_layer=4, n_head=4, n_embd=WIDTH, dropout=0.0, bias=False
    )
    tokens = _tokens()
    return module.GPT(config), {"idx": tokens, "targets": tokens}


def gpt2() -> Made:
    """Hugging Face's, without dropout."""
    import transformers

    config = transformers.GPT2Config(
        n_layer=4, n_embd=WIDTH, n_head=4, vocab_size=VOCABULARY, n_positions=LENGTH, use_cache=False,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return _of_language(transformers.GPT2LMHeadModel(config))


def llama() -> Made:
    """Hugging Face's."""
    import transformers

    config = transformers.LlamaConfig(
        num_hidden_layers=4, hidden_size=WIDTH, intermediate_size=WIDTH * 8 // 3, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=VOCABULARY, use_cache=False, max_position_embeddings=LENGTH,
    )  # fmt: skip
    return _of_language(transformers.LlamaForCausalLM(config))


def llama_by_layer() -> Made:
    """The same, each layer compiled by itself: one graph for all."""
    model, batch = llama()
    layers: Any = model.model.layers  # type: ignore[union-attr]
    for layer in layers:
        layer.compile()
    return model, batch


class Classified(nn.Module):
    """A model of images with its loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.model(images), labels)


def resnet50() -> Made:
    """torchvision's."""
    from torchvision.models import resnet50 as made

    torch.manual_seed(0)
    rows, size = (64, 224) if ON_DEVICE else (8, 128)
    batch = {"images": torch.randn(rows, 3, size, size), "labels": torch.randint(1000, (rows,))}
    return Classified(made()), batch


def _of_language(model: Any) -> Made:
    tokens = _tokens()
    return model, {"input_ids": tokens, "labels": tokens}


def _tokens() -> Tensor:
    torch.manual_seed(0)
    return torch.randint(VOCABULARY, (ROWS, LENGTH))
