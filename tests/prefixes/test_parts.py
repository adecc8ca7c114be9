"""Entries of which several ranks have a part each: what one rank keeps, finds and forgets, all do."""

from __future__ import annotations

import os
import queue
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conversations import KINDS, STEPS, Reference, conversation, conversation_of, goes_on_as
from hypothesis import given, settings
from hypothesis import strategies as st
from two_ranks import TwoRanks, keep, settled

from mlx_kv import PromptStore
from mlx_kv.prefixes.store_layout import MARKER

pytestmark = pytest.mark.usefixtures("small_blocks")
OF_TWO = {**{kind: KINDS[kind] for kind in ("plain", "8 bits", "ring", "a window beside all")}}
OF_TWO["all beside a window"] = lambda: KINDS["a window beside all"]()[::-1]


@pytest.mark.parametrize("kind", OF_TWO)
@pytest.mark.parametrize("where", ["memory", "folder"])
@settings(max_examples=8)
@given(steps=STEPS, most=st.sampled_from([2**30, 2**30, 80_000]))
def test_whatever_is_kept_and_found(kind: str, where: str, steps: Any, most: int, tmp_path_factory: Any) -> None:
    ranks, reference, path = TwoRanks(), Reference(), tmp_path_factory.mktemp("place")
    place = ranks.memory(most) if where == "memory" else ranks.store(path, max_bytes=most)
    for what, *arguments in steps:
        if what == "keep":
            branch, parent = arguments
            tokens, caches = grown(reference, kind, branch, parent)
            if keep(ranks, place, tokens, caches):
                reference.kept[tuple(tokens)] = caches
        elif what == "find" and reference.kept:
            tokens = list(list(reference.kept)[arguments[0] % len(reference.kept)])
            tokens = [*tokens[: len(tokens) - 2 * arguments[1]], 99]
            name, wanted = place._best(tokens) or ("", 0)
            origin = reference.kept[tuple(whose(place, name))] if wanted else []
            found = place.find(tokens)
            assert (0 if found is None else found[1]) == wanted
            if found is not None:
                assert goes_on_as(ranks.whole(found[0]), origin, found[1])
        settled(ranks)
        theirs = ranks.keeper._memory.entries() if where == "memory" else ranks.keeper.store.entries()
        own = place._table.entries() if where == "memory" else place.entries()  # type: ignore[union-attr]
        assert theirs.keys() == own.keys()
        if where == "memory":
            assert place.nbytes == max(place._table.nbytes, ranks.keeper._memory.nbytes) <= most  # type: ignore[union-attr]
    assert list(ranks.keeper._packed) == []


def grown(reference: Reference, kind: str, branch: Any, parent: int) -> tuple[list[int], list[Any]]:
    made = KINDS.get(kind)
    try:
        KINDS[kind] = OF_TWO[kind]
        return reference.grow(kind, branch, parent)
    finally:
        if made is None:
            del KINDS[kind]


def whose(place: Any, name: str) -> list[int]:
    """The tokens of an entry."""
    entry = place._table[name]
    found: list[int] = np.frombuffer(entry.tokens, ">u4").tolist()
    return found


def test_an_entry_is_there_when_all_parts_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The index of the first rank comes last; without the other's part there is none."""
    ranks = TwoRanks()
    store = ranks.store(tmp_path)
    seen: list[bool] = []
    publish = store._layout.publish

    def published(name: str, *arguments: Any) -> None:
        seen.append((tmp_path / "rank-1" / f"{name}.json").exists())
        publish(name, *arguments)

    monkeypatch.setattr(store._layout, "publish", published)
    assert keep(ranks, store, *conversation(0))
    assert seen == [True]
    monkeypatch.setattr(ranks.keeper.store, "write_as", lambda new: (_ for _ in ()).throw(OSError(28, "disk full")))
    with pytest.raises(OSError, match=r"rank 1: OSError.*disk full"):
        keep(ranks, store, *conversation(1))
    monkeypatch.setattr("mlx_kv.prefixes.rank_shards.WRITE_SECONDS", 0.1)
    ranks.link.stopped = {"write_part"}
    with pytest.raises(TimeoutError, match=r"other ranks have not answered for 0\.1 seconds"):
        keep(ranks, store, *conversation(2))
    ranks.link.stopped = set()
    settled(ranks)
    assert store.entries().keys() == ranks.keeper.store.entries().keys()
    assert len(store.entries()) == 1
    assert ranks.keeper._packed == {}


