"""Why a pattern is left alone."""

from __future__ import annotations


class Refusal(Exception):
    """The reason, as the plan shows it."""
