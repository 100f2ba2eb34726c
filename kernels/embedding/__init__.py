"""The gradient of an embedding, added by rows into a dense gradient."""
