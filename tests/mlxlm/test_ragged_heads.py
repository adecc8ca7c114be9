"""Layers and heads that hold different numbers of tokens: each query reads what its head kept, in whole models."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

import mlx_kv
from mlx_kv import CachePolicy
from mlx_kv.cache.eviction.scores import Score, find_score
from mlx_kv.cache.eviction.slot_tokens import LayerMasks, SlotTokens
from mlx_kv.mlxlm.attention import AttentionCall, attention_hooked
from mlx_kv.mlxlm.traverse import attention_caches
from mlx_kv.ranks.communicator import SplitHeads, SplitLayers
from mlx_kv.ranks.splitting import PlannedRank
from tests.tiny_models import VOCAB, make_model


class Watched:
    """Keeps what every layer ever stored, and compares each attention with one over what its heads kept of that."""

    def __init__(self, caches: Sequence[Any]) -> None:
        self.caches = list(attention_caches(caches))
        self.history: dict[int, list[list[np.ndarray]]] = {}  # by cache: keys and values of each row, (H, n, D)
        self.checked, self.uneven = 0, 0

    def attend(self, call: AttentionCall) -> mx.array:
        cache = call.cache
        if cache.evictor is None:
            return call.forward()
        new, rows = call.queries.shape[2], cache.view.rows
        stored = [np.array(buffer.decode(buffer.planes)) for buffer in cache.view.buffers]
        past = self.history.setdefault(id(cache), [[x[:0, :0] for x in stored[:1]] * 2 for _ in rows])
        out = call.forward()
        positions = np.array(cache.positions)
        for i, row in enumerate(rows):
            for which, x in enumerate(stored):
                fresh = x[i, :, row.end - new : row.end]
                past[i][which] = fresh if past[i][which].size == 0 else np.concatenate([past[i][which], fresh], axis=1)
            keys, values = past[i]
            for head in range(call.queries.shape[1]):
                of = head * keys.shape[0] // call.queries.shape[1]
                kept = positions[i, of if positions.shape[1] > 1 else 0]
                for j in range(new):
                    seen = [p for p in kept.tolist() if 0 <= p <= row.offset - new + j]
                    scores = keys[of, seen] @ np.array(call.queries[i, head, j]) * call.scale
                    sinks = [] if call.sinks is None else [call.sinks[head].item()]
                    weights = np.exp(np.array([*scores, *sinks]))
                    wanted = (weights / weights.sum())[: len(seen)] @ values[of, seen]
                    np.testing.assert_allclose(np.array(out[i, head, j]), wanted, atol=2e-5)
        self.checked += 1
        self.uneven += any(row.extra_slots for row in rows)
        return out


def policy(**settings: Any) -> CachePolicy:
    return CachePolicy(budget=12, keep_recent=3, sinks=1, margin=4, **settings)


def ids(rows: int, tokens: int, seed: int = 0) -> mx.array:
    return mx.random.randint(0, VOCAB, (rows, tokens), key=mx.random.key(seed))


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gpt_oss"])
def test_models_attend_to_what_each_head_keeps(family: str) -> None:
    model = make_model(family)
    caches = mlx_kv.make_prompt_cache(model, policy(share="adaptive"))
    watched = Watched(caches)
    with attention_hooked(model, watched.caches, watched):
        for new in (20, 1, 9, *[1] * 12):
            model(ids(1, new, new), cache=caches)
    copies = copy.deepcopy(caches)
    budgets = [cache for cache in watched.caches if cache.evictor is not None]
    assert watched.checked == 15 * len(budgets)
    assert all(cache.evictor.compactions for cache in budgets)
    assert watched.uneven
    for cache in budgets:  # every head together as many as the budget, before the tokens since
        kept = (np.array(cache.positions)[0] >= 0).sum(axis=1)
        assert kept.mean() == cache.size()
    one = ids(1, 1, 7)
    assert mx.array_equal(model(one, cache=caches), model(one, cache=copies)).item()


@pytest.mark.parametrize("bits", [None, 8])
def test_rows_that_come_and_go(bits: int | None) -> None:
    """A ragged batch, filtered and extended, goes on as its rows alone."""
    model = make_model("llama")
    alone = [mlx_kv.make_prompt_cache(model, policy(bits=bits, group_size=32, share="adaptive")) for _ in range(3)]
    for i, (caches, tokens) in enumerate(zip(alone, (31, 8, 22), strict=True)):
        model(ids(1, tokens, i), cache=caches)
        model(ids(1, 2, i), cache=caches)
    joined = [type(layers[0]).merge(copy.deepcopy(layers)) for layers in zip(*alone, strict=True)]
    for step in range(9):
        if step == 5:
            alone[1:] = [alone[2], copy.deepcopy(alone[0])]
            for cache, own in zip(joined, alone[0], strict=True):
                cache.filter([0, 2])
                cache.extend(own.extract(0))
        tokens = ids(3, 1, 100 + step)
        wanted = mx.concatenate([model(tokens[i : i + 1], cache=alone[i]) for i in range(3)])
        got = model(tokens, cache=joined)
        # A difference in the last bit of one layer's output can turn the rounding of a key in the next.
        assert mx.allclose(got, wanted, atol=1e-4 if bits is None else 0.1).item(), step
    for layer, cache in enumerate(joined):
        for i in range(3):
            own = np.array(cache.extract(i).positions)
            assert np.array_equal(own, np.array(alone[i][layer].positions))


def test_trims_and_drafts_leave_no_trace() -> None:
    model = make_model("llama")
    caches = mlx_kv.make_prompt_cache(model, policy(share="adaptive"))
    other = copy.deepcopy(caches)
    for new in (25, 1, 1):
        for each in (caches, other):
            model(ids(1, new, new), cache=each)
    for step in range(8):
        model(ids(1, 3, 50 + step), cache=caches)  # drafts that are rejected
        for cache in caches:
            cache.trim(3)
        tokens = ids(1, 1, step)
        if max(row.end - row.extra_slots for cache in caches for row in cache.view.rows) + 3 > 12 + 4:
            for each in (caches, other):
                mlx_kv.compact(each)
        got, wanted = (model(tokens, cache=each) for each in (caches, other))
        assert mx.allclose(got, wanted, atol=1e-5).item(), step


def test_a_loaded_file_goes_on(tmp_path: Any) -> None:
    model = make_model("llama")
    caches = mlx_kv.make_prompt_cache(model, policy(share="adaptive"))
    for new in (25, 3, 6):
        model(ids(1, new, new), cache=caches)
    mlx_kv.save_prompt_cache(tmp_path / "kept.safetensors", caches)
    loaded = mlx_kv.load_prompt_cache(tmp_path / "kept.safetensors")
    mlx_kv.mlxlm.attention.show_attention(model, loaded)
    assert any(row.extra_slots for cache in loaded for row in cache.view.rows)
    for step in range(9):
        tokens = ids(1, 1, step)
        got, wanted = (model(tokens, cache=each) for each in (loaded, caches))
        assert mx.array_equal(got, wanted).item(), step


def test_what_no_model_can_do_is_refused_in_one_line() -> None:
    with pytest.raises(ValueError, match="does not attend with the mask that it is given"):
        mlx_kv.make_prompt_cache(make_model("deepseek_v3"), policy(share="adaptive"))
    x = mx.random.normal((1, 2, 40, 32))
    cache = mlx_kv.CompressedKVCache(12, keep_recent=3, sinks=1, share="adaptive", margin=4)
    cache.update_and_fetch(x, x)
    with pytest.raises(ValueError, match=r"use the caches of mlx_kv\.make_prompt_cache"):
        cache.update_and_fetch(x, x)  # before any head is longer than another


def test_ranks_refuse_what_they_could_not_compare() -> None:
    alone: Any = PlannedRank(1, 2)  # nothing is sent
    model, layers = make_model("qwen3", num_hidden_layers=2), SplitLayers(alone, (1, 1))
    apart, copies = SplitHeads(alone, copies=False), SplitHeads(alone, copies=True)

    def check(peers: Any, **settings: Any) -> None:
        mlx_kv.make_prompt_cache(model, CachePolicy(budget=80, keep_recent=8, **settings), peers=peers)

    with pytest.raises(ValueError, match="use share='head'"):
        check(apart, share="adaptive")
    check(copies, share="adaptive")  # every rank has all heads of which anything is kept
    check(layers, share="adaptive")
    with pytest.raises(ValueError, match="use share='layer', or give each rank such a layer"):
        check(SplitLayers(alone, (0, 2)))
    check(SplitLayers(alone, (0, 2)), share="layer")
    for peers in (apart, layers):
        check(peers, share="head", layers=((1.0,), (1.0,)))
    fitted = Score("fitted:0123456789ab", find_score("random").function)  # as a calibration has one
    with pytest.raises(ValueError, match="score='fitted' reads the keys and values of all of them"):
        check(apart, share="head", score=fitted)
    check(copies, share="head", score=fitted)
    check(layers, share="head", score=fitted)


def test_ranks_find_their_place_in_a_table() -> None:
    heads, copies = ([SplitHeads(PlannedRank(rank, 3), same) for rank in range(3)] for same in (False, True))
    assert [peers.first_head(2) for peers in heads] == [0, 2, 4]
    assert {peers.total_heads(2) for peers in heads} == {6}
    assert {(peers.first_head(2), peers.total_heads(2)) for peers in copies} == {(0, 2)}
    layers = [SplitLayers(PlannedRank(rank, 3), (4, 2, 1)) for rank in range(3)]  # the last rank has the first layers
    assert [peers.first_layer for peers in layers] == [3, 1, 0]
    assert {peers.total_layers(own) for peers, own in zip(layers, (4, 2, 1), strict=True)} == {7}


@pytest.mark.parametrize("family", ["gemma3_text", "llama4"])
def test_budgets_are_shared_among_layers_of_full_attention_alone(family: str) -> None:
    """Layers with a window or in chunks have no number among them, and no row of a table."""
    model = make_model(family)
    caches = list(attention_caches(mlx_kv.make_prompt_cache(model, policy(share="layer"))))
    full = [cache for cache in caches if cache.evictor is not None]
    assert 0 < len(full) < len(caches)
    assert [cache.evictor.layer for cache in full if cache.evictor] == [*range(len(full))]
    if family == "llama4":  # its layers cannot have masks of their own
        return
    mlx_kv.make_prompt_cache(model, policy(share="layer", layers=((2.0,), *[(1.0,)] * (len(full) - 1))))
    with pytest.raises(ValueError, match=f"has {len(caches) + 1} rows, and this model has {len(full)} layers of full"):
        mlx_kv.make_prompt_cache(model, policy(share="layer", layers=((2.0,), *[(1.0,)] * len(caches))))


# --- the tests above must be able to fail -----------------------------------------------------------------------------


def one_more(gap: int) -> int:
    return max(0, gap - 1)


def none(gap: int) -> int:
    return 0


@pytest.mark.parametrize("broken", [one_more, none])
def test_a_dead_slot_that_is_read_is_caught(broken: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model("llama")
    caches = mlx_kv.make_prompt_cache(model, policy(share="adaptive"))
    watched, right = Watched(caches), LayerMasks.of

    def wrong(self: LayerMasks, call: Any, rows: Any, counts: Any, kept: SlotTokens) -> Any:
        if kept.dead is not None:
            gaps = [[broken(gap) for gap in row] for row in kept.dead.tolist()]
            kept = kept._replace(dead=mx.array(gaps, mx.int32))
        return right(self, call, rows, counts, kept)

    with attention_hooked(model, watched.caches, watched):
        model(ids(1, 20), cache=caches)
        monkeypatch.setattr(LayerMasks, "of", wrong)
        with pytest.raises(AssertionError):
            model(ids(1, 1), cache=caches)
