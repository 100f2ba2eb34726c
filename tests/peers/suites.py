"""What is run of other libraries' tests, and what is not and why."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

FOLDER = "GRADSCOPE_PEERS"  # the variable that names another folder than build/peers
LARGE = "GRADSCOPE_PEERS_LARGE"  # set: tensors of more than LARGEST elements too
LARGEST = 50_000_000
REPOSITORY = Path(__file__).parents[2]


@dataclass(frozen=True)
class Suite:
    """A library's repository and the files of its tests."""

    name: str
    url: str
    commit: str
    plugin: str  # that adapts them, a module of tests/peers
    files: tuple[str, ...]

    def folder(self) -> Path:
        """Where its files lie once they are fetched."""
        return Path(os.environ.get(FOLDER) or REPOSITORY / "build" / "peers").absolute() / self.name


@dataclass(frozen=True)
class Left:
    """Tests of a file that are not run."""

    file: str
    test: str  # a regular expression that the name begins with, its parameters included
    why: str


LIGER = Suite(
    "Liger-Kernel",
    "https://github.com/linkedin/Liger-Kernel",
    "ead96b618e5c67bddc6a6e9bcb99bfe6b5ab661c",
    "liger_plugin",
    tuple(
        f"test/transformers/test_{name}.py"
        for name in (
            "cross_entropy",
            "fused_add_rms_norm",
            "fused_linear_cross_entropy",
            "layer_norm",
            "rms_norm",
            "rope",
            "swiglu",
        )
    ),
)
CUT_CROSS_ENTROPY = Suite(
    "ml-cross-entropy",
    "https://github.com/apple/ml-cross-entropy",
    "d42911f9b1a1f98289bb601c35c8151562603d74",
    "cce_plugin",
    ("tests/test_cce_loss_backward.py", "tests/test_cce_loss_forward.py"),
)
SUITES = (LIGER, CUT_CROSS_ENTROPY)

_ONE_WAY = "asks for another of their implementations; the recipe is one"
_PROCESSES = "starts 4 and 8 processes that exchange tensors, is expected to fail without 8 GPUs, and passes either way"
LEFT = (
    Left("test_cce_loss_backward", r"test_loss_backward\[[^]]*(torch_compile|cce_exact)\]", _ONE_WAY),
    Left(
        "test_cce_loss_backward",
        r"test_loss_backward\[shape\d-True-",
        "takes the gradient of a logsumexp beside the loss; what for, z-loss, is a setting of the recipe",
    ),
    Left("test_cce_loss_forward", r"test_loss_forward\[[^]]*torch_compile\]", _ONE_WAY),
    Left("test_cross_entropy", "test_float32_internal", "launches Liger's own Triton kernel, and asserts nothing"),
    Left("test_rms_norm", "test_dtensor_rms_norm", _PROCESSES),
    Left("test_rope", r"test_functional_correctness\[.*-9-7-41-41-41\]", "heads of 41: transformers refuses odd ones"),
    Left("test_swiglu", "test_correctness_mixtralblocksparsetop2mlp", "transformers 5 has no such layer any more"),
    Left("test_swiglu", "test_dtensor_liger_silumul", _PROCESSES),
    Left("test_swiglu", "test_swiglu_blackwell_tiled", "compares two of Liger's own Triton kernels"),
)


def why_left(file: str, test: str) -> Left | None:
    """The entry that leaves a test out; None where it is run."""
    for left in LEFT:
        if left.file == file and re.match(left.test, test):
            return left
    return None


def elements(parameters: dict[str, object]) -> int:
    """How many logits a test makes, of the names that Liger's tests give their sizes."""
    found = 1
    for name in ("B", "T", "V"):
        size = parameters.get(name)
        found *= size if isinstance(size, int) else 0
    return found
