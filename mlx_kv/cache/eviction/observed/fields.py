"""What was seen of attention, as the fields of `ScoredTokens` that scores look at.

Knows nothing about which score looks at which.
B rows, Hq query heads, H KV heads; n tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx

from mlx_kv.cache.eviction.observed.observation import Observation
from mlx_kv.cache.eviction.scores.tokens import QueryMoments
from mlx_kv.cache.eviction.weights import Keys


def seen_fields(observation: Observation, row: int | None, keys: Keys, offset: int) -> dict[str, Any]:
    """Of the tokens of one row, or of all, which stand alike then.

    Args:
        keys: the tokens, of which n lie in the first slots.
        offset: the next position.
    """
    seen: dict[str, Any] = {}
    if (last := observation.last_queries(row)) is not None:
        seen |= {"queries": last.queries, "query_positions": last.positions, "scale": last.scale}
        seen["attention_sinks"] = last.sinks
    if (received := observation.received_by(row, keys)) is not None:
        seen["received"], seen["observers"] = received
    if (moments := observation.all_moments(row)) is not None and observation.turning is not None:
        ahead = observation.turning.ahead(offset)
        seen |= {"moments": QueryMoments(moments.mean, moments.covariance(), ahead), "scale": observation.scale}
    return seen


def fields_of_head(seen: dict[str, Any], head: int, heads: int, own: Callable[[mx.array], mx.array]) -> dict[str, Any]:
    """The same of one of the KV heads and of those query heads that look at it.

    Args:
        own: the tokens that this head keeps, (1, 1, m) of (1, H, n).
    """

    def asked(x: mx.array, axis: int = 1) -> mx.array:
        return x.split(heads, axis=axis)[head]

    made = dict(seen)
    for name in ("received", "observers", "reread"):
        if name in seen:
            made[name] = own(mx.broadcast_to(seen[name], (1, heads, seen[name].shape[2])))
    if "queries" in seen:
        made["queries"] = asked(seen["queries"])
        sinks = seen["attention_sinks"]
        made["attention_sinks"] = None if sinks is None else asked(sinks, axis=0)
    if "moments" in seen:
        mean, covariance, ahead = seen["moments"]
        made["moments"] = QueryMoments(asked(mean), asked(covariance), ahead)
    return made
