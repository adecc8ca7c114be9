"""Memory of rows: the maximum that they will need, the limit, and what is held now.

A plan is integers only; `rows.plan_rows` makes it from a model and a policy. The bytes of a row at its peak come from
`planning.RowMemory`. In a batch, rows are as long as the longest one, as far as `cache.row_classes` does not separate
them.
"""

from __future__ import annotations

import logging
import threading
from bisect import bisect
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal, NamedTuple

import mlx.core as mx
import numpy as np

from mlx_kv.cache.growth import SLOT_MULTIPLE, FixedStep
from mlx_kv.cache.kv_cache import KVCache
from mlx_kv.cache.layout import Layout, Row
from mlx_kv.cache.plan import round_tail
from mlx_kv.cache.row_classes import MAX_PADDING
from mlx_kv.generation.prefill import next_room
from mlx_kv.generation.statistics import cache_statistics
from mlx_kv.mlxlm.traverse import Places, leaves, places_of
from mlx_kv.planning import RowMemory, default_limit, device_memory
from mlx_kv.prefixes.index import shared

UNKNOWN_MEMORY = 5 * 2**30  # bytes of a device that does not say
RESOLUTION = 1000  # gaps between positions below this fraction of a row are closed
log = logging.getLogger("mlx_kv.server")


# --- planned ----------------------------------------------------------------------------------------------------------


class RowSlots(NamedTuple):
    """Slots of one row.

    Attributes:
        prompt: tokens of the prompt.
        slots: for prompt and answer, if no token is evicted.
        first: first tokens that this row has to itself; those before them are another row's, too.
        shared: first tokens that another row has, too.
    """

    prompt: int
    slots: int
    first: int = 0
    shared: int = 0


def with_shared(rows: Sequence[RowSlots], prompts: Sequence[bytes | None]) -> list[RowSlots]:
    """Rows with the first tokens that they share, ordered by their prompts.

    Args:
        prompts: packed tokens of each row; None for a prompt that is not shared.
    """
    pairs = sorted(zip(rows, prompts, strict=True), key=lambda pair: pair[1] or b"")
    common = [0] + [0 if a is None or b is None else shared(a, b) for (_, a), (_, b) in pairwise(pairs)] + [0]
    return [
        row._replace(first=before, shared=max(before, after))
        for (row, _), (before, after) in zip(pairs, pairwise(common), strict=True)
    ]


