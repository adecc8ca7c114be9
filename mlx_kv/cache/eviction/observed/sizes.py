"""How many bytes an observation holds of one row at the most, from the shapes of the first queries that it has seen.

Hq query heads, H KV heads, D head dim.
"""

from __future__ import annotations

from typing import NamedTuple

from mlx_kv.cache.eviction.observed.observation import PIECES, SHORT, Observation


class ObservedBytes(NamedTuple):
    """Bytes that an observation of one row holds at the most.

    Attributes:
        queries: how many queries are held.
        per_query: (Hq, D) in the dtype of the queries; where tokens are to know what they received, also (Hq,) of
            float32, the log-sum-exp of each.
        per_slot: (H,) of float32, what a token received.
        moments: (Hq, D) and (Hq, D, D) of float32, mean and spread.
    """

    queries: int = 0
    per_query: int = 0
    per_slot: int = 0
    moments: int = 0

    def nbytes(self, slots: int) -> int:
        """Of a row with so many slots in use."""
        return min(slots, self.queries) * self.per_query + slots * self.per_slot + self.moments


def most_bytes(observation: Observation, heads: int, step: int = 1) -> ObservedBytes:
    """What an observation that has seen queries holds of each row; nothing if it has seen none.

    Args:
        heads: H.
        step: tokens of a step of decoding. The queries of `PIECES` steps and of one short chunk wait to be put
            together with those that are held.
    """
    if not observation.recent.pieces:
        return ObservedBytes()
    wants, queries = observation.wants, observation.recent.pieces[0].queries  # (1, Hq, 1, D)
    _, asking, _, dim = queries.shape
    return ObservedBytes(
        observation.most_queries + SHORT + (PIECES * step if step <= SHORT else 0),
        asking * dim * queries.itemsize + (4 * asking if wants.received else 0),
        4 * heads if wants.received else 0,
        4 * asking * dim * (1 + dim) if wants.moments else 0,
    )
