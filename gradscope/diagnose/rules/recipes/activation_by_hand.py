"""An unfused activation function saves a tensor for every operation, although its input is enough.

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
    "gelu": "Unfused GELU: every operation saves a tensor for backward",
    "bias_gelu": "Unfused bias + GELU: two passes over the same tensor, both results saved for backward",
    "geglu": "Unfused GeGLU: GELU and the multiplication are separate passes, and GELU's output is saved for backward",
    "swiglu": (
        "Unfused SwiGLU: silu and the multiplication are separate passes, and silu's output is saved for backward"
    ),
}


def find(case: Case) -> Iterator[Finding]:
    """Yield one finding for each line with an activation function of plain operations."""
    yield from found_places(case, RULE.name, set(_MESSAGES), lambda place: _MESSAGES[place.recipe])


RULE = Rule("activation-by-hand", "unfused GELU, SwiGLU or GeGLU", find)
