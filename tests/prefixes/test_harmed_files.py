"""What entries of a folder share, damaged, made up, or by writers that fail or are killed: nothing wrong is found."""

from __future__ import annotations

import json
import random
import time
import uuid
from multiprocessing.connection import Connection
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from conversations import conversation, conversation_of, goes_on_as, make_blocks_small, named
from effort import THOROUGH
from faults import Faults, everything
from places import Place
from processes import start

from mlx_kv import KVCache, PromptStore
from mlx_kv.files import serialization
from mlx_kv.prefixes.store import VERSION_WITH_BLOCKS, checksum

pytestmark = pytest.mark.usefixtures("small_blocks")


HARMS = ("flip", "cut", "gone", "another", "empty", "somebody's")


@pytest.mark.parametrize("harm", HARMS)
def test_a_damaged_block_removes_its_entries(harm: str, place: Place) -> None:
    """None of them is served; an entry without it is; and what is kept again is there again."""
    store = place.store()
    for number in range(3):
        store.keep(*conversation(number))
    store.keep([7] * 100, conversation_of([7] * 100))
    shared = set.intersection(*[set(store._table[named(store, conversation(n)[0])].blocks) for n in (1, 2)])
    block = f"{sorted(shared)[0]}.block"
    content = bytearray(place.read(block))
    if harm == "flip":
        content[-1] ^= 1
    place.delete(block)
    if harm != "gone":
        other = sorted(place.blocks)[0]
        harmed = {"flip": bytes(content), "cut": bytes(content[:-1]), "another": place.read(f"{other}.block")}
        place.put({block: {**harmed, "empty": b"", "somebody's": b"notes"}[harm]})
    again = place.store()
    for number in range(3):
        found = again.find([*conversation(number)[0], 0])
        assert found is None or goes_on_as(found[0], conversation(number)[1], found[1])
    assert again.find([7] * 101) is not None
    assert named(again, [7] * 100)
    assert len(again.entries()) < 4
    assert block not in place.names()
    assert again.damaged == (harm != "gone")
    for number in range(3):
        again.keep(*conversation(number))
    for number in range(3):
        found = place.store().find([*conversation(number)[0], 0])
        assert found is not None
        assert goes_on_as(found[0], conversation(number)[1], 240)


