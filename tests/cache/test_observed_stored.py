"""What is known of attention to tokens that are stored in any way, against the slow reference of `test_observed`."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import mlx.core as mx
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import HEADS
from test_observed import EVERYTHING, STEP, Call, Known, Watched, apply, close
from test_observed_codecs import STORED, THOROUGH, oldest

from mlx_kv import CachePolicy, KVCache
from mlx_kv.cache.eviction.scores import Score, Wants
from mlx_kv.cache.eviction.scores.tokens import ScoredTokens


class WatchedCodec(Watched):
    """As `Watched`, with tokens that are stored in any way."""

    def __init__(self, stored: dict[str, Any], share: Any, keep_recent: int, seed: int) -> None:
        super().__init__(share, None, keep_recent, sinks=True, seed=seed, wants=EVERYTHING)
        policy = CachePolicy(**stored)
        self.cache = KVCache(evictor=self.cache.evictor, bits=policy.bits, group_size=32, codec=policy.codec)
        self.codec = policy.codecs[0]

    def _scored(self, tokens: ScoredTokens) -> mx.array:
        return tokens.keys.astype(mx.float32).sum(axis=-1)  # another one in each head

    def check(self) -> None:
        """As there, also where heads are asked one by one, since they hold different numbers of tokens."""
        evictor, asked = self.cache.evictor, list[ScoredTokens]()
        assert evictor is not None
        own = evictor.score
        evictor.score = Score("asking", lambda tokens: (asked.append(tokens), self._scored(tokens))[1], wants=own.wants)
        for row, known in enumerate(self.rows):
            asked.clear()
            if known.tokens:
                evictor.live_scores(row)
            for head, tokens in enumerate(asked):
                if len(asked) == HEADS:
                    self._check_head(row, head, known, tokens)
                else:
                    self._check_row(row, row if tokens.keys.shape[0] > 1 else 0, known, tokens)
        evictor.score = own

    def _check_head(self, row: int, head: int, known: Known, tokens: ScoredTokens) -> None:
        seen, group = range(self.observation.since[row], self.observation.ends[row]), slice(2 * head, 2 * head + 2)
        if not seen or tokens.queries is None:
            return
        assert tokens.query_positions is not None
        queries = [known.queries[p][group] for p in tokens.query_positions[0].tolist()]
        close(tokens.queries[0], np.stack(queries, axis=1))
        assert tokens.received is not None
        positions = tokens.positions[0, 0].tolist()
        close(tokens.received[0, 0], np.array([sum(known.given[q][head].get(p, 0.0) for q in seen) for p in positions]))


@settings(max_examples=1000 if THOROUGH else 40)
@given(
    steps=st.lists(STEP, min_size=3, max_size=14),
    stored=st.sampled_from(list(STORED)),
    share=st.sampled_from(["layer", "head", "adaptive"]),
    keep_recent=st.sampled_from([0, 3, 9]),
    seed=st.integers(0, 99),
)
def test_it_is_what_a_reference_knows_of_tokens_that_are_stored_in_any_way(
    steps: list[Any], stored: str, share: Any, keep_recent: int, seed: int
) -> None:
    watched = WatchedCodec(STORED[stored], share, keep_recent, seed)
    with patch.object(Call, "changed", lambda call, **changes: call):  # heads of different lengths bring a mask
        watched.write([20], 20)
        for what, how in steps:
            how = how % len(watched.rows) if what == "filter" else how
            if what != "unseen" or share != "adaptive":  # which needs to be asked for each mask
                apply(watched, what, how)
        watched.check()


def test_tokens_in_slots_of_evicted_ones_have_received_nothing() -> None:
    """Also where nothing moves, since only the last tokens went."""
    with patch.object(Watched, "_scored", lambda self, tokens: oldest(tokens)):
        watched = Watched("layer", None, 0, sinks=False, seed=0, wants=Wants(received=True))
        watched.write([150], 150)  # more than is held: what the first queries gave is summed up
        watched.cache.compact()
        watched.write([20], 20)
        watched.check()
