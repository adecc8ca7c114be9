"""Invariants 4 and 6: models of every attention family, tiny and random, through our caches and through references."""

from __future__ import annotations

import copy
import functools
import random
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.models import cache as stock
from oracle import poison
from shadowing import shadowed
from slow_cache import SlowCache
from tiny_models import FAMILIES, VOCAB, make_model

from mlx_kv import Cache, CachePolicy, KVCache, cache_statistics, make_prompt_cache, trim_prompt_cache
from mlx_kv.mlxlm.traverse import attention_caches, leaves

LENGTH = 60
INDEXED = ("deepseek_v32",)  # the second cache of a layer is its indexer's, which stays plain
WINDOWED = ["gemma3_text", "gpt_oss", "olmo3", "mistral", "llama4"]
RECURRENT = ["lfm2", "falcon_h1"]
make = functools.cache(make_model)  # tests here leave models as they are
TRIMMABLE = [f for f in FAMILIES if f not in RECURRENT]


def random_chunks(rng: random.Random, total: int = LENGTH) -> list[int]:
    chunks = []
    while sum(chunks) < total:
        chunks.append(min(rng.choice([1, 1, 2, 5, 9, 20]), total - sum(chunks)))
    return chunks


def prompt(rows: int = 1, seed: int = 0) -> mx.array:
    return mx.random.randint(0, VOCAB, (rows, LENGTH), key=mx.random.key(seed))


def logits(model: nn.Module, caches: list[Any], tokens: mx.array, chunks: list[int], dirty: bool = False) -> mx.array:
    """Logits of every position, the prompt fed in chunks."""
    out, first = [], 0
    for chunk in chunks:
        if dirty:
            for cache in attention_caches(caches):
                poison(cache)
        out.append(model(tokens[:, first : first + chunk], cache=caches))
        mx.eval(out[-1], [cache.state for cache in caches])
        first += chunk
    return mx.concatenate(out, axis=1)


def slow_caches(model: nn.Module, bits: int | None = None) -> list[Any]:
    """mlx-lm's own list with a slow, obvious cache in the place of every attention cache; the same window."""
    indexed = model.model_type in INDEXED

    def replaced(cache: Any, bits: int | None) -> Any:
        if type(cache) is stock.CacheList:
            inner = enumerate(cache.caches)
            return stock.CacheList(*(replaced(c, None if indexed and i == 1 else bits) for i, c in inner))
        if type(cache) is stock.RotatingKVCache:
            return SlowCache(bits, cache.max_size)
        if type(cache) is stock.ChunkedKVCache:
            return SlowCache(bits, chunk=cache.chunk_size)
        return SlowCache(bits) if type(cache) is stock.KVCache else cache

    return [replaced(cache, bits) for cache in stock.make_prompt_cache(model)]


def assert_close(got: mx.array, wanted: mx.array) -> None:
    scale = mx.abs(wanted).max().item()
    assert scale > 0.01
    assert mx.abs(got - wanted).max().item() <= 2e-5 * scale


@pytest.mark.parametrize("family", FAMILIES)
def test_same_chunks_give_mlx_lms_logits(family: str) -> None:
    model, chunks = make(family), random_chunks(random.Random(family))
    wanted = logits(model, stock.make_prompt_cache(model), prompt(2), chunks)
    caches = make_prompt_cache(model)
    assert any(isinstance(cache, KVCache) for cache in leaves(caches))
    assert_close(logits(model, caches, prompt(2), chunks), wanted)


def write_sizes(family: str) -> dict[str, int]:
    """A policy's max_write, for models that have rings: one that prompts exceed now and then."""
    return {"max_write": 6} if family in WINDOWED else {}


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_the_slow_caches(family: str) -> None:
    model, chunks = make(family), random_chunks(random.Random(family))
    wanted = logits(model, slow_caches(model), prompt(2), chunks)
    got = logits(model, make_prompt_cache(model, CachePolicy(**write_sizes(family))), prompt(2), chunks)
    assert_close(got, wanted)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("family", FAMILIES)
def test_quantised_layers_see_bit_for_bit_the_whole_history(family: str, bits: int) -> None:
    model = make(family)
    policy = CachePolicy(bits=bits, group_size=32, **write_sizes(family))
    caches = make_prompt_cache(model, policy)
    watched, shadows = shadowed(caches, slow_caches(model, bits))
    chunks = random_chunks(random.Random(f"{family}{bits}"))
    logits(model, watched, prompt(2), chunks)
    assert all(shadow.checked == len(chunks) for shadow in shadows)
    assert shadows


