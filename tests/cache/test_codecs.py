"""Codecs from outside, and two at once: all that plain and quantised caches must show, they must show, too."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from brought import bring
from going_on import go_on, tokens_of
from hypothesis import given
from hypothesis import strategies as st
from mlx.utils import tree_flatten
from oracle import Spec, attend
from outside import CODECS, FEW, PACKED, Half, Scaled
from test_cache_properties import fractions, run
from tiny_models import make_model

import mlx_kv
from mlx_kv import (
    CachePolicy,
    KVCache,
    codec_names,
    load_prompt_cache,
    make_prompt_cache,
    register_codec,
    save_prompt_cache,
)
from mlx_kv.cache import attention, codecs
from mlx_kv.cache.buffers import SlotBuffer
from mlx_kv.cache.codecs import Affine, Codec, Microscaled, Plain
from mlx_kv.mlxlm.traverse import attention_caches
from mlx_kv.planning import Planner, Strategy
from mlx_kv.prefixes.reader import cache_format

SHAPES = {
    "full": {},
    "late": {"quantized_start": 20},
    "ring": {"ring": 9, "max_write": 5, "sinks": 2},
    "chunks": {"chunk": 8, "max_write": 5},
    "budget": {"budget": 14, "keep_recent": 4, "sinks": 2, "margin": 3, "max_write": 8},
    "budget by head": {"budget": 14, "keep_recent": 4, "sinks": 2, "margin": 3, "score": "key_diff", "share": "head"},
}
specs = st.builds(
    lambda shape, codec, **options: Spec(codec=codec, **SHAPES[shape], **options),
    st.sampled_from(list(SHAPES)),
    st.sampled_from(CODECS),
    rows=st.sampled_from([1, 3]),
    value_dim=st.sampled_from([32, 64]),
    carries=st.booleans(),
)
operations = st.one_of(
    st.tuples(st.just("update"), st.one_of(st.just(1), st.integers(1, 9), st.integers(10, 40))),
    st.tuples(st.just("trim_few"), st.tuples(*[st.integers(0, 4)] * 3)),
    st.tuples(st.just("trim"), fractions),
    st.tuples(st.sampled_from(["copy", "load", "reset"]), st.none()),
)


@given(specs, st.lists(operations, min_size=3, max_size=10), st.integers(0, 1000))
def test_any_history_with_any_codecs(spec: Spec, steps: list[tuple[str, Any]], seed: int) -> None:
    run(spec, [("update", 5), *steps, ("update", 3), ("update", 1)], seed)


def test_a_codec_that_stores_a_token_late_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = [("update", 5), ("update", 3), ("update", 1)]
    run(Spec(codec="half"), steps)
    monkeypatch.setattr(Half, "encode", lambda self, x: (mx.roll(x.astype(mx.float16), 1, axis=2),))
    with pytest.raises(AssertionError):
        run(Spec(codec="half"), steps)


@pytest.mark.parametrize("codec", PACKED, ids=str)
def test_an_answer_from_planes_of_another_token_is_caught(codec: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = [("update", 5), ("update", 3), ("update", 1)]
    run(Spec(codec=codec, carries=True), steps)
    genuine = attention.Packed.mixed
    monkeypatch.setattr(attention.Packed, "mixed", lambda self, w, slots: genuine(self, mx.roll(w, 1, axis=-1), slots))
    run(Spec(codec=codec), steps)  # decoded, nobody asks it
    with pytest.raises(AssertionError):
        run(Spec(codec=codec, carries=True), steps)


def fed(cache: KVCache, new: int = 10, rows: int = 1) -> KVCache:
    x = mx.random.normal((rows, 2, new, 64), key=mx.random.key(new))
    cache.update_and_fetch(x, x)
    return cache


def test_rows_join_where_their_codecs_are_alike() -> None:
    alike = [fed(KVCache(codec=(FEW, "half")), 3), fed(KVCache(codec=(Scaled(7), Half())), 5)]
    batch = KVCache.merge(alike)
    for row, single in enumerate(alike):
        for got, wanted in zip(batch.extract(row).view.buffers, single.view.buffers, strict=True):
            held = single.offset
            assert all(
                mx.array_equal(p[:, :, :held], w[:, :, :held]) for p, w in zip(got.planes, wanted.planes, strict=True)
            )
    for other in (KVCache(codec=(Scaled(8), "half")), KVCache(codec=("half", FEW)), KVCache(), KVCache(8)):
        with pytest.raises(ValueError, match="only caches of one kind can be one batch"):
            alike[0].extend(fed(other))
    plain = fed(KVCache(codec=(FEW, "half"), quantized_start=100), 3)
    joined = KVCache.merge([plain, fed(KVCache(codec=(FEW, "half"), quantized_start=100), 101)])
    assert plain.view.buffers[0].planes[0].dtype == mx.float32
    fed(joined, 1, 2)
    assert [buffer.planes[0].dtype for buffer in joined.view.buffers] == [mx.int8, mx.float16]


def test_only_what_mlx_lm_can_read_is_handed_out_packed() -> None:
    for codec, is_packed in (
        (Affine(8, 32), True),
        ((Affine(8, 32), Affine(8, 32)), True),
        ((Affine(8, 32), Affine(4, 32)), False),
        ((Affine(8, 32), Affine(8, 64)), False),
        (("plain", Affine(8, 32)), False),
        ("half", False),
    ):
        cache = fed(KVCache(codec=codec), 1)
        assert hasattr(cache, "bits") == is_packed
        assert isinstance(cache.keys_and_values()[0], mx.array) != is_packed
    for codec in PACKED:
        arrays, planes = KVCache(codec=codec), KVCache(codec=codec)
        planes.carry(object())
        for cache in (arrays, planes):
            fed(cache, 1)
            assert not hasattr(cache, "bits")
            assert cache.own_hook is cache
        assert isinstance(arrays.keys_and_values()[0], mx.array)
        assert isinstance(planes.keys_and_values()[0], tuple)
        batch = KVCache.merge([arrays, planes])
        batch.extend(fed(KVCache(codec=codec), 2))
        batch.filter([2, 0])
        for other in (batch, batch.extract(1), copy.deepcopy(planes)):
            fed(other, 1, len(other.view.rows))
            assert isinstance(other.keys_and_values()[0], tuple)
    short, long = KVCache(4, 32), KVCache(codec=Affine(4, 32))
    assert short.state == long.state


def test_bytes_are_counted_as_they_are_stored() -> None:
    cache = fed(KVCache(codec=("scaled", "half")))
    per_token = 2 * (64 + 4) + 2 * 64 * 2
    assert (cache.nbytes, cache.nbytes_live) == (256 * per_token, 10 * per_token)
    model = make_model("llama")
    planned = {
        codec: Planner(model).bytes_held(Strategy("", CachePolicy(codec=codec)), 100)
        for codec in (None, "half", ("half", "plain"))
    }
    assert planned["half"] * 2 == planned[None]
    assert planned["half", "plain"] * 4 == planned[None] * 3


def test_models_run_with_codecs_of_keys_and_values() -> None:
    model, tokens = make_model("llama"), mx.random.randint(1, 50, (1, 40), key=mx.random.key(2))
    whole = model(tokens, cache=make_prompt_cache(model))
    caches = make_prompt_cache(model, CachePolicy(codec=("plain", "half")))
    parts = [model(tokens[:, first : first + 8], cache=caches) for first in range(0, 40, 8)]
    assert mx.allclose(mx.concatenate(parts, axis=1), whole, atol=0.03).item()
    assert all(not cache.view.packed_decode for cache in attention_caches(caches))
    with pytest.raises(ValueError, match="give a multiple of 4"):
        fed(KVCache(codec="scaled")).update_and_fetch(mx.ones((1, 2, 1, 66)), mx.ones((1, 2, 1, 66)))


# --- files ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", CODECS, ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_files_go_on_as_what_was_saved(shape: str, codec: Any, tmp_path: Path) -> None:
    for dtype, rows, writes in ((mx.float32, 1, (6, 20, 6, 6)), (mx.bfloat16, 3, (6, 5)), (mx.float16, 1, ())):
        spec = Spec(codec=codec, rows=rows, value_dim=32, carries=rows == 1, **SHAPES[shape])
        cache = spec.make()
        for seed, new in enumerate(writes):
            attend(cache, *tokens_of(spec, new, dtype, seed), None)
        save_prompt_cache(tmp_path / "a.safetensors", [cache])
        loaded, again = load_prompt_cache(tmp_path / "a.safetensors"), tmp_path / "b.safetensors"
        save_prompt_cache(again, loaded)
        assert described(again) == described(tmp_path / "a.safetensors")
        assert (loaded[0].nbytes, loaded[0].capacity) == (cache.nbytes, cache.capacity)
        go_on([cache, *map(spec.carried, loaded)], spec, dtype)


def described(path: Path) -> Any:
    content = path.read_bytes()
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    (told,) = json.loads(header["__metadata__"]["description"])["caches"]
    if told["state"][-1] is not None:
        told["state"][-1][3] = len(told["state"][-1][3])  # a sequence has a new name wherever it is loaded
    return told


def test_a_codec_that_nobody_registered_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(codecs.CODECS.registered, "mine", Half)
    monkeypatch.setattr(Half, "name", "mine")
    cache = fed(KVCache(codec="mine"))
    save_prompt_cache(tmp_path / "a.safetensors", [cache])
    state = cache.state
    monkeypatch.delitem(codecs.CODECS.registered, "mine")
    message = r"there is no codec 'mine': choose one of affine, .*, or register_codec\(\) one of that name"
    for load in (lambda: load_prompt_cache(tmp_path / "a.safetensors"), lambda: KVCache.from_state(state)):
        with pytest.raises(ValueError, match=message):
            load()


# --- names ------------------------------------------------------------------------------------------------------------


def test_codecs_are_found_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    bring(monkeypatch, codecs.CODECS, "mlx_kv.codecs", "brought", lambda: Scaled(5))
    assert {"affine", "brought", "half", "plain", "scaled"} <= set(codec_names())
    assert KVCache(codec="brought").view.codecs[0].parameters["levels"] == 5
    assert KVCache(codec="affine").view.codecs == (Affine(8, 64),) * 2
    assert KVCache(codec="plain").view.codecs == (Plain(), Plain())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: KVCache(codec="none"), "there is no codec 'none': choose one of affine, "),
        (lambda: Microscaled("mxfp3"), "there is no format 'mxfp3': choose one of mxfp4, mxfp8, nvfp4"),
        (lambda: KVCache(8, codec="half"), "got bits=8 and codec='half', which both describe"),
        (lambda: KVCache(codec=3), "codec is 3: give a codec such as"),
        (lambda: KVCache(codec=("half",) * 3), "give one, or two, of keys and of values"),
        (lambda: KVCache(codec="plain", quantized_start=5), "quantized_start is 5"),
        (lambda: register_codec("x", 3), "the codec x is 3: give what makes one"),
        (lambda: CachePolicy(codec="none"), "there is no codec 'none'"),
        (lambda: CachePolicy(bits=4, codec="half"), "got bits=4 and codec='half', which both describe"),
        (lambda: mlx_kv.RingKVCache(8, codec="none"), "there is no codec 'none'"),
    ],
)
def test_impossible_codecs_are_refused(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_a_codec_that_does_not_do_what_it_says_is_refused() -> None:
    class Wrong(Half):
        def planes(self, head_dim: int, dtype: mx.Dtype) -> Any:
            return ((head_dim, mx.float32),)

    class Forgets(Half):
        def decode(self, planes: Any, dtype: mx.Dtype) -> mx.array:
            return planes[0]

    for codec, message in ((Wrong(), "but makes"), (Forgets(), "expected")):
        cache = KVCache(codec=codec)
        with pytest.raises(ValueError, match=message):
            fed(cache)
        assert cache.empty()


def test_caches_of_other_codecs_do_not_stand_in_for_each_other() -> None:
    kinds: list[Codec | Any] = [None, *CODECS, Affine(4, 32), Affine(8, 32)]
    assert len({cache_format([KVCache(codec=codec)]) for codec in kinds}) == len(kinds)
    assert cache_format([KVCache(8, 32)]) == "append, 8 bits in groups of 32 from 0"


def test_a_state_is_a_tree() -> None:
    cache = fed(KVCache(codec=("scaled", "half")))
    mx.eval(cache.state)
    assert len([x for _, x in tree_flatten(cache.state) if isinstance(x, mx.array)]) == 3


def test_two_settings_of_one_codec_are_two_codecs() -> None:
    tensor = mx.random.normal((1, 2, 5, 64))
    eight, four = Affine(8, 32), Affine(4, 32)
    buffer = SlotBuffer(eight, eight.encode(tensor), 64, mx.float32)
    buffer.recode(Affine(8, 32))
    assert all(mx.array_equal(*each).item() for each in zip(buffer.planes, eight.encode(tensor), strict=True))
    buffer.recode(four)
    wanted = four.encode(eight.decode(eight.encode(tensor), mx.float32))
    assert all(mx.array_equal(*each).item() for each in zip(buffer.planes, wanted, strict=True))