def test_blocks_that_killed_writers_left_are_removed_after_an_hour(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ours alone, and none that an entry holds, of whatever version it is."""
    store = place.store()
    with monkeypatch.context() as patch:
        patch.setattr("mlx_kv.prefixes.store.encode_index", lambda _: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            store.keep(*conversation(0))
    left = place.blocks
    assert len(left) > 2
    kept = sorted(left)[0]
    other = {"version": VERSION_WITH_BLOCKS + 1, "anything": [], "blocks": {"deeply": [[kept]]}}
    place.put({f"{uuid.uuid4().hex}.json": json.dumps(other).encode()})
    foreign = {
        f"{uuid.uuid4().hex}.block": b"a city",
        "notes.block": b"a city",
        f"{uuid.uuid4().hex}.block.bak": b"mine",
    }
    place.put(foreign)
    again = place.store()
    again.keep(*conversation(0, system=10, own=100))
    assert left <= place.blocks  # another writer may be at work: it is given an hour
    monkeypatch.setattr("mlx_kv.prefixes.store.ORPHANED_AFTER", -1.0)
    again.keep(*conversation(1, system=20, own=100))
    assert left & place.blocks == {kept}
    assert again.other_versions == 1
    assert {name: place.read(name) for name in foreign} == foreign
    for number, system in ((0, 10), (1, 20)):
        found = place.store().find([*conversation(number, system=system, own=100)[0], 0])
        assert found is not None
        assert goes_on_as(found[0], conversation(number, system=system, own=100)[1], found[1])


MADE_UP = {
    "no list": lambda fields: fields | {"blocks": 3},
    "no name": lambda fields: fields | {"blocks": [[["../../etc/passwd", 1, 1]]]},
    "no slots": lambda fields: fields | {"blocks": [[[fields["blocks"][0][0][0], 0, 1]]]},
    "other bytes": lambda fields: fields | {"blocks": [[[*fields["blocks"][0][0][:2], -1]]]},
    "two numbers": lambda fields: fields | {"blocks": [[[fields["blocks"][0][0][0], 1]]]},
    "none": lambda fields: {name: value for name, value in fields.items() if name != "blocks"},
    "no checksum": lambda fields: fields,
    "fewer": lambda fields: fields | {"blocks": [fields["blocks"][0][:-1]]},
    "in another order": lambda fields: fields | {"blocks": [fields["blocks"][0][::-1]]},
}


@pytest.mark.parametrize("case", MADE_UP)
def test_an_index_that_cannot_be_is_passed_over(case: str, place: Place) -> None:
    store = place.store()
    store.keep(*conversation(0))
    (name,) = store.entries()
    fields = json.loads(place.read(f"{name}.json"))
    del fields["checksum"]
    made_up = MADE_UP[case](fields)
    if case != "no checksum":
        made_up |= {"checksum": checksum(made_up)}
    place.put({f"{name}.json": json.dumps(made_up).encode()})
    again = place.store()
    assert again.find([*conversation(0)[0], 0]) is None
    assert again.keep(*conversation(0))
    assert place.store().find([*conversation(0)[0], 0]) is not None


DESCRIBED = {
    "no list": 3,
    "no array": [{"arrays": ["nothing"], "blocks": []}],
    "no slots": [{"arrays": ["0.keys.0.0"], "blocks": [["0" * 32, 0]]}],
    "far too many": [{"arrays": ["0.keys.0.0"], "blocks": [["0" * 32, 2**62]]}],
    "no pair": [{"arrays": ["0.keys.0.0"], "blocks": ["0" * 32]}],
    "no arrays": [{"blocks": []}],
}


@pytest.mark.parametrize("case", DESCRIBED)
def test_data_that_tell_of_blocks_that_cannot_be_are_refused(case: str, tmp_path: Path) -> None:
    store = PromptStore(tmp_path, fingerprint="a")
    new = store.pack(*conversation(0))
    assert new is not None
    made = serialization.cut_into_blocks(new.caches, lambda column, slots: [])
    made.rest.description["blocks"] = DESCRIBED[case]
    made.rest.write(tmp_path / "a.safetensors")

    def read() -> None:
        rest = serialization.read(tmp_path / "a.safetensors")
        serialization.join_blocks(rest, lambda name: (_ for _ in ()).throw(AssertionError("nothing is to be read")))

    with pytest.raises(ValueError, match=r"its description is not valid|its blocks are of arrays"):
        read()


def holds(found: list[KVCache], kept: list[KVCache], count: int) -> bool:
    """Whether full caches hold the first tokens of others."""
    planes = [
        [plane[:, :, :count] for cache in caches for plane in (cache.keys, cache.values)] for caches in (found, kept)
    ]
    return found[0].offset == count and all(map(mx.array_equal, *planes))


@pytest.mark.slow
@pytest.mark.parametrize("what", ["keep", "evict", "remove", "find", "damaged"])
def test_whatever_fails_once(what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No older entry is lost, nothing wrong is found, and the next time it works."""
    monkeypatch.setattr(serialization, "BLOCK_SLOTS", 96)
    kept = [conversation(number) for number in range(3)]
    faults = Faults(monkeypatch)
    probe = Place(tmp_path / "probe").store()
    for tokens, caches in kept[:2]:
        probe.keep(tokens, caches)
    size = probe.bytes_live

    def folder() -> Path:
        path = tmp_path / uuid.uuid4().hex
        place = Place(path)
        for tokens, caches in kept[:2]:
            assert place.store().keep(tokens, caches)
        if what == "damaged":
            block = sorted(held_by(place, 1) - held_by(place, 0))[0]
            place.put({f"{block}.block": place.read(f"{block}.block")[:-1]})
        return path

    def held_by(place: Place, number: int) -> set[str]:
        store = place.store()
        return set(store._table[named(store, kept[number][0])].blocks)

    def run(path: Path) -> None:
        store = Place(path).store(max_bytes=size if what == "evict" else 10 * size)
        if what in ("keep", "evict"):
            store.keep(*kept[2])
        elif what == "remove":
            store.refresh()
            for name in [name for name, entry in store._table.entries().items() if entry.tokens[-1] == 101]:
                store._remove(name)
            store.keep(kept[2][0][::-1], kept[2][1])
        else:
            store.find([*kept[0 if what == "find" else 1][0], 0])

    failed = 0
    for path, why in everything(run, faults, folder):
        place = Place(path)
        store = place.store()
        for number in range(3):
            found = store.find([*kept[number][0], 0])
            assert found is None or holds(found[0], kept[number][1], found[1]), why
            if number == 0 and what != "evict":
                assert found is not None, why
                assert found[1] == 240, why
        assert place.held <= place.blocks or what == "damaged", why
        run(path)
        if what in ("keep", "evict"):
            found = place.store().find([*kept[2][0], 0])
            assert found is not None, why
            assert holds(found[0], kept[2][1], 240), why
        failed += "raised None" not in why
    assert failed > 3


def write_forever(folder: Path, turn: int, said: Connection) -> None:
    make_blocks_small(pytest.MonkeyPatch())
    store = Place(folder).store()
    made = [conversation(10 * turn + number, 20 + number) for number in range(3)]
    said.send("ready")
    while True:
        for tokens, caches in made:
            store.keep(tokens, caches)
        for tokens, _ in made:
            store._remove(named(store, tokens))


@pytest.mark.slow
@pytest.mark.parametrize("writers", [1, 2])
def test_kills_while_writing_lose_nothing_and_leave_nothing_wrong(writers: int, tmp_path: Path) -> None:
    """SIGKILL at random moments of keeping what shares blocks, and of removing it, by two at once."""
    kills = 100 if THOROUGH else 4
    place, chance = Place(tmp_path / "store"), random.Random(0)
    place.store().keep(*conversation(0))
    for turn in range(kills):
        children = [start(write_forever, place.folder, 2 * turn + number + 1) for number in range(writers)]
        for _, said in children:
            assert said.recv() == "ready"
        time.sleep(chance.random() * 0.2)
        for child, _ in children:
            assert child.is_alive()
            child.kill()
            child.join()
        again = place.store()
        for name, entry in again.entries().items():
            tokens = np.frombuffer(entry.tokens, ">u4").tolist()
            number, own = tokens[-1] - 100, len(tokens) - 200
            caches = again._read(name, again._table[name]).restore().caches
            assert goes_on_as(caches, conversation(number, own)[1], len(tokens))
        assert named(again, conversation(0)[0])
        assert (again.damaged, again._ignored) == (0, set())
        for name, entry in again.entries().items():
            if entry.tokens != np.array(conversation(0)[0], ">u4").tobytes():
                again._remove(name)
