"""A tutorial's programs for images and sequences, the way many people begin."""

from __future__ import annotations

from field_programs.data import mnist, text_file
from field_programs.program import Program

_TUTORIAL = ("yunjey/pytorch-tutorial", "0500d3df5a2a8080ccfccbc00aca0eacc21818db")


def _tutorial(folder: str, name: str, count: int = 500) -> Program:
    return Program(
        f"tutorial-{name}",
        *_TUTORIAL,
        "main.py",
        folder=f"tutorials/{folder}/{name}",
        data=mnist("../../data", count),
        needs=("torchvision",),
        seed=1,
    )


PROGRAMS: tuple[Program, ...] = (
    Program(
        "tutorial-linear_regression",
        *_TUTORIAL,
        "main.py",
        folder="tutorials/01-basics/linear_regression",
        needs=("matplotlib",),
        seed=1,
    ),
    _tutorial("01-basics", "logistic_regression", 1000),
    _tutorial("02-intermediate", "bidirectional_recurrent_neural_network", 1000),
    _tutorial("02-intermediate", "convolutional_neural_network", 1000),
    _tutorial("03-advanced", "variational_autoencoder", 256),
    Program(
        "tutorial-language_model",
        *_TUTORIAL,
        "main.py",
        folder="tutorials/02-intermediate/language_model",
        without=("tutorials/02-intermediate/language_model/data/*",),
        data=text_file("data/train.txt", 9000),
        seed=1,
        endless=True,
    ),
)
