"""Models of Hugging Face's transformers, unmodified, with random weights."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn

import gradscope
from gradscope.patching.patches import Patches
from tests.made_times import made_times

transformers: Any = pytest.importorskip("transformers")

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")


@pytest.fixture(autouse=True)
def equal_gains(monkeypatch: pytest.MonkeyPatch) -> None:
    """At these sizes nothing is faster; what is tested is that it is right."""
    made_times(monkeypatch)


def gpt2(attention: str) -> nn.Module:
    config = transformers.GPT2Config(
        n_layer=2, n_head=4, n_embd=64, n_positions=64, vocab_size=500, bos_token_id=1, eos_token_id=2
    )
    config._attn_implementation = attention
    model: nn.Module = transformers.GPT2LMHeadModel(config)
    return model


def llama(attention: str) -> nn.Module:
    config = transformers.LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=500,
        max_position_embeddings=64,
    )
    config._attn_implementation = attention
    model: nn.Module = transformers.LlamaForCausalLM(config)
    return model


GPT2 = {"gelu": 2, "linear_cross_entropy": 1, "embedding": 1}
LLAMA = {"rms_norm": 5, "rope": 2, "swiglu": 2, "linear_cross_entropy": 1}


@pytest.mark.usefixtures("nothing_is_idle")
@pytest.mark.parametrize(
    ("make", "attention", "sites"),
    [
        (gpt2, "sdpa", GPT2),
        (gpt2, "eager", GPT2 | {"attention": 2}),
        (llama, "sdpa", LLAMA),
        (llama, "eager", LLAMA | {"attention": 2}),
    ],
    ids=["gpt2 sdpa", "gpt2 eager", "llama sdpa", "llama eager"],
)
def test_sites_are_found_and_proved(make: Any, attention: str, sites: dict[str, int]) -> None:
    torch.manual_seed(0)
    model = make(attention)
    ids = torch.randint(3, 500, (2, 32))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    patches = gradscope.patch(model, {"input_ids": ids, "labels": ids})
    assert patches.verified is not None
    kept = {(result.site.recipe, result.site.path) for result in patches.verified.results if result.status == "kept"}
    reasons = [(result.site.path, result.reason) for result in patches.verified.results if result.status != "kept"]
    assert Counter(recipe for recipe, _ in kept) == sites, reasons
    assert not reasons
    assert patches.verified.loss_difference < 1e-6
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in before.items())
    model.eval()  # no dropout
    logits = model(input_ids=ids).logits
    patches.revert()
    torch.testing.assert_close(logits, model(input_ids=ids).logits, rtol=1e-4, atol=1e-5)
    assert not [path for path, module in model.named_modules() if "forward" in vars(module)]


def gpt_oss() -> tuple[nn.Module, dict[str, Any]]:
    config = transformers.GptOssConfig(
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        vocab_size=500,
        max_position_embeddings=64,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=8,
    )
    config._attn_implementation = config._experts_implementation = "eager"
    model: nn.Module = transformers.GptOssForCausalLM(config)
    for name, parameter in model.named_parameters():
        if name.endswith("sinks"):
            nn.init.normal_(parameter)
    ids = torch.randint(3, 500, (2, 20))
    return model, {"input_ids": ids, "labels": ids}


def windows(name: str) -> tuple[nn.Module, dict[str, Any]]:
    """A model in shifted windows, of two stages; in the second the image is one window."""
    config = getattr(transformers, f"{name}Config")(
        image_size=32, patch_size=2, embed_dim=12, depths=[2, 2], num_heads=[2, 3], window_size=4
    )
    config._attn_implementation = "eager"
    module = transformers.models.donut.modeling_donut_swin if name == "DonutSwin" else transformers
    return getattr(module, f"{name}Model")(config), {"pixel_values": torch.randn(2, 3, 32, 32)}


def loss_of(output: Any, batch: Any) -> torch.Tensor:
    found = output.loss if getattr(output, "loss", None) is not None else output.last_hidden_state.square().mean()
    assert isinstance(found, torch.Tensor)
    return found


@pytest.mark.usefixtures("nothing_is_idle")
@pytest.mark.parametrize(
    ("make", "count"),
    [
        (gpt_oss, 2),
        (lambda: windows("Swin"), 4),
        (lambda: windows("Swinv2"), 4),
        (lambda: windows("DonutSwin"), 4),
    ],
    ids=["gpt-oss", "swin", "swin 2", "donut"],
)
def test_windows_and_sinks_are_found_and_exact(make: Any, count: int) -> None:
    """Each attention is replaced; the loss and every gradient are those of before, also of another batch."""
    torch.manual_seed(0)
    model, batch = make()
    patches = Patches(gradscope.plan(model, batch, loss_of, recipes=["attention"]))
    patches.apply()
    assert len(patches.kept) == count, patches.table.reasons.tolist()
    model.double().eval()  # no dropout, and none of whole layers
    one = {name: each[:1] if each.dtype is torch.int64 else each[:1].double() for name, each in batch.items()}
    found = [loss_of(model(**one), one)]
    grads = [torch.autograd.grad(found[0], list(model.parameters()), allow_unused=True)]
    patches.revert()
    found.append(loss_of(model(**one), one))
    grads.append(torch.autograd.grad(found[1], list(model.parameters()), allow_unused=True))
    torch.testing.assert_close(*found)
    for mine, theirs in zip(*grads, strict=True):
        assert (mine is None) == (theirs is None)
        if mine is not None:
            # transformers computes softmax and norms in float32, whatever the model's dtype
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-7)
