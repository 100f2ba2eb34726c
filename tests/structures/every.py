"""Every declared structure."""

from __future__ import annotations

from . import calls, changing, graphs, layers, training
from .kit import STRUCTURES, Structure

__all__ = ["EVERY", "calls", "changing", "graphs", "layers", "training"]

EVERY: tuple[Structure, ...] = tuple(STRUCTURES.values())
