"""Cross-entropy over logits: loss and gradient in one pass."""
