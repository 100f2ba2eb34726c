"""Small data for the programs of the field list, made here: each maker writes files below the folder it is given."""

from __future__ import annotations

import gzip
import pickle
import random
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np

Maker = Callable[[Path], None]
LETTERS = "abcdefghijklmnopqrstuvwxyz"


def together(*makers: Maker) -> Maker:
    """One maker that runs several."""

    def make(folder: Path) -> None:
        for maker in makers:
            maker(folder)

    make.__name__ = "+".join(maker.__name__ for maker in makers)
    return make


def _named(make: Maker, name: str) -> Maker:
    make.__name__ = name
    return make


def words(count: int, kinds: int = 200, seed: int = 0) -> list[str]:
    """``count`` words out of ``kinds`` made-up ones, the first ones more often."""
    draw = random.Random(seed)
    known = ["".join(draw.choices(LETTERS, k=draw.randint(2, 7))) for _ in range(kinds)]
    return draw.choices(known, weights=[1 / (place + 1) for place in range(kinds)], k=count)


def prose(count: int, seed: int = 0) -> str:
    """Lines of words, with capitals and full stops."""
    drawn = words(count, seed=seed)
    lines = (drawn[start : start + 8] for start in range(0, count, 8))
    return "\n".join(" ".join(line).capitalize() + "." for line in lines) + "\n"


def text_file(path: str, count: int = 4000, start: str = "") -> Maker:
    """A file of prose."""

    def make(folder: Path) -> None:
        place = folder / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(start + prose(count))

    return _named(make, f"text_file({path},{count})")


def word_corpus(path: str, count: int = 3000) -> Maker:
    """train.txt, valid.txt and test.txt, as word language models read them."""

    def make(folder: Path) -> None:
        (folder / path).mkdir(parents=True, exist_ok=True)
        for seed, (name, share) in enumerate((("train", 1), ("valid", 5), ("test", 5))):
            (folder / path / f"{name}.txt").write_text(prose(count // share, seed))

    return _named(make, f"word_corpus({path},{count})")


def names_file(path: str = "names.txt", count: int = 600) -> Maker:
    """One made-up name a line."""

    def make(folder: Path) -> None:
        draw = random.Random(1)
        drawn = ["".join(draw.choices(LETTERS, k=draw.randint(3, 9))) for _ in range(count)]
        (folder / path).write_text("\n".join(drawn) + "\n")

    return _named(make, f"names_file({count})")


def token_bins(path: str, vocabulary: int = 65, count: int = 20000) -> Maker:
    """train.bin and val.bin, uint16 tokens, and meta.pkl with their number of kinds, as nanoGPT reads them."""

    def make(folder: Path) -> None:
        (folder / path).mkdir(parents=True, exist_ok=True)
        draw = np.random.default_rng(0)
        for name in ("train", "val"):
            draw.integers(0, vocabulary, count).astype(np.uint16).tofile(folder / path / f"{name}.bin")
        (folder / path / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": vocabulary, "stoi": {}, "itos": {}}))

    return _named(make, f"token_bins({path},{vocabulary},{count})")


def enwik8(path: str = "data/enwik8.gz") -> Maker:
    """95 MB of bytes, a block repeated, that gzip makes small: the programs split them at 90 MB."""

    def make(folder: Path) -> None:
        place = folder / path
        place.parent.mkdir(parents=True, exist_ok=True)
        block = prose(20000).encode()
        with gzip.open(place, "wb", compresslevel=1) as file:
            for _ in range(95_000_000 // len(block) + 1):
                file.write(block)

    return _named(make, f"enwik8({path})")


def mnist(path: str, count: int = 640, test: int = 128) -> Maker:
    """MNIST's four files with images of noise around a square that depends on the digit."""

    def make(folder: Path) -> None:
        raw = folder / path / "MNIST" / "raw"
        raw.mkdir(parents=True, exist_ok=True)
        draw = np.random.default_rng(0)
        for name, size in (("train", count), ("t10k", test)):
            labels = (np.arange(size) % 10).astype(np.uint8)
            images = draw.integers(0, 60, (size, 28, 28)).astype(np.uint8)
            for image, digit in zip(images, labels, strict=True):
                image[4 + digit : 14 + digit, 6:20] += 180
            (raw / f"{name}-images-idx3-ubyte").write_bytes(struct.pack(">IIII", 2051, size, 28, 28) + images.tobytes())
            (raw / f"{name}-labels-idx1-ubyte").write_bytes(struct.pack(">II", 2049, size) + labels.tobytes())

    return _named(make, f"mnist({path},{count},{test})")


def pictures(path: str, count: int, size: int = 64, kind: str = "png", seed: int = 0) -> Maker:
    """Pictures of smooth noise in one folder."""

    def make(folder: Path) -> None:
        from PIL import Image

        place = folder / path
        place.mkdir(parents=True, exist_ok=True)
        draw = np.random.default_rng(seed)
        for number in range(count):
            coarse = Image.fromarray(draw.integers(0, 255, (8, 8, 3)).astype(np.uint8))
            coarse.resize((size, size), Image.Resampling.BILINEAR).save(place / f"{number:04}.{kind}")

    return _named(make, f"pictures({path},{count},{size},{kind})")


def cora(path: str = "data/cora", nodes: int = 2708, features: int = 100) -> Maker:
    """cora.content and cora.cites: a random graph in the layout of the Cora set, whose size the programs rely on."""

    def make(folder: Path) -> None:
        (folder / path).mkdir(parents=True, exist_ok=True)
        draw = np.random.default_rng(0)
        bits = (draw.random((nodes, features)) < 0.05).astype(int)
        kinds = ["Case", "Genetic", "Neural", "Probabilistic", "Reinforcement", "Rule", "Theory"]
        rows = ("\t".join([str(1000 + node), *map(str, row), kinds[node % 7]]) for node, row in enumerate(bits))
        (folder / path / "cora.content").write_text("\n".join(rows) + "\n")
        ends = draw.integers(0, nodes, (2 * nodes, 2)) + 1000
        (folder / path / "cora.cites").write_text("".join(f"{a}\t{b}\n" for a, b in ends if a != b))

    return _named(make, f"cora({path},{nodes},{features})")


def config_file(path: str, text: str) -> Maker:
    """A settings file that the program reads."""

    def make(folder: Path) -> None:
        place = folder / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text)

    return _named(make, f"config_file({path},{text})")