@pytest.mark.parametrize("bits", [None, 8, 4])
@pytest.mark.parametrize("family", FAMILIES)
def test_dead_slots_are_dead(family: str, bits: int | None) -> None:
    model, chunks = make(family), random_chunks(random.Random(f"{family}{bits}"))
    policy = CachePolicy(bits=bits, group_size=32, **write_sizes(family))
    clean, dirty = (logits(model, make_prompt_cache(model, policy), prompt(2), chunks, dirty=d) for d in (False, True))
    assert mx.array_equal(clean, dirty).item()


@pytest.mark.parametrize("max_write", [1, 3, 64])
@pytest.mark.parametrize("family", WINDOWED)
def test_rings_of_any_size_equal_the_full_history_with_the_same_window(family: str, max_write: int) -> None:
    model, chunks = make(family), random_chunks(random.Random(max_write))
    wanted = logits(model, slow_caches(model), prompt(2), chunks)
    policy = CachePolicy(max_write=max_write)
    assert_close(logits(model, make_prompt_cache(model, policy), prompt(2), chunks), wanted)


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_max_kv_size_bounds_full_attention_and_keeps_the_first_four(family: str) -> None:
    model, chunks = make(family), random_chunks(random.Random(5))
    policy = CachePolicy(max_kv_size=20, max_write=6)
    caches = make_prompt_cache(model, policy)
    got = logits(model, caches, prompt(), chunks, dirty=True)
    slow = [SlowCache(None, 12) if cache.layout.window == 12 else SlowCache(None, 20, sinks=4) for cache in caches]
    assert any(cache.window == 20 for cache in slow)
    assert_close(got, logits(model, slow, prompt(), chunks))


@pytest.mark.parametrize("family", FAMILIES)
def test_any_split_of_the_prompt_gives_the_same_logits(family: str) -> None:
    model = make(family)
    wanted = logits(model, make_prompt_cache(model), prompt(), [LENGTH])
    for seed in range(3):
        got = logits(model, make_prompt_cache(model), prompt(), random_chunks(random.Random(seed)))
        assert_close(got, wanted)


@pytest.mark.parametrize("bits", [None, 8])
@pytest.mark.parametrize("family", TRIMMABLE)
def test_a_trim_goes_back_exactly_and_so_does_a_copy(family: str, bits: int | None) -> None:
    """Reads on, takes it back, reads something else: as if the first had never been."""
    model = make(family)
    policy = CachePolicy(
        bits=bits, group_size=32, **({"max_write": 4, "max_rollback": 20} if family in WINDOWED else {})
    )
    caches = make_prompt_cache(model, policy)
    logits(model, caches, prompt(), [30, 1])
    kept = copy.deepcopy(caches)
    logits(model, caches, prompt(seed=5)[:, :20], [16, 3, 1])
    for cache in leaves(caches):
        assert cache.can_trim(20)
        cache.trim(20)
    got, wanted = (logits(model, c, prompt(seed=6)[:, :9], [8, 1], dirty=True) for c in (caches, kept))
    assert mx.array_equal(got, wanted).item()


@pytest.mark.parametrize("family", ["llama", "deepseek_v3", *(f for f in WINDOWED if f != "llama4")])
def test_rows_of_a_batch_are_trimmed_one_by_one(family: str) -> None:
    """Ragged rows: each continues as it would alone. (gemma2 and llama4 cannot: they take no mask for each row.)"""
    model, keep = make(family), (20, 7, 13)
    tokens, more = prompt(3), prompt(3, seed=9)[:, :6]
    caches = make_prompt_cache(model)
    logits(model, caches, tokens[:, :20], [20])
    for cache in caches:
        cache.trim_per_sequence([20 - n for n in keep])
    got = logits(model, caches, more, [4, 1, 1], dirty=True)
    for i, n in enumerate(keep):
        alone = make_prompt_cache(model)
        logits(model, alone, tokens[i : i + 1, :n], [n])
        assert_close(got[i : i + 1], logits(model, alone, more[i : i + 1], [4, 1, 1]))


@pytest.mark.parametrize(
    ("family", "packed"),
    [("llama", True), ("gemma3_text", True), ("gpt_oss", False), ("gemma2", False), ("deepseek_v3", False)],
)
def test_packed_planes_go_only_where_attention_takes_them(family: str, packed: bool) -> None:
    model = make(family)
    caches = make_prompt_cache(model, CachePolicy(bits=8, group_size=32))
    logits(model, caches, prompt()[:, :21], [20, 1])
    ours = attention_caches(caches)
    assert ours
    assert all(hasattr(cache, "bits") == packed for cache in ours)
    logits(model, caches, prompt()[:, :20], [20])
    assert not any(hasattr(cache, "bits") for cache in ours)


def test_recurrent_layers_stay_mlx_lms_own() -> None:
    kinds = {family: [type(c) for c in leaves(make_prompt_cache(make(family)))] for family in FAMILIES}
    assert stock.ArraysCache in kinds["lfm2"]
    assert stock.ArraysCache in kinds["falcon_h1"]
    for found in kinds.values():
        assert not {stock.KVCache, stock.RotatingKVCache, stock.ChunkedKVCache} & set(found)
    assert all(KVCache in found for found in kinds.values())


