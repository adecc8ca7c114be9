"""What a compaction takes beside the cache: MLX counts it, and on a CPU the same every time."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest

from mlx_kv import CachePolicy, KVCache, compact
from mlx_kv.cache import buffers
from mlx_kv.cache.eviction import scores as blocks
from mlx_kv.cache.eviction.evictor import LayerGroup

LAYERS, HEADS, DIM, BUDGET = 12, 8, 128, 4096
MOST = 0.03  # of the cache
ON_CPU = mx.default_device().type == mx.DeviceType.cpu
pytestmark = pytest.mark.skipif(not ON_CPU, reason="blocks are of another size where memory is")


def filled(tokens: int, **policy: Any) -> list[KVCache]:
    """Caches of all layers that hold so many tokens and have compacted nothing yet."""
    made, group = CachePolicy(budget=BUDGET, margin=tokens, max_write=tokens, **policy), LayerGroup()
    caches = [made.make_cache(layer_group=group, layer=layer) for layer in range(LAYERS)]
    x = mx.random.normal((1, HEADS, tokens // 2, DIM), key=mx.random.key(0)).astype(mx.float16)
    for cache in caches:
        for _half in range(2):  # one write of all slots would only borrow the array
            cache.update_and_fetch(x, x)
            mx.eval(cache.state)
    return caches


def extra(caches: list[KVCache]) -> float:
    """Memory at the peak of a compaction beyond what was held before, as a share of what is live."""
    live = sum(cache.nbytes_live for cache in caches)
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    compact(caches)
    mx.eval([cache.state for cache in caches])
    return (mx.get_peak_memory() - before) / live


@pytest.mark.parametrize(
    ("score", "policy"),
    [
        ("key_diff", {}),
        ("key_norm", {}),
        ("key_norm", {"share": "head"}),
        ("key_norm", {"bits": 8}),
        ("key_diff", {"bits": 8}),
    ],
)
@pytest.mark.slow
def test_a_compaction_takes_a_few_hundredths_of_the_cache(score: str, policy: dict[str, Any]) -> None:
    assert extra(filled(BUDGET + 64, score=score, **policy)) < MOST


def test_so_it_does_where_half_of_the_tokens_go() -> None:
    assert extra(filled(2 * BUDGET, score="key_norm")) < MOST


def test_tokens_that_are_scored_all_at_once_take_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(blocks.BLOCK_BYTES, mx.DeviceType.cpu, 2**30)
    assert extra(filled(BUDGET + 64, score="key_norm")) > 2 * MOST
    assert extra(filled(BUDGET + 64, score="key_diff")) > 2 * MOST


def test_slots_that_are_moved_all_at_once_take_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buffers, "MOVED_BYTES", 2**30)
    assert extra(filled(2 * BUDGET, score="key_norm")) > MOST


@pytest.mark.parametrize("copied", [0, 2**20])  # what was read is waited for, or what is written is copied
@pytest.mark.parametrize("share", ["layers", "layer", "head"])
@pytest.mark.parametrize("keep_recent", [3, 40])  # the recent block slides past itself, or over its own slots
def test_slots_that_are_moved_one_by_one_end_where_they_do_all_at_once(
    share: Any, keep_recent: int, copied: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def compacted(moved: int) -> list[list[mx.array]]:
        monkeypatch.setattr(buffers, "MOVED_BYTES", moved)
        monkeypatch.setattr(buffers, "COPIED_BYTES", copied)
        policy = CachePolicy(budget=50, margin=90, keep_recent=keep_recent, score="random", share=share)
        group = LayerGroup()
        caches = [policy.make_cache(layer_group=group, layer=layer) for layer in range(2)]
        for tokens in (52, 9, 30):
            for layer, cache in enumerate(caches):
                x = mx.random.normal((3, 2, tokens, 32), key=mx.random.key(100 * layer + tokens))
                cache.update_and_fetch(x, x + 1)
            compact(caches)
        return [[cache.keys[:, :, :50], cache.values[:, :, :50], cache.positions] for cache in caches]

    for layer, other in zip(compacted(2**30), compacted(1), strict=True):
        for one, same in zip(layer, other, strict=True):
            assert mx.array_equal(one, same).item()


@pytest.mark.parametrize("score", ["key_diff", "key_norm"])
@pytest.mark.parametrize("bits", [None, 8])
def test_tokens_that_are_scored_in_blocks_score_as_they_do_all_at_once(
    score: str, bits: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = CachePolicy(budget=500, margin=600, score=score, bits=bits, share="head")
    cache = policy.make_cache()
    for _ in range(2):
        cache.update_and_fetch(*(mx.random.normal((2, 3, 333, 64)) for _ in range(2)))
    scores = []
    monkeypatch.setattr(blocks, "SHORT_BYTES", 0)
    for size in (1, 2**30):
        monkeypatch.setitem(blocks.BLOCK_BYTES, mx.DeviceType.cpu, size)
        assert cache.evictor is not None
        scores.append(cache.evictor.live_scores(1))
    assert mx.allclose(*scores, rtol=1e-5, atol=1e-6).item()