@dataclass(frozen=True)
class RowPlan:
    """Memory of rows of one policy.

    Attributes:
        memory: sizes of a row.
        draft: those in the caches of a draft model.
        drafted: maximum draft tokens per pass.
        class_slots: slots that the rows of a batch may hold beyond need before they are separated into classes; None
            if they never are, so that each row is as long as the longest.
        shares_up_to: slots of a row up to which it holds first tokens that another row has, too, once with that; 0 is
            never.
    """

    memory: RowMemory
    draft: RowMemory = field(default_factory=RowMemory)
    drafted: int = 0
    class_slots: int | None = None
    shares_up_to: int = 0

    def slots(self, prompt: int, answer: int) -> RowSlots:
        """Slots for a prompt and an answer of so many tokens, if none is evicted."""
        return RowSlots(prompt, prompt + answer + self.drafted)

    def grow(self, prompt: int, answer: int, max_tokens: int, slack: bool) -> int:
        """Tokens of an answer for which a row gets room once it outgrows so many."""
        growth = self.memory.growth if slack else FixedStep()
        return next_room(growth, prompt + self.drafted, answer, max_tokens)

    def nbytes(self, slots: int) -> int:
        """Bytes of one row in a batch of which the longest row has so many slots."""
        return self.memory.read_once(slots, SLOT_MULTIPLE) + self.draft.read_once(slots, SLOT_MULTIPLE)

    def tokens_in(self, nbytes: int) -> int | None:
        """Tokens of cached prompts in so many bytes; None if caches are of one size however long a prompt is."""
        per_token = self.memory.per_token + self.draft.per_token
        return nbytes // per_token if per_token else None

    def two_pass_bytes(self, row: RowSlots) -> int:
        """Bytes of one row during a two-pass prefill, outside of the batch; 0 if the prefill has one pass."""
        if self.memory.instructions is None:
            return 0
        return self.memory.read_twice(row.prompt, row.slots, SLOT_MULTIPLE) + self.draft.read_once(
            row.slots, SLOT_MULTIPLE
        )

    def together(self, rows: Sequence[RowSlots]) -> int:
        """Maximum bytes of several rows: all in one batch, or all in a two-pass prefill."""
        if not rows:
            return 0
        longest = self.nbytes(max(row.slots for row in rows))
        in_one_batch = sum(max(longest, self.two_pass_bytes(row)) for row in rows)
        if self.class_slots is None or self.memory.instructions is not None:
            return in_one_batch
        bytes_per_slot = self.memory.bytes_per_slot + self.draft.bytes_per_slot
        in_classes = int(MAX_PADDING * sum(self.nbytes(row.slots) for row in rows)) + self.class_slots * bytes_per_slot
        needed, first = min(in_one_batch, in_classes), [row.first for row in rows if row.first]
        # Rows share first tokens where that saves at least twice what it takes.
        shares = first and self.shares(rows) and sum(first) >= self.class_slots * len(set(first))
        return min(needed, self._sharing(rows, self.class_slots)) if shares else needed

    def shares(self, rows: Iterable[RowSlots]) -> bool:
        """Whether these rows can hold what they share once until their end."""
        return all(row.slots <= self.shares_up_to for row in rows)

    def _sharing(self, rows: Sequence[RowSlots], class_slots: int) -> int:
        """Maximum bytes of rows that hold shared tokens once.

        Two rows may have whole copies beside: the one that reads the shared tokens, and one that has not joined others.
        """
        tails = [round_tail(row.slots - row.shared + 1) for row in rows]
        segments = sum(row.shared - row.first for row in rows)
        max_tails = min(len(rows) * max(tails), int(MAX_PADDING * sum(tails)) + class_slots)
        return (segments + max_tails) * self.memory.bytes_per_slot + 2 * self.nbytes(max(row.slots for row in rows))


@dataclass(frozen=True)
class MemoryLimit:
    """Limit for weights, rows and cached prefixes.

    Attributes:
        limit: bytes; None is no limit.
        weights: bytes of weights, which are held in any case.
    """

    limit: int | None = None
    weights: int = 0

    @property
    def for_rows(self) -> int | None:
        """Bytes for rows, and for cached prefixes in what rows leave; None is no limit."""
        return None if self.limit is None else self.limit - self.weights

    def fits(self, planned: int) -> bool:
        """Whether rows of so many bytes fit."""
        return self.for_rows is None or planned <= self.for_rows

    def left(self, planned: int) -> int | None:
        """Bytes left for cached prefixes beside rows of so many bytes; None is no limit."""
        return None if self.for_rows is None else max(0, self.for_rows - planned)

    def for_prompts(self, nbytes: int | None) -> int:
        """Bytes for cached prefixes at most: as many as given, or else what is for rows, or a quarter of the device."""
        if nbytes is not None:
            return nbytes
        return (device_memory() or UNKNOWN_MEMORY) // 4 if self.for_rows is None else self.for_rows

    def refusal(self, plan: RowPlan, prompt: int, answer: int) -> str | None:
        """An error message if a prompt and an answer of so many tokens do not fit without other rows, else None."""
        needed = plan.together([plan.slots(prompt, answer)])
        if self.fits(needed):
            return None
        return (
            f"a prompt of {prompt:,} tokens and {answer:,} of an answer take {needed / 1e6:,.1f} MB, and this "
            f"server has {max(0, self.for_rows or 0) / 1e6:,.1f} MB for keys and values: shorten the prompt, or lower "
            "max_tokens"
        )

    def longest(self, plan: RowPlan, prompt: int, answer: int) -> int:
        """The tokens of the longest prompt below this one that fits with such an answer."""
        return bisect(range(1, prompt), self.for_rows or 0, key=lambda n: plan.together([plan.slots(n, answer)]))


