"""``activation(gate) * up``, with gradients of both in one pass."""