@pytest.mark.parametrize("harm", ["gone", "damaged", "block", "silent"])
def test_without_a_part_an_entry_is_forgotten(harm: str, tmp_path: Path) -> None:
    ranks = TwoRanks()
    store = ranks.store(tmp_path, deadline=0.2 if harm == "silent" else 20)
    assert keep(ranks, store, *conversation(0))
    assert keep(ranks, store, [7] * 100, conversation_of([7] * 100))
    (name,) = [name for name, entry in store.entries().items() if len(entry) == 240]
    part = tmp_path / "rank-1" / f"{name}.safetensors"
    if harm == "gone":
        part.unlink()
    elif harm == "damaged":
        part.write_bytes(part.read_bytes()[:-1])
    elif harm == "block":
        block = tmp_path / "rank-1" / f"{sorted(ranks.keeper.store._table[name].blocks)[0]}.block"
        block.write_bytes(block.read_bytes()[:-1] + b"?")
    else:
        ranks.link.stopped = {"read_part"}
        with pytest.raises(TimeoutError):
            store.find([*conversation(0)[0], 0])
        ranks.link.stopped = set()
        store.deadline = 20
        found = store.find([*conversation(0)[0], 0])
        assert found is not None
        assert goes_on_as(ranks.whole(found[0]), conversation(0)[1], 240)
        return
    assert store.find([*conversation(0)[0], 0]) is None
    settled(ranks)
    assert store.entries().keys() == ranks.keeper.store.entries().keys()
    assert len(store.entries()) == 1
    assert keep(ranks, store, *conversation(0))
    found = store.find([*conversation(0)[0], 0])
    assert found is not None
    assert goes_on_as(ranks.whole(found[0]), conversation(0)[1], 240)


def test_another_number_of_ranks_is_refused(tmp_path: Path) -> None:
    """With the reason; and what one process has made, too."""
    ranks = TwoRanks()
    keep(ranks, ranks.store(tmp_path / "two"), *conversation(0))
    ranks.parts.description = "3 ranks, of which each has some layers"
    with pytest.raises(
        ValueError, match="it was made by 2 ranks, of which each has some layers, not by 3 ranks, of which"
    ):
        ranks.store(tmp_path / "two")
    ranks.parts.description = "2 ranks, of which each has some heads"
    with pytest.raises(
        ValueError, match=r"made by 2 ranks, of which each has some layers, not by 2 ranks.* heads; give"
    ):
        ranks.store(tmp_path / "two")
    with pytest.raises(
        ValueError, match=r"made by 2 ranks, .*, not by one process, which has all; give another folder"
    ):
        PromptStore(tmp_path / "two")
    PromptStore(tmp_path / "one", fingerprint="a").keep(*conversation(0))
    with pytest.raises(ValueError, match="it was made by one process, which has all, not by 2 ranks"):
        ranks.store(tmp_path / "one")
    (tmp_path / "one" / MARKER).unlink()  # as 0.1.0 left it
    with pytest.raises(ValueError, match="it was made by one process, which has all, not by 2 ranks"):
        ranks.store(tmp_path / "one")
    (tmp_path / "two" / "rank-1" / MARKER).write_text("{}")
    assert len(TwoRanks().store(tmp_path / "two").entries()) == 1
    (tmp_path / "two" / "rank-1" / MARKER).write_text('{"format": 9}')
    with pytest.raises(ValueError, match=r"rank 1 cannot keep prompts in .*rank-1: it is a prompt store of format 9"):
        TwoRanks().store(tmp_path / "two")


