"""Rows of a batch in several buffers: first tokens that rows share, and the tails of rows by length.

`segment` has the shared parts and the attention over them, `rule` and `moving` group the tails, and `segmented` is the
cache that a model sees.
"""

from __future__ import annotations

from mlx_kv.cache.segments.deferred_mask import DeferredMask
from mlx_kv.cache.segments.segment import Chain, Segment, can_share, segment_of, with_chain, with_shared
from mlx_kv.cache.segments.segmented import SegmentedCache

__all__ = ["Chain", "DeferredMask", "Segment", "SegmentedCache", "can_share", "segment_of", "with_chain", "with_shared"]
