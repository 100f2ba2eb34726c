"""Generative adversarial networks: several optimizers, often at unequal rates, and gradient penalties."""

from __future__ import annotations

from field_programs.data import mnist
from field_programs.program import Program

_GANS = ("eriklindernoren/PyTorch-GAN", "36d3c77e5ff20ebe0aeefd322326a134a279b93e")
_OPTIONS = "--batch_size 16 --n_cpu 0 --sample_interval 1000"


def _gan(name: str, options: str = "", epochs: int = 2) -> Program:
    return Program(
        f"gan-{name}",
        *_GANS,
        f"{name}.py --n_epochs {epochs} {_OPTIONS} {options}".strip(),
        folder=f"implementations/{name}",
        data=mnist("../../data/mnist", 320),
        needs=("torchvision",),
        seed=5,
    )


PROGRAMS: tuple[Program, ...] = (
    _gan("gan"),
    _gan("wgan", "--n_critic 3", epochs=6),
    _gan("wgan_gp", "--n_critic 5", epochs=8),
    _gan("wgan_div", "--n_critic 5", epochs=8),
    _gan("acgan"),
    _gan("aae"),
    _gan("infogan"),
    _gan("lsgan"),
    _gan("relativistic_gan"),
    _gan("ebgan"),
    _gan("sgan"),
)
