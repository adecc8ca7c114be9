"""How far a sequence is, for who watches. Knows nothing about how it goes on."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class SequenceProgress:
    """How far a sequence is.

    Attributes:
        left: tokens of its prompt that are still to be read.
        drafted: tokens that were drafted for it in the last pass.
        accepted: drafted tokens that were right, so far.
    """

    left: int = 0
    drafted: int = 0
    accepted: int = 0
