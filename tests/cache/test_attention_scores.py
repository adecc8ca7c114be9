"""The formulas of scores that look at attention, against loops over tokens; tokens lie in any order."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_kv.cache.eviction.scores import Score, ScoredTokens, Wants, find_score, key_diff, snap_kv, tova

HEADS, GROUP, DIM, N, SCALE = 2, 3, 16, 40, 0.25
RANDOM = np.random.default_rng(5)
ORDER = RANDOM.permutation(N)


def drawn(*shape: int) -> np.ndarray:
    return RANDOM.normal(size=shape).astype(np.float32)


KEYS, VALUES, QUERIES = drawn(1, HEADS, N, DIM), drawn(1, HEADS, N, DIM), drawn(1, HEADS * GROUP, 7, DIM)


def tokens(**more: Any) -> ScoredTokens:
    """40 tokens of a text, of which the 7 queries are the last, in another order."""
    return ScoredTokens(
        keys=mx.array(KEYS[:, :, ORDER]),
        values=mx.array(VALUES[:, :, ORDER]),
        positions=mx.array(ORDER.astype(np.int32))[None, None],
        **more,
    )


def asked(count: int) -> dict[str, Any]:
    positions = mx.arange(N - count, N)[None]
    return {"queries": mx.array(QUERIES[:, :, -count:]), "query_positions": positions, "scale": SCALE}


def attention(count: int) -> np.ndarray:
    """(Hq, count, N), in the order of positions."""
    shares = np.zeros((HEADS * GROUP, count, N))
    for head in range(HEADS * GROUP):
        for index, position in enumerate(range(N - count, N)):
            query = QUERIES[0, head, index - count]
            weights = np.exp(SCALE * KEYS[0, head // GROUP, : position + 1] @ query)
            shares[head, index, : position + 1] = weights / weights.sum()
    return shares


def in_order(scores: mx.array) -> np.ndarray:
    made = np.zeros((HEADS, N))
    made[:, ORDER] = np.array(scores)[0]
    return made


def test_snap_kv() -> None:
    shares = attention(7).mean(axis=1).reshape(HEADS, GROUP, N).mean(axis=1)
    shares[:, -7:] = 0
    padded = np.pad(shares, [(0, 0), (2, 2)])
    pooled = np.stack([padded[:, i : i + 5].sum(axis=1) / 5 for i in range(N)], axis=1)
    got = in_order(snap_kv(tokens(**asked(7))))
    np.testing.assert_allclose(got[:, :-7], pooled[:, :-7], rtol=1e-4, atol=1e-6)
    assert (got[:, -7:] > got[:, :-7].max()).all()


def test_tova() -> None:
    shares = attention(1)[:, 0].mean(axis=0)
    got = in_order(tova(tokens(**asked(1))))
    np.testing.assert_allclose(got[:, :-1], np.broadcast_to(shares[:-1], (HEADS, N - 1)), rtol=1e-4, atol=1e-6)
    assert (got[:, -1] > got[:, :-1].max()).all()


@pytest.mark.parametrize("name", ["snap_kv", "tova"])
def test_as_long_as_nothing_was_seen_they_score_as_key_diff(name: str) -> None:
    score = find_score(name)
    assert score.wants is not None
    assert mx.array_equal(score.function(tokens()), key_diff(tokens())).item()


def test_what_cannot_be_wanted_is_refused() -> None:
    with pytest.raises(ValueError, match="wants nothing"):
        Wants()
    with pytest.raises(ValueError, match="give a number of queries"):
        Wants(queries=-1)
    with pytest.raises(ValueError, match="leave per_token out"):
        Score("mine", key_diff, per_token=True, wants=Wants(queries=1))
    for removed in ({"received": True}, {"queries": 3, "moments": True}):
        with pytest.raises(ValueError, match=r"were removed in 0\.4: use queries=N or reread"):
            Wants(**removed)
