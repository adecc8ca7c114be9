"""Prompt caches in files: what is loaded goes on as what was saved, and what is no such file is refused in one line."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models import cache as stock
from oracle import HEADS, QUERY_HEADS, Spec, attend, live_slots
from tiny_models import FAMILIES, VOCAB, make_model

import mlx_kv
from mlx_kv import (
    CachePolicy,
    ChunkedKVCache,
    FixedStep,
    Geometric,
    KVCache,
    RingKVCache,
    load_prompt_cache,
    make_prompt_cache,
    save_prompt_cache,
)
from mlx_kv.cache.eviction import scores
from mlx_kv.files import tensor_files
from mlx_kv.files.fingerprint import check_fingerprint, model_fingerprint
from mlx_kv.files.replacing import replacing
from mlx_kv.files.serialization import VERSION_WORD, _checksum, load_prompt_file
from mlx_kv.generation.encoding import encode_beginning, encode_ending
from mlx_kv.mlxlm.convert import attention_caches, leaves, load

THOROUGH = os.environ.get("HYPOTHESIS_PROFILE") == "thorough"
KILLS = 200 if THOROUGH else 10
FLIPS = 20_000 if THOROUGH else 500
DTYPES = {"float32": mx.float32, "float16": mx.float16, "bfloat16": mx.bfloat16}
KINDS: dict[str, Spec] = {
    "full": Spec(reserve=300),
    "steps": Spec(step_growth=True),
    "late": Spec(quantized_start=60, bits=4),
    "values of another head dim": Spec(value_dim=32),
    "ring": Spec(ring=24, max_write=6),
    "ring with sinks": Spec(ring=24, max_write=6, sinks=3),
    "ring that has not wrapped": Spec(ring=200, max_write=20),
    "chunks": Spec(chunk=16, max_write=6),
    "budget": Spec(budget=30, keep_recent=6, sinks=2, margin=4, max_write=8),
    "budget by head": Spec(budget=30, keep_recent=6, sinks=2, margin=4, score="key_diff", share="head"),
}


def tokens_of(spec: Spec, new: int, dtype: mx.Dtype, seed: int) -> tuple[mx.array, ...]:
    """Queries, keys and values of `new` tokens."""
    keys = mx.random.split(mx.random.key(seed), 3)
    shapes = [(QUERY_HEADS, spec.key_dim), (HEADS, spec.key_dim), (HEADS, spec.value_dim)]
    return tuple(
        mx.random.normal((spec.rows, heads, new, dim), key=key).astype(dtype)
        for (heads, dim), key in zip(shapes, keys, strict=True)
    )


def go_on(caches: list[KVCache], spec: Spec, dtype: mx.Dtype) -> None:
    """The same updates and trims of all caches: outputs must be the same bits."""
    for seed, new in enumerate((1, 3, 1, 6, 1, 5, 6, 6, 6, 1, 20, 1), 100):
        first, *rest = [attend(cache, *tokens_of(spec, new, dtype, seed), None) for cache in caches]
        assert all(mx.array_equal(first, other).item() for other in rest)
        assert len({str(cache._rows) for cache in caches}) == 1
        if seed == 105 and caches[0].can_trim(2):
            for cache in caches:
                cache.trim(2)
        if spec.budget is not None:
            assert all(mx.array_equal(caches[0].positions, other.positions).item() for other in caches[1:])


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
    assert (loaded._growth, loaded._reserve) == (cache._growth, cache._reserve)
    assert loaded._announced == cache._announced
    # Only live slots are there: what a row holds, and no other row's.
    written = tensor_files.read(tmp_path / "a.safetensors").arrays
    for row, stands in enumerate(cache._rows):
        assert written[f"0.keys.0.{row}"].shape[1] == max(live_slots(cache, stands), default=-1) + 1
    attend(again, *tokens_of(spec, 1, DTYPES[dtype], 99), None)
    assert again.growths == 0
    assert again.capacity == cache.capacity
    go_on([cache, loaded], spec, DTYPES[dtype])


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


@pytest.mark.parametrize("growth", [Geometric(3.0, 512, 4096), FixedStep(512)])
def test_headroom_is_restored_and_a_full_cache_gets_some(growth: Any, tmp_path: Path) -> None:
    for tokens, capacity in ((3, 1024), (1024, None)):
        cache = KVCache(growth=growth, reserve=1000)
        x = mx.random.normal((1, 2, tokens, 32))
        cache.update_and_fetch(x, x)
        save_prompt_cache(tmp_path / "a.safetensors", [cache])
        assert (tmp_path / "a.safetensors").stat().st_size < tokens * 512 + 3000
        loaded = load_prompt_cache(tmp_path / "a.safetensors")[0]
        assert loaded._growth == growth
        assert loaded.capacity == (capacity or growth.capacity(1025, 1024))
        loaded.update_and_fetch(x[:, :, :1], x[:, :, :1])
        assert loaded.growths == 0


def test_a_rule_of_another_package_becomes_the_default(tmp_path: Path) -> None:
    class Exact:
        def capacity(self, needed: int, current: int) -> int:
            return needed

    save_prompt_cache(tmp_path / "a.safetensors", [KVCache(growth=Exact())])
    assert load_prompt_cache(tmp_path / "a.safetensors")[0]._growth == Geometric()


def test_empty_and_padded_caches(tmp_path: Path) -> None:
    x = mx.random.normal((2, 2, 4, 32))
    padded, announced = KVCache(), KVCache()
    padded._rows *= 2
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
        assert own._rows == other._rows
        assert own._lengths == other._lengths
        assert mx.array_equal(fetched[0][0], fetched[1][0]).item()


# --- models -----------------------------------------------------------------------------------------------------------

PROMPT = mx.random.randint(1, VOCAB, (90,), key=mx.random.key(3))
AFTER = mx.random.randint(1, VOCAB, (60,), key=mx.random.key(4))
POLICIES = {
    "as it is": CachePolicy(),
    "8 bits": CachePolicy(bits=8, group_size=32),
    "budget": CachePolicy(budget=40, keep_recent=6, sinks=2, margin=5),
}


def feed(model: nn.Module, caches: list[Any], tokens: mx.array, chunk: int) -> mx.array:
    """Logits (1, n, vocabulary), the tokens read in chunks."""
    out = []
    for first in range(0, tokens.size, chunk):
        out.append(model(tokens[None, first : first + chunk], cache=caches))
        mx.eval(out[-1], [cache.state for cache in caches])
    return mx.concatenate(out, axis=1)


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
            assert own._rows == other._rows
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
    assert all(cache.evictor.layer_groups == loaded[0].evictor.layer_groups for cache in loaded)
    for first in range(60, 120, 6):
        outputs = [model(tokens[:, first : first + 6], cache=each) for each in (caches, loaded)]
        assert mx.array_equal(*outputs).item()
    assert loaded[0].evictor.compactions > 3
    for cache in loaded[1:]:
        assert mx.array_equal(cache.positions, loaded[0].positions).item()


def test_a_score_that_nobody_knows_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(scores._known, "mine", scores.Score("mine", lambda keys, values, positions: keys[..., 0]))
    save_prompt_cache(tmp_path / "a.safetensors", [mlx_kv.CompressedKVCache(100, score="mine")])
    monkeypatch.delitem(scores._known, "mine")
    with pytest.raises(ValueError, match="mine"):
        load_prompt_cache(tmp_path / "a.safetensors")


# --- mlx-lm's files ---------------------------------------------------------------------------------------------------


def stock_caches(model: nn.Module, kind: str) -> list[Any]:
    if kind == "max_kv_size":
        return [stock.RotatingKVCache(20, keep=4) for _ in model.layers]
    caches = stock.make_prompt_cache(model)
    return [cache.to_quantized(32, 8) for cache in caches] if kind == "quantised" else caches


STOCK_KINDS = {
    "plain": ("llama", "own"),
    "quantised": ("llama", "quantised"),
    "max_kv_size": ("llama", "max_kv_size"),
    "windows": ("gemma3_text", "own"),
    "state and attention": ("falcon_h1", "own"),
    "state or attention": ("lfm2", "own"),
}


@pytest.mark.parametrize(
    ("chunk", "prompt"), [(1, 5), (1, 20), (1, 24), (8, 19), (8, 20), (8, 21), (8, 90), (90, 12), (90, 90)]
)
@pytest.mark.parametrize("kind", STOCK_KINDS)
def test_files_of_mlx_lm_go_on_as_in_mlx_lm(kind: str, chunk: int, prompt: int, tmp_path: Path) -> None:
    family, how = STOCK_KINDS[kind]
    model = make_model(family)
    caches = stock_caches(model, how)
    feed(model, caches, PROMPT[:prompt], chunk)
    stock.save_prompt_cache(str(tmp_path / "a.safetensors"), caches, {"model": "m", "more": "x"})
    loaded, metadata = load_prompt_cache(tmp_path / "a.safetensors", return_metadata=True)
    assert metadata == {"model": "m", "more": "x"}
    assert all(isinstance(cache, (KVCache, stock.ArraysCache)) for cache in leaves(loaded))
    # And back: what mlx-lm reads of what we write.
    save_prompt_cache(tmp_path / "b.safetensors", loaded, {"model": "m"}, format="mlx-lm")
    back, words = stock.load_prompt_cache(str(tmp_path / "b.safetensors"), return_metadata=True)
    assert words == {"model": "m"}
    assert [type(cache) for cache in leaves(back)] == [type(cache) for cache in leaves(caches)]
    wanted = feed(model, caches, AFTER[:20], 1)
    for each in (loaded, back):
        assert mx.allclose(feed(model, each, AFTER[:20], 1), wanted, atol=2e-3, rtol=1e-3).item()


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("chunk", [1, 10])
@pytest.mark.parametrize("keep", [0, 4])
def test_rings_of_mlx_lm_know_what_they_can_take_back(keep: int, chunk: int, rows: int, tmp_path: Path) -> None:
    spec = Spec(ring=20, sinks=keep, max_write=512, rows=rows)
    cache, fresh = stock.RotatingKVCache(20, keep=keep), spec.make()
    _, keys, values = tokens_of(spec, 50, mx.float32, 0)
    for first in range(0, 50, chunk):
        cache.update_and_fetch(keys[:, :, first : first + chunk], values[:, :, first : first + chunk])
    stock.save_prompt_cache(str(tmp_path / "a.safetensors"), [cache])
    loaded = load_prompt_cache(tmp_path / "a.safetensors")[0]
    most = loaded.layout.most_trim(loaded._rows[0])
    assert most == chunk  # what the last write left behind the window
    fresh.update_and_fetch(keys[:, :, : 50 - most], values[:, :, : 50 - most])
    with pytest.raises(ValueError, match="cannot trim"):
        loaded.trim(most + 1)
    loaded.trim(most)
    for seed, new in enumerate((1, 7, 1, 30, 600, 1)):
        outputs = [attend(each, *tokens_of(spec, new, mx.float32, seed), None) for each in (loaded, fresh)]
        assert mx.allclose(*outputs, atol=1e-5, rtol=1e-5).item()


@pytest.mark.parametrize("policy", [CachePolicy(), CachePolicy(bits=4, group_size=32), CachePolicy(max_kv_size=20)])
def test_our_caches_go_on_in_mlx_lm(policy: CachePolicy, tmp_path: Path) -> None:
    for family in ("llama", "deepseek_v3") if policy == CachePolicy() else ("llama",):
        model = make_model(family)
        for prompt in (0, 3, 30):
            caches = make_prompt_cache(model, policy)
            feed(model, caches, PROMPT[:prompt], 7) if prompt else None
            save_prompt_cache(tmp_path / "a.safetensors", caches, format="mlx-lm")
            theirs = stock.load_prompt_cache(str(tmp_path / "a.safetensors"))
            if prompt:
                logits = [feed(model, each, AFTER, 1) for each in (caches, theirs)]
                assert mx.allclose(*logits, atol=2e-3, rtol=1e-3).item()
            else:
                assert all(cache.empty() for cache in theirs)


def filled(cache: KVCache, rows: int = 1, tokens: int = 60) -> KVCache:
    x = mx.random.normal((rows, 2, tokens, 32), key=mx.random.key(0))
    cache.update_and_fetch(x, x)
    cache.compact()
    return cache


CANNOT_BE_THEIRS: dict[str, tuple[Callable[[], Any], str]] = {
    "rows": (lambda: filled(KVCache(), rows=2), "has 2 rows"),
    "evicted": (lambda: filled(mlx_kv.CompressedKVCache(30, 4)), "has evicted tokens"),
    "chunks": (lambda: filled(mlx_kv.ChunkedKVCache(16)), "has chunks"),
    "quantised ring": (lambda: filled(RingKVCache(16, bits=8, group_size=32)), "is a quantised ring"),
    "never packed": (lambda: filled(KVCache(8, 32, packed_decode=False)), "whose attention cannot take"),
    "no cache": (object, "is a object"),
}


@pytest.mark.parametrize("case", CANNOT_BE_THEIRS)
def test_what_mlx_lm_cannot_hold_is_refused(case: str, tmp_path: Path) -> None:
    make, message = CANNOT_BE_THEIRS[case]
    with pytest.raises(ValueError, match=message):
        save_prompt_cache(tmp_path / "a.safetensors", [make()], format="mlx-lm")
    assert list(tmp_path.iterdir()) == []


def test_caches_that_are_still_mlx_lms_are_kept_as_they_are(tmp_path: Path) -> None:
    model = make_model("gemma3_text")
    caches = stock.make_prompt_cache(model)
    feed(model, caches, PROMPT, 8)
    save_prompt_cache(tmp_path / "a.safetensors", caches)
    loaded = load_prompt_cache(tmp_path / "a.safetensors")
    assert [type(cache) for cache in loaded] == [type(cache) for cache in caches]
    assert mx.array_equal(feed(model, caches, AFTER, 5), feed(model, loaded, AFTER, 5)).item()


# --- what is refused --------------------------------------------------------------------------------------------------


def same_caches(caches: list[Any], others: list[Any]) -> bool:
    return all(
        own._rows == other._rows
        and all(
            mx.array_equal(a, b).item() for a, b in zip(own.keys_and_values(), other.keys_and_values(), strict=True)
        )
        for own, other in zip(caches, others, strict=True)
    )


def refused(path: Path) -> str:
    """The one line that a file is refused with."""
    with pytest.raises(ValueError) as caught:  # noqa: PT011, the caller looks at the message
        load_prompt_cache(path)
    message = str(caught.value)
    assert message.count("\n") == 0
    assert str(path) in message
    assert "again" in message or "give" in message
    return message


def loaded_or_refused(path: Path) -> tuple[list[Any], str]:
    try:
        return load_prompt_cache(path), ""
    except ValueError as error:
        return [], str(error)


@pytest.fixture
def small(tmp_path: Path) -> tuple[Path, list[KVCache]]:
    caches = [filled(KVCache(), tokens=9), filled(RingKVCache(6, 2), tokens=9)]
    save_prompt_cache(tmp_path / "small.safetensors", caches, {"name": "x"}, tokens=range(9), fingerprint="f")
    return tmp_path / "small.safetensors", load_prompt_cache(tmp_path / "small.safetensors")


def test_a_file_that_was_cut_off_is_refused(small: tuple[Path, list[KVCache]], tmp_path: Path) -> None:
    whole = small[0].read_bytes()
    cut = tmp_path / "cut.safetensors"
    for length in [*range(0, len(whole), 97), 1, 7, 8, 9, len(whole) - 1]:
        cut.write_bytes(whole[:length])
        refused(cut)
    for more in (b"\x00", whole):
        cut.write_bytes(whole + more)
        refused(cut)


def test_a_flipped_bit_is_refused(small: tuple[Path, list[KVCache]], tmp_path: Path) -> None:
    path, caches = small
    for cache in caches:  # so that there is something to compare
        cache.update_and_fetch(*[mx.ones((1, 2, 1, 32))] * 2)
    whole = path.read_bytes()
    header = 8 + int.from_bytes(whole[:8], "little")
    flipped, chosen, harmless = tmp_path / "flipped.safetensors", random.Random(0), 0
    for count in range(FLIPS):
        place = chosen.randrange(header) if count % 2 else chosen.randrange(header, len(whole))
        content = bytearray(whole)
        content[place] ^= 1 << chosen.randrange(8)
        flipped.write_bytes(content)
        loaded, message = loaded_or_refused(flipped)
        if message:
            assert "\n" not in message
            continue
        assert place < header, "a bit of an array"
        harmless += 1
        for cache in loaded:
            cache.update_and_fetch(*[mx.ones((1, 2, 1, 32))] * 2)
        assert same_caches(caches, loaded)
    assert harmless < FLIPS / 50  # spaces at the end of the header


def test_a_header_that_claims_too_much_is_not_read(small: tuple[Path, list[KVCache]], tmp_path: Path) -> None:
    whole = small[0].read_bytes()
    huge = tmp_path / "huge.safetensors"
    for length in (2**63, 2**64 - 1, 100_000_001, len(whole), len(whole) - 7):
        huge.write_bytes(length.to_bytes(8, "little") + whole[8:])
        assert "its header has" in refused(huge)
    with open(huge, "wb") as file:  # and where the file is as large as it claims (a hole, nothing is written)
        file.write((200_000_000).to_bytes(8, "little"))
        file.truncate(300_000_000)
    mx.reset_peak_memory()
    assert "its header has" in refused(huge)
    for text in (b"[" * 5000, b'{"a":' * 5000, b"\xff\xfe", b"[]", b"{}", b'{"x": 3}', b'{"__metadata__": []}'):
        huge.write_bytes(len(text).to_bytes(8, "little") + text)
        refused(huge)


def test_other_files_are_refused(tmp_path: Path, small: tuple[Path, list[KVCache]]) -> None:
    path = tmp_path / "other.safetensors"
    shutil.copy(Path(mlx_kv.model_path("draft")) / "model.safetensors", path)
    assert "no prompt cache of mlx-kv or mlx-lm" in refused(path)
    for content in (b"", b"PK\x03\x04" * 100, b"\x80\x04." * 9, b"some text\n" * 20):
        path.write_bytes(content)
        refused(path)
    assert "is a folder" in refused(tmp_path)
    with pytest.raises(FileNotFoundError):
        load_prompt_cache(tmp_path / "nowhere.safetensors")
    file = tensor_files.read(small[0])
    tensor_files.write(path, file.arrays, {**file.words, VERSION_WORD: "2"})
    assert "of version '2', but this mlx-kv reads version 1" in refused(path)
    # Arrays of another file under the description of this one, and a description that was exchanged.
    changed = {name: array + 1 for name, array in file.arrays.items()}
    tensor_files.write(path, changed, file.words)
    assert "its arrays are not what was written" in refused(path)
    text = file.words["description"].replace('"x"', '"y"')
    tensor_files.write(path, file.arrays, {**file.words, "description": text})
    assert "its description is not what was written" in refused(path)
    assert _checksum(text) != file.words["checksum"]


def test_a_damaged_file_of_mlx_lm_is_refused(tmp_path: Path) -> None:
    caches = [stock.RotatingKVCache(8, keep=2), stock.KVCache(), stock.QuantizedKVCache(32, 8)]
    for cache in caches:
        for _ in range(12):
            cache.update_and_fetch(*[mx.ones((1, 2, 1, 32))] * 2)
    path = tmp_path / "a.safetensors"
    stock.save_prompt_cache(str(path), caches)
    file = tensor_files.read(path)
    for name, value in {"0.2": 3, "0.3": 9, "0.4": 100, "0.5": 99, "1.2": 999, "2.3": 7, "2.4": 5}.items():
        tensor_files.write(path, {**file.arrays, name: mx.array(value)}, file.words)
        assert "was written by mlx-lm, but cannot be used" in refused(path)
    for name in ("0.0", "1.1", "2.0.1", "2.4"):
        tensor_files.write(path, {k: v for k, v in file.arrays.items() if k != name}, file.words)
        refused(path)
    tensor_files.write(path, file.arrays, {**file.words, "1.1": "ConcatenateKVCache"})
    assert "holds a ConcatenateKVCache" in refused(path)


def test_what_cannot_be_saved_is_refused_and_leaves_the_old_file(small: tuple[Path, list[KVCache]]) -> None:
    path, caches = small
    old = path.read_bytes()
    with pytest.raises(ValueError, match="cache 1 is a object"):
        save_prompt_cache(path, [caches[0], object()])
    with pytest.raises(ValueError, match="no text"):
        save_prompt_cache(path, caches, {"a": 3})  # type: ignore[dict-item]
    with pytest.raises(ValueError, match="there is no folder"):
        save_prompt_cache(path.parent / "nowhere" / "a.safetensors", caches)
    with pytest.raises(ValueError, match="is a folder"):
        save_prompt_cache(path.parent, caches)
    with pytest.raises(ValueError, match="choose mlx-kv or mlx-lm"):
        save_prompt_cache(path, caches, format="pickle")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"\*.safetensors only"):
        save_prompt_cache(path.with_suffix(".bin"), caches, format="mlx-lm")
    assert path.read_bytes() == old
    assert os.listdir(path.parent) == [path.name]


def test_words_of_any_kind_come_back(tmp_path: Path) -> None:
    words = {"": "", "0.1": 'quotes " and \\ and \n', "größe": "☃ \U0001f600", "x" * 500: "y" * 100_000}
    for form in ("mlx-kv", "mlx-lm"):
        save_prompt_cache(tmp_path / "a.safetensors", [KVCache()], words, format=form)  # type: ignore[arg-type]
        assert load_prompt_cache(tmp_path / "a.safetensors", return_metadata=True)[1] == words


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
        (None, "does not say"),
    ):
        with pytest.raises(ValueError, match=message):
            check_fingerprint("f", saved, own, "m")


# --- killed writers ---------------------------------------------------------------------------------------------------

WRITER = """
import sys
import mlx.core as mx
from mlx_kv.cache.kv_cache import KVCache
from mlx_kv.files.serialization import save_prompt_cache
path = sys.argv[1]
caches = {}
for which, value in (("A", 1.0), ("B", 2.0)):
    caches[which] = [KVCache() for _ in range(4)]
    for cache in caches[which]:
        cache.update_and_fetch(*[mx.full((1, 4, 1000, 64), value)] * 2)
