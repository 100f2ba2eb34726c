"""TF32 by its older and its newer switches: what is recorded of them, and what the rule says on a made-up GPU."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch

from gradscope.diagnose.rules import RULES
from gradscope.recording.graph import Node
from gradscope.tables import Finding, OpRow
from tests.diagnose.settings.test_settings_made import HOPPER, LINEAR, MATMUL, call, check_words, made_case, tensor
from tests.diagnose.timing_cases import row as layer

IMAGES = tensor(8, 16, 32, 32)
CONV = call("conv2d", [IMAGES, tensor(16, 16, 3, 3)], IMAGES, layer="conv")
ROWS = [
    OpRow("conv", "forward", "aten::cudnn_convolution", 4, 10_000_000),
    OpRow("conv", "backward", "aten::convolution_backward", 4, 20_000_000),
]


def found(rows: list[OpRow], calls: list[Node], **settings: Any) -> list[Finding]:
    return list(RULES["tf32-off"].find(made_case(rows, calls, **{"capability": [9, 0], **settings})))


def test_convolutions_have_a_switch_of_their_own() -> None:
    (finding,) = found(ROWS, [CONV], conv_fp32="none", matmul_fp32="none", matmul_precision="highest")
    check_words(finding)
    assert finding.message == "Float32 convolutions do not use the GPU's tensor cores because TF32 is off"
    assert finding.evidence.startswith("8 float32 convolutions in forward and backward, 30.0 ms per step (30.0 %)")
    assert finding.code == "torch.backends.cudnn.allow_tf32 = True"
    assert finding.predicted_saving_ns == 15_000_000
    assert found(ROWS, [CONV], cudnn_tf32=False, matmul_precision="high")[0].code == finding.code


@pytest.mark.parametrize(
    "settings",
    [{"conv_fp32": "tf32"}, {"cudnn_tf32": True}, {}, {"conv_fp32": "none", "device": "cpu"}],
    ids=["newer switch", "older switch", "not known", "CPU"],
)
def test_convolutions_that_are_left_alone(settings: dict[str, Any]) -> None:
    assert found(ROWS, [CONV], **settings) == []


def test_convolutions_under_autocast_and_of_other_formats_are_left_alone() -> None:
    half = replace(CONV, inputs=tuple(replace(each, dtype=torch.bfloat16) for each in CONV.inputs))
    assert found(ROWS, [replace(CONV, autocast=True)], conv_fp32="none") == []
    assert found(ROWS, [half], conv_fp32="none") == []


def test_products_by_the_newer_switches() -> None:
    settings = {**HOPPER, "matmul_precision": None}
    (finding,) = found([MATMUL], [LINEAR], **{**settings, "matmul_fp32": "ieee"})
    assert finding.code == 'torch.backends.cuda.matmul.fp32_precision = "tf32"'
    (finding,) = found([MATMUL], [LINEAR], **{**settings, "matmul_fp32": "none"})
    assert finding.code == 'torch.set_float32_matmul_precision("high")'
    assert found([MATMUL], [LINEAR], **{**settings, "matmul_fp32": "tf32"}) == []
    assert found([MATMUL], [LINEAR], **settings) == []  # torch refused to say


def test_products_of_torchs_own_layers() -> None:
    """Whose call is known by the module around them alone, and whose time by their own path."""
    case = made_case([replace(MATMUL, layer="body.fc")], [replace(LINEAR, module="Linear")], **HOPPER)
    rows = (
        layer("body", 0, 0, "Sequential", backward_self_steps_ns=(0,)),
        layer("body.fc", 0, 0, "Linear", backward_self_steps_ns=(0,)),
    )
    (finding,) = RULES["tf32-off"].find(replace(case, run=replace(case.run, layers=rows)))
    assert finding.cost_ns == MATMUL.self_ns


def test_both_are_two_findings() -> None:
    both = found([MATMUL, *ROWS], [LINEAR, CONV], conv_fp32="ieee", matmul_fp32="ieee")
    assert [each.code for each in both] == [
        'torch.backends.cuda.matmul.fp32_precision = "tf32"',
        'torch.backends.cudnn.conv.fp32_precision = "tf32"',
    ]


_SCRIPT = """
import warnings
warnings.simplefilter("error")
import torch
from gradscope.capture.environment import current_settings, fp32_precision
{setting}
current_settings()
found = fp32_precision("matmul"), fp32_precision("conv")
assert found == {before}, found
{advice}
assert fp32_precision({kind!r}) == "tf32"
"""


# Up to torch 2.12 convolutions have TF32 as a setting of their own, which the switch above all does not change.
CONV_UNDER_IEEE = "ieee" if torch.__version__[:4] >= "2.13" else "tf32"


@pytest.mark.parametrize(
    ("setting", "before", "kind"),
    [
        ("", ("none", "tf32"), "matmul"),
        ("torch.backends.cudnn.allow_tf32 = False", ("none", "none"), "conv"),
        ('torch.backends.fp32_precision = "ieee"', ("ieee", CONV_UNDER_IEEE), "matmul"),
        ('torch.backends.fp32_precision = "ieee"', ("ieee", CONV_UNDER_IEEE), "conv"),
        ('torch.backends.fp32_precision = "tf32"', ("tf32", "tf32"), "matmul"),
        ('torch.backends.cuda.matmul.fp32_precision = "tf32"', ("tf32", "tf32"), "matmul"),
        ('torch.backends.cudnn.conv.fp32_precision = "ieee"', ("none", "ieee"), "conv"),
    ],
)
def test_switches_are_read_without_warnings_and_the_advice_turns_them(
    setting: str, before: tuple[str, str], kind: str
) -> None:
    """In a process of its own: the newer switches cannot all be set back."""
    rows, calls = ([MATMUL], [LINEAR]) if kind == "matmul" else (ROWS, [CONV])
    findings = found(rows, calls, **{f"{kind}_fp32": before[0 if kind == "matmul" else 1]})
    advice = findings[0].code if findings else ""
    script = _SCRIPT.format(setting=setting, before=before, advice=advice, kind=kind)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


_PROFILED = """
import warnings
warnings.simplefilter("error")
import torch, gradscope
{setting}
report = gradscope.profile(torch.nn.Linear(4, 4), torch.ones(2, 4), steps=1, warmup=1)
assert not any("failed" in note for note in report.data.notes), report.data.notes
"""


@pytest.mark.parametrize(
    "setting", ['torch.backends.fp32_precision = "tf32"', 'torch.backends.cuda.matmul.fp32_precision = "tf32"']
)
def test_a_run_whose_code_sets_the_newer_switches_is_measured(setting: str) -> None:
    """The older ones raise from then on."""
    script = _PROFILED.format(setting=setting)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
