"""What entries of a folder share: blocks, which come before whatever holds them and leave after the last that did."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conversations import KINDS, STEPS, Reference, conversation, conversation_of, goes_on_as, named
from hypothesis import given, settings
from hypothesis import strategies as st
from places import Place

from mlx_kv import PromptMemory, PromptStore, load_prompt_cache
from mlx_kv.files import serialization

pytestmark = pytest.mark.usefixtures("small_blocks")
LARGE = 2**30


def check_all(place: Place, reference: Reference) -> None:
    """Every entry that is there is what was kept, in a store that has seen nothing of it."""
    store = place.store()
    for name, entry in store.entries().items():
        tokens = tuple(np.frombuffer(entry.tokens, ">u4").tolist())
        caches = store._read(name, store._table[name]).restore().caches
        assert goes_on_as(caches, reference.kept[tokens], len(tokens))
    assert (store.damaged, store._ignored) == (0, set())


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=6)
@given(steps=STEPS, most=st.sampled_from([LARGE, LARGE, 120_000]), data=st.data())
@pytest.mark.slow
def test_whatever_is_kept_found_and_removed(
    kind: str, steps: list[tuple[Any, ...]], most: int, data: st.DataObject, tmp_path_factory: Any
) -> None:
    """By two processes, for which stand two stores."""
    place, reference = Place(tmp_path_factory.mktemp("place")), Reference()
    stores = [place.store(max_bytes=most) for _ in range(2)]
    for what, *arguments in steps:
        store = data.draw(st.sampled_from(stores))
        names = sorted(store.entries())
        if what == "keep":
            tokens, caches = reference.grow(kind, *arguments)
            reference.kept.setdefault(tuple(tokens), copy.deepcopy(caches))
            if store.keep(tokens, caches):
                reference.kept[tuple(tokens)] = copy.deepcopy(caches)
                left = place.blocks - place.held  # the other store has removed an entry, and kept nothing since
                assert left <= set.union(*(other._released for other in stores if other is not store))
                if not left:
                    assert place.array_bytes == store.bytes_live <= most
        elif what == "remove" and names:
            store._remove(names[arguments[0] % len(names)])
        elif what == "find" and reference.kept:
            tokens = list(list(reference.kept)[arguments[0] % len(reference.kept)])
            tokens = [*tokens[: len(tokens) - arguments[1]], 99]
            there = store.serves(tokens)
            found = store.find(tokens)
            assert (0 if found is None else found[1]) >= there
        assert place.held <= place.blocks
        check_all(place, reference)


@pytest.mark.parametrize("system", [200, 192, 191, 193])
def test_what_conversations_share_is_there_once(system: int, place: Place) -> None:
    store = place.store()
    for number in range(10):
        assert store.keep(*conversation(number, system=system))
    slot = conversation(0)[1][0].nbytes_live // 240 * 2
    # The first knew nobody: it has its own block where the others part, and these have one beside it.
    most = system + 10 * (40 + (0 if system % 32 >= 8 else system % 32)) + 2 * 32
    assert (system + 400) * slot <= store.bytes_live == place.array_bytes <= most * slot
    for number in range(10):
        (first, _), count = store.find([*conversation(number, system=system)[0], 0])
        assert goes_on_as([first], conversation(number, system=system)[1][:1], count)
    names = list(store.entries())
    for name in names[:-1]:
        store._remove(name)
    assert store.keep(*conversation(10, system=system))
    assert place.blocks == place.held
    assert store.bytes_live <= (system + 80 + 2 * 32) * slot


def test_a_store_that_is_full_frees_what_one_entry_alone_has(place: Place) -> None:
    """Bytes that are shared leave with the last."""
    whole = place.store()
    for number in range(4):
        whole.keep(*conversation(number))
    tight = place.store(max_bytes=whole.bytes_live)
    tight.find([*conversation(0)[0], 0])
    tight.keep(*conversation(4))
    served = [tight.serves([*conversation(number)[0], 0]) for number in range(5)]
    assert served == [240, 200, 240, 240, 240]
    assert tight.bytes_live == place.array_bytes <= tight.max_bytes


def test_an_entry_alone_is_one_file_and_serves_older_versions(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serialization, "BLOCK_SLOTS", 512)
    store = place.store()
    store.keep(*conversation(0))
    (name,) = store.entries()
    assert json.loads(place.read(f"{name}.json"))["version"] == 2
    assert not place.blocks
    assert goes_on_as(load_prompt_cache(place.folder / f"{name}.safetensors"), conversation(0)[1], 240)
    store.keep(*conversation(1))  # the first that parts from it has a block that the others share
    assert len(place.blocks) == 1


def test_a_part_of_an_entry_is_no_prompt_cache(tmp_path: Path) -> None:
    store = PromptStore(tmp_path, fingerprint="a")
    store.keep(*conversation(0))
    (name,) = store.entries()
    with pytest.raises(ValueError, match=r"a part of an entry of a prompt store, .* mlx_kv\.PromptStore"):
        load_prompt_cache(tmp_path / f"{name}.safetensors")


def test_what_leaves_while_another_writes_is_written_again(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """A writer has seen a block; before its index is there, the last entry leaves that held the block."""
    store, another = place.store(), place.store()
    store.keep(*conversation(0))
    write = PromptStore._write_data

    def written(files: PromptStore, name: str, new: Any, there: Any) -> None:
        monkeypatch.setattr(PromptStore, "_write_data", write)
        write(files, name, new, there)
        another._remove(named(another, conversation(0)[0]))
        another.keep(conversation(0)[0][:100], conversation_of([9] * 100))  # of other slots: all others leave

    monkeypatch.setattr(PromptStore, "_write_data", written)
    assert store.keep(*conversation(1))
    found = place.store().find([*conversation(1)[0], 0])
    assert found is not None
    assert goes_on_as(found[0], conversation(1)[1], 240)


def test_a_block_stays_while_an_index_cannot_be_read(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its blocks are unknown."""
    monkeypatch.setattr("mlx_kv.prefixes.store.ORPHANED_AFTER", -1.0)
    place.store().keep(*conversation(0))
    place.store().keep(*conversation(1))
    (first, second) = (named(place.store(), conversation(number)[0]) for number in (0, 1))
    fresh, read_bytes = place.store(), Path.read_bytes

    def broken(path: Path) -> bytes:
        if path.name == f"{second}.json":
            raise OSError(5, "Input/output error")
        return read_bytes(path)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_bytes", broken)
        fresh._remove(first)
        fresh.keep(*conversation(2, system=5, own=90))
    found = place.store().find([*conversation(1)[0], 0])
    assert found is not None
    assert goes_on_as(found[0], conversation(1)[1], 240)
    fresh.keep(*conversation(3, system=5, own=90))
    assert place.blocks == place.held


