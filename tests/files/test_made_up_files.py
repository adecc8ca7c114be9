"""Files that somebody made up, with every checksum right: refused in one line that names the file, or what they say."""

from __future__ import annotations

import contextlib
import copy
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from classes import attend
from effort import THOROUGH
from mlx_lm.models import cache as stock

from mlx_kv import (
    CachePolicy,
    ChunkedKVCache,
    CompressedKVCache,
    KVCache,
    RingKVCache,
    load_prompt_cache,
    save_prompt_cache,
)
from mlx_kv.files import tensor_files
from mlx_kv.files.serialization import _checksum, pack

MUTATIONS = 5000 if THOROUGH else 400
STRANGE: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2, 3, 7, 256, 255, 2**31, 2**40, 2**63, -(2**70), 10**400),
    *(
        0.5,
        1e308,
        float("nan"),
        float("inf"),
        "",
        "0",
        "x" * 300,
        "\ud800",
        "mlx-kv",
        "list",
        "append",
        "ring",
        "budget",
    ),
    *([], {}, [[]], [0], [None], {"array": "0.keys.0.0"}, {"array": 1}, {"kind": "mlx-kv"}),
)
BUDGET: dict[str, Any] = {"budget": 12, "keep_recent": 4, "sinks": 2, "margin": 4}
TABLE = ((1.0, 0.5), (2.0, 0.1))
ALLOCATED: tuple[dict[str, Any], ...] = (
    {"share": "head", "layers": TABLE, "score": "key_norm"},
    {"share": "layer", "layers": TABLE},
    {"share": "adaptive", "layers": TABLE},
)
DTYPES = ("BOOL", "U8", "I8", "U16", "F16", "BF16", "I32", "U32", "F32", "U64", "C64", "F64", None, 3)


