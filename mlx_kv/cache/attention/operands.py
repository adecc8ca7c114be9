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


class Joined:
    """Two tensors, the slots of one after those of the other.

    Args:
        first, second: of the same B, H and D.
        apart: slots of the first that are used.
    """

    def __init__(self, first: Operand, second: Operand, apart: int) -> None:
        self._first, self._second, self._apart = first, second, apart

    @property
    def shape(self) -> tuple[int, int, int, int]:
        rows, heads, slots, dim = self._second.shape
        return rows, heads, self._apart + slots, dim

    def scores(self, queries: mx.array, slots: int) -> mx.array:
        if slots <= self._apart:
            return self._first.scores(queries, slots)
        beside = self._second.scores(queries, slots - self._apart)
        return mx.concatenate([self._first.scores(queries, self._apart), beside], axis=-1)

    def mixed(self, weights: mx.array, slots: int) -> mx.array:
        if slots <= self._apart:
            return self._first.mixed(weights, slots)
        beside = self._second.mixed(weights[..., self._apart :], slots - self._apart)
        return self._first.mixed(weights[..., : self._apart], self._apart) + beside