def memory_limit(limit: int | Literal["device"] | None, weights: int) -> MemoryLimit:
    """The limit of a server with so many bytes of weights.

    Args:
        limit: "device" is a share of the device's memory, or no limit where the weights need more.

    Raises:
        ValueError: the weights alone exceed the limit.
    """
    if limit == "device":
        limit = default_limit()
        if limit is not None and limit <= weights:
            log.warning("weights of %.1f MB leave nothing of this device's memory: there is no limit", weights / 1e6)
            limit = None
    if limit is not None and limit <= weights:
        raise ValueError(
            f"a memory limit of {limit / 1e6:,.1f} MB leaves nothing for rows: the weights take {weights / 1e6:,.1f} MB"
        )
    return MemoryLimit(limit, weights)


# --- held now: in the thread of the caches ----------------------------------------------------------------------------

PositionRanges = list[tuple[int, int]]  # [first, last)


@dataclass(frozen=True)
class RowOccupancy:
    """One row, in the layers that share a layout.

    Attributes:
        rule: name of the layout.
        layers: number of layers with this layout.
        offset: the next position.
        live, capacity: slots that hold a token of this row, and all its slots, shared ones included.
        kept: positions held by the first of the layers (and its first head), as ranges [first, last); None where not
            requested. Gaps below a thousandth of the row are closed.
        heads: tokens held by each head of each layer; one number if all heads of a layer hold the same tokens. None if
            all hold equally many, or where not requested.
        shared: first tokens that are in segments, which several rows may read.
    """

    rule: str
    layers: int
    offset: int
    live: int
    capacity: int
    kept: PositionRanges | None
    heads: list[list[int]] | None = None
    shared: int = 0

    @property
    def evicted(self) -> int:
        """Tokens no longer held: evicted, or overwritten in a ring."""
        return self.offset - self.live


@dataclass(frozen=True)
class BatchOccupancy:
    """All decoding rows, in the order of the batch, and the bytes of their caches."""

    rows: tuple[tuple[RowOccupancy, ...], ...] = ()
    bytes_live: int = 0
    bytes_allocated: int = 0
    bytes_full: int = 0


def occupancy_of(caches: Sequence[Any], positions: bool) -> BatchOccupancy:
    """What the caches of one batch hold.

    Args:
        caches: one for each layer.
        positions: whether to read which positions are kept, which may have to wait for the device.
    """
    totals = cache_statistics(caches)
    by_layout: dict[tuple[Any, ...], list[Places]] = {}
    for cache in leaves(caches):
        if places := places_of(cache):
            by_layout.setdefault(places[0][0].layout.parameters, []).append(places)
    columns = [_rows_of(layers, positions) for layers in by_layout.values()]
    rows = tuple(zip(*columns, strict=True)) if columns else ()
    return BatchOccupancy(rows, totals.bytes_live, totals.bytes_allocated, totals.bytes_full)


def tokens_evicted(caches: Iterable[Any]) -> list[int]:
    """Tokens evicted by a budget from each row, in the busiest layer."""
    counts = [
        [max(0, cache.view.rows[index].evicted) for cache, index in places]
        for places in map(places_of, leaves(caches))
        if places and places[0][0].evictor is not None
    ]
    return [max(layers) for layers in zip(*counts, strict=True)]


def _rows_of(layers: Sequence[Places], positions: bool) -> list[RowOccupancy]:
    """The rows in layers that share a layout."""
    name = layout_name(layers[0][0][0].layout)
    rows = []
    for number, (cache, index) in enumerate(layers[0]):
        row = cache.view.rows[index]
        kept = _positions(cache, row, index) if positions else None
        heads = _heads(layers, number) if positions else None
        live = max(0, cache.layout.visible_tokens(row))
        slots = cache.capacity + row.shared
        rows.append(RowOccupancy(name, len(layers), max(0, row.offset), live, slots, kept, heads, row.shared))
    return rows


