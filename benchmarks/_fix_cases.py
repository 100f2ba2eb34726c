"""The models of benchmarks/fix.py: the project's examples, Hugging Face's, and public ones from their clones."""

from __future__ import annotations

import importlib
import sys
import tempfile
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from _common import ROOT
from _field_sources import Missing, read_tree

from gradscope.workload import Workload, load_factory


@dataclass(frozen=True)
class WholeStep:
    """A model with its batch, and what a fix is to gain.

    Args:
        make: the workload; ``tiny`` at sizes that say nothing about speed. Of a public one it is given its modules.
        speed: at least this, the step before over the step after.
        memory: at least this, the peak before over the peak after.
        either: one of the two goals is enough: where attention or logits dominate.
        repo, commit, module: of a public model; its clone lies in --sources.
    """

    make: Callable[..., Workload]
    speed: float = 0.98
    memory: float = 1.0
    either: tuple[float, float] | None = None
    repo: str = ""
    commit: str = ""
    module: str = ""


def workload_of(case: WholeStep, sources: Path | None, *, tiny: bool) -> Workload:
    """The case's workload.

    Raises:
        Missing: its clone or a package is not there.
    """
    if not case.repo:
        return case.make(tiny=tiny)
    folder = sources / case.repo.replace("/", "+") if sources is not None else None
    if folder is None or not folder.is_dir():
        raise Missing(
            f"git clone https://github.com/{case.repo} FOLDER/{case.repo.replace('/', '+')}, and --sources FOLDER"
        )
    with _imported(folder, case) as module:
        return case.make(module, tiny=tiny)


@contextmanager
def _imported(folder: Path, case: WholeStep) -> Iterator[Any]:
    """The module as it is at the commit. Its files stay until the process ends: a fix reads them."""
    place = Path(tempfile.mkdtemp(prefix="gradscope-fix-"))
    for path, content in read_tree(folder, case.commit, ("tests/*", "images/*", "assets/*")):
        (place / path).parent.mkdir(parents=True, exist_ok=True)
        (place / path).write_bytes(content)
    sys.path.insert(0, str(place))
    # makemore writes its losses there; what it trains does not need it.
    board = types.ModuleType("torch.utils.tensorboard")
    vars(board)["SummaryWriter"] = object
    sys.modules.setdefault(board.__name__, board)
    try:
        yield importlib.import_module(case.module)
    except ModuleNotFoundError as error:
        raise Missing(f"pip install {error.name}") from error
    finally:
        sys.path.remove(str(place))
        if sys.modules.get(board.__name__) is board:
            del sys.modules[board.__name__]


def _example(name: str) -> Any:
    factory: Any = load_factory(f"{ROOT / 'examples' / name}:main", [])
    return factory.module