def filled(cache: Any, rows: int = 1, tokens: int = 40, writes: int = 4) -> Any:
    for turn in range(writes):
        x = mx.random.normal((rows, 2, tokens // writes, 32), key=mx.random.key(turn))
        if getattr(cache, "evictor", None) is None:
            cache.update_and_fetch(x, x)
        else:
            attend(cache, x, x, x)  # where heads differ in length, a mask must be asked for
    return cache


def caches() -> list[Any]:
    recurrent = stock.ArraysCache(2)
    recurrent[0] = mx.ones((1, 3, 4))
    ragged = filled(KVCache(reserve=300), rows=2)
    ragged.trim_per_sequence([1, 3])
    return [
        filled(KVCache()),
        ragged,
        filled(KVCache(8, 32)),
        filled(KVCache(4, 32, quantized_start=1000)),
        filled(KVCache(4, 32, residual_length=8), rows=2),
        filled(RingKVCache(16, 8, sinks=2)),
        filled(ChunkedKVCache(16, 8)),
        filled(CompressedKVCache(20, 4, sinks=2, margin=4), rows=2),
        filled(CompressedKVCache(20, 4, sinks=2, margin=4, share="head", score="key_norm")),
        *[filled(CachePolicy(**BUDGET, **own).make_cache(layer=1), rows=2) for own in ALLOCATED],
        stock.CacheList(recurrent, filled(KVCache())),
        KVCache(),
        *(filled(cache) for cache in (stock.KVCache(), stock.QuantizedKVCache(32, 8), stock.RotatingKVCache(16, 2))),
        *(filled(cache) for cache in (stock.ChunkedKVCache(16), stock.ConcatenateKVCache())),
    ]


def places(tree: Any) -> Iterator[tuple[Any, Any]]:
    """Every place of a tree in JSON: what holds it, and where."""
    for key in list(tree) if isinstance(tree, dict) else range(len(tree)) if isinstance(tree, list) else ():
        yield tree, key
        yield from places(tree[key])


def mutated(tree: Any, chance: random.Random) -> Any:
    """A copy with one thing changed."""
    tree = copy.deepcopy(tree)
    everywhere = list(places(tree))
    holder, key = chance.choice(everywhere)
    what = chance.randrange(6)
    if what == 0:
        del holder[key]
    elif what == 1 and isinstance(holder[key], int):
        holder[key] += chance.choice((-256, -1, 1, 2, 255, 256, 10**6))
    elif what == 2 and isinstance(holder, list):
        holder.insert(key, copy.deepcopy(chance.choice(everywhere)[0]))
    elif what == 3 and isinstance(holder, dict):
        holder["strange"] = chance.choice(STRANGE)
    elif what == 4:
        other, where = chance.choice(everywhere)
        holder[key] = copy.deepcopy(other[where])
    else:
        holder[key] = chance.choice(STRANGE)
    return tree


def header_of(content: bytes) -> tuple[dict[str, Any], bytes]:
    length = int.from_bytes(content[:8], "little")
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def file_of(header: dict[str, Any], rest: bytes) -> bytes:
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + rest


def sealed(header: dict[str, Any], rest: bytes, description: Any) -> dict[str, Any]:
    """The header with this description and right checksums, those of arrays too."""
    digests = {}
    for name, told in header.items():
        if name != "__metadata__":
            first, last = told["data_offsets"]
            content = tensor_files.Content(told["dtype"], told["shape"], memoryview(rest)[first:last])
            digests[name] = content.digest(name)
    if isinstance(description, dict) and "arrays" in description:
        description = {**description, "arrays": digests}
    text = json.dumps(description)
    return {**header, "__metadata__": {**header["__metadata__"], "description": text, "checksum": _checksum(text)}}


def in_words(loaded: list[Any]) -> Any:
    """What caches say of themselves; a sequence has a new name wherever it is loaded."""
    told = json.loads(json.dumps(pack(loaded).description["caches"]))
    for each in told:
        if each["kind"] == "mlx-kv" and each["state"][-1] is not None:
            each["state"][-1][3] = len(each["state"][-1][3])
        each.pop("growth", None)  # of a rule that nobody knows here, the default
    return told


def check(path: Path, wanted: Callable[[], Any] | None) -> bool:
    """Whether a file was loaded: else it must have been refused."""
    try:
        loaded, metadata = load_prompt_cache(path, return_metadata=True)
    except ValueError as error:
        refusal = str(error)
    else:
        refusal = ""
    if refusal:
        assert str(path) in refusal
        assert "\n" not in refusal
        return False
    assert all(type(word) is str for pair in metadata.items() for word in pair)
    if wanted is not None:
        assert in_words(loaded) == wanted()
    mx.eval([cache.state for cache in loaded])
    return True


def test_a_made_up_description_is_refused_or_true(tmp_path: Path) -> None:
    path, chance = tmp_path / "a.safetensors", random.Random(5)
    loaded = 0
    for each in caches():
        save_prompt_cache(path, [each], {"some": "words"}, tokens=range(5), fingerprint="f")
        header, rest = header_of(path.read_bytes())
        description = json.loads(header["__metadata__"]["description"])
        for _ in range(MUTATIONS // 15 + 1):
            made_up = mutated(description, chance)
            path.write_bytes(file_of(sealed(header, rest, made_up), rest))

            def wanted(made_up: Any = made_up) -> Any:
                told = copy.deepcopy(made_up["caches"])
                for one in told:
                    if one["kind"] == "mlx-kv" and one["state"][-1] is not None:
                        one["state"][-1][3] = len(one["state"][-1][3])
                    one.pop("growth", None)
                return told

            loaded += check(path, wanted)
    assert loaded > MUTATIONS // 100  # other words, another rule of growth, more room: those are true


def changed_eviction(told: list[Any], field: int, value: Any) -> list[Any]:
    changed = [*copy.deepcopy(told), *[None] * (9 - len(told))]
    changed[field] = value
    return changed


@pytest.mark.parametrize(
    ("allocated", "field", "value"),
    [
        (0, 7, None),  # nobody knows how long its heads are
        (2, 7, None),
        (0, 8, "uniform"),  # its heads are of one length
        (0, 1, "layer"),
        (0, 2, 2),  # a third layer, of two
        (0, 8, [[2.0, 1.0], [4.0, 0.2]]),  # its mean is not 1
        (0, 8, [[1.0, 1.0], [1.0, -1.0]]),
        (0, 8, "of the moon"),
        (2, 1, "layer"),
    ],
)
def test_heads_of_other_lengths_are_refused(allocated: int, field: int, value: Any, tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    cache = filled(CachePolicy(**BUDGET, **ALLOCATED[allocated]).make_cache(layer=1))
    assert cache.evictor.compactions
    save_prompt_cache(path, [cache], tokens=range(5))
    header, rest = header_of(path.read_bytes())
    description = json.loads(header["__metadata__"]["description"])
    assert check(path, None)
    state = description["caches"][0]["state"]
    state[-1] = changed_eviction(state[-1], field, value)
    path.write_bytes(file_of(sealed(header, rest, description), rest))
    assert not check(path, None)


def test_made_up_arrays_are_refused_or_true(tmp_path: Path) -> None:
    path, chance = tmp_path / "a.safetensors", random.Random(6)
    for each in caches():
        save_prompt_cache(path, [each], tokens=range(5), force=True)
        header, rest = header_of(path.read_bytes())
        description = json.loads(header["__metadata__"]["description"])
        for _ in range(MUTATIONS // 15 + 1):
            made_up = copy.deepcopy(header)
            name = chance.choice([name for name in header if name != "__metadata__"] or ["__metadata__"])
            told = made_up[name]
            if name != "__metadata__" and chance.random() < 0.5 and told["shape"]:
                place = chance.randrange(len(told["shape"]))  # the same bytes in another shape or dtype
                told["shape"].insert(place, chance.choice((1, 2)))
                told["shape"][chance.randrange(len(told["shape"]))] //= chance.choice((1, 2))
                told["dtype"] = chance.choice((*DTYPES[:11], told["dtype"]))
            else:
                made_up = mutated(header, chance)
            with contextlib.suppress(TypeError, ValueError, KeyError, AttributeError):  # no list of arrays, no digests
                made_up = sealed(made_up, rest, description)
            path.write_bytes(file_of(made_up, rest))
            check(path, None)


def test_a_made_up_file_of_mlx_lm_is_refused_or_loaded(tmp_path: Path) -> None:
    path, chance = tmp_path / "a.safetensors", random.Random(7)
    theirs = [each for each in caches() if isinstance(each, stock._BaseCache)]
    for each in [*theirs, filled(stock.RotatingKVCache(16, 2), writes=40)]:
        if type(each) in (stock.ChunkedKVCache, stock.ConcatenateKVCache):
            continue
        if type(each) is stock.CacheList:
            each = stock.CacheList(each[0], filled(stock.KVCache()))
        stock.save_prompt_cache(str(path), [each], {"a": "b"})
        header, rest = header_of(path.read_bytes())
        for _ in range(MUTATIONS // 5 + 1):
            content = bytearray(rest)
            if chance.random() < 0.5:
                content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
                path.write_bytes(file_of(header, bytes(content)))
            else:
                path.write_bytes(file_of(mutated(header, chance), rest))
            check(path, None)


@pytest.mark.parametrize("name", ["\ud800", "a" * 10_000, "0." * 5000 + "0", ""])
def test_names_of_any_kind(name: str, tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    for words in ({"1.0": "KVCache", "2.0": ""}, {"mlx_kv_prompt_cache": "1"}, {name: name}):
        header = {"__metadata__": words, name: {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}
        path.write_bytes(file_of(header, b"x"))
        assert not check(path, None)


@pytest.mark.parametrize("part", ["reserve", "announced"])
def test_room_that_no_machine_has_is_refused_wherever_it_is_told(part: str, tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    save_prompt_cache(path, [filled(KVCache())])
    header, rest = header_of(path.read_bytes())
    for tokens, fits in ((1000, True), (2**31 - 1, False)):
        description = json.loads(header["__metadata__"]["description"])
        description["caches"][0][part] = tokens if part == "reserve" else [tokens]
        path.write_bytes(file_of(sealed(header, rest, description), rest))
        assert check(path, None) == fits


def test_files_of_the_first_version_counted_the_work_of_all_rows_together(tmp_path: Path) -> None:
    path, cache = tmp_path / "a.safetensors", filled(CompressedKVCache(20, keep_recent=2, margin=3))
    assert cache.evictor.compactions == 1
    save_prompt_cache(path, [cache])
    header, rest = header_of(path.read_bytes())
    description = json.loads(header["__metadata__"]["description"])
    (work,) = description["caches"][0]["state"][-1][-1]
    description["caches"][0]["state"][-1][-1] = work
    path.write_bytes(file_of(sealed(header, rest, description), rest))
    (loaded,) = load_prompt_cache(path)
    assert loaded.evictor.metadata.work == cache.evictor.metadata.work


def test_room_that_no_machine_has_and_arrays_of_no_cache_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.safetensors"
    save_prompt_cache(path, [filled(KVCache())])
    header, rest = header_of(path.read_bytes())
    description = json.loads(header["__metadata__"]["description"])
    more = header | {"more": {"dtype": "U8", "shape": [0], "data_offsets": [len(rest), len(rest)]}}
    path.write_bytes(file_of(sealed(more, rest, description), rest))
    with pytest.raises(ValueError, match="no cache has an array more"):
        load_prompt_cache(path)
    monkeypatch.setattr("mlx_kv.files.caches.os.sysconf", lambda name: 1024)  # a machine of 1 MiB
    for capacity, fits in ((1024, True), (2**15, False)):
        description["caches"][0]["capacity"] = capacity
        path.write_bytes(file_of(sealed(header, rest, description), rest))
        if fits:
            assert load_prompt_cache(path)[0].capacity == capacity
            continue
        with pytest.raises(ValueError, match="would take more than the 1,048,576 bytes of this machine"):
            load_prompt_cache(path)


def test_heads_without_their_sinks_are_refused(tmp_path: Path) -> None:
    """Slots without a token come after the sinks, which no head loses."""
    cache = filled(CachePolicy(**BUDGET, share="adaptive", layers=TABLE).make_cache(layer=1))
    most, metadata = cache.layout.cut_of(cache.view.rows[0]) - cache.layout.sinks, cache.evictor.metadata
    for dead in (most, most + 1):
        kept = metadata.kept._replace(dead=mx.array([[0, dead]], mx.int32))
        cache.evictor.metadata = metadata._replace(kept=kept)
        save_prompt_cache(tmp_path / f"{dead}.safetensors", [cache])
    load_prompt_cache(tmp_path / f"{most}.safetensors")
    with pytest.raises(ValueError, match="heads that do not hold their share of a budget"):
        load_prompt_cache(tmp_path / f"{most + 1}.safetensors")
