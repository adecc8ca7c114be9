"""What attention multiplies with: keys, or values, in whatever form they are stored.

B rows, H KV heads, N slots, D head dim, m queries of all query heads that share a KV head.
"""

from __future__ import annotations

from typing import Protocol

import mlx.core as mx


class Operand(Protocol):
    """One tensor (B, H, N, D), as keys and as values."""

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(B, H, N, D)."""
        ...

    def scores(self, queries: mx.array, slots: int) -> mx.array:
        """(B, H, m, slots): the products of queries (B, H, m, D) with the first slots, as keys."""
        ...

    def mixed(self, weights: mx.array, slots: int) -> mx.array:
        """(B, H, m, D): the first slots, as values, weighted by (B, H, m, slots) and added up."""
        ...


class Dense:
    """A tensor as it is.

    Args:
        tensor: (B, H, N, D).
    """

    def __init__(self, tensor: mx.array) -> None:
        self._tensor = tensor

    @property
    def shape(self) -> tuple[int, int, int, int]:
        rows, heads, slots, dim = self._tensor.shape
        return rows, heads, slots, dim

    def scores(self, queries: mx.array, slots: int) -> mx.array:
        return queries @ self._first(slots).swapaxes(2, 3)

    def mixed(self, weights: mx.array, slots: int) -> mx.array:
        return weights @ self._first(slots)

    def _first(self, slots: int) -> mx.array:
        return self._tensor if slots == self._tensor.shape[2] else self._tensor[:, :, :slots]
