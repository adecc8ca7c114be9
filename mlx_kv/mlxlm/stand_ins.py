"""Stand-ins for a model's caches: of zeros, at any position, and a record of what the model asks of them.

Graphs are built over them and dropped, and nothing is evaluated. Knows nothing about what is asked.
B rows, N new tokens, K slots.
"""

from __future__ import annotations

from itertools import count
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import cache as stock

from mlx_kv.mlxlm.traverse import mapped

ATTENTION = {stock.KVCache, stock.QuantizedKVCache, stock.RotatingKVCache, stock.ChunkedKVCache}
# A length at which whatever a model does in long texts only has begun. Graphs of any length cost the same.
FAR = 1 << 20
# Rows, when each has a length of its own: as no model has heads, so that no axis of rows passes for one of heads.
ROWS = 13


class StandIn:
    """Keys and values of nothing but zeros in the place of a layer's cache, and a record of what the model asks of it.

    Args:
        position: tokens that were read before.
        extra: dead slots after the last token, which the mask hides.
        rows: of the batch; each stands one token before the one before it where there are several.
        packed: group size and bits of the planes that it hands out; None are plain arrays.
    """

    start_position = 0

    def __init__(self, position: int, extra: int = 0, rows: int = 1, packed: tuple[int, int] | None = None) -> None:
        self._position, self._extra, self._rows, self._packed = position, extra, rows, packed
        self.windows: list[int | None] = []  # what masks were asked for
        self.written = False
        self.says_values = True  # whether the values that it was given say anything
        self.keys: mx.array | None = None
        self.values: mx.array | None = None
        self.given: tuple[mx.array, mx.array] | None = None  # the last keys and values that were to be stored

    @property
    def offset(self) -> int | mx.array:
        return self._position if self._rows == 1 else self._position - mx.arange(self._rows)

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> Any:
        self.windows.append(window_size)
        if self._position == 0 and self._rows == 1:
            return stock.create_attention_mask(N, 0, return_array, window_size)
        shape = (N, self._position + N + self._extra)
        return mx.ones(shape if self._rows == 1 else (self._rows, 1, *shape), dtype=mx.bool_)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> Any:
        self._position += keys.shape[2]
        self.given = keys, values
        self.written, self.says_values = True, values is not keys and values.shape[3] > 0
        self.keys, self.values = (
            mx.zeros((*x.shape[:2], self._position + self._extra, x.shape[3]), x.dtype) for x in (keys, values)
        )
        return self.keys_and_values()

    def keys_and_values(self) -> Any:
        stored: Any = self.keys, self.values
        if self._planes is None:
            return stored
        group_size, bits = self._planes
        return tuple(mx.quantize(x, group_size=group_size, bits=bits) for x in stored)

    @property
    def _planes(self) -> tuple[int, int] | None:
        """Group size and bits of what is handed out: as from `KVCache` not where keys and values differ in head dim."""
        if self.keys is None or self.values is None or self.keys.shape[3] != self.values.shape[3]:
            return None
        return self._packed

    @property
    def group_size(self) -> int:
        return self._of_planes(0)

    @property
    def bits(self) -> int:
        return self._of_planes(1)

    def _of_planes(self, which: int) -> int:
        if self._planes is None:
            raise AttributeError("only packed planes have bits and a group size")
        return self._planes[which]

    def maybe_trim_front(self) -> None:
        pass


def stand_ins(
    model: nn.Module,
    position: int,
    packed: tuple[int, int] | None = None,
    plain: frozenset[int] = frozenset(),
    **how: int,
) -> list[Any]:
    """The model's own list of caches, stand-ins for those of attention.

    Args:
        plain: the numbers of those, in the order of `leaves`, that never hand out packed planes.
    """
    number = count()

    def replaced(cache: Any) -> Any:
        index = next(number)
        if type(cache) not in ATTENTION:
            return cache
        # In chunks, the model makes the mask itself, of the slots from the front on: there are no others.
        given = how | {"extra": 0} if type(cache) is stock.ChunkedKVCache else how
        return StandIn(position, packed=None if index in plain else packed, **given)

    return mapped(stock.make_prompt_cache(model), replaced)
