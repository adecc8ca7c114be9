"""What all ranks hold together: bytes are added up, and of what all do at once the busiest counts.

Decides which is which. Knows nothing about what is shown.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, fields
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache

from mlx_kv.generation.statistics import CacheStatistics
from mlx_kv.mlxlm.traverse import leaves
from mlx_kv.ranks.group import RankGroup


def statistics_of_all(group: RankGroup, own: CacheStatistics) -> CacheStatistics:
    """What the caches of all ranks hold and did. All ranks must call it."""
    every = [CacheStatistics(**each) for each in group.gathered(asdict(own))]
    return CacheStatistics(
        **{
            field.name: (sum if field.name.startswith("bytes") else max)(getattr(each, field.name) for each in every)
            for field in fields(CacheStatistics)
        }
    )


class Shares:
    """What keys and values of one token take on each rank: from what one rank holds follows what the others do.

    Args:
        bytes_of_a_token: of each rank.
        rank: the one that counts its own.
    """

    def __init__(self, bytes_of_a_token: Sequence[int], rank: int) -> None:
        self._bytes, self._own = [max(1, each) for each in bytes_of_a_token], rank

    def of_all(self, count: int) -> int:
        """Bytes on all ranks together, where this one has so many."""
        return round(count * sum(self._bytes) / self._bytes[self._own])

    def own_limit(self, limits: Sequence[int]) -> int:
        """Bytes that this rank may hold, so that each stays below a limit of its own."""
        return min(limit * self._bytes[self._own] // each for limit, each in zip(limits, self._bytes, strict=True))


ALONE = Shares([1], 0)


def shares_of(model: nn.Module, group: RankGroup) -> Shares:
    """What a token takes on each rank. All ranks must call it; nothing is evaluated."""
    return Shares(group.gathered(bytes_of_a_token(model)), group.rank)


def bytes_of_a_token(model: nn.Module) -> int:
    """What the layers of a model hold once they have read one token, by mlx-lm's own caches."""
    caches: list[Any] = make_prompt_cache(model)
    model(mx.array([[0]]), cache=caches)
    arrays = tree_flatten([cache.state for cache in leaves(caches)])
    return sum(array.nbytes for _, array in arrays if isinstance(array, mx.array))  # type: ignore[str-unpack,misc]
