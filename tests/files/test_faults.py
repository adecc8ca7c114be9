"""Every write, flush, rename and allocation of a file and of a store fails once: nothing lost, nothing foreign touched.

The calls are counted in a run in which nothing fails; then call 1 fails, then call 2, and so on, each with every error.
"""

from __future__ import annotations

import json
import os
import uuid
from itertools import groupby
from pathlib import Path

import click
import mlx.core as mx
import pytest
from faults import ERRORS, Faults, everything

from mlx_kv import KVCache, PromptStore, load_prompt_cache, save_prompt_cache
from mlx_kv.cli.batch import OutputFile, Request


@pytest.fixture
def faults(monkeypatch: pytest.MonkeyPatch) -> Faults:
    return Faults(monkeypatch)


def caches(seed: int = 0) -> list[KVCache]:
    cache = KVCache()
    cache.update_and_fetch(*[mx.random.normal((1, 2, 100, 32), key=mx.random.key(seed))] * 2)
    return [cache]


def tokens(seed: int) -> list[int]:
    return [(seed * 1000 + index) % 60_000 for index in range(100)]


@pytest.mark.parametrize("older", [True, False])
def test_a_file(older: bool, faults: Faults, tmp_path: Path) -> None:
    new, old = caches(1), caches(2)

    def folder() -> Path:
        made = tmp_path / uuid.uuid4().hex
        made.mkdir()
        (made / "precious.safetensors").write_text("precious")
        (made / ".a.safetensors.mine.tmp").write_text("mine")
        if older:
            save_prompt_cache(made / "a.safetensors", old)
            (made / "a.safetensors").chmod(0o600)
        return made

    def run(place: Path) -> None:
        save_prompt_cache(place / "a.safetensors", new)

    failed = 0
    for place, what in everything(run, faults, folder):
        left = set(os.listdir(place))
        assert (place / "precious.safetensors").read_text() == "precious", what
        assert (place / ".a.safetensors.mine.tmp").read_text() == "mine", what
        assert left - {"a.safetensors"} == {"precious.safetensors", ".a.safetensors.mine.tmp"}, what
        if "a.safetensors" in left:
            found = load_prompt_cache(place / "a.safetensors")[0].keys[:, :, :100]
            assert any(mx.array_equal(found, each[0].keys[:, :, :100]) for each in (old, new)), what
            assert not older or (place / "a.safetensors").stat().st_mode & 0o777 == 0o600, what
        else:
            assert not older, what
        run(place)
        assert mx.array_equal(load_prompt_cache(place / "a.safetensors")[0].keys[:, :, :100], new[0].keys[:, :, :100])
        failed += "raised None" not in what
    assert failed > 20


def test_a_file_is_on_the_disk_before_it_has_its_name(faults: Faults, tmp_path: Path) -> None:
    """Bytes and mode first, and the name last, itself on the disk: a power cut finds the old file or the new one."""
    path = tmp_path / "a.safetensors"
    save_prompt_cache(path, caches(1))
    with faults.failing(0, ERRORS[0]):
        save_prompt_cache(path, caches(2))
    steps = [
        name for name, _ in groupby(faults.names) if name in ("write", "flush", "os.fchmod", "os.fsync", "os.replace")
    ]
    assert steps == ["write", "flush", "os.fchmod", "os.fsync", "os.replace", "os.fsync"]


@pytest.mark.parametrize("what", ["open", "keep", "find", "evict", "damaged"])
@pytest.mark.slow
def test_a_store(what: str, faults: Faults, tmp_path: Path) -> None:
    first, second = caches(1), caches(2)
    foreign = {"precious.json": b"{}", "model.safetensors": b"weights", f"{uuid.uuid4().hex}.json": b'{"a": 1}'}
    size = first[0].nbytes_live

    def open_store(place: Path) -> PromptStore:
        return PromptStore(place, max_bytes=size * (1 if what == "evict" else 3), fingerprint="a")

    def put(place: Path, files: dict[str, bytes]) -> None:
        for name, content in files.items():
            (place / name).write_bytes(content)

    def names(place: Path) -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in place.iterdir()} if place.exists() else {}

    def folder() -> Path:
        place = tmp_path / uuid.uuid4().hex
        if what != "open":
            open_store(place).keep(tokens(1), first)
            put(place, foreign)
        if what == "damaged":
            open_store(place).keep(tokens(2), second)
            name = next(n for n, entry in open_store(place).entries().items() if entry.tokens[:4] == b"\0\0\x07\xd0")
            put(place, {f"{name}.safetensors": names(place)[f"{name}.safetensors"][:-1]})
        return place

    def run(place: Path) -> None:
        store = open_store(place)
        if what in ("keep", "evict"):
            store.keep(tokens(2), second)
        elif what != "open":
            store.find([*tokens(1 if what == "find" else 2), 0])

    failed = 0
    for place, why in everything(run, faults, folder):
        there = names(place)
        if what != "open":
            assert {name: there[name] for name in foreign} == foreign, why
            store = open_store(place)
            found = store.find([*tokens(1), 0])
            if what == "evict":
                assert found or store.find([*tokens(2), 0]), why
            else:
                assert found, why
                assert mx.array_equal(found[0][0].keys[:, :, :100], first[0].keys[:, :, :100]), why
        assert not [name for name in there if "partial" in name or ".tmp" in name] or "unlink" in why, why
        run(place)  # and the next time
        if what in ("keep", "evict"):
            found = open_store(place).find([*tokens(2), 0])
            assert found, why
            assert mx.array_equal(found[0][0].keys[:, :, :100], second[0].keys[:, :, :100]), why
        if what == "damaged":
            assert open_store(place).find([*tokens(2), 0]) is None, why
        failed += "raised None" not in why
    assert failed > 3


@pytest.mark.parametrize("what", ["append", "drop"])
def test_answers(what: str, faults: Faults, tmp_path: Path) -> None:
    lines = [json.dumps({"id": n, "line": n, "digest": "0"}) + "\n" for n in (1, 2)]

    def folder() -> Path:
        made = tmp_path / uuid.uuid4().hex
        made.mkdir()
        (made / "a.jsonl").write_text("".join(lines))
        (made / "a.jsonl.kept").write_text("somebody's")
        return made

    def run(place: Path) -> None:
        try:
            with OutputFile(str(place / "a.jsonl")) as answers:
                if what == "append":
                    answers.append(Request(3, 3, "x", 1, "d"), {})
                else:
                    answers.drop({1})
        except click.UsageError as error:  # the one line that users see
            raise error.__cause__ or error from None

    for place, why in everything(run, faults, folder):
        left = (place / "a.jsonl").read_text()
        assert set(os.listdir(place)) == {"a.jsonl", "a.jsonl.kept"}, why
        assert (place / "a.jsonl.kept").read_text() == "somebody's", why
        assert lines[1] in left, why
        assert what == "drop" or left.startswith("".join(lines)), why
        with OutputFile(str(place / "a.jsonl")) as answers:
            if what == "append" and 3 in answers.done:
                continue  # it was written before what failed
        run(place)
        with OutputFile(str(place / "a.jsonl")) as answers:
            assert answers.done.keys() == ({1, 2, 3} if what == "append" else {2}), why
