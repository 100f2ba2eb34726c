"""Recipes: custom autograd Functions that replace what the profiler found slow. Imported as ``gradscope.recipes``.

Each is one module: its autograd Function, its functional form, its drop-in Module. Functions take the arguments of
their namesake in ``torch.nn.functional``, and more by keyword; ``function.explain(...)`` takes the same arguments and
says what would run and why.
"""

# Each module is imported before the function of its name: afterwards the name here stays the function.
from gradscope.recipes.cross_entropy import CrossEntropyLoss, cross_entropy
from gradscope.recipes.dropout import Dropout, dropout
from gradscope.recipes.embedding import Embedding, embedding
from gradscope.recipes.gelu import GELU, BiasGELU, bias_gelu, gelu
from gradscope.recipes.norm import AddLayerNorm, AddRMSNorm, add_layer_norm, add_rms_norm, layer_norm, rms_norm
from gradscope.recipes.swiglu import SwiGLU, swiglu

__all__ = [
    "AddLayerNorm",
    "AddRMSNorm",
    "BiasGELU",
    "CrossEntropyLoss",
    "Dropout",
    "Embedding",
    "GELU",
    "SwiGLU",
    "add_layer_norm",
    "add_rms_norm",
    "bias_gelu",
    "cross_entropy",
    "dropout",
    "embedding",
    "gelu",
    "layer_norm",
    "rms_norm",
    "swiglu",
]