@given(st.integers(0, 200), st.integers(0, 200), st.sets(st.integers(0, 250), max_size=4))
def test_where_blocks_end(shared: int, slots: int, wanted: set[int]) -> None:
    """As far as two share anything, the second is cut as the first was, and where they part."""
    first = serialization.block_ends(slots + shared, wanted)
    assert all(b - a >= 8 for a, b in zip([0, *first], first, strict=False))
    assert (slots + shared) - ([0, *first][-1]) < 32 + 8
    same = [end for end in first if end <= shared]
    second = serialization.block_ends(max(shared, 150), [*same, shared])
    assert [end for end in second if end < shared] == [end for end in same if end < shared]
    third = serialization.block_ends(shared + 70, [*[end for end in second if end <= shared], shared])
    assert [end for end in third if end <= shared] == [end for end in second if end <= shared]


def test_memory_behind_which_lies_a_store_is_told_of_the_same(tmp_path: Path) -> None:
    """What a store gives goes into memory, and shares there what it shared in the folder."""
    store, memory = PromptStore(tmp_path, fingerprint="a"), PromptMemory(fingerprint="a")
    for number in range(5):
        store.keep(*conversation(number))
    for number in range(5):
        caches, count = store.find([*conversation(number)[0], 0])
        assert memory.keep(conversation(number)[0][:count], caches)
    slot = conversation(0)[1][0].nbytes_live // 240 * 2
    assert memory.nbytes == (200 + 5 * 40) * slot
