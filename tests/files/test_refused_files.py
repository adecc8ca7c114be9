"""What is no prompt cache, or was damaged, is refused in one line; what cannot be saved leaves the old file."""

from __future__ import annotations

import json
import os
import random
import shutil
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from effort import THOROUGH
from going_on import filled, refused
from mlx_lm.models import cache as stock

import mlx_kv
from mlx_kv import (
    KVCache,
    RingKVCache,
    load_prompt_cache,
    save_prompt_cache,
)
from mlx_kv.files import tensor_files
from mlx_kv.files.serialization import VERSION_WORD, _checksum

FLIPS = 20_000 if THOROUGH else 500


def same_caches(caches: list[Any], others: list[Any]) -> bool:
    return all(
        own.view.rows == other.view.rows
        and all(
            mx.array_equal(a, b).item() for a, b in zip(own.keys_and_values(), other.keys_and_values(), strict=True)
        )
        for own, other in zip(caches, others, strict=True)
    )


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
    with pytest.raises(ValueError, match="not text"):
        save_prompt_cache(path, caches, {"a": 3})  # type: ignore[dict-item]
    with pytest.raises(ValueError, match="there is no folder"):
        save_prompt_cache(path.parent / "nowhere" / "a.safetensors", caches)
    with pytest.raises(ValueError, match="is a folder"):
        save_prompt_cache(path.parent, caches)
    with pytest.raises(ValueError, match="format is 'pickle', and only mlx-kv is written"):
        save_prompt_cache(path, caches, format="pickle")  # type: ignore[arg-type]
    assert path.read_bytes() == old
    assert os.listdir(path.parent) == [path.name]


def test_words_of_any_kind_come_back(tmp_path: Path) -> None:
    words = {"": "", "0.1": 'quotes " and \\ and \n', "größe": "☃ \U0001f600", "x" * 500: "y" * 100_000}
    save_prompt_cache(tmp_path / "a.safetensors", [KVCache()], words)
    assert load_prompt_cache(tmp_path / "a.safetensors", return_metadata=True)[1] == words


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        (("caches", 0, "capacity"), "256", "Expected `int`, got `str` - at `$.capacity`"),
        (("caches", 0, "live", 0), True, "Expected `int`, got `bool` - at `$.live[0]`"),
        (("caches", 0, "more\nlines"), 1, "Object contains unknown field `more lines`"),
        (("caches", 1, "state", 5), -1, "Expected `int` >= 0 - at `$.state[5]`"),
        (("caches", 1, "kind"), "no kind", "a cache of unknown kind 'no kind'"),
        (("fingerprint",), 3, "Expected `str | null`, got `int` - at `$.fingerprint`"),
        (("metadata", "a"), float("nan"), "NaN is not a number there"),
    ],
)
def test_a_refusal_names_the_field(
    small: tuple[Path, list[KVCache]], place: tuple[Any, ...], value: Any, message: str
) -> None:
    file = tensor_files.read(small[0])
    description = json.loads(file.words["description"])
    holder = description
    for key in place[:-1]:
        holder = holder[key]
    holder[place[-1]] = value
    text = json.dumps(description)
    tensor_files.write(small[0], file.arrays, {**file.words, "description": text, "checksum": _checksum(text)})
    assert message in refused(small[0])


def test_a_header_that_has_an_array_twice_is_refused(small: tuple[Path, list[KVCache]]) -> None:
    path, _ = small
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = content[8 : 8 + length].rstrip()
    again = header[:-1] + b',"tokens":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}'
    path.write_bytes(len(again).to_bytes(8, "little") + again + content[8 + length :])
    assert "its header cannot be read" in refused(path)


def test_words_that_no_encoding_has_come_back(tmp_path: Path) -> None:
    """As of a path that is no UTF-8."""
    save_prompt_cache(tmp_path / "a.safetensors", [KVCache()], {"model": "\udcff/model"})
    assert load_prompt_cache(tmp_path / "a.safetensors", return_metadata=True)[1] == {"model": "\udcff/model"}
