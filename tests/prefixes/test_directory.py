"""A store beside foreign files: it deletes and serves only files that it wrote."""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from places import Place

import mlx_kv
from mlx_kv import KVCache, PromptStore, save_prompt_cache
from mlx_kv.prefixes.store import MARKER, VERSION_WITH_BLOCKS, checksum

HEX = "0123456789abcdef" * 2  # a name as a hash gives it
HEX_NAME = re.compile("[0-9a-f]{32}[.]")
WEIGHTS = (Path(mlx_kv.model_path("draft")) / "model.safetensors").read_bytes()


def prompt_cache() -> bytes:
    """A file of `save_prompt_cache`, not of a store."""
    with tempfile.TemporaryDirectory() as folder:
        save_prompt_cache(f"{folder}/a.safetensors", caches())
        return Path(f"{folder}/a.safetensors").read_bytes()


def caches(count: int = 100, seed: int = 0) -> list[KVCache]:
    cache = KVCache()
    cache.update_and_fetch(*[mx.random.normal((1, 2, count, 32), key=mx.random.key(seed))] * 2)
    return [cache]


FOREIGN: dict[str, bytes] = {
    "model.safetensors": WEIGHTS,
    "config.json": b'{"version": 2, "tokens": []}',
    "tokenizer.json": b"{}",
    "notes.used": b"1.0",
    "download.tmp": b"half",
    ".model.safetensors.0123456789abcdef.tmp": b"half",
    f"{HEX}.json": b'{"a": 1}',
    f"{HEX[::-1]}.json": b"[" * 9000,
    f"{HEX}.safetensors": WEIGHTS,
    f"{HEX[::-1]}.safetensors": b"none at all",
    f"{HEX[1:]}0.safetensors": prompt_cache(),
    f"{HEX}.used": b"second-hand",
    f"{HEX}.json.partial": b"half",
    f"{HEX}.bin": b"",
}


def tokens(seed: int, count: int = 100) -> list[int]:
    found: list[int] = mx.random.randint(1, 1000, (count,), key=mx.random.key(seed)).tolist()  # type: ignore[assignment]
    return found


@pytest.mark.parametrize("name", FOREIGN)
def test_a_folder_with_other_things_is_refused(name: str, place: Place) -> None:
    place.put({name: FOREIGN[name]})
    with pytest.raises(
        ValueError, match=r"it is not a prompt store and holds .*; give a new or an empty folder"
    ) as raised:
        place.store()
    assert "\n" not in str(raised.value)
    assert place.names() == {name}
    assert place.read(name) == FOREIGN[name]


