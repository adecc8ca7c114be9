"""Entries in a memory that is too small: what does not fit keeps its beginning, in whole blocks."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from conversations import KINDS, conversation_of, read, same
from hypothesis import given, settings
from hypothesis import strategies as st
from test_blocks import bytes_of

from mlx_kv import PromptMemory, PromptStore
from mlx_kv.prefixes import memory as blocks
from mlx_kv.prefixes.index import MIN_SHARED, packed

SLOT = 2 * 2 * 2 * 32 * 2  # bytes of one token of `conversation_of`: layers, keys and values, heads, width, float16
HISTORY = st.lists(
    st.one_of(
        st.tuples(st.just("keep"), st.integers(0, 2), st.integers(64, 320), st.integers(0, 200)),
        st.tuples(st.just("find"), st.integers(0, 2), st.integers(65, 320), st.integers(0, 200)),
        st.tuples(st.just("take"), st.integers(0, 2), st.integers(65, 320), st.integers(0, 200)),
        st.tuples(st.just("shrink"), st.integers(0, 500)),
    ),
    min_size=2,
    max_size=12,
)


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "BLOCK_SLOTS", dict.fromkeys(blocks.BLOCK_SLOTS, 32))
    monkeypatch.setattr(blocks, "LEAST_SLOTS", 4)


def text(branch: int, length: int, common: int) -> list[int]:
    """Tokens of a conversation that begins as all do."""
    return [index % 7 if index < common else 10 + branch + index % 5 for index in range(length)]


def fresh(kind: str, tokens: list[int]) -> list[Any]:
    caches = KINDS[kind]()
    for first in range(0, len(tokens), 16):
        read(caches, tokens[first : first + 16], first)
    return caches


def as_fresh(found: list[Any], wanted: list[Any], count: int) -> bool:
    """Whether caches hand out what freshly read ones do, also in what comes."""
    alike = [cache.offset for cache in found] == [count] * len(found)
    for new in (1, 3, 30, 1):
        alike = alike and same(read(found, range(new), count), read(wanted, range(new), count))
        count += new
    return alike


def poison(caches: list[Any]) -> None:
    """Fills the slots after those in use."""
    for cache in caches:
        used = cache.view.used
        keys, values = (
            [mx.concatenate([p[:, :, :used], mx.full_like(p[:, :, used:], 113)], axis=2) for p in buffer.planes]
            for buffer in cache.view.buffers
        )
        cache.replace_planes(keys, values)


@pytest.mark.parametrize("kind", ["plain", "8 bits", "late", "ring", "a window beside all", "budget"])
@settings(max_examples=15, deadline=None)
@given(history=HISTORY, limit=st.integers(40, 500))
def test_any_history_in_any_memory(kind: str, history: list[tuple[Any, ...]], limit: int) -> None:
    per_token = blocks._entry_bytes(fresh(kind, text(0, 64, 64))) // 64
    memory, last = PromptMemory(limit * per_token, fingerprint="a"), list[int]()
    for what, *arguments in history:
        if what == "keep":
            last = text(*arguments)
            caches = fresh(kind, last)
            poison(caches)
            was_empty = len(memory) == 0
            memory.keep(last, caches)
            if was_empty and kind == "plain" and limit >= MIN_SHARED:  # else a shared block may have unused slots
                assert memory.serves([*last, 99]) == min(len(last), limit)
            assert memory.nbytes <= memory.max_bytes
        elif what == "shrink":
            memory.shrink(arguments[0] * per_token)
            assert memory.nbytes <= arguments[0] * per_token
        else:
            tokens, held = text(*arguments), len(memory)
            found = memory.find(tokens) if what == "find" else memory.take(tokens)
            assert len(memory) == held - (what == "take" and found is not None)
            if found is not None:
                assert what == "find" or not any(cache.chain for cache in found[0])
            # Trimmed rings hand out other dead slots, and what was quantised late stays so: `test_blocks` has these.
            if found is not None and kind in ("plain", "8 bits", "budget"):
                assert as_fresh(found[0], fresh(kind, tokens[: found[1]]), found[1])
        assert memory.nbytes == bytes_of(memory)
        for entry in memory._table.entries().values():
            assert len(entry) >= MIN_SHARED
            assert entry.least <= len(entry)


def test_what_is_taken_is_nobody_elses() -> None:
    """An entry of which much is not used stays, and so does one whose beginning a row has, too."""
    tokens = list(range(320))
    memory = PromptMemory(1000 * SLOT, fingerprint="a")
    memory.keep(tokens, conversation_of(tokens))
    used, less = [*tokens[:280], 999, 998], [*tokens[:279], 999, 998]
    assert memory.take([500, *tokens]) is None
    assert memory.take(less) is None
    assert memory.take(used, common=140) is None
    assert memory.serves(used) == 280
    caches, count = memory.take(used, common=139) or ([], 0)
    assert (count, len(memory), memory.nbytes) == (280, 0, 0)
    assert as_fresh(caches, conversation_of(tokens[:280]), 280)


def test_what_was_found_before_is_taken_without_its_old_blocks() -> None:
    """They would be held beside the copy."""
    tokens = list(range(320))
    memory = PromptMemory(1000 * SLOT, fingerprint="a")
    memory.keep(tokens, conversation_of(tokens))
    caches, _ = memory.find([*tokens, 1]) or ([], 0)
    assert any(cache.chain for cache in caches)
    read(caches, range(320, 400), 320)
    memory.keep([*tokens, *range(320, 400)], caches)
    caches, count = memory.take([*range(400), 1]) or ([], 0)
    assert count == 400
    assert not any(cache.chain for cache in caches)


def test_a_prefix_that_no_longer_one_serves_stays_where_it_fits() -> None:
    tokens = list(range(320))
    memory = PromptMemory(2**24, fingerprint="a")
    memory.keep(tokens, fresh("ring", tokens))
    (entry,) = memory._table.entries().values()
    assert entry.least
    assert memory.take([*tokens, 1], room=entry.bytes) is None
    assert memory.serves([*tokens, 1]) == 320
    assert (memory.take([*tokens, 1], room=entry.bytes - 1) or ([], 0))[1] == 320


def test_two_conversations_in_turns() -> None:
    """Each of 0.6 of the memory: the newest is whole, the other one has what is left, and what both share is there."""
    first, second = ([*range(128), *([500 + number] * 256)] for number in range(2))
    memory = PromptMemory(int(384 * SLOT / 0.6), fingerprint="a")
    for turn in range(6):
        newest, other = (first, second)[:: 1 if turn % 2 == 0 else -1]
        newest += [900 + turn] * 8
        assert memory.serves(newest) >= (turn > 0) * 128
        assert memory.keep(newest, conversation_of(newest))
        assert memory.serves([*newest, 1]) == len(newest)
        if turn:
            assert memory.serves([*other, 1]) >= 384 - 32
        assert memory.nbytes <= memory.max_bytes
    longest = [*range(700, 700 + 600)]
    assert memory.keep(longest, conversation_of(longest))
    assert memory.serves(first) < 64
    assert memory.evicted.longest(packed(first)) >= 384


def test_the_least_recent_is_cut_at_its_end_and_dropped_when_little_is_left() -> None:
    first, second = list(range(320)), list(range(1000, 1200))
    memory = PromptMemory(400 * SLOT, fingerprint="a")
    for tokens in (first, second):
        assert memory.keep(tokens, conversation_of(tokens))
    assert (memory.serves([*first, 1]), memory.serves([*second, 1])) == (192, 200)
    assert memory.evicted.longest(packed(first)) == 320
    memory.shrink(263 * SLOT)  # less than 64 tokens
    assert (memory.serves([*first, 1]), memory.serves([*second, 1]), memory.nbytes) == (0, 200, 200 * SLOT)
    memory.shrink(100 * SLOT)
    assert (memory.serves([*second, 1]), memory.nbytes) == (96, 96 * SLOT)
    memory.shrink(0)
    assert (len(memory), memory.nbytes) == (0, 0)


@pytest.mark.parametrize("kind", ["plain", "8 bits", "budget", "ring"])
def test_a_prompt_larger_than_the_memory(kind: str) -> None:
    tokens = list(range(300))
    caches = fresh(kind, tokens)
    kept = copy.deepcopy(caches)
    memory = PromptMemory(blocks._entry_bytes(caches) // 2, fingerprint="a")
    shortens = kind in ("plain", "8 bits")
    assert memory.keep(tokens, caches) == shortens
    assert memory.too_large.longest(packed(tokens)) == 256
    found = memory.find(tokens)
    assert (0 if found is None else found[1]) == (150 if shortens else 0)
    assert found is None or as_fresh(found[0], fresh(kind, tokens[:150]), 150)
    assert as_fresh(caches, kept, 300)  # those of the caller are whole
    assert not memory.keep(tokens, caches)


def test_what_falls_out_of_memory_is_in_the_store(tmp_path: Path) -> None:
    from mlx_kv.server.rows import TieredPrefixes

    class Job:
        def __init__(self, tokens: list[int]) -> None:
            self.to_read, self.prompt, self.caches = tokens, packed(tokens), None

    tokens = list(range(400))
    store = PromptStore(tmp_path, fingerprint="a")
    tiers = TieredPrefixes(PromptMemory(200 * SLOT, fingerprint="a"), store, lambda: None, lambda: "a")
    tiers.keep(tokens, conversation_of(tokens))
    tiers._disk.submit(lambda: None).result()
    assert tiers.memory.serves([*tokens, 1]) == 200
    assert tiers.take(packed([*tokens, 1]), 0, 0) is None  # the store has more
    tiers.request(Job([*tokens, 1]))  # type: ignore[arg-type]
    assert list(tiers.look_up()) == []
    tiers._disk.submit(lambda: None).result()
    ((_, caches, count),) = tiers.look_up()
    assert count == 400
    assert caches is not None
    assert as_fresh(caches, conversation_of(tokens), 400)
    assert tiers.memory.serves([*tokens, 1]) == 200
    tiers.close()
