"""Rows of a batch in several buffers: first tokens that rows share, and the tails of rows by length.

`segment` has the shared parts, `rule` and `moving` group the tails, `reading` attends to both, and `segmented` is the
cache that a model sees.
"""

from __future__ import annotations

from mlx_kv.cache.segments.reading import DeferredMask
from mlx_kv.cache.segments.segment import Chain, Segment, can_evict_later, can_share, read_from, segment_of, sharable
from mlx_kv.cache.segments.segmented import SegmentedCache

__all__ = [
    "Chain",
    "DeferredMask",
    "Segment",
    "SegmentedCache",
    "can_evict_later",
    "can_share",
    "read_from",
    "segment_of",
    "sharable",
]
