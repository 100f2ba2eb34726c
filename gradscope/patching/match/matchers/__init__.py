"""The patterns, one a file: each finds in a recording what its recipe replaces.

A matcher is a function from a recording to matches. It reads the graph of calls only: how the source spells them, and
whether the source allows the change, is the business of :mod:`gradscope.patching.edit.rewrite`.
"""

from __future__ import annotations

from gradscope.patching.match.matchers import (
    add_norm,
    attention,
    cross_entropy,
    embedding,
    gated,
    gelu,
    linear_cross_entropy,
    norms,
    packed_attention,
    rope,
)

# In the order of preference: where two overlap, the earlier one is taken.
MATCHERS = {
    packed_attention.RECIPE: packed_attention.matches,
    attention.RECIPE: attention.matches,
    linear_cross_entropy.RECIPE: linear_cross_entropy.matches,
    cross_entropy.RECIPE: cross_entropy.matches,
    rope.RECIPE: rope.matches,
    embedding.RECIPE: embedding.matches,
    add_norm.RECIPE: add_norm.matches,
    gated.GEGLU: gated.geglu,
    gelu.BIAS_RECIPE: gelu.with_bias,
    gelu.RECIPE: gelu.matches,
    gated.SWIGLU: gated.swiglu,
    norms.RMS: norms.rms,
    norms.LAYER: norms.layer,
}
