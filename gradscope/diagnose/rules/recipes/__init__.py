"""Rules about calls that a recipe could take the place of: attention, norms, activations, positions, heads, losses."""
