"""Blocks of prompts in memory: each entry is restored as it was kept, and shared bytes are counted once."""

from __future__ import annotations

import copy
import gc
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from conversations import KINDS, STEPS, Reference, budget, goes_on_as, read
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_kv import KVCache, PromptMemory, compact
from mlx_kv.prefixes import memory as blocks
from mlx_kv.prefixes.index import EntryTable
from mlx_kv.prefixes.memory import BlockCaches
from mlx_kv.prefixes.store import IndexedEntry


def bytes_of(memory: PromptMemory) -> int:
    """Of all distinct arrays that the entries hold, looked at one by one."""
    arrays = {}
    for entry in memory._table.entries().values():
        for strip in entry.caches._strips:
            arrays |= {id(plane): plane.nbytes for block, _ in strip.pieces for plane in block.planes}
    shells = [shell for entry in memory._table.entries().values() for shell in entry.caches._shells]
    evictors = sum(cache.evictor.nbytes for cache in shells if cache.evictor)
    return sum(arrays.values()) + evictors


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=12)
@given(steps=STEPS)
@pytest.mark.slow
def test_whatever_is_kept_found_and_removed(kind: str, steps: list[tuple[Any, ...]]) -> None:
    patch = pytest.MonkeyPatch()
    patch.setattr(blocks, "BLOCK_SLOTS", dict.fromkeys(blocks.BLOCK_SLOTS, 32))
    patch.setattr(blocks, "LEAST_SLOTS", 4)
    reference, memory = Reference(), PromptMemory(fingerprint="a")
    try:
        for what, *arguments in steps:
            names = list(memory._table.entries())
            if what == "keep":
                tokens, caches = reference.grow(kind, *arguments)
                if memory.keep(tokens, caches):
                    reference.kept[tuple(tokens)] = copy.deepcopy(caches)
                read(caches, [1, 2, 3], len(tokens))  # the caller goes on with its caches
            elif what == "remove" and names:
                memory._remove(names[arguments[0] % len(names)])
            elif what == "find" and reference.kept:
                tokens = list(list(reference.kept)[arguments[0] % len(reference.kept)])
                tokens = [*tokens[: len(tokens) - arguments[1]], 99]
                found = memory.find(tokens)
                if found is not None:
                    read(found[0], [5] * 20, found[1])  # and with those it found
            assert memory.nbytes == bytes_of(memory)
            check_all(memory, reference)
        for name in memory._table.entries():
            memory._remove(name)
        assert memory.nbytes == 0
    finally:
        patch.undo()


def check_all(memory: PromptMemory, reference: Reference) -> None:
    """Everything that is there is what was kept."""
    for entry in memory._table.entries().values():
        tokens = tuple(np.frombuffer(entry.tokens, ">u4").tolist())
        assert goes_on_as(entry.caches.restore(0, 0), reference.kept[tokens], len(tokens))
        for count in {max(entry.least, len(tokens) - 3), entry.least}:
            if count >= 64:
                found = entry.caches.restore(len(tokens) - count, count)
                assert {cache.capacity % 256 for cache in found} == {0}
                assert goes_on_as(found, reference.kept[tokens], count)


def conversations(count: int, system: int = 4000, own: int = 100) -> tuple[PromptMemory, list[list[int]], int]:
    """So many that begin alike, and the bytes of one slot of all layers."""
    memory, prompts = PromptMemory(fingerprint="a"), []
    (first,) = caches = [KVCache()]
    read(caches, [token % 50 for token in range(system)], 0)
    for number in range(count):
        mine = copy.deepcopy(caches)
        tokens = [*(token % 50 for token in range(system)), *([100 + number] * own)]
        read(mine, tokens[system:], system)
        assert memory.keep(tokens, mine)
        prompts.append(tokens)
    return memory, prompts, first.nbytes_live // system


@pytest.mark.parametrize("system", [4000, 4096, 4095, 4097, 300])
def test_what_conversations_share_is_there_once(system: int) -> None:
    memory, prompts, slot = conversations(20, system)
    part = min(system, blocks.LEAST_SLOTS - 1)  # a short piece of a block is copied
    assert (system + 20 * 100) * slot <= memory.nbytes <= (system + 20 * (100 + part * (system == 4097))) * slot
    for name in list(memory._table.entries())[:19]:
        before = memory.nbytes
        memory._remove(name)
        assert before - memory.nbytes >= 100 * slot * (name != "0")
    (found,), count = memory.find(prompts[19])  # type: ignore[misc]
    assert (len(memory), count) == (1, len(prompts[19]) - 1)
    assert memory.nbytes <= (system + 100 + blocks.BLOCK_SLOTS[mx.default_device().type]) * slot
    assert found.capacity <= count + 1 + 256


