"""Who answers attention over packed planes that mlx-lm's cannot read."""

from __future__ import annotations

import mlx.core as mx

from mlx_kv.cache.attention.blocks import attend
from mlx_kv.cache.attention.packed import Packed
from mlx_kv.cache.codecs import Packing
from mlx_kv.cache.protocol import Call


class PackedAnswer:
    """Attention over keys and values that are packed each in its own way.

    Args:
        keys, values: how.
    """

    def __init__(self, keys: Packing, values: Packing) -> None:
        self._keys, self._values = keys, values

    def attend(self, call: Call) -> mx.array:
        """(B, Hq, S, Dv)."""
        keys, values = Packed(call.keys, self._keys), Packed(call.values, self._values)
        return attend(call.queries, keys, values, call.scale, call.mask, call.sinks)
