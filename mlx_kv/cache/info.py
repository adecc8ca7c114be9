"""Base class of `KVCache`: lengths, bytes, positions, pausing of eviction, state and copies. B rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Self

import mlx.core as mx

from mlx_kv.cache import rows, state
from mlx_kv.cache.codecs import affine_of, are_plain, in_words
from mlx_kv.cache.eviction.evictor import Evictor
from mlx_kv.cache.growth import SLOT_MULTIPLE
from mlx_kv.cache.layout import NO_LIMIT, Layout
from mlx_kv.cache.residual import Residual
from mlx_kv.cache.state import CacheData, CacheState


class CacheInfo:
    """Properties, state and copies of a cache. Base class of `KVCache`, which adds the updates."""

    def __init__(self, data: CacheData) -> None:
        self._data = data

    @property
    def layout(self) -> Layout:
        """Which slot holds which position."""
        return self._data.layout

    @property
    def evictor(self) -> Evictor | None:
        """Evicts tokens and records what it evicted; None without a budget."""
        return self._data.evictor

    @property
    def view(self) -> CacheData:
        """The cache's fields, to read; only methods of the cache change them."""
        return self._data

    # --- patched attention ------------------------------------------------------------------------------------------

    @property
    def seam(self) -> object:
        """The attention patch that this cache keeps alive, if any."""
        return self._data.seam

    def carry(self, seam: object) -> None:
        """Keeps an attention patch alive for as long as this cache, or a copy of it, lives."""
        self._data.seam = seam

    # --- two-pass prefill -------------------------------------------------------------------------------------------

    def hold(self) -> None:
        """Pauses eviction until `release`: two-pass prefill needs the whole text during its first pass."""
        state.hold(self._data)

    def release(self) -> None:
        """Resumes eviction from the next write on."""
        state.release(self._data)

    @property
    def residual(self) -> Residual | None:
        """A copy of the newest tokens in full precision; None without a residual.

        Setting it to such a copy allows a trim back to the offset at which that was made, whatever was written since.
        """
        return None if self._data.residual is None else self._data.residual.copied()

    @residual.setter
    def residual(self, value: Residual | None) -> None:
        self._data.residual = value

    # --- lengths ----------------------------------------------------------------------------------------------------

    @property
    def offset(self) -> int | mx.array:
        """The next position: an int where all rows agree, an array (B,) of int32 where they differ."""
        offsets = [row.offset for row in self._data.rows]
        return offsets[0] if len(set(offsets)) == 1 else mx.array(offsets)

    def size(self) -> int:
        """Tokens held by the longest row."""
        return max(0, *map(self.layout.held, self._data.rows))

    def empty(self) -> bool:
        """Whether no row holds a token."""
        return self._data.empty()

    @property
    def max_write(self) -> int | None:
        """The longest write that slots are planned for; rings read a copy after a longer one. None is no limit."""
        return None if self.layout.max_write == NO_LIMIT else self.layout.max_write

    # --- mlx-lm's names ---------------------------------------------------------------------------------------------

    step: ClassVar[int] = SLOT_MULTIPLE  # slots come in multiples of it

    @property
    def max_size(self) -> int:
        """The window of a ring; AttributeError for other caches."""
        if (window := self.layout.window) is None:
            raise AttributeError("max_size is the window of a ring, and this cache has none")
        return window

    @property
    def keep(self) -> int:
        """Sinks of a ring, first tokens that are never dropped; AttributeError for other caches."""
        if self.layout.window is None:
            raise AttributeError("keep is the number of a ring's sinks, and this cache is not a ring")
        return self.layout.sinks

    @property
    def chunk_size(self) -> int:
        """Positions of a chunk; AttributeError for caches without chunked attention."""
        if (size := self.layout.chunk_size) is None:
            raise AttributeError("chunk_size is that of chunked attention, and this cache has none")
        return size

    @property
    def left_padding(self) -> mx.array:
        """(B,), announced padding before the first token of each row; 0 once tokens are stored.

        Padding itself is never stored.
        """
        return mx.array([max(0, -row.offset) for row in self._data.rows])

    @property
    def start_position(self) -> int:
        """The first position after the sinks that attention reads."""
        return min(row.front for row in self._data.rows)

    @property
    def positions(self) -> mx.array:
        """The position of each live slot: (B, H', n), with H' = H where each head keeps its own tokens, else 1.

        Rows with fewer live slots are padded with -1. Only for caches that keep all tokens or have a budget.

        Raises:
            ValueError: this cache is a ring or has chunks.
        """
        data = self._data
        if data.layout.most_slots != NO_LIMIT:
            raise ValueError("a ring reuses its slots: use the layout of the cache for the position of a slot")
        ends = [max(0, row.end) for row in data.rows]
        lines = [
            mx.arange(end, dtype=mx.int32)[None] - row.start
            if data.evictor is None
            else data.evictor.live_positions(row, i)
            for i, (row, end) in enumerate(zip(data.rows, ends, strict=True))
        ]
        heads, most = max(line.shape[0] for line in lines), max(ends)
        return mx.stack(
            [
                mx.pad(mx.broadcast_to(line, (heads, end)), [(0, 0), (0, most - end)], constant_values=mx.array(-1))
                for line, end in zip(lines, ends, strict=True)
            ]
        )

    @property
    def most_trims(self) -> tuple[int, ...]:
        """Tokens that each row can drop exactly, so that later queries see what they saw before."""
        data = self._data
        layout, residual = data.layout, data.residual
        most = [layout.most_trim(row) for row in data.rows]
        if residual is not None:
            own = [residual.most_trim(i, row.offset, layout.ordered_from(row)) for i, row in enumerate(data.rows)]
            most = [min(pair) for pair in zip(most, own, strict=True)]
        return tuple(most)

    # --- memory ----------------------------------------------------------------------------------------------------

    @property
    def capacity(self) -> int:
        """Slots allocated for each row; 0 before the first update."""
        return self._data.capacity

    @property
    def growths(self) -> int:
        """Reallocations since the first allocation."""
        return self._data.growths

    @property
    def nbytes(self) -> int:
        """Bytes allocated, dead slots included."""
        data = self._data
        evicting = 0 if data.evictor is None else data.evictor.nbytes
        stored = data.stored_bytes
        return evicting + self.nbytes_residual + stored if data.holds_slots else 0

    @property
    def nbytes_residual(self) -> int:
        """Bytes allocated for the residual: a ring of fixed size, however many tokens there are."""
        return 0 if self._data.residual is None else self._data.residual.nbytes

    @property
    def nbytes_live(self) -> int:
        """Bytes of the slots that hold a token, and of the residual; without shared segments."""
        data = self._data
        if not data.holds_slots:
            return 0
        tokens = sum(max(0, data.layout.held(row) - row.shared) for row in data.rows)
        return tokens * self._bytes_per_slot + self.nbytes_residual

    @property
    def nbytes_full(self) -> int:
        """Bytes that all tokens read so far would take if none had been evicted or overwritten."""
        return sum(max(0, row.offset) for row in self._data.rows) * self._bytes_per_slot

    @property
    def _bytes_per_slot(self) -> int:
        """Bytes of one slot of one row, keys and values, as currently stored; 0 before the first update."""
        return self._data.bytes_per_slot

    # --- state and copies ------------------------------------------------------------------------------------------

    @property
    def state(self) -> CacheState:
        """Everything to continue from, as a pytree: planes of keys and of values, rows, and how they are stored."""
        return state.state_of(self._data)

    @state.setter
    def state(self, value: tuple[Any, ...]) -> None:
        before = self._data
        self._data = state.data_of(value, before.growth, before.reserved)
        self._data.growths, self._data.seam = before.growths, before.seam
        if before.evictor is not None and self._data.evictor is not None:
            self._data.evictor.set_communicator(before.evictor.communicator)

    @classmethod
    def from_state(cls, value: tuple[Any, ...], **settings: Any) -> Self:
        """A cache that continues from another's `state`; it grows by the default rule.

        Args:
            settings: arguments of `state.data_of` that are not part of a state.
        """
        made = cls.__new__(cls)
        made._data = state.data_of(value, **settings)
        return made

    def replace_planes(self, keys: Sequence[mx.array], values: Sequence[mx.array]) -> None:
        """Replaces the planes by others with more or fewer slots, the tokens in the same slots.

        With zero slots the cache can only be copied and trimmed.

        Args:
            keys, values: as many planes (B, H, C, width) as before, of the same rows, heads, widths and dtypes.

        Raises:
            ValueError: nothing was stored yet.
        """
        if self._data.buffers is None:
            raise ValueError("this cache is empty: it has no planes to replace")
        for buffer, planes in zip(self._data.buffers, (keys, values), strict=True):
            buffer.planes = tuple(plane[:] for plane in planes)
        self._data.transient, self._data.ranges, self._data.packed, self._data.last = None, (), False, None

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        copied = memo[id(self)] = self._like(self._data.copied(memo))
        return copied

    def select(self, chosen: Sequence[int]) -> Self:
        """A copy of some rows, in this order, reserved slots included."""
        return self._like(rows.copied_rows(self._data, chosen))

    def _like(self, data: CacheData) -> Self:
        """A cache of the same type with other data."""
        made = type(self).__new__(type(self))
        made.__dict__ |= vars(self) | {"_data": data}
        return made

    def __repr__(self) -> str:
        affine, codecs = affine_of(self._data.codecs), self._data.codecs
        how = f", bits={affine.bits}" if affine is not None else "" if are_plain(codecs) else f", {in_words(codecs)}"
        return f"{type(self).__name__}(offset={self.offset}, capacity={self.capacity}, nbytes={self.nbytes}{how})"
