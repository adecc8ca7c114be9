"""All that one cache is made of and holds, by name. What is done to it is in `update`, `rows`, `state` and `memory`.

B rows.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx

from mlx_kv.cache.buffers import Buffers
from mlx_kv.cache.codecs import PLAIN, Codecs, Packing, packing_of, packings_of
from mlx_kv.cache.eviction.evictor import Evictor
from mlx_kv.cache.growth import DEFAULT, Growth
from mlx_kv.cache.layout import Append, Budget, Layout, Plan, Ranges, Row
from mlx_kv.cache.residual import Residual
from mlx_kv.cache.view import CacheView


@dataclass(slots=True, weakref_slot=True, eq=False)
class Contents:
    """The parts of a cache, its settings, and where it stands.

    Attributes:
        codecs, layout, growth, reserved, quantized_start, packed_decode, announced, lengths: as in `CacheView`.
        last, alike: the plan of the last update and what it was like, where the next may be a step like it, and else
            None; see `steady`.
        following: the layout that the next short write finds, with less room; None where nothing changes.
        steps, most_steps: of `steady`, in a row, and after how many of them `phases` has another look.
        short_writes, longest, trimmed_at: what `phases` has seen: writes in a row that want far less room than there
            is, the longest of them, and the offset of each row after the last trim.
        evictor: what compacts the rows of a budget; None without one.
        packing: how mlx-lm can read what the codecs store; None where it cannot.
        packings: how our own attention can, of keys and of values, where mlx-lm's cannot.
        residual: the newest tokens as they came; None where none are kept so.
        seam: what shows this cache its attention, if anything does: then it can be answered here.
        rows: where each row stands.
        buffers: of keys and of values.
        encoded: whether the buffers are stored by the codecs; before `quantized_start` they are plain.
        ranges: the slots that the last fetch was made of.
        transient: what attention read of a write longer than max_write, until the next step.
        packed: whether the last fetch handed out packed planes.
        counts: how many of the last update's tokens were tokens of each row, where some were padding; else None.
        growths: reallocations since the first allocation.
    """

    codecs: Codecs = PLAIN
    layout: Layout = Append()
    evictor: Evictor | None = None
    growth: Growth = DEFAULT
    reserved: int = 0
    quantized_start: int = 0
    packed_decode: bool = True
    announced: tuple[int, ...] = (0,)
    lengths: tuple[int, ...] | None = None
    rows: tuple[Row, ...] = (Row(),)
    buffers: Buffers | None = None
    encoded: bool = False
    ranges: Ranges = ()
    packed: bool = False
    transient: tuple[mx.array, mx.array] | None = None
    counts: tuple[int, ...] | None = None
    growths: int = 0
    last: Plan | None = None
    alike: Any = None
    following: Layout | None = None
    steps: int = 0
    most_steps: int = 0
    short_writes: int = 0
    longest: int = 0
    trimmed_at: tuple[int, ...] = ()
    seam: object = None
    residual: Residual | None = None
    packing: Packing | None = field(init=False)
    packings: tuple[Packing, Packing] | None = field(init=False)

    def __post_init__(self) -> None:
        self._find_packings()
        if self.evictor is None and isinstance(self.layout, Budget):  # without one, nothing would ever be evicted
            self.evictor = Evictor(self.layout)
        if self.evictor is not None:
            self.layout = self.evictor.layout
            self.evictor.belong_to(self)
        if self.residual is not None:
            keep_recent = None if self.evictor is None else self.evictor.layout.keep_recent
            uneven = self.evictor is not None and self.evictor.uneven_heads
            self.residual.check_beside(self.layout.max_rollback, keep_recent, uneven)

    def use(self, codecs: Codecs) -> None:
        """From now on these say how tensors are stored."""
        self.codecs, self.last = codecs, None
        self._find_packings()
        for buffer, codec in zip(self.buffers or (), codecs, strict=False):
            buffer.recode(codec)
        self.encoded = True

    def _find_packings(self) -> None:
        """mlx-lm's attention knows nothing of a residual: beside one, ours reads what its own could."""
        if self.residual is None:
            self.packing, self.packings = packing_of(self.codecs), packings_of(self.codecs)
            return
        keys, values = (codec.packed for codec in self.codecs)
        self.packing, self.packings = None, None if keys is None or values is None else (keys, values)

    @property
    def capacity(self) -> int:
        """Slots allocated for each row; 0 before the first update."""
        return 0 if self.buffers is None else self.buffers[0].capacity

    def empty(self) -> bool:
        """Whether no row holds a token."""
        return not any(row.offset > 0 for row in self.rows)

    @property
    def view(self) -> CacheView:
        """For others to look at."""
        return CacheView(
            self.layout,
            self.rows,
            self.codecs,
            self.buffers,
            self.quantized_start,
            self.packed_decode,
            self.reserved,
            self.announced,
            self.lengths,
            self.growth,
            0 if self.residual is None else self.residual.length,
        )

    def copied(self, memo: dict[int, Any]) -> Contents:
        """A deep copy; the memory of its buffers is shared until one of them writes.

        Args:
            memo: deepcopy's.
        """
        evictor = None if self.evictor is None else self.evictor.copied(memo)
        copied = self.without_evictor()
        if evictor is not None:
            copied.evictor = evictor
            evictor.belong_to(copied)
        return copied

    def without_evictor(self) -> Contents:
        """A copy that whoever asks gives an evictor."""
        copied = copy.copy(self)  # all of it is never changed in place, but for those that follow
        copied.evictor = None
        if self.buffers is not None:
            copied.buffers = self.buffers[0].copied(), self.buffers[1].copied()
        if self.residual is not None:
            copied.residual = self.residual.copied()
        return copied