@pytest.mark.slow
def test_memory_is_given_back() -> None:
    """A block holds on to nothing else: neither to the cache that it is a part of, nor to what others have."""
    memory, _, _ = conversations(4)
    for _ in range(2):
        gc.collect()
        before = mx.get_active_memory()
        again, _, _ = conversations(4)
        gc.collect()
        assert abs(mx.get_active_memory() - before - again.nbytes) <= again.nbytes / 10  # pages, to which it is rounded
        del again
    one_head = [KVCache()]  # of which a part of the slots is no copy by itself
    one_head[0].update_and_fetch(mx.ones((1, 1, 4096, 64)), mx.zeros((1, 1, 4096, 64)))
    kept = BlockCaches.of(one_head, 4096, None, 0)
    mx.eval(one_head[0].state)
    before = mx.get_active_memory()
    del one_head
    gc.collect()
    assert before - mx.get_active_memory() >= 4096 * 64 * 4 * 2 - 4096
    del kept, memory


def test_one_bit_is_enough_to_share_nothing_of_a_block() -> None:
    """Also the sign of a zero, and a NaN is itself."""
    plane = np.zeros((1, 1, 256, 32), np.float32)
    plane[0, 0, 5] = np.nan

    def kept(like: BlockCaches | None, changed: int | None) -> BlockCaches:
        values = plane.copy()
        if changed is not None:
            values[0, 0, changed, 31] = -0.0
        cache = KVCache()
        cache.update_and_fetch(mx.array(plane), mx.array(values))
        return BlockCaches.of([cache], 256, like, 256)

    first = kept(None, None)
    for changed, pieces in ((None, [256]), (200, [200, 56]), (10, [256]), (255, [255, 1])):
        (strip,) = kept(first, changed)._strips
        assert [count for _, count in strip.pieces] == pieces
        own = [block for block, _ in strip.pieces if block not in first.blocks]
        assert sum(block.planes[0].shape[2] for block in own) == {None: 0, 200: 56, 10: 256, 255: 1}[changed]
        (cache,) = BlockCaches([*first._shells], [strip]).restore(0, 0)
        assert np.signbit(np.array(cache.values)[0, 0, :, 31]).tolist() == [i == changed for i in range(512)]


def test_entries_of_other_shapes_share_nothing() -> None:
    def cache(**options: Any) -> list[KVCache]:
        made = KVCache(**options)
        made.update_and_fetch(*[mx.zeros((1, 2, 100, 64))] * 2)
        return [made]

    first = BlockCaches.of(cache(), 100, None, 0)
    for other in (cache(bits=8, group_size=64), cache() * 2):
        assert not BlockCaches.of(other, 100, first, 100).blocks.keys() & first.blocks.keys()
    assert BlockCaches.of(cache(), 100, first, 100).blocks == first.blocks


def test_pieces_do_not_become_many() -> None:
    """A conversation of many short turns: no more than a piece for each LEAST_SLOTS, and one for each block."""
    memory, caches, tokens = PromptMemory(fingerprint="a"), [KVCache()], [0] * 64
    read(caches, tokens, 0)
    for turn in range(100):
        tokens += [turn] * 9
        read(caches, tokens[-9:], len(tokens) - 9)
        assert memory.keep(tokens, caches)
    assert len(memory) == 1
    (entry,) = memory._table.entries().values()
    (strip,) = entry.caches._strips
    size = blocks.BLOCK_SLOTS[mx.default_device().type]
    assert len(strip.pieces) <= len(tokens) // blocks.LEAST_SLOTS + len(tokens) // size + 1
    assert goes_on_as(entry.caches.restore(0, 0), caches, len(tokens))


HELD = st.dictionaries(st.integers(0, 5), st.just(10), max_size=4)


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 3), HELD), max_size=12))
def test_block_references_are_those_of_a_look_at_all(steps: list[tuple[int, int, dict[int, int]]]) -> None:
    table: EntryTable[IndexedEntry] = EntryTable()
    there: dict[str, tuple[int, dict[int, int]]] = {}
    for number, own, held in steps:
        if str(number) in there:
            gone = there.pop(str(number))
            free = set(gone[1]) - {block for _, other in there.values() for block in other}
            assert {int(block) for block in table.remove(str(number))} == free
        else:
            there[str(number)] = own, held
            column = tuple((str(block), 1, size) for block, size in held.items())
            table.add(str(number), IndexedEntry(b"", own + sum(held.values()), 0, columns=(column,)))
        every = {block: size for _, other in there.values() for block, size in other.items()}
        assert table.nbytes == sum(own for own, _ in there.values()) + sum(every.values())
        assert set(map(int, table.blocks)) == set(every)
    assert table.remove("none") == []


def test_compaction_between_two_keeps() -> None:
    """What a compaction moved is no longer what the other entry has; what it left in place is."""
    caches = budget()
    read(caches, list(range(44)), 0)
    first = BlockCaches.of(caches, 44, None, 0)
    kept = copy.deepcopy(caches)
    compact(caches)
    read(caches, [7] * 2, 44)
    second = BlockCaches.of(caches, 46, first, 44)
    assert goes_on_as(first.restore(0, 0), kept, 44)
    assert goes_on_as(second.restore(0, 0), caches, 46)