def _heads(layers: Sequence[Places], number: int) -> list[list[int]] | None:
    """Tokens held by each head of each layer, of one row; None if all hold equally many."""
    counts = []
    for places in layers:
        cache, index = places[number]
        if cache.evictor is None or not cache.evictor.ragged_heads:
            return None
        counts.append(cache.evictor.tokens_by_head(cache.view.rows[index], index))
    return counts


def _positions(cache: KVCache, row: Row, index: int) -> PositionRanges:
    offset, live = max(0, row.offset), max(0, cache.layout.visible_tokens(row))
    if cache.evictor is not None and row.evicted > 0:
        positions = np.sort(np.array(cache.evictor.live_positions(row, index)[0]))
        positions = positions[positions >= 0]  # of the first head, where heads keep different numbers of tokens
        return position_ranges(positions, offset // RESOLUTION)
    sinks = min(cache.layout.sinks, live)  # a ring: its first tokens, and its newest
    return [(0, offset)] if live == offset else [(0, sinks), (offset - live + sinks, offset)][sinks == 0 :]


def position_ranges(positions: Any, gap: int = 0) -> PositionRanges:
    """Rising positions as ranges [first, last); ranges at most `gap` positions apart are merged."""
    if len(positions) == 0:
        return []
    breaks = np.flatnonzero(np.diff(positions) > gap + 1)
    firsts, lasts = np.append(0, breaks + 1), np.append(breaks, len(positions) - 1)
    return [(int(positions[a]), int(positions[b]) + 1) for a, b in zip(firsts, lasts, strict=True)]


def layout_name(layout: Layout) -> str:
    """A layout in words."""
    name, *numbers = layout.parameters
    if name == "append":
        return "all tokens"
    if name == "budget":
        return f"a budget of {numbers[0]:,} tokens"
    if layout.chunk_size is not None:
        return f"chunks of {layout.chunk_size:,} tokens"
    return f"a window of {layout.window:,} tokens"


# --- buffers that MLX keeps -------------------------------------------------------------------------------------------


FREED_SHARE = 1 / 8  # of the memory for rows and cached prefixes
MIN_FREED = 32 * 2**20  # bytes; the buffers of a step are reused in the next one


class FreedMemory:
    """The cache limit of this process: the lowest that any of its servers needs, restored after the last one.

    MLX's cache limit is how many bytes of freed buffers it keeps for reuse, instead of returning them to the system. A
    buffer is reused only for arrays of nearly its size. Rows and cached prefixes of a server come in many sizes, so
    what they free adds up to the limit. On Macs MLX's own limit is about the memory of the device; on a CPU it is 32
    MiB.
    """

    def __init__(self) -> None:
        self._limits: dict[object, int] = {}
        self._before = 0  # the limit to be restored
        self._lock = threading.Lock()

    def begin(self, server: object, for_rows: int | None) -> int | None:
        """Sets the limit for a server, which never raises MLX's own.

        Args:
            for_rows: bytes for rows and cached prefixes; None is no limit, and then MLX's stays as it is.

        Returns:
            The limit in bytes; None if it stays as it is.
        """
        if for_rows is None:
            return None
        limit = max(MIN_FREED, int(FREED_SHARE * for_rows))
        with self._lock:
            if not self._limits:
                self._before = mx.set_cache_limit(limit)  # returns the previous one
            self._limits[server] = min(limit, self._before)
            mx.set_cache_limit(min(self._limits.values()))
            return self._limits[server]

    def end(self, server: object) -> None:
        """Called when a server has ended; does nothing if it has set no limit."""
        with self._lock:
            if self._limits.pop(server, None) is not None:
                mx.set_cache_limit(min(self._limits.values(), default=self._before))


freed_memory = FreedMemory()
