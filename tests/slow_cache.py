"""A cache for whole models that concatenates: what is read of it is all that was written."""

from __future__ import annotations

import mlx.core as mx
from outside import round_trip


class SlowCache:
    """Concatenates, and compares every key position with every query position."""

    start_position = 0  # llama4 makes a mask of it

    def __init__(
        self, bits: int | None = None, window: int | None = None, sinks: int = 0, chunk: int | None = None
    ) -> None:
        self.how, self.window, self.sinks, self.chunk, self.offset = (bits, 32), window, sinks, chunk, 0
        self.keys: mx.array | None = None
        self.values: mx.array | None = None

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        keys, values = round_trip(keys, *self.how), round_trip(values, *self.how)
        if self.keys is not None:
            keys, values = mx.concatenate([self.keys, keys], 2), mx.concatenate([self.values, values], 2)
        self.keys, self.values, self.offset = keys, values, keys.shape[2]
        return keys, values

    @property
    def state(self) -> tuple[mx.array | None, mx.array | None]:
        return self.keys, self.values

    def maybe_trim_front(self) -> None:
        pass

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> mx.array | None:
        window = self.window if window_size is None else window_size
        if N == 1 and window is None and self.chunk is None:
            return None
        rows = [
            [
                p <= q
                and (window is None or q - p < window - self.sinks or p < self.sinks)
                and (self.chunk is None or p // self.chunk == q // self.chunk)
                for p in range(self.offset + N)
            ]
            for q in range(self.offset, self.offset + N)
        ]
        return mx.array(rows)