def test_a_folder_inside_is_another_thing(tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    with pytest.raises(ValueError, match="holds photos"):
        PromptStore(tmp_path)


def test_what_others_put_into_a_store_stays(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever it is called, however old it is; and what killed writers left goes."""
    monkeypatch.setattr("mlx_kv.prefixes.store.ORPHANED_AFTER", -1.0)
    store = place.store()
    store.keep(tokens(0), caches())
    ours = place.names() - {"lock"}
    place.put(FOREIGN)
    (entry,) = store.entries()
    left = uuid.uuid4().hex
    halves = {f"{left}.json.{uuid.uuid4().hex}.partial": b"{", f".{left}.safetensors.0123456789abcdef.tmp": b""}
    data = place.read(f"{entry}.safetensors")
    place.put({**halves, f"{left}.safetensors": data, f"{left}.used": b"1000.5", f"{left}.json": b"{"})
    for seed in (1, 2):
        again = place.store()
        again.keep(tokens(seed), caches())
    assert not any(left in name for name in place.names())
    assert {name: place.read(name) for name in FOREIGN} == FOREIGN
    assert ours <= place.names()
    assert len(again.entries()) == 3
    for seed in (0, 1, 2):
        assert again.find([*tokens(seed), 0]) is not None
    tight = place.store(max_bytes=again.bytes_live // 3)
    tight.keep(tokens(3), caches())
    assert len(tight.entries()) == 1
    assert {name: place.read(name) for name in FOREIGN} == FOREIGN


def test_a_store_without_a_marker_is_taken_over(place: Place) -> None:
    """As mlx-kv 0.1.0 wrote it: no marker, no checksum in an index."""
    store = place.store()
    store.keep(tokens(0), caches())
    (name,) = store.entries()
    fields = json.loads(place.read(f"{name}.json"))
    del fields["checksum"]
    old = Place(f"{place.folder}-old")
    old.put(
        {
            f"{name}.json": json.dumps(fields).encode(),
            **{file: place.read(file) for file in (f"{name}.safetensors", f"{name}.used")},
            f"damaged/{HEX}.safetensors": b"damaged",
            "lock": b"",
        }
    )
    again = old.store()
    assert again.find([*tokens(0), 0]) is not None
    assert MARKER in old.names()
    old.put({"lock": b"123"})  # with a marker, other files are foreign
    assert len(old.store().entries()) == 1


def test_entries_of_another_version_are_left_alone_and_counted(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlx_kv.prefixes.store.ORPHANED_AFTER", -1.0)
    store = place.store()
    store.keep(tokens(0), caches())
    (name,) = store.entries()
    other = {
        f"{HEX}.json": json.dumps({"version": VERSION_WITH_BLOCKS + 1, "anything": []}).encode(),
        f"{HEX}.safetensors": place.read(f"{name}.safetensors"),
        f"{HEX}.used": b"1.0",
    }
    place.put(other)
    again = place.store(max_bytes=2 * store.bytes_live)
    for seed in (1, 2, 3):
        again.keep(tokens(seed), caches())
    assert again.other_versions == 1
    assert len(again.entries()) == 2
    assert {file: place.read(file) for file in other} == other
    place.delete(f"{HEX}.json")
    again.refresh()
    assert again.other_versions == 0


def test_a_marker_of_another_format_is_refused_and_a_broken_one_is_one(place: Place) -> None:
    place.store().keep(tokens(0), caches())
    for broken in (b"", b"{", b"[1]", b"[" * 9000):
        place.put({MARKER: broken})
        assert place.store().find([*tokens(0), 0]) is not None
    place.put({MARKER: b'{"format": 2}'})
    with pytest.raises(ValueError, match="is a prompt store of format 2, and this mlx-kv has format 1"):
        place.store()


def test_damaged_entries_are_removed_and_what_earlier_versions_set_aside_stays(place: Place) -> None:
    store = place.store()
    place.put({f"damaged/1700000000-{HEX}.safetensors": b"set aside", "damaged/precious.safetensors": b"precious"})
    for seed in range(4):
        assert store.keep(tokens(seed), caches())
        (name,) = store.entries()
        place.put({f"{name}.safetensors": place.read(f"{name}.safetensors")[:-1]})
        assert store.find([*tokens(seed), 0]) is None
    assert store.damaged == 4
    left = {MARKER, "lock", f"damaged/1700000000-{HEX}.safetensors", "damaged/precious.safetensors"}
    assert place.names() == left


INDEX: dict[str, Callable[[dict[str, Any]], Any]] = {
    "a list": lambda fields: [fields],
    "a float among the tokens": lambda fields: fields | {"tokens": [1.5, *fields["tokens"][1:]]},
    "a list among the tokens": lambda fields: fields | {"tokens": [[1], *fields["tokens"][1:]]},
    "a bool among the tokens": lambda fields: fields | {"tokens": [True, *fields["tokens"][1:]]},
    "a huge token": lambda fields: fields | {"tokens": [2**40, *fields["tokens"][1:]]},
    "no tokens": lambda fields: {key: value for key, value in fields.items() if key != "tokens"},
    "bytes below 0": lambda fields: fields | {"bytes_live": -1},
    "huge bytes": lambda fields: fields | {"bytes_live": 2**80},
    "more must stay than there is": lambda fields: fields | {"least": 101},
    "a number for a fingerprint": lambda fields: fields | {"fingerprint": 3},
    "a text for a version": lambda fields: fields | {"version": "2"},
    "other tokens": lambda fields: fields | {"tokens": [*fields["tokens"][1:], 5]},
    "another fingerprint": lambda fields: fields | {"fingerprint": "a "},
}


@pytest.mark.parametrize("sealed", [True, False])
@pytest.mark.parametrize("case", INDEX)
def test_an_index_that_cannot_be_is_passed_over(case: str, sealed: bool, tmp_path: Path) -> None:
    store = PromptStore(tmp_path, fingerprint="a")
    store.keep(tokens(0), caches())
    (index,) = tmp_path.glob("*.json")
    fields = json.loads(index.read_text())
    del fields["checksum"]
    made_up = INDEX[case](fields)
    if sealed and isinstance(made_up, dict):
        made_up |= {"checksum": checksum(made_up)}
    index.write_text(json.dumps(made_up))
    again = PromptStore(tmp_path, fingerprint="a")
    assert again.find([*tokens(0), 0]) is None
    assert again.keep(tokens(0), caches())
    assert again.find([*tokens(0), 0]) is not None


def test_an_index_that_could_not_be_read_is_read_the_next_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    PromptStore(tmp_path, fingerprint="a").keep(tokens(0), caches())
    store = PromptStore(tmp_path, fingerprint="a")

    def broken(path: Path) -> bytes:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_bytes", broken)
        assert not store.entries()
    assert store.find([*tokens(0), 0]) is not None


def test_a_store_in_a_folder_of_a_model_loses_nothing(tmp_path: Path) -> None:
    """The first report: one `keep` deleted all three."""
    model = tmp_path / "model"
    shutil.copytree(mlx_kv.model_path("draft"), model)
    before = {path.name: path.read_bytes() for path in model.iterdir()}
    with pytest.raises(ValueError, match=r"holds .*config\.json"):
        PromptStore(model)
    store = PromptStore(model / "prompts", fingerprint="a")
    store.keep(tokens(0), caches())
    assert {path.name: path.read_bytes() for path in model.iterdir() if path.is_file()} == before
    save_prompt_cache(model / "own.safetensors", caches())
    with pytest.raises(ValueError, match="not a prompt store"):
        PromptStore(model)


def test_an_index_comes_last_and_goes_first(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Readers in between never find an index without its data."""
    names: list[set[str]] = []
    delete, write = PromptStore._delete, PromptStore._replace

    def seen(change: Callable[..., None]) -> Callable[..., None]:
        def changing(store: PromptStore, *arguments: Any) -> None:
            for one in [[name] for name in arguments] if change is delete else [arguments]:
                change(store, *one)
                names.append({name.rpartition(".")[2] for name in place.names() if HEX_NAME.match(name)})

        return changing

    monkeypatch.setattr(PromptStore, "_delete", seen(delete))
    monkeypatch.setattr(PromptStore, "_replace", seen(write))
    store = place.store()
    store.keep(tokens(0), caches())
    (name,) = store.entries()
    store._remove(name)
    states = [sorted(suffixes) for suffixes in names if suffixes]
    assert states == [["used"], ["json", "safetensors", "used"], ["safetensors", "used"], ["used"]]
    assert not names[-1]


def test_what_another_process_uses_does_not_leave(place: Place) -> None:
    """Each process knows its own uses at once, and asks for those of others before something leaves."""
    size = caches()[0].nbytes_live
    store, another = (place.store(max_bytes=3 * size) for _ in range(2))
    for seed in range(3):
        store.keep(tokens(seed), caches())
    assert another.find([*tokens(0), 0]) is not None
    store.keep(tokens(3), caches())
    assert [store.find([*tokens(seed), 0]) is not None for seed in range(4)] == [True, False, True, True]


def test_nothing_has_its_name_before_it_is_whole(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[str] = []
    write = Path.write_bytes

    def seen(path: Path, content: bytes) -> int:
        written.append(path.name)
        return write(path, content)

    monkeypatch.setattr(Path, "write_bytes", seen)
    assert place.store().keep(tokens(0), caches())
    assert len(written) == 3  # the marker, when it was used, the index
    assert all(name.endswith(".partial") for name in written)
    assert not any("partial" in name for name in place.names())


def test_what_a_writer_at_work_has_recorded_is_left_alone(tmp_path: Path) -> None:
    """Also where the clock of a network drive is behind: the files then look old, and the record of their use new."""
    store = PromptStore(tmp_path, fingerprint="a")
    store.keep(tokens(0), caches())
    (name,) = store.entries()
    data, now = (tmp_path / f"{name}.safetensors").read_bytes(), time.time()
    at_work, killed = uuid.uuid4().hex, uuid.uuid4().hex
    for half, used in ((at_work, now), (killed, now - 7200)):
        for file, content in ((f"{half}.safetensors", data), (f"{half}.used", str(used).encode())):
            (tmp_path / file).write_bytes(content)
            os.utime(tmp_path / file, (now - 7200, now - 7200))
    store.keep(tokens(1), caches())
    assert len(store.entries()) == 2
    left = {file.stem for file in tmp_path.iterdir()} - set(store.entries())
    assert at_work in left
    assert killed not in left
    assert (tmp_path / f"{at_work}.safetensors").exists()
