"""Rows that come together: which caches fit, and their buffers as one.

A row's slots begin at 0 in every cache, whatever was evicted or overwritten, so rows are put side by side as they are:
nothing is rolled, padded or realigned. Knows nothing about attention or masks; `KVCache` has the methods.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from mlx_kv.cache.buffers import SlotBuffer
from mlx_kv.cache.codecs import Codec
from mlx_kv.cache.eviction.evictor import Evictor
from mlx_kv.cache.layout import Layout, Row


class Joinable(Protocol):
    """What of a cache must agree, and what is joined."""

    layout: Layout
    _codec: Codec
    _rows: tuple[Row, ...]
    _buffers: tuple[SlotBuffer, SlotBuffer] | None
    _evictor: Evictor | None

    def empty(self) -> bool: ...


def check_joinable(index: int, first: Joinable, other: Joinable) -> None:
    """Raises ValueError unless `other`, number `index` of those to be joined, keeps its tokens as `first` does."""
    if type(other) is not type(first):
        raise ValueError(
            f"cache {index} is a {type(other).__name__}: only caches of this library can be merged with one"
        )
    kept, wanted = _how(other), _how(first)
    if first._buffers is None or other._buffers is None:  # what has stored nothing yet takes any shape
        kept, wanted = kept[:-2], wanted[:-2]
    for (what, own), (_, theirs) in zip(wanted, kept, strict=True):
        if own != theirs:
            raise ValueError(
                f"cache {index} has {what} {theirs}, the first one {own}: only caches of one kind can be one batch"
            )


def _how(cache: Joinable) -> list[tuple[str, object]]:
    """All that must be the same in every row of a batch, in words and as it is."""
    evictor = cache._evictor
    keys, values = (None, None) if cache._buffers is None else (buffer.tensor[1:] for buffer in cache._buffers)
    return [
        ("layout", cache.layout.parameters),
        ("bits and group size", (cache._codec.bits, cache._codec.group_size)),
        ("score and share", None if evictor is None else (evictor.score.name, evictor.granularity)),
        # Lambdas have one name, and so have functions that were registered under it one after the other.
        ("the score function", None if evictor is None else (evictor.score.function, evictor.score.per_token)),
        ("KV heads, head dim and dtype of keys", keys),
        ("KV heads, head dim and dtype of values", values),
    ]


def check_rows(chosen: Sequence[int], rows: int) -> None:
    """Raises ValueError unless these are rows that there are."""
    if not chosen or len(set(chosen)) < len(chosen) or not all(0 <= index < rows for index in chosen):
        raise ValueError(
            f"cannot take rows {list(chosen)}: this cache has rows 0 to {rows - 1}; give at least one, and none twice"
        )


def joined_buffers(caches: Sequence[Joinable], capacity: int) -> tuple[SlotBuffer, SlotBuffer]:
    """Keys and values of all rows. If one cache is quantised by now, all are."""
    stored = [None if cache.empty() else cache._buffers for cache in caches]
    codec = max(
        (buffers[0].codec for buffers in stored if buffers is not None), key=lambda codec: codec.bits is not None
    )

    def joined(which: int) -> SlotBuffer:
        parts: list[tuple[SlotBuffer | None, int, int]] = []
        for cache, buffers in zip(caches, stored, strict=True):
            if buffers is None:
                parts.append((None, len(cache._rows), 0))
                continue
            buffer = buffers[which]
            if buffer.codec != codec:
                buffer = SlotBuffer(buffer.codec, buffer.planes)
                buffer.recode(codec)
            used = max(0, *(row.end for row in cache._rows))
            parts.append((buffer, len(cache._rows), min(used, cache.layout.most_slots)))
        return SlotBuffer.stacked(parts, capacity)

    return joined(0), joined(1)
