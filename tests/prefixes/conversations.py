"""Trees of conversations that grow, are kept, found and removed in any order, on caches of every kind.

Beside a place that keeps them lies a copy of each cache that was kept, whole: the slow and obvious reference.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import strategies as st

from mlx_kv import KVCache, PromptStore, RingKVCache, trim_prompt_cache
from mlx_kv.cache.eviction.evictor import Evictor, LayerGroup
from mlx_kv.cache.layout import Budget
from mlx_kv.files import serialization

LAYERS, HEADS, DIM = 2, 2, 32


def budget() -> list[KVCache]:
    """Layers that keep the same tokens."""
    layout, group = Budget(40, 8, 2, 8), LayerGroup()
    return [KVCache(evictor=Evictor(layout, "key_norm", "layers", group, layer)) for layer in range(LAYERS)]


KINDS: dict[str, Callable[[], list[KVCache]]] = {
    "plain": lambda: [KVCache() for _ in range(LAYERS)],
    "8 bits": lambda: [KVCache(bits=8, group_size=32) for _ in range(LAYERS)],
    "late": lambda: [KVCache(bits=4, group_size=32, quantized_start=90) for _ in range(LAYERS)],
    "ring": lambda: [RingKVCache(48, 40) for _ in range(LAYERS)],
    "a window beside all": lambda: [RingKVCache(48, 40, sinks=4), KVCache()],
    "budget": budget,
}


@functools.cache
def tensors(token: int, position: int, layer: int) -> np.ndarray:
    """Keys and values (2, H, D) of a token at a position: the same wherever it is read."""
    drawn = np.random.default_rng([token, position, layer]).standard_normal((2, HEADS, DIM))
    return drawn.astype(np.float16)


def read(caches: Sequence[Any], tokens: Sequence[int], first: int) -> list[Any]:
    """Tokens at positions from `first` on, in one update; what attention gets of the last layer."""
    out = []
    for layer, cache in enumerate(caches):
        drawn = np.stack([tensors(token, first + i, layer) for i, token in enumerate(tokens)], axis=2)  # (2, H, S, D)
        out.append(cache.update_and_fetch(mx.array(drawn[0][None]), mx.array(drawn[1][None])))
    return out


def same(first: Any, second: Any) -> bool:
    if isinstance(first, (list, tuple)):
        return len(first) == len(second) and all(map(same, first, second))
    return (first.shape, first.dtype) == (second.shape, second.dtype) and bool(mx.array_equal(first, second))


def goes_on_as(found: Sequence[Any], kept: Sequence[Any], count: int) -> bool:
    """Whether what was found is what was kept, trimmed to so many tokens, also in what comes."""
    wanted = copy.deepcopy(list(kept))
    trim_prompt_cache(wanted, wanted[-1].offset - count, strict=True)
    alike = [cache.view.rows for cache in found] == [cache.view.rows for cache in wanted]
    for new in (1, 3, 30, 1):
        alike = alike and same(read(found, range(new), count), read(wanted, range(new), count))
        count += new
    return alike


class Reference:
    """A whole copy of everything that was kept."""

    def __init__(self) -> None:
        self.kept: dict[tuple[int, ...], list[KVCache]] = {}

    def grow(self, kind: str, branch: Sequence[int], parent: int) -> tuple[list[int], list[KVCache]]:
        """Caches that have read on from something that is kept, with the same bytes before, or from nothing."""
        tokens: list[int] = []
        caches = KINDS[kind]()
        if self.kept and parent >= 0:
            tokens, caches = (list(each) for each in list(self.kept.items())[parent % len(self.kept)])
            caches = copy.deepcopy(caches)
            back = len(branch) % 30
            if back and all(cache.can_trim(back) for cache in caches):
                trim_prompt_cache(caches, back, strict=True)
                tokens = tokens[:-back]
        for first in range(0, len(branch), 16):
            read(caches, branch[first : first + 16], len(tokens))
            tokens += branch[first : first + 16]
        return tokens, caches


BRANCHES = st.builds(
    lambda token, count: [token + index % 7 for index in range(count)], st.integers(0, 3), st.integers(64, 150)
)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("keep"), BRANCHES, st.integers(-1, 9)),
        st.tuples(st.just("find"), st.integers(0, 9), st.integers(0, 40)),
        st.tuples(st.just("remove"), st.integers(0, 9)),
    ),
    min_size=2,
    max_size=12,
)


def make_blocks_small(patch: pytest.MonkeyPatch) -> None:
    """Those of files."""
    patch.setattr(serialization, "BLOCK_SLOTS", 32)
    patch.setattr(serialization, "MIN_BLOCK_SLOTS", 8)


SYSTEM = [token % 50 for token in range(200)]


def conversation(number: int, own: int = 40, system: int = 200) -> tuple[list[int], list[KVCache]]:
    """One of those that begin alike."""
    caches, tokens = [KVCache(), KVCache()], [*SYSTEM[:system], *([100 + number] * own)]
    read(caches, tokens, 0)
    return tokens, caches


def conversation_of(tokens: list[int]) -> list[KVCache]:
    """Full caches that have read them."""
    caches = [KVCache(), KVCache()]
    read(caches, tokens, 0)
    return caches


def named(store: PromptStore, tokens: list[int]) -> str:
    return next(name for name, e in store.entries().items() if np.frombuffer(e.tokens, ">u4").tolist() == tokens)
