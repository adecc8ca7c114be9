"""What a cache holds, for those who look and change nothing: statistics, files, evictors, the server's memory page."""

from __future__ import annotations

from typing import NamedTuple

from mlx_kv.cache.buffers import SlotBuffer
from mlx_kv.cache.layout import Layout, Row


class CacheView(NamedTuple):
    """A cache as it was when it was asked.

    Attributes:
        layout: which slot holds which position.
        rows: where each row stands.
        buffers: of keys and of values; None before the first update.
    """

    layout: Layout
    rows: tuple[Row, ...]
    buffers: tuple[SlotBuffer, SlotBuffer] | None
