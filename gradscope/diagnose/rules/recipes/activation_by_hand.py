"""An activation function written out keeps a tensor for every operation, where its input alone would do.

Example::

    y = 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))

Pattern: formulas that are GELU, exact or by tanh, in any spelling; GELU of a sum with a bias; silu(gate) · up and
gelu(gate) · up.
Evidence: time of the lines, and what they hold. Estimate: both ways run alone at the recorded shapes.

Source: D. Hendrycks and K. Gimpel, Gaussian error linear units (arXiv:1606.08415); PyTorch's performance tuning guide,
"Fuse operations"; N. Shazeer, GLU variants improve transformer (arXiv:2002.05202).
"""

from __future__ import annotations

from collections.abc import Iterator

from gradscope.diagnose.case import Case, Rule
from gradscope.diagnose.rules.recipes.places import found_places
from gradscope.tables import Finding

_MESSAGES = {
    "gelu": "GELU is written out: every operation makes and keeps a tensor of its own",
    "bias_gelu": "the bias and GELU each pass over the same tensor, and both results are kept",
    "geglu": "GELU of the gate and its product are passes of their own, and GELU's result is kept",
    "swiglu": "silu of the gate and its product are passes of their own, and silu's result is kept",
}


def find(case: Case) -> Iterator[Finding]:
    """Yield one finding for each line with an activation function of plain operations."""
    yield from found_places(case, RULE.name, set(_MESSAGES), lambda place: _MESSAGES[place.recipe])


RULE = Rule("activation-by-hand", "GELU, SwiGLU or GeGLU made of plain operations", find)
