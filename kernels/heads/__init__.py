"""Heads and parts of a packed projection as views, and their gradients in one buffer."""
