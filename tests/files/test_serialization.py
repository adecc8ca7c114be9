"""Prompt caches in files: what is loaded goes on as what was saved."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from calibrations import centred
from going_on import AFTER, DTYPES, KINDS, POLICIES, PROMPT, feed, go_on, tokens_of
from mlx_lm.models import cache as stock
from oracle import attend, live_slots
from tiny_models import FAMILIES, VOCAB, make_model

import mlx_kv
from mlx_kv import (
    CachePolicy,
    ChunkedKVCache,
    FixedStep,
    Geometric,
    KVCache,
    RingKVCache,
    Tapered,
    load_prompt_cache,
    make_prompt_cache,
    save_prompt_cache,
)
from mlx_kv.cache.codecs import Affine
from mlx_kv.cache.eviction import scores
from mlx_kv.files import tensor_files
from mlx_kv.files.serialization import check_fingerprint, model_fingerprint
from mlx_kv.mlxlm.traverse import attention_caches, leaves


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", [None, 8, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_goes_on_as_it_was(kind: str, bits: int | None, dtype: str, rows: int, tmp_path: Path) -> None:
    spec = replace(KINDS[kind], rows=rows, bits=KINDS[kind].bits or bits)
    if spec.value_dim != spec.key_dim and spec.bits is not None:
        spec = replace(spec, packed_decode=False)
    cache = spec.make()
    for seed, new in enumerate((6, 20, 6, 6, 6, 5)):
        attend(cache, *tokens_of(spec, new, DTYPES[dtype], seed), None)
    if rows > 1 and cache.can_trim([0, 2, 1]):
        cache.trim_per_sequence([0, 2, 1])
    save_prompt_cache(tmp_path / "a.safetensors", [cache], {"some": "words"})
    caches, metadata = load_prompt_cache(tmp_path / "a.safetensors", return_metadata=True)
    again = load_prompt_cache(tmp_path / "a.safetensors")[0]
    assert metadata == {"some": "words"}
    loaded = caches[0]
    assert (loaded.capacity, loaded.nbytes, loaded.size()) == (cache.capacity, cache.nbytes, cache.size())
    assert (loaded.view.growth, loaded.view.reserved) == (cache.view.growth, cache.view.reserved)
    assert loaded.view.announced == cache.view.announced
    # Only live slots are there: what a row holds, and no other row's.
    written = tensor_files.read(tmp_path / "a.safetensors").arrays
    for row, stands in enumerate(cache.view.rows):
        assert written[f"0.keys.0.{row}"].shape[1] == max(live_slots(cache, stands), default=-1) + 1
    attend(again, *tokens_of(spec, 1, DTYPES[dtype], 99), None)
    assert again.growths == 0
    assert again.capacity == cache.capacity
    go_on([cache, loaded], spec, DTYPES[dtype])


FOUR = Affine(4, 32, rotate=True)
STORED = {
    "bits apart": CachePolicy(bits=(8, 4), group_size=32),
    "rotated": CachePolicy(bits=8, group_size=32, codec="rotated"),
    "the newest as they came": CachePolicy(bits=4, group_size=32, codec="rotated", residual_length=5),
    "the newest as they came, half a codec": CachePolicy(codec=("plain", "mxfp8"), residual_length=70),
    "the newest as they came, a budget": CachePolicy(
        bits=4, group_size=32, budget=40, keep_recent=6, sinks=2, margin=5, residual_length=6
    ),
    "rotated, bits apart, a budget": CachePolicy(
        bits=(8, 4), group_size=32, codec="rotated", budget=40, keep_recent=6, sinks=2, margin=5
    ),
    "mxfp8": CachePolicy(codec="mxfp8"),
    "nvfp4 and plain, a ring": CachePolicy(codec=("nvfp4", "plain"), max_kv_size=40, max_write=16),
    "centred keys": CachePolicy(codec=(centred(make_model("llama"), list(range(2, 90)), FOUR), FOUR)),
    "not yet": CachePolicy(bits=(8, 4), group_size=32, quantized_start=100),
}


@pytest.mark.parametrize("kind", STORED)
@pytest.mark.slow
def test_planes_of_every_packing_go_on_as_they_were(kind: str, tmp_path: Path) -> None:
    model = make_model("llama")
    caches = make_prompt_cache(model, STORED[kind])
    feed(model, caches, PROMPT, 16)
    save_prompt_cache(tmp_path / "a.safetensors", caches)
    loaded = load_prompt_cache(tmp_path / "a.safetensors")
    for own, other in zip(caches, loaded, strict=True):
        assert [(each.name, each.parameters) for each in own.view.codecs] == [
            (each.name, each.parameters) for each in other.view.codecs
        ]
        assert str(own) == str(other)
    mlx_kv.show_attention(model, loaded)  # as the loops of this library do
    assert mx.array_equal(feed(model, caches, AFTER, 1), feed(model, loaded, AFTER, 1)).item()


def test_a_cache_says_how_it_stores() -> None:
    for policy, told in (
        (CachePolicy(bits=8), ", bits=8)"),
        (CachePolicy(bits=(8, 8)), ", bits=8)"),
        (CachePolicy(codec="mxfp8"), ", keys as mxfp8 {} and values as mxfp8 {})"),
        (CachePolicy(), "nbytes=0)"),
    ):
        assert str(policy.make_cache()).endswith(told)


def test_a_write_longer_than_was_planned_for_is_saved_too(tmp_path: Path) -> None:
    for cache in (ChunkedKVCache(16, max_write=5), RingKVCache(16, max_write=5)):
        for new in (5, 27):
            x = mx.random.normal((1, 2, new, 32))
            cache.update_and_fetch(x, x)
        save_prompt_cache(tmp_path / "a.safetensors", [cache])
        (loaded,) = load_prompt_cache(tmp_path / "a.safetensors")
        x = mx.random.normal((1, 2, 2, 32))
        for one, other in zip(cache.update_and_fetch(x, x), loaded.update_and_fetch(x, x), strict=True):
            assert mx.array_equal(one, other).item()


@pytest.mark.parametrize("growth", [Tapered(2048), Geometric(3.0, 512, 4096), FixedStep(512)])
def test_headroom_is_restored_and_a_full_cache_gets_some(growth: Any, tmp_path: Path) -> None:
    for tokens, capacity in ((3, 1024), (1024, None)):
        cache = KVCache(growth=growth, reserve=1000)
        x = mx.random.normal((1, 2, tokens, 32))
        cache.update_and_fetch(x, x)
        save_prompt_cache(tmp_path / "a.safetensors", [cache])
        assert (tmp_path / "a.safetensors").stat().st_size < tokens * 512 + 3000
        loaded = load_prompt_cache(tmp_path / "a.safetensors")[0]
        assert loaded.view.growth == growth
        assert loaded.capacity == (capacity or growth.capacity(1025, 1024))
        loaded.update_and_fetch(x[:, :, :1], x[:, :, :1])
        assert loaded.growths == 0


def test_a_rule_of_another_package_becomes_the_default(tmp_path: Path) -> None:
    class Exact:
        def capacity(self, needed: int, current: int) -> int:
            return needed

    save_prompt_cache(tmp_path / "a.safetensors", [KVCache(growth=Exact())])
    assert load_prompt_cache(tmp_path / "a.safetensors")[0].view.growth == Tapered()


def test_empty_and_padded_caches(tmp_path: Path) -> None:
    x = mx.random.normal((2, 2, 4, 32))
    padded, announced = KVCache.merge([KVCache(), KVCache()]), KVCache()
    padded.prepare(left_padding=[0, 3])
    announced.update_and_fetch(x, x)
    announced.prepare(lengths=[1, 3])
    caches = [KVCache(8, 32), RingKVCache(9), padded, announced, stock.ArraysCache(2)]
    save_prompt_cache(tmp_path / "a.safetensors", caches)
    loaded = load_prompt_cache(tmp_path / "a.safetensors")
    assert [cache.empty() for cache in loaded] == [True, True, True, False, True]
    for own, other in zip(caches[2:4], loaded[2:4], strict=True):
        masks = [cache.make_mask(4) for cache in (own, other)]
        fetched = [cache.update_and_fetch(x, x) for cache in (own, other)]
        assert mx.array_equal(*masks).item()
        assert own.view.rows == other.view.rows
        assert own.view.lengths == other.view.lengths
        assert mx.array_equal(fetched[0][0], fetched[1][0]).item()


# --- models -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("family", FAMILIES)
def test_models_go_on_as_they_were(family: str, policy: str, tmp_path: Path) -> None:
    model = make_model(family)
    caches = make_prompt_cache(model, POLICIES[policy] if family != "deepseek_v32" else CachePolicy())
    feed(model, caches, PROMPT, 8)
    save_prompt_cache(tmp_path / "a.safetensors", caches)
    loaded = [load_prompt_cache(tmp_path / "a.safetensors") for _ in range(2)]
    assert [type(cache) for cache in leaves(loaded[0])] == [type(cache) for cache in leaves(caches)]
    wanted = feed(model, caches, AFTER, 5)
    for each in loaded:  # two copies do not get into each other's way
        assert mx.array_equal(feed(model, each, AFTER, 5), wanted).item()
        for own, other in zip(attention_caches(caches), attention_caches(each), strict=True):
            assert own.view.rows == other.view.rows
            if own.evictor is not None and other.evictor is not None:
                assert mx.array_equal(own.positions, other.positions).item()
                assert (own.evictor.evicted, own.evictor.compactions) == (
                    other.evictor.evicted,
                    other.evictor.compactions,
                )


def test_layers_of_a_loaded_batch_stay_in_step(tmp_path: Path) -> None:
    model = make_model("llama")
    caches = make_prompt_cache(model, POLICIES["budget"])
    tokens = mx.random.randint(1, VOCAB, (3, 120), key=mx.random.key(1))
    for first in range(0, 60, 10):
        model(tokens[:, first : first + 10], cache=caches)
    mlx_kv.trim_prompt_cache(caches, [0, 3, 1])
    save_prompt_cache(tmp_path / "a.safetensors", caches)
    loaded = load_prompt_cache(tmp_path / "a.safetensors")
    assert all(cache.evictor.metadata.groups == loaded[0].evictor.metadata.groups for cache in loaded)
    for first in range(60, 120, 6):
        outputs = [model(tokens[:, first : first + 6], cache=each) for each in (caches, loaded)]
        assert mx.array_equal(*outputs).item()
    assert loaded[0].evictor.compactions > 3
    for cache in loaded[1:]:
        assert mx.array_equal(cache.positions, loaded[0].positions).item()


def test_a_score_that_nobody_knows_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(scores.SCORES.registered, "mine", scores.Score("mine", lambda tokens: tokens.keys[..., 0]))
    save_prompt_cache(tmp_path / "a.safetensors", [mlx_kv.CompressedKVCache(100, score="mine")])
    monkeypatch.delitem(scores.SCORES.registered, "mine")
    with pytest.raises(ValueError, match="mine"):
        load_prompt_cache(tmp_path / "a.safetensors")


def test_fingerprints_tell_models_apart(reference: tuple[nn.Module, Any]) -> None:
    model, tokenizer = reference
    own = model_fingerprint(model, tokenizer)
    assert own == model_fingerprint(model, tokenizer)
    assert own.startswith(model_fingerprint(model) + "-")
    same = [model_fingerprint(make_model("llama", **changes)) for changes in ({}, {})]
    others = [{"seed": 1}, {"rope_theta": 5000.0}, {"num_hidden_layers": 2}]
    found = {*same, *(model_fingerprint(make_model("llama", **changes)) for changes in others)}
    assert len(found) == 4
    check_fingerprint("f", own, own)
    check_fingerprint("f", own, model_fingerprint(model))
    other = f"{own.partition('-')[0]}-{'0' * 32}"
    for saved, message in (
        (same[0], "another model: make it again, or give"),
        (other, "another tokenizer"),
        (None, "has no fingerprint of a model"),
    ):
        with pytest.raises(ValueError, match=message):
            check_fingerprint("f", saved, own, "m")
