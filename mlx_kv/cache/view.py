"""What a cache holds, for those who look and change nothing: statistics, files, evictors, the server's memory page."""

from __future__ import annotations

from typing import NamedTuple

from mlx_kv.cache.buffers import Buffers
from mlx_kv.cache.codecs import Codecs
from mlx_kv.cache.growth import Growth
from mlx_kv.cache.layout import Layout, Row


class CacheView(NamedTuple):
    """A cache as it was when it was asked.

    Attributes:
        layout: which slot holds which position.
        rows: where each row stands.
        codecs: how keys and how values are stored from `quantized_start` on.
        buffers: of keys and of values; None before the first update. Before `quantized_start` they are plain.
        quantized_start: the codecs are used from the first write on that begins at this offset or later.
        packed_decode: whether attention may be handed packed planes.
        reserved: tokens that room is made for at the first update, in any row.
        announced: tokens that each row will hold, as far as was said.
        lengths: tokens of each row that are announced, padding follows them; None where none is.
        growth: how capacity grows.
        residual_length: tokens that a query sees as they came, however they are stored.
    """

    layout: Layout
    rows: tuple[Row, ...]
    codecs: Codecs
    buffers: Buffers | None
    quantized_start: int
    packed_decode: bool
    reserved: int
    announced: tuple[int, ...]
    lengths: tuple[int, ...] | None
    growth: Growth
    residual_length: int = 0

    @property
    def used(self) -> int:
        """Slots, from the first on, among which those lie that hold a token of any row."""
        return min(max(0, *(row.end for row in self.rows)), self.layout.most_slots)