def test_whose_they_are_all_ranks_say(tmp_path: Path) -> None:
    """The first rank's part of the model may be the same, and another one's not."""
    first, second = TwoRanks(), TwoRanks()
    second.keeper._fingerprint = lambda: "another second layer"
    for ranks, there in ((first, False), (second, False), (first, True)):
        for place in (ranks.store(tmp_path, fingerprint=None),):
            place.bind(lambda: "the first layer")
            assert (place.find([*conversation(0)[0], 0]) is not None) == there
            if not there:
                assert keep(ranks, place, *conversation(0))


def test_what_the_first_rank_has_lost_the_other_removes(tmp_path: Path) -> None:
    """When the first rank has seen all there is, and only what is old: others may be at work."""
    ranks = TwoRanks()
    store = ranks.store(tmp_path)
    for number in range(3):
        keep(ranks, store, *conversation(number))
    lost, new, _ = store.entries()
    for name in (lost, new):
        (tmp_path / f"{name}.json").unlink()
    long_ago = time.time() - 7200
    os.utime(tmp_path / "rank-1" / f"{lost}.json", (long_ago, long_ago))
    ranks = TwoRanks()
    store = ranks.store(tmp_path)
    assert keep(ranks, store, *conversation(5))
    settled(ranks)
    assert ranks.keeper.store.entries().keys() == {new, *store.entries()}


def test_what_the_disk_wants_told_waits_for_the_thread_that_speaks(tmp_path: Path) -> None:
    """Of the thread of a disk nothing is heard before its turn, or before that thread does nothing else."""
    ranks = TwoRanks()
    turns: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
    ranks.parts._call = turns.put
    store = ranks.store(tmp_path)
    told: list[str] = []
    tell = ranks.link.tell
    ranks.link.tell = lambda kind, *content: (told.append(kind), tell(kind, *content))
    store._shards.remove("0" * 32)
    assert told == []
    turns.get_nowait()()
    assert told == ["remove_part"]
    store._shards.remove("0" * 32)
    assert told == ["remove_part"]
    store.by_themselves()
    store._shards.remove("0" * 32)
    assert told == ["remove_part"] * 3


def test_memory_that_one_rank_does_not_have_keeps_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = TwoRanks()
    place = ranks.memory()
    assert keep(ranks, place, *conversation(0))
    with monkeypatch.context() as patch:
        full = lambda *arguments: (_ for _ in ()).throw(RuntimeError("[malloc] out of memory"))  # noqa: E731
        patch.setattr("mlx_kv.prefixes.rank_shards.BlockCaches.of", full)
        with pytest.raises(MemoryError, match=r"rank 1: RuntimeError.*out of memory"):
            ranks.parts.keep("x", ranks.named(conversation(1)[1]), 240, None, 0)
    assert len(place) == len(ranks.keeper._memory) == 1
    found = place.find([*conversation(0)[0], 0])
    assert found is not None
    assert goes_on_as(ranks.whole(found[0]), conversation(0)[1], 240)


def test_a_part_of_another_entry_is_not_restored(tmp_path: Path) -> None:
    """The other rank has only the part that it read last."""
    ranks = TwoRanks()
    store = ranks.store(tmp_path)
    for number in range(2):
        assert keep(ranks, store, *conversation(number))
    first, last = (store.fetch([*conversation(number)[0], 0]) for number in range(2))
    assert first is not None
    assert last is not None
    assert store.restore(first) is None
    found = store.find([*conversation(1)[0], 0])
    assert found is not None
    assert goes_on_as(ranks.whole(found[0]), conversation(1)[1], 240)


def test_a_part_is_dropped_where_another_rank_has_no_memory_for_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = TwoRanks()
    answers, of_a_third = ranks.link.answers, iter(["rank 2: RuntimeError: [malloc] out of memory", 0])
    monkeypatch.setattr(ranks.link, "answers", lambda: [*answers(), next(of_a_third)])
    with pytest.raises(MemoryError, match=r"rank 2: RuntimeError.*out of memory"):
        ranks.parts.keep("x", ranks.named(conversation(1)[1]), 240, None, 0)
    assert len(ranks.keeper._memory) == 0
