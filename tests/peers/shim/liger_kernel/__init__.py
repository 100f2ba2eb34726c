"""Offer the names that Liger-Kernel's tests import, with gradscope's recipes behind them.

Found before the real package where this folder comes first on the path. Importing it puts the submodules, which are
tables of names, into ``sys.modules``.

What Liger has and the recipes have not is made around them with torch, as a user would: Gemma's offset, Falcon's
multipliers, scaling by a token's probability; and z-loss, accuracy and predictions beside a loss, so that what tests
compare of those three says nothing of a recipe.
"""

from __future__ import annotations

import sys
from types import ModuleType

from . import _layers, _losses, _machine

_FUNCTIONS = {
    "liger_cross_entropy": _losses.liger_cross_entropy,
    "liger_fused_add_rms_norm": _layers.FusedAddRMSNorm.apply,
    "liger_fused_linear_cross_entropy": _losses.liger_fused_linear_cross_entropy,
    "liger_layer_norm": _layers.liger_layer_norm,
    "liger_rms_norm": _layers.liger_rms_norm,
    "liger_rope": _layers.Rope.apply,
    "liger_swiglu": _layers.liger_swiglu,
}
_MODULES = {
    "cross_entropy": {"LigerCrossEntropyLoss": _losses.CrossEntropyLoss},
    "fused_add_rms_norm": {"LigerFusedAddRMSNorm": _layers.AddRMSNormModule},
    "fused_linear_cross_entropy": {"LigerFusedLinearCrossEntropyLoss": _losses.LinearCrossEntropyLoss},
    "layer_norm": {"LigerLayerNorm": _layers.LayerNormModule},
    "rms_norm": {"LigerRMSNorm": _layers.RMSNormModule},
    "rope": {"liger_rotary_pos_emb": _layers.Rope.apply},
    "swiglu": {
        "LigerBlockSparseTop2MLP": None,  # of transformers before 5; its test is left out
        "LigerExperts": _layers.Experts,
        "LigerFalconH1SwiGLUMLP": _layers.FalconMLP,
        "LigerPhi3SwiGLUMLP": _layers.PackedMLP,
        "LigerSwiGLUMLP": _layers.LlamaMLP,
    },
}
_OPERATIONS = {
    "LigerCrossEntropyFunction": _losses.CrossEntropy,
    "LigerFusedAddRMSNormFunction": _layers.FusedAddRMSNorm,
    "LigerFusedLinearCrossEntropyFunction": _losses.LinearCrossEntropy,
    "LigerLayerNormFunction": _layers.LayerNorm,
    "LigerRMSNormFunction": _layers.RMSNorm,
    "LigerRopeFunction": _layers.Rope,
    "LigerSiLUMulFunction": _layers.SiLUMul,
}


def _offer(name: str, content: dict[str, object]) -> None:
    module = ModuleType(f"{__name__}.{name}")
    module.__path__ = []  # a package, so that what lies in it is looked up in sys.modules
    vars(module).update(content)
    sys.modules[module.__name__] = module
    parent, _, last = module.__name__.rpartition(".")
    setattr(sys.modules[parent], last, module)


_offer("utils", _machine.NAMES)
_offer("ops", _OPERATIONS)
_offer("ops.cross_entropy", {"liger_cross_entropy_kernel": None})  # Triton's; the test that calls it is left out
_offer("ops.swiglu", {})
_offer("ops.utils", {"is_hip": lambda: False})
_offer("transformers", {name: value for names in _MODULES.values() for name, value in names.items()})
_offer("transformers.functional", {"CrossEntropyOutput": _losses.CrossEntropyOutput, **_FUNCTIONS})
for _name, _names in _MODULES.items():
    _offer(f"transformers.{_name}", _names)
