"""Recipes: custom autograd Functions that replace what the profiler found slow. Imported as ``gradscope.recipes``.

Each is one module: its autograd Function, its functional form, its drop-in Module. Functions take the arguments of
their namesake in ``torch.nn.functional``, and more by keyword; ``function.explain(...)`` takes the same arguments and
says what would run and why. Arguments that do not fit raise ``ValueError`` before anything runs; the error is a
``RuntimeError`` as well, and an ``IndexError`` where torch raises one: code around a namesake goes on catching it.
"""

# Each module is imported before the function of its name: afterwards the name here stays the function.
from gradscope.recipes.attention import Attention, attention
from gradscope.recipes.attention_mask import attention_mask
from gradscope.recipes.attention_with_weights import attention_with_weights
from gradscope.recipes.cross_entropy import CrossEntropyLoss, cross_entropy
from gradscope.recipes.dropout import Dropout, dropout
from gradscope.recipes.embedding import Embedding, embedding
from gradscope.recipes.gelu import GELU, BiasGELU, bias_gelu, gelu
from gradscope.recipes.heads import chunk, merge_heads, split, split_heads, split_qkv
from gradscope.recipes.held import is_number as is_number  # for patches: no recipe
from gradscope.recipes.lazy_linear import lazy_linear
from gradscope.recipes.linear_cross_entropy import linear_cross_entropy, linear_cross_entropy_and_logits
from gradscope.recipes.linear_cross_entropy_modules import LinearCrossEntropyHead, LinearCrossEntropyLoss
from gradscope.recipes.norm import AddLayerNorm, AddRMSNorm, add_layer_norm, add_rms_norm, layer_norm, rms_norm
from gradscope.recipes.packed_attention import PackedSelfAttention, packed_attention
from gradscope.recipes.rope import RotaryEmbedding, rope
from gradscope.recipes.swiglu import GeGLU, SwiGLU, geglu, swiglu

__all__ = [
    "AddLayerNorm",
    "AddRMSNorm",
    "Attention",
    "BiasGELU",
    "CrossEntropyLoss",
    "Dropout",
    "Embedding",
    "GELU",
    "GeGLU",
    "LinearCrossEntropyHead",
    "LinearCrossEntropyLoss",
    "PackedSelfAttention",
    "RotaryEmbedding",
    "SwiGLU",
    "add_layer_norm",
    "add_rms_norm",
    "attention",
    "attention_mask",
    "attention_with_weights",
    "bias_gelu",
    "chunk",
    "cross_entropy",
    "dropout",
    "embedding",
    "geglu",
    "gelu",
    "layer_norm",
    "lazy_linear",
    "linear_cross_entropy",
    "linear_cross_entropy_and_logits",
    "merge_heads",
    "packed_attention",
    "rms_norm",
    "rope",
    "split",
    "split_heads",
    "split_qkv",
    "swiglu",
]
