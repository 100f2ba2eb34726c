"""Linear layer and cross-entropy in one: the logits are never held all at once."""
