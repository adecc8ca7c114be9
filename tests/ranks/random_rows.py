"""Random lives of compressed caches: some sequences, each of several layers, whose tensors are the same on every rank.

A rank has all heads and layers, or its part of them. What happens is drawn from the seed alone, so all ranks do alike.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any, NamedTuple

import mlx.core as mx
from classes import attend

from mlx_kv import CachePolicy, KVCache
from mlx_kv.cache.eviction.evictor import LayerGroup
from mlx_kv.communicator import CacheCommunicator
from mlx_kv.mlxlm.traverse import set_communicator
from mlx_kv.ranks.communicator import SplitHeads, SplitLayers

LAYERS, HEADS, DIM = 5, 6, 32
SHARES = ("layer", "head")
TABLES: tuple[dict[str, Any], ...] = (
    {},
    {"layers": [[(5 * layer + 3 * head) % 7 for head in range(HEADS)] for layer in range(LAYERS)]},
)
SPLITS = {2: (2, 3), 3: (1, 3, 1)}  # layers of each rank, of which the last has the first


class Has(NamedTuple):
    """What a rank has; noise is what its tensors are off by, as copies may be that ranks computed for themselves."""

    layers: range
    heads: slice
    noise: float = 0.0


ALL = Has(range(LAYERS), slice(None))


def part_of(split: str, group: mx.distributed.Group) -> Has:
    rank, size = group.rank(), group.size()
    if split == "copies":
        return Has(range(LAYERS), slice(None), 0.1 * rank)
    if split == "heads":
        return Has(range(LAYERS), slice(rank * HEADS // size, (rank + 1) * HEADS // size))
    counts = SPLITS[size]
    first = sum(counts[rank + 1 :])
    return Has(range(first, first + counts[rank]), slice(None))


def communicator(split: str, group: mx.distributed.Group) -> CacheCommunicator:
    return SplitLayers(group, SPLITS[group.size()]) if split == "layers" else SplitHeads(group, split == "copies")


def played(seed: int, has: Has, communicator: CacheCommunicator) -> Life:
    """A life to its end."""
    draw = random.Random(seed)
    share, allocated = draw.choice([*[("layers", {})] * 2, *[(share, own) for share in SHARES for own in TABLES]])
    quantised: dict[str, Any] = draw.choice([{}, {}, {"bits": 8, "group_size": 32}])
    policy = CachePolicy(
        budget=draw.randint(20, 30),
        keep_recent=draw.randint(2, 8),
        sinks=draw.randint(0, 3),
        margin=draw.randint(0, 9),
        score=draw.choice(["key_diff", "key_norm", "recent", "random"]),
        share=share,
        **allocated,
        **quantised,
    )
    life = Life(draw, policy, has, communicator)
    for _ in range(30):
        draw.choice(life.acts)()
    return life


def alike(count: int, has: Has, communicator: CacheCommunicator) -> None:
    """Rows that stand alike, compacted once."""
    life = Life(random.Random(0), CachePolicy(budget=20, keep_recent=4), has, communicator)
    life.batch = life.sequence(count, 40)
    life.compact()


class Life:
    """A batch of sequences, and one that was kept aside."""

    def __init__(self, draw: random.Random, policy: CachePolicy, has: Has, communicator: CacheCommunicator) -> None:
        self.draw, self.policy, self.has, self.communicator = draw, policy, has, communicator
        rows, tokens = draw.choice([1, 1, 2, 3]), draw.randint(1, 40)
        self.batch, self.kept_aside = self.sequence(rows, tokens), self.sequence()
        self.acts: list[Callable[[], None]] = [
            *[self.write, self.decode, self.decode] * 3,
            *[self.trim, self.copy, self.join, self.leave, self.load, self.compact],
            *[self.replace, self.merge, self.single_out],
        ]

    def sequence(self, rows: int = 1, tokens: int = 30) -> list[KVCache]:
        group = LayerGroup(self.communicator)
        caches = [self.policy.make_cache(layer_group=group, layer=layer) for layer in self.has.layers]
        self.update(caches, [tokens] * rows)
        return caches

    def update(self, caches: list[KVCache], counts: list[int]) -> None:
        """So many new tokens of each row; the shorter ones are padded."""
        longest, key = max(counts), mx.random.key(self.draw.getrandbits(32))
        shape = (2, LAYERS, len(counts), HEADS, longest, DIM)
        keys, values = mx.random.normal(shape, key=key)
        if self.has.noise:
            keys = keys + self.has.noise * mx.random.normal(keys.shape, key=mx.random.key(len(self.has.layers)))
        for cache, layer in zip(caches, self.has.layers, strict=True):
            if len(set(counts)) > 1:
                cache.prepare(lengths=counts)
            own = [x[layer, :, self.has.heads] for x in (keys, values)]
            attend(cache, own[0], *own)  # where heads differ in length, a mask must be asked for
            cache.finalize()

    @property
    def rows(self) -> int:
        return len(self.batch[0].view.rows)

    def write(self) -> None:
        self.update(self.batch, [self.draw.randint(1, 25) for _ in range(self.rows)])

    def decode(self) -> None:
        for _ in range(self.draw.randint(1, 6)):
            self.update(self.batch, [1] * self.rows)

    def trim(self) -> None:
        n = self.draw.randint(0, self.policy.keep_recent)
        if all(cache.can_trim(n) for cache in self.batch):
            for cache in self.batch:
                cache.trim(n)

    def copy(self) -> None:
        self.kept_aside = [cache.extract(0) for cache in copy.deepcopy(self.batch)]

    def join(self) -> None:
        if self.rows < 4:
            for cache, other in zip(self.batch, self.kept_aside, strict=True):
                cache.extend(other)

    def leave(self) -> None:
        if self.rows > 1:
            stay = sorted(self.draw.sample(range(self.rows), self.rows - 1))
            for cache in self.batch:
                cache.filter(stay)

    def replace(self) -> None:
        self.batch = copy.deepcopy(self.batch)

    def merge(self) -> None:
        if self.rows < 4:
            self.batch = [KVCache.merge(each) for each in zip(self.kept_aside, self.batch, strict=True)]

    def single_out(self) -> None:
        self.batch = [cache.extract(self.rows - 1) for cache in self.batch]

    def load(self) -> None:
        self.batch = [KVCache.from_state(cache.state) for cache in self.batch]
        set_communicator(self.batch, self.communicator)

    def compact(self) -> None:
        for cache in self.batch:
            cache.compact()

    def kept(self) -> list[list[Any]]:
        """The positions that are left in each layer and row, of each head that keeps its own."""
        return [
            [[sorted(p for p in head if p >= 0) for head in row] for row in cache.positions.tolist()]
            for cache in self.batch
        ]

    def part(self, has: Has) -> list[list[Any]]:
        """What of that a rank should have: as long as nothing was evicted, all heads have the same."""
        layers = [self.kept()[layer] for layer in has.layers]
        return [[row if len(row) == 1 else row[has.heads] for row in layer] for layer in layers]

    def compactions(self) -> int:
        return max(cache.evictor.compactions for cache in self.batch if cache.evictor is not None)
