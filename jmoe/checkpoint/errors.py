"""The one error of this package."""

from __future__ import annotations

from collections.abc import Iterable


class CheckpointError(ValueError):
    """A checkpoint that cannot be read as what it claims to be. It names the file and, where it can, the key."""


def list_keys(keys: Iterable[str], shown: int = 5) -> str:
    """The first `shown` keys in natural order and how many there are, for messages about missing or unexpected keys."""
    ordered = sorted(keys)
    head = ", ".join(ordered[:shown])
    return f"{len(ordered)} in all: {head}{', ...' if len(ordered) > shown else ''}"
