"""Tokens that are taken back from all layers: as many as mlx-lm's function of that name, or what `strict` refuses."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models import cache as stock

from mlx_kv import KVCache, RingKVCache, can_trim_prompt_cache, trim_prompt_cache


def filled(cache: Any, tokens: int) -> Any:
    cache.update_and_fetch(mx.zeros((1, 2, tokens, 64)), mx.zeros((1, 2, tokens, 64)))
    return cache


@pytest.mark.parametrize("n", [0, 1, 7, 10, 11, 99])
@pytest.mark.parametrize("bits", [None, 8])
def test_as_many_as_are_held_go_as_in_mlx_lm(bits: int | None, n: int) -> None:
    ours = [filled(KVCache(bits), 10) for _ in range(2)]
    theirs = [filled(stock.KVCache(), 10) for _ in range(2)]
    assert trim_prompt_cache(ours, n) == stock.trim_prompt_cache(theirs, n)
    assert [cache.offset for cache in ours] == [cache.offset for cache in theirs]


def test_rows_give_what_every_one_of_them_holds() -> None:
    rows = KVCache.merge([filled(KVCache(), 10), filled(KVCache(), 3)])
    assert trim_prompt_cache([rows], 5) == 3
    assert rows.offset.tolist() == [7, 0]
    assert trim_prompt_cache([rows], 1) == 0


def recurrent() -> Any:
    cache: Any = stock.ArraysCache(size=1)
    cache[0] = mx.zeros((1, 4))
    return cache


@pytest.mark.parametrize("other", [recurrent, lambda: filled(RingKVCache(8, max_write=4), 30)])
def test_where_a_layer_cannot_nothing_goes_and_strict_says_why(other: Any) -> None:
    caches = [filled(KVCache(), 30), other()]
    for n, nothing in ((5, 0), ([5], [0])):
        assert trim_prompt_cache(caches, n) == nothing
        with pytest.raises(ValueError, match=r"cannot trim .*5.* tokens: layer 1"):
            trim_prompt_cache(caches, n, strict=True)
    assert caches[0].offset == 30
    assert not can_trim_prompt_cache(caches)
    assert not can_trim_prompt_cache(caches, 5)


def test_strict_takes_all_or_none() -> None:
    caches = [filled(KVCache(), 10)]
    with pytest.raises(ValueError, match="this cache holds 10; trim by 0 to 10"):
        trim_prompt_cache(caches, 11, strict=True)
    assert caches[0].offset == 10
    assert trim_prompt_cache(caches, 10, strict=True) == 10


def test_what_a_ring_can_take_back_is_asked_of_it() -> None:
    caches = [filled(RingKVCache(8, max_write=4), 30)]
    assert can_trim_prompt_cache([filled(RingKVCache(8), 5)])
    assert not can_trim_prompt_cache(caches)  # not any number
    assert can_trim_prompt_cache(caches, 4)
    assert trim_prompt_cache(caches, 4) == 4
    assert trim_prompt_cache(caches, -1) == 0
    assert caches[0].offset == 26