while True:
    for which in "AB":
        save_prompt_cache(path, caches[which], {"which": which})
        print(which, flush=True)
"""


def test_a_killed_writer_leaves_the_old_file_or_the_new(tmp_path: Path) -> None:
    path, chosen = tmp_path / "a.safetensors", random.Random(0)
    save_prompt_cache(tmp_path / "older.safetensors", [filled(KVCache())])
    older = (tmp_path / "older.safetensors").read_bytes()
    left = 0
    for _ in range(KILLS):
        with subprocess.Popen([sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE) as writer:
            assert writer.stdout is not None
            writer.stdout.readline()
            time.sleep(chosen.random() * 0.1)
            writer.send_signal(signal.SIGKILL)
        caches, metadata = load_prompt_cache(path, return_metadata=True)
        value = {"A": 1.0, "B": 2.0}[metadata["which"]]
        for cache in caches:
            assert cache.offset == 1000
            assert all(mx.all(x[:, :, :1000] == value).item() for x in (cache.keys, cache.values))
        temporary = [name for name in os.listdir(tmp_path) if name.endswith(".tmp")]
        assert len(temporary) <= 1  # what earlier ones left was removed
        left += len(temporary)
    assert left > 0, "no writer was killed while it wrote"
    assert (tmp_path / "older.safetensors").read_bytes() == older
    save_prompt_cache(path, caches)
    assert sorted(os.listdir(tmp_path)) == ["a.safetensors", "older.safetensors"]


def test_a_writer_at_work_keeps_its_file_and_a_failed_one_leaves_none(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    with replacing(path) as file:
        file.write(b"first")
        with replacing(path) as other:
            other.write(b"second")
        assert path.read_bytes() == b"second"
    assert path.read_bytes() == b"first"
    words: Any = {"a": object()}
    with pytest.raises(TypeError):
        tensor_files.write(path, {}, words)
    breaks: Any = {"a": SimpleNamespace(dtype=mx.float32, nbytes=4, shape=(1,))}  # only when its bytes are asked for
    with pytest.raises(TypeError):
        tensor_files.write(path, breaks, {})
    assert path.read_bytes() == b"first"
    (tmp_path / "link").symlink_to(path)
    tensor_files.write(tmp_path / "link", {}, {})
    assert (tmp_path / "link").is_symlink()
    assert tensor_files.read(path).words == {}
    assert sorted(os.listdir(tmp_path)) == ["a.safetensors", "link"]


# --- the command ------------------------------------------------------------------------------------------------------

TEXT = (Path(mlx_kv.__file__).parent / "cache" / "growth.py").read_text()[:1500].rpartition("\n")[0]
REST = "\n\n\ndef double(slots: int) -> int:\n"


@pytest.fixture
def call(command: Any) -> Any:
    return command


POLICY_OPTIONS: dict[str, tuple[str, ...]] = {
    "plain": (),
    "quantised": ("--kv-bits", "8"),
    "ring": ("--max-kv-size", "200", "--max-write", "64"),
    "budget": ("--kv-budget", "300"),
}


@pytest.mark.parametrize("options", POLICY_OPTIONS)
def test_a_cached_prompt_is_gone_on_from(options: str, call: Any, tmp_path: Path, reference: Any) -> None:
    tokenizer = reference[1]
    ids = tokenizer.encode(TEXT), tokenizer.encode(REST, add_special_tokens=False)
    assert [*ids[0], *ids[1]] == tokenizer.encode(TEXT + REST), "this text splits at another place"
    path = tmp_path / "p.safetensors"
    (tmp_path / "prompt.py").write_text(TEXT)
    made = call("cache", "--prompt-file", tmp_path / "prompt.py", "--output", path, *POLICY_OPTIONS[options])
    assert (made.code, made.out) == (0, "")
    for words in (f"{len(ids[0]):,} tokens", "tokens/s", "live", str(path)):
        assert words in made.err
    file = load_prompt_file(path)
    assert (file.tokens, file.metadata) == (ids[0], {"model": "reference"})
    common = ("--max-tokens", "24", "--json")
    went_on = json.loads(call("generate", "--prompt-cache-file", path, "--prompt", REST, *common).out)
    whole = json.loads(call("generate", "--prompt", TEXT + REST, *common, *POLICY_OPTIONS[options]).out)
    assert went_on["tokens"] == whole["tokens"]
    assert (went_on["cached_tokens"], went_on["prompt_tokens"]) == (len(ids[0]), len(ids[1]))
    assert whole["cached_tokens"] == 0


def test_room_is_made_for_what_follows_a_cached_prompt_and_no_more(call: Any, tmp_path: Path, reference: Any) -> None:
    """1,000 tokens and more: twice the room of what was loaded would show."""
    path, bytes_per_slot = tmp_path / "p.safetensors", 4 * 2 * 2 * 64 * 4
    call("cache", "--prompt", "import os\n" * 340, "--output", path)
    answer = json.loads(
        call("generate", "--prompt-cache-file", path, "--prompt", "import", "--max-tokens", "20", "--json").out
    )
    held = answer["cached_tokens"] + answer["prompt_tokens"] + 20
    assert answer["cached_tokens"] <= 1024 < held
    assert answer["kv_bytes_allocated"] == 1280 * bytes_per_slot


def test_in_a_chat_both_prompts_are_one_message() -> None:
    _, tokenizer = load(mlx_kv.model_path("reference"))
    tokenizer.chat_template = "{% for m in messages %}user:\n{{ m['content'] }}\n{% endfor %}"
    tokenizer.chat_template += "{% if add_generation_prompt %}answer:\n{% endif %}"
    begun = tokenizer.decode(encode_beginning(tokenizer, TEXT, chat=True))
    ended = tokenizer.decode(encode_ending(tokenizer, REST, chat=True))
    messages = [{"role": "user", "content": TEXT + REST}]
    assert begun == f"user:\n{TEXT}"
    assert begun + ended == tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)


def test_a_file_of_mlx_lm_is_gone_on_from(call: Any, tmp_path: Path, reference: Any) -> None:
    model, tokenizer = reference
    caches = stock.make_prompt_cache(model)
    feed(model, caches, mx.array(tokenizer.encode(TEXT)), 512)
    path = tmp_path / "p.safetensors"
    stock.save_prompt_cache(str(path), caches, {"model": "reference", "tokenizer_config": "{}"})
    common = ("--max-tokens", "12")
    went_on = call("generate", "--prompt-cache-file", path, "--prompt", REST, *common)
    assert went_on.out == call("generate", "--prompt", TEXT + REST, *common).out
    stock.save_prompt_cache(str(path), caches, {"model": "mlx-community/other"})
    other = call("generate", "--prompt-cache-file", path, "--prompt", REST)
    assert (other.code, other.err.count("\n")) == (2, 1)
    assert "is a prompt cache of another model: give --model mlx-community/other" in other.err


REFUSED = {
    "another model": (["generate", "--model", "draft", "--prompt-cache-file", "{p}"], "of another model"),
    "a policy": (["generate", "--kv-bits", "8", "--prompt-cache-file", "{p}"], "leave out --kv-bits"),
    "a draft": (["generate", "--draft-model", "reference", "--prompt-cache-file", "{p}"], "leave out --draft-model"),
    "no file": (["generate", "--prompt-cache-file", "{p}.not"], "does not exist"),
    "another file": (["generate", "--prompt-cache-file", "{weights}"], "no prompt cache"),
    "another version": (["generate", "--prompt-cache-file", "{version}"], "of version '7'"),
    "another tokenizer": (["generate", "--prompt-cache-file", "{tokenizer}"], "with another tokenizer"),
    "damaged": (["generate", "--prompt-cache-file", "{damaged}"], "was damaged"),
    "nobody's": (["generate", "--prompt-cache-file", "{anonymous}"], "does not say of which model it is"),
    "no folder": (["cache", "--output", "{p}/nowhere/a.safetensors"], "there is no folder"),
    "no output": (["cache"], "Missing option '--output'"),
    "policy": (["cache", "--output", "{p}", "--kv-bits", "7"], "--kv-bits 7: "),
}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory, reference: tuple[nn.Module, Any]) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("files")
    names = ("p", "version", "tokenizer", "damaged", "anonymous")
    paths = {name: folder / f"{name}.safetensors" for name in names}
    caches = make_prompt_cache(reference[0])
    feed(reference[0], caches, mx.array([1, 2, 3]), 3)
    own = model_fingerprint(*reference)
    save_prompt_cache(paths["p"], caches, tokens=[1, 2, 3], fingerprint=own)
    save_prompt_cache(paths["tokenizer"], caches, fingerprint=own[:33] + "0" * 32)
    save_prompt_cache(paths["anonymous"], caches)
    file = tensor_files.read(paths["p"])
    tensor_files.write(paths["version"], file.arrays, {**file.words, VERSION_WORD: "7"})
    damaged = bytearray(paths["p"].read_bytes())
    damaged[-9] ^= 4
    paths["damaged"].write_bytes(damaged)
    return {**paths, "weights": Path(mlx_kv.model_path("draft")) / "model.safetensors"}


@pytest.mark.parametrize("case", REFUSED)
def test_bad_input_is_one_line_and_exit_code_2(case: str, call: Any, files: dict[str, Path]) -> None:
    arguments, message = REFUSED[case]
    done = call(*(argument.format(**files) for argument in arguments), "--prompt", "x")
    assert (done.code, done.out) == (2, "")
    assert message in done.err
    assert done.err.startswith("mlx-kv: error: ")
    assert done.err.count("\n") == 1


def test_help_has_examples(call: Any) -> None:
    done = call("cache", "--help")
    assert done.code == 0
    assert "mlx-kv generate --prompt-cache-file" in done.out
