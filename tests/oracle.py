"""Slow, obvious references: what a cache should have done, written without looking at how ours does it.

`Twins` drives one of our caches beside a poisoned copy of it and a plain Python history of every row, and compares
attention after every update.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from kept import Kept
from mlx_lm.models.base import scaled_dot_product_attention
from outside import left_of, round_trip

from mlx_kv import ChunkedKVCache, CompressedKVCache, FixedStep, KVCache, RingKVCache, Tapered
from mlx_kv.cache.layout import Row
from mlx_kv.cache.residual import ROOM
from mlx_kv.mlxlm.attention import AttentionCall

HEADS, QUERY_HEADS = 2, 4


@dataclass(frozen=True)
class Spec:
    """One combination of parts."""

    bits: int | None = None
    rows: int = 1
    key_dim: int = 64
    value_dim: int = 64
    step_growth: bool = False
    reserve: int = 0
    packed_decode: bool = True
    quantized_start: int = 0
    window: int | None = None  # asked for by the model, of a cache that may keep more
    ring: int | None = None  # the window that the cache itself keeps
    chunk: int | None = None  # the chunks whose tokens see each other
    max_write: int = 1
    sinks: int = 0
    budget: int | None = None
    keep_recent: int = 0
    margin: int = 0
    score: str = "key_norm"
    share: Any = "layers"
    codec: Any = None  # instead of bits: one of `outside.LEFT`, or two, of keys and of values
    residual: int = 0  # tokens that a query sees as they came
    room: int = ROOM  # beside them
    carries: bool = False  # something that shows it its attention, which it can then answer itself

    @property
    def max_slots(self) -> int | None:
        """What a bounded cache may use."""
        if self.chunk is not None:
            return self.chunk + self.max_write
        return None if self.ring is None else self.ring + self.max_write - 1

    @property
    def encodes(self) -> bool:
        """Whether what comes back is not what was stored."""
        return self.bits is not None or self.codec is not None

    def left(self, which: int, x: mx.array | np.ndarray) -> np.ndarray:
        """What is left of keys (0) or of values (1) that were stored."""
        if self.codec is None:
            return np.array(round_trip(mx.array(x), self.bits, 32))
        return left_of(self.codec[which] if isinstance(self.codec, tuple) else self.codec, np.array(x))

    def make(self) -> KVCache:
        return self.carried(self._made())

    def carried(self, cache: KVCache) -> KVCache:
        """The cache, which carries what this one does."""
        if self.carries:
            cache.carry(object())
        if self.residual:
            set_room(cache, self.room)
        return cache

    def _made(self) -> KVCache:
        if self.budget is not None:
            return CompressedKVCache(
                self.budget,
                self.keep_recent,
                self.sinks,
                self.score,
                self.share,
                self.margin,
                self.bits,
                32,
                self.max_write,
                packed_decode=self.packed_decode,
                reserve=self.reserve,
                codec=self.codec,
                residual_length=self.residual,
            )
        if self.chunk is not None:
            options = {"reserve": self.reserve, "packed_decode": self.packed_decode, "codec": self.codec}
            options["residual_length"] = self.residual
            return ChunkedKVCache(self.chunk, self.max_write, self.bits, 32, **options)
        if self.ring is not None:
            growth = FixedStep() if self.step_growth else Tapered()
            return RingKVCache(
                self.ring,
                self.max_write,
                self.sinks,
                bits=self.bits,
                group_size=32,
                growth=growth,
                reserve=self.reserve,
                packed_decode=self.packed_decode,
                codec=self.codec,
                residual_length=self.residual,
            )
        return KVCache(
            bits=self.bits,
            group_size=32,
            growth=FixedStep() if self.step_growth else Tapered(),
            reserve=self.reserve,
            packed_decode=self.packed_decode,
            quantized_start=self.quantized_start,
            codec=self.codec,
            residual_length=self.residual,
        )


def live_slots(cache: KVCache, row: Row) -> set[int]:
    """Slots of the positions that a query from here on may see, or may see again after the longest lossless trim."""
    layout = cache.layout
    if cache.evictor is not None:
        return set(range(row.end))
    first = row.offset - layout.max_trim(row)
    parts = Spec(ring=layout.window, chunk=layout.chunk_size, sinks=layout.sinks)
    return {layout.slot(row, p) for p in range(row.offset) if p >= first or sees(parts, first, p)}


def poison(cache: KVCache) -> None:
    """Fills every slot that holds no token with large finite values."""
    live = [live_slots(cache, row) for row in cache.view.rows]
    for buffer in cache.view.buffers or ():
        planes = []
        for plane in buffer.planes:
            dead = np.stack([[[slot not in slots for slot in range(plane.shape[2])]] for slots in live])  # (B, 1, C)
            if cache.evictor is not None and not cache.empty():  # heads may have dead slots of their own
                gone = np.array(cache.positions) < 0  # (B, H', n)
                dead = np.broadcast_to(dead, (len(live), gone.shape[1], plane.shape[2])).copy()
                dead[:, :, : gone.shape[2]] |= gone
            large = {mx.uint32: 0xDEADBEEF, mx.int8: 99, mx.uint8: 0xA7}.get(plane.dtype, 1e4)  # in e8m0 2^40
            bad = mx.array(large, plane.dtype)
            planes.append(mx.where(mx.array(dead)[..., None], bad, plane))
        buffer.planes = tuple(planes)
    poison_residual(cache)


def set_room(cache: KVCache, room: int) -> None:
    """Less room than there is beside newest tokens: short histories go over it."""
    assert cache.residual is not None
    cache.residual.room = room


def poison_residual(cache: KVCache) -> None:
    """Fills the slots of a residual that hold no token that is to be seen, or to be seen after a trim."""
    residual = cache.residual
    for buffer in () if residual is None else residual.buffers or ():
        first = residual.first if len(residual.first) > 1 else residual.first * len(cache.view.rows)
        held = [
            {p % residual.slots for p in range(max(0, least), row.offset)}
            for least, row in zip(first, cache.view.rows, strict=True)
        ]
        (plane,) = buffer.planes
        dead = np.stack([[[[slot not in own] for slot in range(plane.shape[2])]] for own in held])
        buffer.planes = (mx.where(mx.array(dead), mx.array(1e4, plane.dtype), plane),)


def attend(cache: KVCache, q: mx.array, k: mx.array, v: mx.array, window: int | None) -> mx.array:
    """One layer's attention through a cache, as mlx-lm's models do it. The scale is 1 / sqrt(Dk)."""
    mask = cache.make_mask(q.shape[2], window_size=window)
    keys, values = cache.update_and_fetch(k, v)
    named = {"cache": cache, "scale": q.shape[3] ** -0.5, "mask": mask}
    call = AttentionCall(scaled_dot_product_attention, (mx.array(q), keys, values), named)
    return call.forward() if cache.attention_hook is None else cache.attention_hook.attend(call)


def sees(spec: Spec, query: int, key: int) -> bool:
    """Whether a query sees an earlier key. A window that the model asks for counts where it is the narrower one."""
    if spec.window is not None and (spec.ring is None or spec.window < spec.ring) and query - key >= spec.window:
        return False
    if spec.chunk is not None:
        return query // spec.chunk == key // spec.chunk
    return spec.ring is None or key < spec.sinks or query - key < spec.ring - spec.sinks


def slow_attention(
    q: np.ndarray,
    keys: np.ndarray,
    values: np.ndarray,
    spec: Spec,
    gone: list[set[int]] | None = None,
    came: tuple[np.ndarray, np.ndarray] | None = None,
) -> np.ndarray:
    """One row: q (QH, S, Dk) are the last S positions of keys (H, n, Dk) and values (H, n, Dv); float64 throughout.

    `gone`: positions that each head has evicted. `came`: keys and values as they came.
    """
    keys = np.repeat(keys.astype(np.float64), QUERY_HEADS // HEADS, axis=0)
    values = np.repeat(values.astype(np.float64), QUERY_HEADS // HEADS, axis=0)
    stored = keys, values
    exact = (
        stored if came is None else tuple(np.repeat(x.astype(np.float64), QUERY_HEADS // HEADS, axis=0) for x in came)
    )
    n, new = keys.shape[1], q.shape[1]
    out = np.zeros((QUERY_HEADS, new, values.shape[2]))
    for j in range(new):
        position = n - new + j
        in_reach = [p for p in range(position + 1) if sees(spec, position, p)]
        near = (np.arange(n) > position - spec.residual)[:, None]
        keys, values = (np.where(near, x, old) for x, old in zip(exact, stored, strict=True))
        scores = np.einsum("hd,hnd->hn", q[:, j].astype(np.float64), keys[:, in_reach]) * q.shape[2] ** -0.5
        if gone is not None:
            for head in range(QUERY_HEADS):
                lost = gone[head // (QUERY_HEADS // HEADS)]
                scores[head, [i for i, p in enumerate(in_reach) if p in lost]] = -np.inf
        weights = np.exp(scores - scores.max(1, keepdims=True))
        out[:, j] = np.einsum("hn,hnd->hd", weights / weights.sum(1, keepdims=True), values[:, in_reach])
    return out


class Twins:
    """A cache, the same cache with poisoned dead slots, and the history that both should stand for."""

    def __init__(self, spec: Spec, seed: int = 0) -> None:
        self.spec, self.cache, self.poisoned = spec, spec.make(), spec.make()
        self.was_quantized = spec.encodes and spec.quantized_start == 0
        self.rng = np.random.default_rng(seed)
        self.keys = [np.zeros((HEADS, 0, spec.key_dim), np.float32) for _ in range(spec.rows)]
        self.values = [np.zeros((HEADS, 0, spec.value_dim), np.float32) for _ in range(spec.rows)]
        self.came = list(zip(self.keys, self.values, strict=True))  # before anything was stored
        self.lowest = [0] * spec.rows  # position that a ring of residual + room slots has not written over
        self.kept = None if spec.budget is None else Kept(spec)

    def seen_again(self, counts: Sequence[int]) -> bool:
        """Whether all is still there, as it came, that queries after a trim see so."""
        residual = self.spec.residual
        lowest = self.lowest
        if self.kept is not None:  # before the oldest token that a trim can take back, some of them may be evicted
            lowest = [
                max(low, base) if any(gone) else low
                for low, base, gone in zip(lowest, self.kept.base, self.kept.gone, strict=True)
            ]
        return not residual or all(
            low == 0 or low <= length - count - residual + 1
            for low, length, count in zip(lowest, self.lengths(), counts, strict=False)
        )

    def lengths(self) -> list[int]:
        return [row.shape[1] for row in self.keys]

    def each(self) -> tuple[KVCache, KVCache]:
        return self.cache, self.poisoned

    def update(self, new: int) -> None:
        spec, rows = self.spec, self.spec.rows
        quantized = spec.encodes and max(self.lengths()) >= spec.quantized_start
        q, k, v = (
            mx.array(self.rng.normal(size=(rows, heads, new, dim)).astype(np.float32))
            for heads, dim in ((QUERY_HEADS, spec.key_dim), (HEADS, spec.key_dim), (HEADS, spec.value_dim))
        )
        if quantized and not self.was_quantized:
            self.keys = [spec.left(0, row) for row in self.keys]
            self.values = [spec.left(1, row) for row in self.values]
        self.was_quantized = quantized
        if self.kept is not None:
            self.kept.compact(self.keys, self.values)
        for i, (own, its) in enumerate(self.came):
            self.lowest[i] = max(self.lowest[i], own.shape[1] + new - spec.residual - spec.room)
            self.came[i] = np.concatenate([own, np.array(k[i])], axis=1), np.concatenate([its, np.array(v[i])], axis=1)
        for i in range(rows):
            stored = (spec.left(which, x[i]) if quantized else np.array(x[i]) for which, x in enumerate((k, v)))
            self.keys[i], self.values[i] = (
                np.concatenate([old, x], axis=1) for old, x in zip((self.keys[i], self.values[i]), stored, strict=True)
            )
        poison(self.poisoned)
        if spec.chunk is not None and self.rng.random() < 0.7:  # as llama4 does, if it is asked
            for cache in self.each():
                cache.maybe_trim_front()
                assert len(set(map(tuple, cache.view.rows))) > 1 or cache.size() <= spec.chunk
        got, other = (attend(cache, q, k, v, spec.window) for cache in self.each())
        assert mx.array_equal(got, other).item(), "a dead slot changed the output"
        if self.kept is not None:
            for cache in self.each():
                self.kept.check(np.array(cache.positions), self.lengths())
        for i in range(rows):
            gone = None if self.kept is None else self.kept.gone[i]
            wanted = slow_attention(np.array(q[i]), self.keys[i], self.values[i], spec, gone, self.came[i])
            np.testing.assert_allclose(np.array(got[i]), wanted, atol=2e-5, rtol=2e-5)
        self.check_lengths()

    def trim(self, counts: Sequence[int]) -> None:
        """Trims, or finds that the cache refuses and is as it was."""
        held = self.cache.view.rows
        allowed = all(n <= self.cache.layout.max_trim(row) for n, row in zip(counts, held, strict=True))
        if self.kept is not None:
            lengths = self.lengths()
            assert allowed == all(n <= self.kept.max_trim(i, lengths[i]) for i, n in enumerate(counts))
        if not (allowed and self.seen_again(counts)):
            assert not self.cache.is_trimmable()
            for cache in self.each():
                with pytest.raises(
                    ValueError, match=r"is a ring that has overwritten|has evicted tokens|in full precision"
                ):
                    cache.trim_per_sequence(counts)
            self.check_lengths()
            return
        for cache in self.each():
            if len(set(counts)) == 1:
                assert cache.can_trim(counts[0])
                assert cache.trim(counts[0]) == counts[0]
            else:
                cache.trim_per_sequence(counts)
        for i, count in enumerate(counts):
            keep = self.keys[i].shape[1] - count
            self.keys[i], self.values[i] = self.keys[i][:, :keep], self.values[i][:, :keep]
            self.came[i] = self.came[i][0][:, :keep], self.came[i][1][:, :keep]
            self.lowest[i] = min(self.lowest[i], keep)
            if self.kept is not None:
                self.kept.trim(i, keep)
        self.check_lengths()

    def replace_by_copy(self) -> None:
        """Goes on with deep copies; the originals are destroyed, so that nothing can be shared unnoticed."""
        old = self.each()
        self.cache, self.poisoned = copy.deepcopy(self.cache), copy.deepcopy(self.poisoned)
        self._destroy(old)

    def replace_by_loaded(self) -> None:
        """Goes on with what `from_state` makes of `state`; writes to the originals must not reach it."""
        old = self.each()
        self.cache, self.poisoned = (self.spec.carried(KVCache.from_state(cache.state)) for cache in old)
        self._destroy(old)

    def _destroy(self, caches: Sequence[KVCache]) -> None:
        for cache in caches:
            if not cache.empty():
                shape = (self.spec.rows, HEADS, 1)
                cache.update_and_fetch(
                    mx.full((*shape, self.spec.key_dim), 99.0), mx.full((*shape, self.spec.value_dim), 99.0)
                )

    def reset(self) -> None:
        for cache in self.each():
            cache.reset()
        self.keys = [row[:, :0] for row in self.keys]
        self.values = [row[:, :0] for row in self.values]
        self.came, self.lowest = list(zip(self.keys, self.values, strict=True)), [0] * self.spec.rows
        self.kept = None if self.spec.budget is None else Kept(self.spec)
        self.check_lengths()

    def check_lengths(self) -> None:
        lengths = self.lengths()
        for cache in self.each():
            offset = cache.offset
            known = [offset] * len(lengths) if isinstance(offset, int) else offset.tolist()
            assert known == lengths
            most = self.spec.max_slots
            if self.kept is not None:
                gone = [sum(map(len, heads)) / HEADS for heads in self.kept.gone]
                assert cache.size() == max(n - own for n, own in zip(lengths, gone, strict=True))
            elif self.spec.chunk is None:
                assert cache.size() == min(max(lengths), self.spec.ring or max(lengths))
            else:
                assert cache.size() <= max(lengths)
            assert cache.empty() == (max(lengths) == 0)
            assert cache.capacity % 256 == 0
            assert self.kept is not None or cache.capacity >= min(max(lengths), most or max(lengths))
            assert most is None or cache.capacity < most + 256
            assert cache.nbytes_live <= cache.nbytes
