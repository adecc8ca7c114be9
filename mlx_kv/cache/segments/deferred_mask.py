"""The mask of a batch in several caches, each of which makes its own."""

from __future__ import annotations

from typing import Any

from mlx_kv.cache.kv_cache import KVCache
from mlx_kv.cache.mask import Mask


class DeferredMask:
    """What the caches of one step make their masks of; models hand it on from the layer that was asked to all others.

    Args:
        new, return_array, window_size: what the model asked `make_mask` for.
    """

    def __init__(self, new: int, return_array: bool, window_size: int | None) -> None:
        self._new, self._return_array, self._window = new, return_array, window_size
        self._known: dict[Any, Mask] = {}  # layers whose caches stand alike share a mask

    def of(self, number: int, cache: KVCache) -> Mask:
        """The mask of a cache before its update.

        Args:
            number: of its class. Caches of two classes have histories of their own, and may come to stand alike in what
                can be seen of them.
        """
        if cache.evictor is not None and self._window is not None:  # then integers alone do not say
            return self._made_by(cache)
        view = cache.view
        key = number, view.layout, view.rows, view.lengths
        if key not in self._known:
            self._known[key] = self._made_by(cache)
        return self._known[key]

    def _made_by(self, cache: KVCache) -> Mask:
        return cache.make_mask(self._new, self._return_array, self._window)