def _tokens(words: int, batch: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    return torch.randint(words, (batch, length)), torch.randint(words, (batch, length))


def gpt(*, tiny: bool) -> Workload:
    """examples/gpt.py with GPT-2's vocabulary."""
    module = _example("gpt.py")
    size = {"vocab_size": 50257, "n_layer": 4, "n_head": 6, "n_embd": 384, "block_size": 512, "batch_size": 4}
    if tiny:
        size = {"vocab_size": 500, "n_layer": 2, "n_head": 2, "n_embd": 32, "block_size": 64, "batch_size": 2}
    return Workload(*module.make(module.Config(**size)))


def gpt_compiled(*, tiny: bool) -> Workload:
    """The same under torch.compile: before and after are compiled."""
    found = gpt(tiny=tiny)
    return Workload(torch.compile(found.model), found.batch)


def gpt_blocks_compiled(*, tiny: bool) -> Workload:
    """The same with each block compiled by itself."""
    found = gpt(tiny=tiny)
    for block in found.model.transformer["h"]:
        block.compile()
    return found


def names(*, tiny: bool) -> Workload:
    """examples/names.py as it trains."""
    module = _example("names.py")
    torch.manual_seed(3407)
    x, y = module.make_data()
    model = module.CharacterTransformer(27, 32 if tiny else 64, 4, 2 if tiny else 4, x.shape[1])
    rows = torch.randint(len(x), (8 if tiny else 64,))
    return Workload(model, (x[rows], y[rows]))


def makemore(module: Any, *, tiny: bool) -> Workload:
    """makemore's transformer at its defaults."""
    width = 32 if tiny else 64
    config = module.ModelConfig(block_size=16, vocab_size=27, n_layer=4, n_head=4, n_embd=width, n_embd2=width)
    return Workload(module.Transformer(config), _tokens(27, 32, 16), loss=lambda output, batch: output[1])


def mingpt(module: Any, *, tiny: bool) -> Workload:
    """minGPT of 4 layers."""
    config = module.GPT.get_default_config()
    config.model_type, config.n_layer, config.n_head, config.n_embd = None, 4, 4, 32 if tiny else 128
    config.vocab_size, config.block_size = 65, 16 if tiny else 128
    return Workload(
        module.GPT(config), _tokens(65, 2 if tiny else 16, config.block_size), loss=lambda output, _: output[1]
    )


def _nanogpt(module: Any, dropout: float, length: int, *, tiny: bool) -> Any:
    length = 16 if tiny else length
    width = 32 if tiny else 128
    config = module.GPTConfig(
        block_size=length, vocab_size=65, n_layer=4, n_head=4, n_embd=width, dropout=dropout, bias=False
    )
    batch = _tokens(65, 2 if tiny else 12, length)
    return module.GPT(config), batch


def nanogpt(module: Any, *, tiny: bool) -> Workload:
    """nanoGPT as it trains Shakespeare on a CPU: torch's own attention."""
    model, batch = _nanogpt(module, 0.0, 64, tiny=tiny)
    return Workload(model, batch, loss=lambda output, _: output[1])


def nanogpt_by_hand(module: Any, *, tiny: bool) -> Workload:
    """nanoGPT's attention by hand, with dropout, at 512 tokens: what it runs where torch has no attention."""
    model, batch = _nanogpt(module, 0.2, 512, tiny=tiny)
    length = batch[0].shape[1]
    for block in model.transformer.h:
        block.attn.flash = False
        block.attn.register_buffer("bias", torch.tril(torch.ones(length, length)).view(1, 1, length, length))
    return Workload(model, batch, loss=lambda output, _: output[1])


def _transformers() -> Any:
    try:
        import transformers
    except ModuleNotFoundError as error:
        raise Missing("pip install transformers") from error
    return transformers


def hugging_face_gpt2(*, tiny: bool) -> Workload:
    """GPT-2 with eager attention, 4 layers, all its words."""
    transformers = _transformers()
    config = transformers.GPT2Config(
        n_layer=4, n_head=4, n_embd=32 if tiny else 256, n_positions=256, vocab_size=500 if tiny else 50257
    )
    config._attn_implementation = "eager"
    ids, _ = _tokens(config.vocab_size, 2 if tiny else 4, 16 if tiny else 256)
    return Workload(transformers.GPT2LMHeadModel(config), {"input_ids": ids, "labels": ids})


def hugging_face_llama(*, tiny: bool) -> Workload:
    """A Llama of 4 layers, 256 wide, with 8,000 words."""
    transformers = _transformers()
    width = 32 if tiny else 256
    config = transformers.LlamaConfig(
        num_hidden_layers=4,
        hidden_size=width,
        intermediate_size=2 * width,
        num_attention_heads=4,
        vocab_size=500 if tiny else 8000,
        use_cache=False,
    )
    config._attn_implementation = "eager"
    ids, _ = _tokens(config.vocab_size, 2 if tiny else 4, 16 if tiny else 256)
    return Workload(transformers.LlamaForCausalLM(config), {"input_ids": ids, "labels": ids})


def simple_vit(module: Any, *, tiny: bool) -> Workload:
    """vit-pytorch's SimpleViT on pictures of 64 pixels."""
    width = 32 if tiny else 256
    model = module.SimpleViT(
        image_size=64, patch_size=8, num_classes=10, dim=width, depth=2 if tiny else 4, heads=4, mlp_dim=2 * width
    )
    torch.manual_seed(0)
    pictures, classes = torch.randn(2 if tiny else 32, 3, 64, 64), torch.randint(10, (2 if tiny else 32,))

    def loss(output: torch.Tensor, _batch: Any) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(output, classes)

    return Workload(model, (pictures,), loss=loss)


_NANOGPT = {"repo": "karpathy/nanoGPT", "commit": "3adf61e154c3fe3fca428ad6bc3818b27a3b8291", "module": "model"}
DOMINATED = (1.25, 4.0)  # time or memory, where attention or logits are most of the step

CASES: dict[str, WholeStep] = {
    "gpt": WholeStep(gpt, 1.25, 4.0),
    "gpt-compiled": WholeStep(gpt_compiled),
    "gpt-blocks-compiled": WholeStep(gpt_blocks_compiled),
    "names": WholeStep(names, 1.17),
    "makemore": WholeStep(
        makemore,
        repo="karpathy/makemore",
        commit="988aa59e4d8fefa526d06f3b453ad116258398d4",
        module="makemore",
    ),
    "mingpt": WholeStep(
        mingpt,
        repo="karpathy/minGPT",
        commit="37baab71b9abea1b76ab957409a1cc2fbfba8a26",
        module="mingpt.model",
    ),
    "nanogpt": WholeStep(nanogpt, **_NANOGPT),
    "nanogpt-by-hand": WholeStep(nanogpt_by_hand, either=DOMINATED, **_NANOGPT),
    "hf-gpt2": WholeStep(hugging_face_gpt2, either=DOMINATED),
    "hf-llama": WholeStep(hugging_face_llama),
    "simple-vit": WholeStep(
        simple_vit,
        repo="lucidrains/vit-pytorch",
        commit="69d24fe9e3024c0d4b02761123b8583a24ebed1e",
        module="vit_pytorch.simple_vit",
    ),
}
