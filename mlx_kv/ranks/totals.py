"""What all ranks hold together: bytes are added up, and of what all do at once the busiest counts.

Decides which is which. Knows nothing about what is shown.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, fields
from fractions import Fraction
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


class MemoryOfAll:
    """What all ranks hold, from what one of them does; of a process that is alone, its own.

    Keys and values of a token take the same on a rank whatever the token is. What else is in memory is asked for.

    Args:
        model: this rank's part. All ranks make one of these at once.
    """

    def __init__(self, model: nn.Module | None = None, group: RankGroup | None = None) -> None:
        self._group, self._factor = group, Fraction(1)
        if group is not None and model is not None:
            shares = group.gathered(max(1, bytes_of_a_token(model)))
            self._factor = Fraction(sum(shares), shares[group.rank])

    def of_all(self, count: int) -> int:
        """Bytes of keys and values on all ranks, where this one has so many."""
        return round(count * self._factor)

    def active(self) -> int:
        """Bytes of all arrays on all ranks; the others answer between two steps."""
        own = mx.get_active_memory()
        if self._group is None:
            return own
        self._group.leader.tell("memory")
        return int(own + sum(self._group.leader.answers()))

    @property
    def handlers(self) -> dict[str, Callable[..., object]]:
        """What a rank that follows does with what this tells."""
        group = self._group
        assert group is not None, "who is alone follows nobody"
        return {"memory": lambda: group.follower.answer(mx.get_active_memory())}


def bytes_of_a_token(model: nn.Module) -> int:
    """What the layers of a model hold once they have read one token, by mlx-lm's own caches; nothing is evaluated."""
    caches: list[Any] = make_prompt_cache(model)
    model(mx.array([[0]]), cache=caches)
    arrays = tree_flatten([cache.state for cache in leaves(caches)])
    return sum(array.nbytes for _, array in arrays if isinstance(array, mx.array))  # type: ignore[str-unpack,misc]