def test_a_policy_that_no_layer_can_honour_is_refused() -> None:
    class Recurrent(nn.Module):
        def make_cache(self) -> list[Any]:
            return [stock.ArraysCache(2)]

    assert type(make_prompt_cache(Recurrent())[0]) is stock.ArraysCache
    with pytest.raises(ValueError, match="no layer of this model can honour bits, reserve: its caches are ArraysCache"):
        make_prompt_cache(Recurrent(), CachePolicy(bits=8, reserve=100))


def test_head_dims_that_cannot_be_quantised_are_refused_before_anything_is_read() -> None:
    model = make_model("llama", head_dim=40)
    with pytest.raises(ValueError, match="head dim 40, not a multiple of group_size=64"):
        make_prompt_cache(model, CachePolicy(bits=8))


def test_policy_is_frozen_and_checks_itself() -> None:
    policy = CachePolicy(bits=8, reserve=4096)
    with pytest.raises(AttributeError):
        policy.bits = 4  # type: ignore[misc]
    for options, message in (
        ({"bits": 1}, "bits is 1"),
        ({"bits": 8, "group_size": 5}, "group_size is 5"),
        ({"reserve": -1}, "reserve is -1"),
        ({"quantized_start": 9}, "quantized_start is 9, but bits is None"),
        ({"max_kv_size": 0}, "max_kv_size is 0"),
        ({"max_kv_size": 2.5}, "max_kv_size is 2.5"),
        ({"growth": "geometric"}, "growth is 'geometric': give a rule"),
        ({"group_size": 48}, "group_size is 48"),
        ({"max_write": 0}, "max_write is 0"),
        ({"max_rollback": -1}, "max_rollback is -1"),
    ):
        with pytest.raises(ValueError, match=message):
            CachePolicy(**options)


class Theirs:
    """A cache of somebody else's: what the protocol says, and nothing beside it."""

    def __init__(self) -> None:
        self.slow = SlowCache()

    @property
    def offset(self) -> int:
        return self.slow.offset

    @property
    def state(self) -> Any:
        return self.slow.state

    @state.setter
    def state(self, value: Any) -> None:
        self.slow.keys, self.slow.values = value

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> Any:
        return self.slow.make_mask(N, return_array, window_size)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> Any:
        return self.slow.update_and_fetch(keys, values)

    def size(self) -> int:
        return self.slow.offset

    def can_trim(self, n: Any) -> bool:
        (count,) = [n] if isinstance(n, int) else n
        return 0 <= count <= self.slow.offset

    def trim(self, n: int) -> int:
        self.trim_per_sequence([n])
        return n

    def trim_per_sequence(self, n: Any) -> None:
        if not self.can_trim(n):
            raise ValueError("too many")
        kept = self.slow.offset - n[0]
        self.slow.keys, self.slow.values = (x[:, :, :kept] for x in (self.slow.keys, self.slow.values))
        self.slow.offset = kept

    @property
    def nbytes(self) -> int:
        return 0 if self.slow.keys is None else self.slow.keys.nbytes + self.slow.values.nbytes

    def reset(self) -> None:
        self.slow = SlowCache()


@pytest.mark.parametrize("beside_ours", [False, True])
def test_a_cache_of_others_needs_what_the_protocol_says_and_no_more(beside_ours: bool) -> None:
    public = {name for name in vars(Theirs) if not name.startswith("_")}
    assert public == {name for name in vars(Cache) if not name.startswith("_")}
    assert isinstance(Theirs(), Cache)
    model = make("llama")
    caches: list[Any] = [Theirs() for _ in model.layers]
    if beside_ours:
        caches[0] = KVCache()
    assert cache_statistics(caches).bytes_allocated == 0
    text = prompt()[0, :20]

    def answer(held: list[Any], tokens: mx.array) -> list[int]:
        return [int(token) for token, _ in generate_step(tokens, model, max_tokens=8, prompt_cache=held)]

    wanted = answer(make_prompt_cache(model), text)
    assert answer(caches, text) == wanted
    assert trim_prompt_cache(caches, 8) == 8
    assert [cache.size() for cache in caches] == [20] * len(caches)
    trim_prompt_cache(caches, [1], strict=True)
    assert answer(caches, text[-1:]) == wanted
    with pytest.raises(ValueError, match="cannot trim 99 tokens: layer 0"):
        trim_prompt_cache(caches, 99, strict=True)
    assert [cache.size() for cache in caches] == [28] * len(caches)
    statistics = cache_statistics(caches)
    live = 2 * 28 * 2 * 32 * 4
    assert statistics.bytes_live == len(caches) * live
    assert (statistics.tokens_evicted, statistics.growths) == (0, 0)
