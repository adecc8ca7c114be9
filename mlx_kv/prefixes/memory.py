"""Processed prompts in memory, as blocks of slots that several entries can share.

An entry shares a block of another one if all bytes are equal, whatever layout, codec or score put the tokens there.
Blocks are compared, not hashed as those of files are: a digest would take several times as long. Blocks are never
written to. A restored full cache refers to them as segments (`mlx_kv.cache.segments`), without a copy; slots of other
caches are copied.

An entry has *shells*, copies of its caches without slots, and a *strip* of slots for all layers of one layout. A strip
is a list of pieces, each the first slots of a block: an entry that diverges from another one in the middle of a block
uses the beginning of that block, and then its own blocks.
B rows, H KV heads.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_kv.cache.buffers import Buffers, SlotBuffer, as_words
from mlx_kv.cache.checks import cache_list
from mlx_kv.cache.growth import round_up
from mlx_kv.cache.kv_cache import KVCache
from mlx_kv.cache.segments import Segment, can_share
from mlx_kv.cache.state import cut_chain
from mlx_kv.generation.statistics import cache_statistics
from mlx_kv.mlxlm.recurrent import recurrent_states
from mlx_kv.mlxlm.traverse import attention_caches, is_ours, leaves, trim_prompt_cache
from mlx_kv.prefixes.index import MIN_SHARED, Entry, EvictedPrefixes, PrefixCache, min_tokens, packed, refuse_removed
from mlx_kv.ranks.engine import Part, RankCaches
from mlx_kv.ranks.group import RankGroup
from mlx_kv.settings import as_int, shown

# Blocks of a GPU are larger: each that a row refers to takes calls in each layer and step.
BLOCK_SLOTS = {mx.DeviceType.cpu: 1024, mx.DeviceType.gpu: 8192}
MOST_USED = 7 / 8  # of an entry's tokens, from which on others lose little if it goes on in a row alone
LEAST_SLOTS = 32  # of a shared piece; fewer are copied, as many short pieces are slow to restore


@dataclass(frozen=True, eq=False)
class ArrayBlock:
    """Slots of all layers of a strip.

    Attributes:
        planes: keys and values of each layer, each (B, H, slots, width); evaluated.
        segments: of each layer, by its first plane; made when they are first shared.
    """

    planes: tuple[mx.array, ...]
    segments: dict[int, Segment] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        return sum(plane.nbytes for plane in self.planes)

    def segment(self, first: int, like: Buffers) -> Segment:
        """The slots of one layer as a segment; the same each time.

        Args:
            first: index of its first plane.
            like: buffers of the layer.
        """
        if first not in self.segments:
            counts = [len(buffer.planes) for buffer in like]
            ends = [first, first + counts[0], first + sum(counts)]
            keys, values = (
                SlotBuffer(buffer.codec, self.planes[start:end], buffer.head_dim, buffer.dtype)
                for buffer, start, end in zip(like, ends[:-1], ends[1:], strict=True)
            )
            self.segments[first] = Segment((keys, values))
        return self.segments[first]


Piece = tuple[ArrayBlock, int]  # the first slots of a block


def first_slots(pieces: Sequence[Piece], slots: int) -> list[Piece]:
    """Pieces up to a number of slots, the last one cut."""
    ends = accumulate((count for _, count in pieces), initial=0)
    return [
        (block, min(count, slots - first)) for (block, count), first in zip(pieces, ends, strict=False) if first < slots
    ]


@dataclass(frozen=True)
class Strip:
    """All slots of the layers of one layout.

    Attributes:
        layers: indices among the caches of this package.
        pieces: in the order of their slots.
    """

    layers: tuple[int, ...]
    pieces: tuple[Piece, ...]

    def planes(self, slots: int, capacity: int) -> list[mx.array]:
        """The first slots of every plane, as new arrays (B, H, capacity, width); not evaluated."""
        pieces, planes = first_slots(self.pieces, slots), []
        for index, like in enumerate(self.pieces[0][0].planes):
            parts = [block.planes[index][:, :, :count] for block, count in pieces]
            empty = mx.zeros((*like.shape[:2], capacity - slots, like.shape[3]), like.dtype)
            planes.append(mx.concatenate([*parts, empty], axis=2))
        return planes


class BlockCaches:
    """Caches of one sequence, as blocks.

    Args:
        shells: the caches, those of this package without slots.
        strips: their slots.

    Attributes:
        own_bytes: outside of blocks: state of evictors, and other packages' caches.
        blocks: the bytes of each block.
        min_tokens: how few tokens other ranks can trim their parts to; 0 without ranks.
    """

    min_tokens = 0

    def __init__(self, shells: list[Any], strips: list[Strip]) -> None:
        self._shells, self._strips = shells, strips
        self.own_bytes = cache_statistics(shells).bytes_allocated
        self.blocks = {block: block.nbytes for strip in strips for block, _ in strip.pieces}

    @classmethod
    def of(cls, caches: Sequence[Any], tokens: int, like: BlockCaches | None, shared: int) -> BlockCaches:
        """A copy of caches, evaluated.

        Args:
            tokens: number of tokens that the caches have read.
            like: an entry to share equal blocks with.
            shared: length of the token prefix shared with `like`.
        """
        shells = copy.deepcopy(list(caches))
        for state in recurrent_states(shells):
            state.forget()  # a copy needs no way back
        strips: dict[tuple[Any, ...], list[int]] = {}
        ours = attention_caches(shells)
        for number, cache in enumerate(ours):
            if cache.view.buffers is not None and cache.view.used:
                strips.setdefault((cache.view.used, *cache.layout.parameters), []).append(number)
        cuts = []
        for (used, *_), numbers in strips.items():
            planes = [p for number in numbers for buffer in ours[number].view.buffers or () for p in buffer.planes]
            # Where slots are positions, slots after the shared tokens differ.
            equal = shared if used == tokens else used
            strip = None if like is None else next((s for s in like._strips if s.layers == tuple(numbers)), None)
            pieces = [] if strip is None else first_slots(strip.pieces, equal)
            cuts.append(StripCut(tuple(numbers), planes, used, pieces))
        mx.eval([cut.equal for cut in cuts])
        new = [cut.strip() for cut in cuts]
        mx.eval([block.planes for strip in new for block, _ in strip.pieces])
        for cache in ours:
            if cache.view.buffers is not None:
                keys, values = cache.view.buffers
                cache.replace_planes(_empty(keys.planes), _empty(values.planes))
        return cls(shells, new)

    def shortened(self, tokens: int, excess: int) -> BlockCaches:
        """Without the last `excess` tokens of so many, in the same blocks; slots must be positions."""
        shells = copy.deepcopy(self._shells)
        trim_prompt_cache(shells, excess, strict=True)
        strips = [Strip(strip.layers, tuple(first_slots(strip.pieces, tokens - excess))) for strip in self._strips]
        return BlockCaches(shells, strips)

    def first_bytes(self, slots: int, others: Collection[ArrayBlock]) -> int:
        """Bytes of the blocks of the first slots, but for blocks of others."""
        blocks = {block for strip in self._strips for block, _ in first_slots(strip.pieces, slots)}
        return sum(self.blocks[block] for block in blocks if block not in others)

    def ends(self, tokens: int) -> list[int]:
        """Numbers of tokens at which blocks end, the largest first, below so many; none if slots are not positions."""
        if not slots_are_positions(self._shells, tokens):
            return []
        ends = {end for strip in self._strips for end in accumulate(count for _, count in strip.pieces)}
        return sorted(ends - {tokens}, reverse=True)

    def restore(self, excess: int, tokens: int, shares: bool = True) -> list[Any]:
        """New caches without the last `excess` tokens; computed on first use.

        Args:
            tokens: that the caches will hold soon; capacity for them is allocated.
            shares: whether full caches refer to the blocks, so that other rows can share them.

        Raises:
            ValueError: the caches can't be trimmed so far.
        """
        caches = copy.deepcopy(self._shells)
        trim_prompt_cache(caches, excess, strict=True)
        ours = attention_caches(caches)
        for strip in self._strips:
            layers = [ours[number] for number in strip.layers]
            used = max(cache.view.used for cache in layers)
            planes = iter(strip.planes(used, max(_capacity(cache, used, tokens) for cache in layers)))
            for cache in layers:
                counts = [len(buffer.planes) for buffer in cache.view.buffers or ()]
                cache.replace_planes(*([next(planes) for _ in range(count)] for count in counts))
            first = 0
            for cache in layers:
                buffers = cache.view.buffers
                assert buffers is not None
                cache.view.chain = ()
                if shares and can_share(cache):
                    pieces = tuple((block.segment(first, buffers), count) for block, count in strip.pieces)
                    cache.view.chain = cut_chain(pieces, used)
                first += sum(len(buffer.planes) for buffer in buffers)
        return caches


class StripCut:
    """Slots of some layers, compared with the pieces that another entry has of these layers.

    Args:
        planes: each (B, H, C, width).
        used: number of slots to keep.
        pieces: of the other entry.

    Attributes:
        equal: whether each of these pieces, up to `used`, has the same bytes: booleans (pieces,).
    """

    def __init__(self, layers: tuple[int, ...], planes: list[mx.array], used: int, pieces: list[Piece]) -> None:
        self._layers, self._used = layers, used
        self._dtypes, self._words = [plane.dtype for plane in planes], [as_words(plane) for plane in planes]
        self._pieces: list[tuple[int, ArrayBlock, int]] = []  # first slot, block, number of slots
        first = 0
        for block, count in first_slots(pieces, used) if pieces and self._fits(pieces[0][0]) else []:
            self._pieces.append((first, block, count))
            first += count
        self.equal = mx.array([], mx.bool_)
        if self._pieces:
            self.equal = mx.stack([mx.all(self._alike(*piece)) for piece in self._pieces])

    def _fits(self, block: ArrayBlock) -> bool:
        def kinds(words: Iterable[mx.array], dtypes: Iterable[mx.Dtype]) -> list[tuple[Any, ...]]:
            return [(*plane.shape[:2], plane.shape[3], dtype) for plane, dtype in zip(words, dtypes, strict=True)]

        others = kinds(map(as_words, block.planes), [plane.dtype for plane in block.planes])
        return kinds(self._words, self._dtypes) == others

    def _alike(self, first: int, block: ArrayBlock, count: int, each: bool = False) -> mx.array:
        """Whether a piece has the same bytes, for each plane; or also for each slot, (planes, count)."""
        parts = [
            words[:, :, first : first + count] == as_words(plane)[:, :, :count]
            for words, plane in zip(self._words, block.planes, strict=True)
        ]
        return mx.stack([mx.all(part, axis=(0, 1, 3)) if each else mx.all(part) for part in parts])

    def strip(self) -> Strip:
        """Pieces of the other entry as far as they are equal, with new blocks in between, not evaluated."""
        end, pieces = 0, list[Piece]()
        for (first, block, count), equal in zip(self._pieces, np.array(self.equal), strict=True):
            if not equal:  # rare, so slots are seldom compared one by one
                count = int(np.argmin(np.array(mx.all(self._alike(first, block, count, each=True), axis=0))))
            if count >= LEAST_SLOTS:
                pieces += [*self._new_pieces(end, first), (block, count)]
                end = first + count
        return Strip(self._layers, (*pieces, *self._new_pieces(end, self._used)))

    def _new_pieces(self, first: int, last: int) -> list[Piece]:
        """New blocks, which end at multiples of a number of slots."""
        size = BLOCK_SLOTS[mx.default_device().type]
        ends = [first, *range(round_up(first + 1, size), last, size), last]
        return [(self._block(a, b), b - a) for a, b in pairwise(ends) if a < b]

    def _block(self, first: int, last: int) -> ArrayBlock:
        # A slice would keep the whole array alive; or-ing its words with 0 makes a copy.
        parts = [words[:, :, first:last] | mx.array(0, words.dtype) for words in self._words]
        return ArrayBlock(tuple(part.view(dtype) for part, dtype in zip(parts, self._dtypes, strict=True)))


def _entry_bytes(caches: Sequence[Any]) -> int:
    """Bytes of an entry with these caches that shares nothing."""
    total = 0
    for cache in leaves(caches):
        if is_ours(cache):
            total += cache.view.used * len(cache.view.rows) * cache.view.bytes_per_slot
            total += 0 if cache.evictor is None else cache.evictor.nbytes
        else:
            total += cache.nbytes
    return total


def slots_are_positions(caches: Sequence[Any], tokens: int) -> bool:
    """Whether caches that have read so many tokens hold each of them in the slot of its position."""
    return all(is_ours(cache) and cache.evictor is None and cache.view.used == tokens for cache in leaves(caches))


def _empty(planes: Sequence[mx.array]) -> list[mx.array]:
    return [mx.zeros((*plane.shape[:2], 0, plane.shape[3]), plane.dtype) for plane in planes]


def _capacity(cache: KVCache, used: int, tokens: int) -> int:
    """Slots for those in use, one more, and the tokens that are announced, within the limits of the layout."""
    view = cache.view
    expected = max(tokens, view.reserved, *view.announced)
    return round_up(max(min(used + 1, view.layout.max_slots), min(expected, view.layout.enough_slots), 1))


# --- the memory -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class MemoryEntry(Entry):
    """An entry with its caches."""

    caches: BlockCaches = field(kw_only=True)

    @property
    def blocks(self) -> Mapping[ArrayBlock, int]:
        return self.caches.blocks

    @property
    def own_bytes(self) -> int:
        return self.caches.own_bytes


class PromptMemory(PrefixCache[MemoryEntry]):
    """Processed prompts in memory. The least recently used ones are shortened or removed to make room.

    A prompt that does not fit keeps its beginning, where caches hold each token in the slot of its position. Others
    (windows, budgets, recurrent state) are kept whole or not at all.

    Args:
        max_bytes: of all entries together, what several share counted once. 0 keeps nothing.
        fingerprint: of model and policy; None takes that of the first `PromptReader`. A reader of another model or
            policy is refused.

    Attributes:
        too_large: digests of the prompts that were larger than max_bytes.

    Raises:
        ValueError: max_bytes below 0; from `find` and `keep`, that there is no fingerprint yet.
    """

    _shortens = True

    def __init__(self, max_bytes: int = 2**30, fingerprint: str | None = None, **removed: object) -> None:
        refuse_removed("PromptMemory", removed)
        max_bytes = as_int(max_bytes)
        if not (isinstance(max_bytes, int | float) and max_bytes >= 0):
            raise ValueError(f"max_bytes is {shown(max_bytes)}: give a number of bytes from 0 up")
        super().__init__(max_bytes, fingerprint)
        self._number, self.too_large = 0, EvictedPrefixes()  # number of entries so far

    def __len__(self) -> int:
        return len(self._table)

    @property
    def nbytes(self) -> int:
        """Of all entries together, what several share counted once."""
        return self._table.nbytes

    def find(self, tokens: Sequence[int]) -> tuple[list[Any], int] | None:
        """New caches for the longest prefix of a prompt, all but its last token at most.

        Returns:
            The caches and the number of tokens they have read; None if no entry serves. Full caches refer to the
            entry's blocks as segments, other caches are copies. The caller may change either: blocks are never
            written to.
        """
        key = packed(tokens)
        best = self._table.best(key, self._bound())
        if best is None:
            return None
        name, count = best
        entry = self._table[name]
        self._table.touch(name, time.monotonic())
        return entry.caches.restore(len(entry) - count, len(key) // 4), count

    def take(self, tokens: Sequence[int], common: int = 0, room: int = 0) -> tuple[list[Any], int] | None:
        """As `find`, and removes the entry, where there is no room for all entries beside a row.

        Args:
            common: first tokens that a row reads, too, and could share.
            room: bytes beside the row. What a longer entry will not serve, other prompts may need: it stays if it fits.

        Returns:
            Also None, with the entry as the last one used, if it has much more than what these tokens use of it, if
            most of that is in common, or if it stays.
        """
        key = packed(tokens)
        name, count = self._table.best(key, self._bound()) or ("", 0)
        if not count:
            return None
        entry = self._table[name]
        if count < MOST_USED * len(entry) or 2 * common >= count or (entry.least and entry.bytes <= room):
            self._table.touch(name, time.monotonic())
            return None
        caches = entry.caches.restore(len(entry) - count, len(key) // 4, shares=False)
        self._remove(name)
        return caches, count

    def held_bytes(self, segments: Iterable[Segment]) -> int:
        """Bytes of those segments of rows that are blocks of entries."""
        held = {segment for block in self._table.blocks for segment in block.segments.values()}
        return sum(segment.nbytes for segment in segments if segment in held)

    def keep(self, tokens: Sequence[int], caches: Sequence[Any]) -> bool:
        """Keeps a copy of the caches that have read exactly these tokens, unless an entry serves as well.

        If they are larger than `max_bytes`, as many of their first tokens are kept as fit, if they can be shortened.
        Blocks that are equal to those of another entry are shared with it. The caches are evaluated.

        Returns:
            Whether there is a new entry.
        """
        layers = cache_list("caches", caches)
        nbytes = _entry_bytes(layers)
        if 0 < self.max_bytes < nbytes:
            self.too_large.add(packed(tokens))
            fit = int(len(tokens) * self.max_bytes / nbytes)
            if self._shortens and slots_are_positions(layers, len(tokens)) and fit >= min_tokens(layers, len(tokens)):
                layers = copy.deepcopy(layers)
                trim_prompt_cache(layers, len(tokens) - fit, strict=True)
                tokens, nbytes = tokens[:fit], _entry_bytes(layers)
        plain = self._entry(tokens, layers, nbytes)
        if plain is None:
            return False
        now, covering = time.monotonic(), self._table.covering(plain)
        if covering is not None:
            self._table.touch(covering, now)
            return False
        like, shared = self._table.nearest(plain.tokens, plain.fingerprint) or (None, 0)
        copies = self._pack(layers, len(plain), None if like is None else like.caches, shared)
        if like is not None and copies.own_bytes + sum(copies.blocks.values()) > self.max_bytes:
            copies = self._pack(layers, len(plain), None, 0)  # shared blocks are longer than what is shared of them
        name, self._number = str(self._number), self._number + 1
        least = max(plain.least, copies.min_tokens)
        entry = MemoryEntry(plain.tokens, plain.bytes, least, plain.fingerprint, caches=copies)
        self._table.add(name, entry)  # from here on, nothing can fail
        self._table.touch(name, now)
        self._make_room(name, entry)
        return True

    def _pack(self, caches: list[Any], tokens: int, like: BlockCaches | None, shared: int) -> BlockCaches:
        return BlockCaches.of(caches, tokens, like, shared)

    def shrink(self, most: int) -> None:
        """Shortens or removes the least recently used entries until all have at most so many bytes."""
        self._evict(most)

    def _evict(self, max_bytes: float) -> None:
        while self._table and self._table.nbytes > max_bytes:
            name = self._table.least_recent(self._last_used)
            entry, used = self._table[name], self._table.touched(name)
            self.evicted.add(entry.tokens)
            self._remove(name)
            shorter = self._shortened(entry, max_bytes - self._table.nbytes)
            if shorter is not None:
                self._table.add(name, shorter)
                self._table.touch(name, used)

    def _shortened(self, entry: MemoryEntry, room: float) -> MemoryEntry | None:
        """The longest beginning of an entry, in whole blocks, that takes at most so many bytes beside all others.

        None if it is too short, or another entry serves as well.
        """
        others = self._table.blocks
        for end in entry.caches.ends(len(entry)) if self._shortens and room > 0 else ():
            if end < max(MIN_SHARED, entry.least):
                break
            if entry.own_bytes + entry.caches.first_bytes(end, others) <= room:
                caches = entry.caches.shortened(len(entry), len(entry) - end)
                nbytes = caches.own_bytes + sum(caches.blocks.values())
                shorter = MemoryEntry(entry.tokens[: 4 * end], nbytes, entry.least, entry.fingerprint, caches=caches)
                return None if self._table.covering(shorter) is not None else shorter
        return None

    def forget(self, tokens: Sequence[int]) -> None:
        """Removes the entry of these tokens, unless it serves longer prompts, too."""
        best = self._table.best(packed(tokens), self._bound())
        if best is not None and packed(tokens).startswith(self._table[best[0]].tokens):
            self._remove(best[0])

    def _remove(self, name: str) -> None:
        self._table.remove(name)

    def _last_used(self, name: str) -> float:
        return self._table.touched(name)


# --- on several ranks -------------------------------------------------------------------------------------------------


class RankBlocks(Part, BlockCaches):
    """The leader's part of an entry."""

    def restore(self, excess: int, tokens: int, shares: bool = True) -> list[Any]:
        caches = RankCaches(self.group, super().restore(excess, tokens))
        self.group.tell("restore", self.number, excess, tokens)
        return caches


class RankMemory(PromptMemory):
    """The leader's, of `RankCaches`: it decides what all ranks keep, each its part. Sizes are those of its own part.

    Entries are kept whole or not at all: other ranks have no message to shorten theirs.
    """

    _shortens = False

    def _pack(self, caches: Any, tokens: int, like: Any, shared: int) -> BlockCaches:
        group, blocks = caches.group, super()._pack(caches, tokens, like, shared)
        entry = RankBlocks(group, blocks._shells, blocks._strips)
        group.tell("pack", caches.number, tokens, None if like is None else like.number, shared)
        entry.min_tokens = -group.all_min([-min_tokens(caches, tokens)])[0]
        return entry


def memory_handlers(group: RankGroup) -> dict[str, Callable[..., object]]:
    """A follower's handlers of the messages of a `RankMemory`, by name."""

    def pack(number: int, tokens: int, like: int | None, shared: int) -> None:
        parts = group.parts
        parts.add(BlockCaches.of(parts[number], tokens, None if like is None else parts[like], shared))
        group.all_min([-min_tokens(parts[number], tokens)])

    def restore(number: int, excess: int, tokens: int) -> None:
        group.parts.add(group.parts[number].restore(excess, tokens))

    return {"pack": pack, "restore": restore}
