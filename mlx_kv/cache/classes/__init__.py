"""Rows of very different lengths in a few caches, by capacity class: each is held and read as long as it is, or nearly.

`rule` decides which rows are together, `moving` puts them there, and `row_classes` answers for all of them.
"""

from __future__ import annotations

from mlx_kv.cache.classes.row_classes import DeferredMask, RowClasses

__all__ = ["DeferredMask", "RowClasses"]
