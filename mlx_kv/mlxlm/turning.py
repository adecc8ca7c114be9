"""The RoPE of a model's layers, found by asking them: queries are turned back by it, and on to positions to come.

A layer's own `rope(x, offset=...)` is all that is called: it turns back where it is given negative positions, whatever
its frequencies, and what it does to the columns of a unit matrix is its matrix. Some scale what they turn, by the same
factor at every position; that is divided out. What is found is tried on the model itself, so no other RoPE passes for
it. Knows nothing about caches or scores.
B rows, Hq query heads, m queries, D head dim.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import generation_stream
from mlx_lm.models import cache as stock

from mlx_kv.mlxlm.asking import asked_once
from mlx_kv.mlxlm.attention import HOOK, AttentionCall, AttentionSeam
from mlx_kv.mlxlm.stand_ins import stand_ins
from mlx_kv.mlxlm.traverse import leaves

AHEAD = 512  # positions to come: kvpress' number
TRIED_AT = 37  # a position at which it is tried
MOST_ROUNDING = 0.02  # of the largest query: models of 16 bits are tried, too


class Rope:
    """What one layer's RoPE does.

    Args:
        rope: (x, offset=...), of (B, heads, S, D).
        dim: D.
    """

    def __init__(self, rope: Callable[..., mx.array], dim: int) -> None:
        self._rope, self._dim = rope, dim
        self._factor = rope(mx.ones((1, 1, 1, dim)), offset=0).astype(mx.float32)
        self._mean: mx.array | None = None

    def back(self, queries: mx.array, positions: Sequence[int]) -> mx.array:
        """Queries (B, Hq, m, D) of consecutive tokens as they were before RoPE, in float32.

        Args:
            positions: of the first of each row.
        """
        last = [-(position + queries.shape[2] - 1) for position in positions]
        offset = last[0] if len(set(last)) == 1 else mx.array(last)
        reversed_order = queries.astype(mx.float32)[:, :, ::-1]
        return self._rope(reversed_order, offset=offset)[:, :, ::-1] / self._factor.square()

    def ahead(self, position: int) -> mx.array:
        """(D, D): the mean, over 512 positions from `position` on, of what RoPE does to a column."""
        if self._mean is None:
            unit = mx.broadcast_to(mx.eye(self._dim)[None, :, None], (1, self._dim, AHEAD, self._dim))
            self._mean = self._rope(unit, offset=0).mean(axis=2, keepdims=True)  # (1, D, 1, D), each row a column
            mx.eval(self._mean)
        turned: mx.array = self._rope(self._mean[...], offset=position) / self._factor
        return turned[0, :, 0].T


@dataclass
class _Listener:
    """Writes down the queries that each layer asked with."""

    caches: list[Any]
    queries: dict[int, mx.array] = field(default_factory=dict)

    def attend(self, call: AttentionCall) -> mx.array:
        for index, cache in enumerate(self.caches):
            if cache is call.cache:
                self.queries[index] = call.queries[...]
        return call.hand_on()


@asked_once
def ropes(model: nn.Module) -> tuple[Rope | None, ...]:
    """The RoPE of each cache's layer, in the order of `leaves`; None where none is found that does what the model does.

    A token is read at two positions, over caches of zeros: queries that are turned back must be the same.
    """
    layers = list(getattr(model, "layers", []))
    found: list[Rope | None] = [None] * len(list(leaves(stock.make_prompt_cache(model))))
    if len(layers) != len(found):
        return tuple(found)
    first, later = (_queries(model, position) for position in (0, TRIED_AT))
    for index, layer in enumerate(layers):
        named = (getattr(part, "rope", None) for part in layer.modules())
        own = next((rope for rope in named if callable(rope)), None)
        if own is None or index not in first or index not in later:
            continue
        try:
            rope = Rope(own, first[index].shape[3])
            one, other = rope.back(first[index], [0]), rope.back(later[index], [TRIED_AT])
            largest = mx.abs(one).max()
            if mx.abs(one - other).max().item() <= MOST_ROUNDING * largest.item():  # type: ignore[operator]
                found[index] = rope
        except (TypeError, ValueError):  # one that is called otherwise
            continue
    return tuple(found)


def _queries(model: nn.Module, position: int) -> dict[int, mx.array]:
    """What each layer asks with for one token at a position; attention over zeros tells it nothing of the text."""
    caches = stand_ins(model, position)
    listener = _Listener(list(leaves(caches)))
    for cache in listener.caches:
        setattr(cache, HOOK, listener)
    try:
        with AttentionSeam(model), mx.stream(generation_stream):
            answer = model(mx.zeros((1, 1), mx.int32), cache=caches)
            mx.eval(answer, list(listener.queries.values()))  # other ranks wait for what the answer sends them
    except Exception:  # a model that needs more than stand-ins: nothing is known of its RoPE
        return {}
    return listener.queries
