"""What other code reads of a cache: a view of its contents, lengths, bytes, and the state to continue from elsewhere.

`KVCache` inherits it and adds the updates. B rows.
"""

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
from mlx_kv.cache.state import CacheState, CacheView, Contents


class Holder:
    """Contents that others may read. Abstract: `KVCache` says what is done to them."""

    def __init__(self, held: Contents) -> None:
        self._held = held

    @property
    def layout(self) -> Layout:
        """Which slot holds which position."""
        return self._held.layout

    @property
    def evictor(self) -> Evictor | None:
        """The part that evicts, with what it did so far; None without a budget."""
        return self._held.evictor

    @property
    def view(self) -> CacheView:
        """What it holds and how, as it is now, for those who look and change nothing."""
        return self._held.view

    # --- what shows attention ---------------------------------------------------------------------------------------

    @property
    def seam(self) -> object:
        """What shows this cache its attention, if anything that it carries does."""
        return self._held.seam

    def carry(self, seam: object) -> None:
        """Keeps what shows it its attention for as long as it lives, or a copy of it."""
        self._held.seam = seam

    # --- texts that are read twice ---------------------------------------------------------------------------------

    def hold(self) -> None:
        """Evicts nothing from now on, until `release`: a text that is to be read again is held whole for that."""
        state.hold(self._held)

    def release(self) -> None:
        """Evicts again what is due, from the next write on."""
        state.release(self._held)

    @property
    def residual(self) -> Residual | None:
        """A copy of the newest tokens as they came; None where none are kept so.

        Put back before a trim to where it was made, it makes that possible whatever was written in between.
        """
        return None if self._held.residual is None else self._held.residual.copied()

    @residual.setter
    def residual(self, value: Residual | None) -> None:
        self._held.residual = value

    # --- lengths ----------------------------------------------------------------------------------------------------

    @property
    def offset(self) -> int | mx.array:
        """The next position: an int where all rows agree, an array (B,) of int32 where they differ."""
        offsets = [row.offset for row in self._held.rows]
        return offsets[0] if len(set(offsets)) == 1 else mx.array(offsets)

    def size(self) -> int:
        """Tokens held by the longest row."""
        return max(0, *map(self.layout.held, self._held.rows))

    def empty(self) -> bool:
        """Whether no row holds a token."""
        return self._held.empty()

    @property
    def max_write(self) -> int | None:
        """The longest write that slots are planned for; after a longer one rings read a copy. None is no limit."""
        return None if self.layout.max_write == NO_LIMIT else self.layout.max_write

    # --- what mlx-lm calls it ---------------------------------------------------------------------------------------

    step: ClassVar[int] = SLOT_MULTIPLE  # slots come in multiples of it

    @property
    def max_size(self) -> int:
        """The window of a ring; other caches have none (AttributeError)."""
        if (window := self.layout.window) is None:
            raise AttributeError("max_size is the window of a ring, and this cache has none")
        return window

    @property
    def keep(self) -> int:
        """Sinks of a ring: so many of the first tokens are never dropped; other caches have none (AttributeError)."""
        if self.layout.window is None:
            raise AttributeError("keep is the number of a ring's sinks, and this cache is none")
        return self.layout.sinks

    @property
    def chunk_size(self) -> int:
        """Positions of a chunk; caches that do not go by chunks have none (AttributeError)."""
        if (size := self.layout.chunk_size) is None:
            raise AttributeError("chunk_size is that of chunked attention, and this cache has none")
        return size

    @property
    def left_padding(self) -> mx.array:
        """(B,), slots of padding before the first token of each row: what was announced, and 0 once tokens came.

        Padding is never stored, so nothing lies before a row's first token.
        """
        return mx.array([max(0, -row.offset) for row in self._held.rows])

    @property
    def start_position(self) -> int:
        """The first position, sinks aside, that attention reads."""
        return min(row.front for row in self._held.rows)

    @property
    def positions(self) -> mx.array:
        """The position of each live slot: (B, H', n), H' being the number of heads where each keeps its own, else 1.

        Rows with fewer live slots end with -1. Only where slots are not used again: all is kept, or by a budget.

        Raises:
            ValueError: this cache is a ring, or of chunks.
        """
        held = self._held
        if held.layout.most_slots != NO_LIMIT:
            raise ValueError("a ring uses its slots again: ask its layout for the position of a slot")
        ends = [max(0, row.end) for row in held.rows]
        lines = [
            mx.arange(end, dtype=mx.int32)[None] - row.start
            if held.evictor is None
            else held.evictor.live_positions(row, i)
            for i, (row, end) in enumerate(zip(held.rows, ends, strict=True))
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
        """Tokens that each row can drop and see what it saw before them."""
        held = self._held
        layout, residual = held.layout, held.residual
        most = [layout.most_trim(row) for row in held.rows]
        if residual is not None:
            own = [residual.most_trim(i, row.offset, layout.ordered_from(row)) for i, row in enumerate(held.rows)]
            most = [min(pair) for pair in zip(most, own, strict=True)]
        return tuple(most)

    # --- memory ----------------------------------------------------------------------------------------------------

    @property
    def capacity(self) -> int:
        """Slots allocated for each row; 0 before the first update."""
        return self._held.capacity

    @property
    def growths(self) -> int:
        """Reallocations since the first allocation."""
        return self._held.growths

    @property
    def nbytes(self) -> int:
        """Bytes allocated, dead slots included."""
        held = self._held
        evicting = 0 if held.evictor is None else held.evictor.nbytes
        stored = held.buffers
        return 0 if stored is None else evicting + self.nbytes_residual + sum(buffer.nbytes for buffer in stored)

    @property
    def nbytes_residual(self) -> int:
        """Bytes allocated for newest tokens as they came: a ring of its own size, however many tokens there are."""
        return 0 if self._held.residual is None else self._held.residual.nbytes

    @property
    def nbytes_live(self) -> int:
        """Bytes of the slots that hold a token, and of newest tokens as they came."""
        held = self._held
        if held.buffers is None:
            return 0
        tokens = sum(max(0, held.layout.held(row)) for row in held.rows)
        return tokens * self._bytes_per_slot + self.nbytes_residual

    @property
    def nbytes_full(self) -> int:
        """Bytes that all tokens up to here would take if none had been evicted or overwritten."""
        return sum(max(0, row.offset) for row in self._held.rows) * self._bytes_per_slot

    @property
    def _bytes_per_slot(self) -> int:
        """Bytes of one slot of one row, keys and values, as they are stored now; 0 before the first update."""
        return sum(buffer.bytes_per_slot for buffer in self._held.buffers or ())

    # --- state and copies ------------------------------------------------------------------------------------------

    @property
    def state(self) -> CacheState:
        """Everything to continue from, as a pytree: planes of keys and of values, rows, and how they are stored."""
        return state.state_of(self._held)

    @state.setter
    def state(self, value: tuple[Any, ...]) -> None:
        before = self._held
        self._held = state.contents_of(value, before.growth, before.reserved)
        self._held.growths, self._held.seam = before.growths, before.seam
        if before.evictor is not None and self._held.evictor is not None:
            self._held.evictor.hear_from(before.evictor.peers)

    @classmethod
    def from_state(cls, value: tuple[Any, ...], **settings: Any) -> Self:
        """A cache that continues from another's `state`; it grows by the default rule.

        Args:
            settings: what is not part of a state, by the names of `state.contents_of`.
        """
        made = cls.__new__(cls)
        made._held = state.contents_of(value, **settings)
        return made

    def replace_planes(self, keys: Sequence[mx.array], values: Sequence[mx.array]) -> None:
        """Puts other planes in the place of its own: with more slots or fewer, those of its tokens as they are.

        With no slot at all it is still copied and trimmed as ever, and good for nothing else.

        Args:
            keys, values: as many as its own, of the same rows, heads, widths and dtypes: (B, H, C, width).

        Raises:
            ValueError: nothing has been stored yet.
        """
        if self._held.buffers is None:
            raise ValueError("this cache is empty: it has no planes that could be replaced")
        for buffer, planes in zip(self._held.buffers, (keys, values), strict=True):
            buffer.planes = tuple(plane[:] for plane in planes)
        self._held.transient, self._held.ranges, self._held.packed, self._held.last = None, (), False, None

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        copied = memo[id(self)] = self._like(self._held.copied(memo))
        return copied

    def select(self, chosen: Sequence[int]) -> Self:
        """A copy of some rows, in this order, with all that was reserved for them."""
        return self._like(rows.copied_rows(self._held, chosen))

    def _like(self, held: Contents) -> Self:
        """A cache of other contents."""
        made = type(self).__new__(type(self))
        made.__dict__ |= vars(self) | {"_held": held}
        return made

    def __repr__(self) -> str:
        affine, codecs = affine_of(self._held.codecs), self._held.codecs
        how = f", bits={affine.bits}" if affine is not None else "" if are_plain(codecs) else f", {in_words(codecs)}"
        return f"{type(self).__name__}(offset={self.offset}, capacity={self.capacity}, nbytes={self.nbytes}{how})"
