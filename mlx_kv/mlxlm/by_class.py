"""Batches whose rows are kept by capacity class (`cache.classes`): which models can take them, found by asking.

Decides whether a model hands on what the caches of several classes give it in the place of a mask, keys and values, and
asks for attention where it is answered. Knows nothing about classes.
B rows, N new tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import cache as stock

from mlx_kv.cache.classes import DeferredMask, RowClasses
from mlx_kv.cache.protocol import Call
from mlx_kv.mlxlm.asking import asked_once
from mlx_kv.mlxlm.attention import AttentionSeam
from mlx_kv.mlxlm.quirks import indexers, refuses_ragged
from mlx_kv.mlxlm.stand_ins import ATTENTION, FAR, ROWS
from mlx_kv.mlxlm.traverse import is_ours, mapped
from mlx_kv.mlxlm.trials import objection


class RowsByClass:
    """Makes caches whose batches keep rows by class, and has their attention asked for until it is closed.

    Args:
        model: of mlx-lm. One that cannot take such caches gets those that it had.
        rows: of a batch at the most; one alone needs no classes.
    """

    def __init__(self, model: nn.Module, rows: int) -> None:
        self._seam = AttentionSeam(model) if rows > 1 and attends_by_class(model) else None

    def of(self, caches: Sequence[Any]) -> list[Any]:
        """The caches of a sequence, ready to be joined with those of others."""
        if self._seam is None:
            return list(caches)
        return mapped(caches, lambda cache: RowClasses(cache) if is_ours(cache) else cache)

    def close(self) -> None:
        """No batch keeps its rows by class any more: those that come now get the caches that they had."""
        seam, self._seam = self._seam, None
        if seam is not None:
            seam.close()


@asked_once
def attends_by_class(model: nn.Module) -> bool:
    """Whether a model asks all of its attention with what its caches returned, and with the mask that they gave it.

    So do most: others make a mask of their own or another of it, call another function, attend to what they make of
    the keys, or read the tokens of another layer.
    """
    if refuses_ragged(model) is not None or indexers(model):
        return False
    return all(_hands_on(model, new, position) for new, position in ((2, 0), (2, FAR), (1, FAR)))


def _hands_on(model: nn.Module, new: int, position: int) -> bool:
    asked: list[_Asked] = []

    def stand_in(cache: Any, position: int) -> Any:
        if type(cache) not in ATTENTION:
            return cache
        asked.append(_Asked(position))
        return asked[-1]

    def caches_at(position: int) -> list[Any]:
        asked.clear()
        return mapped(stock.make_prompt_cache(model), lambda cache: stand_in(cache, position))

    with AttentionSeam(model):
        why = objection(model, (ROWS, new), caches_at, position)
    return why is None and bool(asked) and all(one.answered for one in asked)


class _Asked:
    """In a cache's place: gives what those of several classes would, and raises where a model does not hand it on."""

    def __init__(self, position: int) -> None:
        self._position = position
        self._fetched: tuple[mx.array, mx.array] | None = None
        self.attention_hook = self

    @property
    def answered(self) -> bool:
        """Whether attention came after every update."""
        return self._fetched is None

    @property
    def offset(self) -> mx.array:
        if self._fetched is not None:
            raise ValueError("positions were asked for between an update and its attention")
        return self._position - mx.arange(ROWS)

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> Any:
        return DeferredMask(N, return_array, window_size)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        if self._fetched is not None:
            raise ValueError("an update was not attended to")
        self._fetched = keys, values
        return keys, values

    def attend(self, call: Call) -> mx.array:
        fetched, self._fetched = self._fetched, None
        if fetched is None or not isinstance(call.mask, DeferredMask):
            raise ValueError("another mask, or no update before")
        keys, values = fetched
        if call.keys is not keys or call.values is not values or call.queries.shape[0] != ROWS:
            raise ValueError("other keys, values or rows than of the update")
        self._position += keys.shape[2]
        return mx.zeros((*call.queries.shape[:3], values.shape[3]), call.queries.dtype)
