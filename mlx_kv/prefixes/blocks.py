"""Caches in memory, cut into blocks of slots, of which those that are alike are held once.

Decides where blocks end, and which of another entry's blocks an entry takes instead of its own: those that are equal
byte for byte, whatever the layout, the codec or the score that put tokens there. A block is never written to: caches
that are made of blocks get memory of their own. Knows nothing about which entry is like another (`index`), nor what
leaves (`memory`).

An entry is *shells*, copies of its caches without slots, and *strips*: layers of one layout have their slots together
in a strip, as pieces, each the first slots of a block. So an entry that parts from another within a block holds the
beginning of that block, and its own slots from there on.
B rows, H KV heads.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_kv.cache.buffers import as_words
from mlx_kv.cache.growth import round_up
from mlx_kv.cache.kv_cache import KVCache
from mlx_kv.generation.statistics import cache_statistics
from mlx_kv.mlxlm.recurrent import recurrent_states
from mlx_kv.mlxlm.traverse import attention_caches, is_ours, leaves
from mlx_kv.mlxlm.trimming import trim_prompt_cache

BLOCK_SLOTS = 256
LEAST_SLOTS = 32  # fewer are copied: pieces would become many and short


@dataclass(frozen=True, eq=False)
class Block:
    """Some slots of all layers of a strip.

    Attributes:
        planes: of keys and of values, layer by layer, each (B, H, slots, width); evaluated, and held by nobody else.
    """

    planes: tuple[mx.array, ...]

    @property
    def nbytes(self) -> int:
        return sum(plane.nbytes for plane in self.planes)


Piece = tuple[Block, int]  # the first so many slots of it


@dataclass(frozen=True)
class Strip:
    """The slots of layers of one layout, from the first on.

    Attributes:
        layers: their numbers among the caches that are ours.
        pieces: one after the other.
    """

    layers: tuple[int, ...]
    pieces: tuple[Piece, ...]

    def planes(self, slots: int, capacity: int) -> list[mx.array]:
        """The first `slots` slots of every plane, in new ones (B, H, capacity, width); not evaluated."""
        wanted, left = [], slots
        for block, count in self.pieces:
            if left > 0:
                wanted.append((block, min(count, left)))
            left -= count
        found = []
        for index, like in enumerate(self.pieces[0][0].planes):
            parts = [block.planes[index][:, :, :count] for block, count in wanted]
            empty = mx.zeros((*like.shape[:2], capacity - slots, like.shape[3]), like.dtype)
            found.append(mx.concatenate([*parts, empty], axis=2))
        return found


class KeptCaches:
    """Caches of one sequence that nobody writes to.

    Args:
        shells: the caches, ours without slots.
        strips: the slots of ours.
    """

    def __init__(self, shells: list[Any], strips: list[Strip]) -> None:
        self._shells, self._strips = shells, strips
        self.own_bytes = cache_statistics(shells).bytes_allocated  # what an evictor knows; what is not ours
        self.blocks = {block: block.nbytes for strip in strips for block, _ in strip.pieces}

    @classmethod
    def of(cls, caches: Sequence[Any], tokens: int, like: KeptCaches | None, shared: int) -> KeptCaches:
        """What is to be kept of caches, as they are now; evaluated.

        Args:
            tokens: that they have read.
            like: an entry whose blocks are taken where they are equal; None takes none.
            shared: the tokens that it begins with alike.
        """
        shells = copy.deepcopy(list(caches))
        for state in recurrent_states(shells):
            state.forget()  # kept is what was read, and no way back
        strips: dict[tuple[Any, ...], list[int]] = {}
        ours = attention_caches(shells)
        for number, cache in enumerate(ours):
            if cache.view.buffers is not None and cache.view.used:
                strips.setdefault((cache.view.used, *cache.layout.parameters), []).append(number)
        cuts = []
        for (used, *_), numbers in strips.items():
            planes = [p for number in numbers for buffer in ours[number].view.buffers or () for p in buffer.planes]
            # Where slots are positions, none beyond what is shared is worth a look.
            most = shared if used == tokens else used
            cuts.append(StripCut(tuple(numbers), planes, used, [] if like is None else like._pieces(numbers, most)))
        mx.eval([cut.equal for cut in cuts])
        made = [cut.strip() for cut in cuts]
        mx.eval([block.planes for strip in made for block, _ in strip.pieces])
        for cache in ours:
            if cache.view.buffers is not None:
                keys, values = cache.view.buffers
                cache.replace_planes(_empty(keys.planes), _empty(values.planes))
        return cls(shells, made)

    def _pieces(self, layers: Sequence[int], most: int) -> list[Piece]:
        """What these layers have in their first slots."""
        found: list[Piece] = []
        for strip in self._strips:
            if strip.layers == tuple(layers):
                for block, count in strip.pieces:
                    if most > 0:
                        found.append((block, min(count, most)))
                    most -= count
        return found

    def caches(self, excess: int, room: int) -> list[Any]:
        """Caches of the asker's own, without the last `excess` tokens; computed when they are first used.

        Args:
            room: tokens that they will hold soon: there are slots for them.

        Raises:
            ValueError: they cannot be trimmed so far.
        """
        caches = copy.deepcopy(self._shells)
        trim_prompt_cache(caches, excess, strict=True)
        ours = attention_caches(caches)
        for strip in self._strips:
            layers = [ours[number] for number in strip.layers]
            used = max(cache.view.used for cache in layers)
            planes = iter(strip.planes(used, max(_capacity(cache, used, room) for cache in layers)))
            for cache in layers:
                counts = [len(buffer.planes) for buffer in cache.view.buffers or ()]
                cache.replace_planes(*([next(planes) for _ in range(count)] for count in counts))
        return caches


class StripCut:
    """The slots of some layers that are to become blocks, beside the pieces that another entry has of these layers.

    Args:
        planes: each (B, H, C, width).
        used: slots that are worth keeping.
        pieces: of the other.

    Attributes:
        equal: of each of these pieces, as far as there are slots, whether all of it is the same: booleans (pieces,).
    """

    def __init__(self, layers: tuple[int, ...], planes: list[mx.array], used: int, pieces: list[Piece]) -> None:
        self._layers, self._used = layers, used
        self._dtypes, self._words = [plane.dtype for plane in planes], [as_words(plane) for plane in planes]
        self._pieces: list[tuple[int, Block, int]] = []  # with the slot where each begins
        first = 0
        for block, count in pieces if pieces and self._fits(pieces[0][0]) else []:
            if first < used:
                self._pieces.append((first, block, min(count, used - first)))
            first += count
        self.equal = mx.array([], mx.bool_)
        if self._pieces:
            self.equal = mx.stack([mx.all(self._alike(*piece)) for piece in self._pieces])

    def _fits(self, block: Block) -> bool:
        def kind(plane: mx.array) -> tuple[Any, ...]:
            return (*plane.shape[:2], plane.shape[3], plane.dtype)

        words = [(*kind(words)[:3], dtype) for words, dtype in zip(self._words, self._dtypes, strict=True)]
        return words == [(*kind(as_words(plane))[:3], plane.dtype) for plane in block.planes]

    def _alike(self, first: int, block: Block, count: int, each: bool = False) -> mx.array:
        """Of each plane, whether a piece is the same; or of each of its slots, (planes, count)."""
        parts = [
            words[:, :, first : first + count] == as_words(plane)[:, :, :count]
            for words, plane in zip(self._words, block.planes, strict=True)
        ]
        return mx.stack([mx.all(part, axis=(0, 1, 3)) if each else mx.all(part) for part in parts])

    def strip(self) -> Strip:
        """The pieces: those of the other as far as they are alike, and new blocks, not evaluated, in between."""
        place, pieces = 0, list[Piece]()
        for (first, block, count), equal in zip(self._pieces, np.array(self.equal), strict=True):
            if not equal:  # most are, so that slots are seldom looked at one by one
                count = int(np.argmin(np.array(mx.all(self._alike(first, block, count, each=True), axis=0))))
            if count >= LEAST_SLOTS:
                pieces += [*self._own(place, first), (block, count)]
                place = first + count
        return Strip(self._layers, (*pieces, *self._own(place, self._used)))

    def _own(self, first: int, last: int) -> list[Piece]:
        """New blocks of some slots, which end where all blocks do that begin at the first slot."""
        ends = [first, *range(round_up(first + 1, BLOCK_SLOTS), last, BLOCK_SLOTS), last]
        return [(self._block(a, b), b - a) for a, b in pairwise(ends) if a < b]

    def _block(self, first: int, last: int) -> Block:
        # A part of an array would hold on to all of it: the same words, or'ed with nothing, are a copy.
        parts = [words[:, :, first:last] | mx.array(0, words.dtype) for words in self._words]
        return Block(tuple(part.view(dtype) for part, dtype in zip(parts, self._dtypes, strict=True)))


def kept_bytes(caches: Sequence[Any]) -> int:
    """What caches would take that share nothing."""
    return sum(_kept_bytes(cache) if is_ours(cache) else cache.nbytes for cache in leaves(caches))


def _kept_bytes(cache: KVCache) -> int:
    view, known = cache.view, 0 if cache.evictor is None else cache.evictor.nbytes
    return known + view.used * len(view.rows) * sum(buffer.bytes_per_slot for buffer in view.buffers or ())


def _empty(planes: Sequence[mx.array]) -> list[mx.array]:
    return [mx.zeros((*plane.shape[:2], 0, plane.shape[3]), plane.dtype) for plane in planes]


def _capacity(cache: KVCache, used: int, room: int) -> int:
    """Slots for what it holds, one more, and what is announced, as far as its layout wants any."""
    view = cache.view
    wanted = max(room, view.reserved, *view.announced)
    return round_up(max(min(used + 1, view.layout.most_slots), min(wanted, view.layout.enough_slots), 1))
