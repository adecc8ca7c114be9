"""Which processed prompt serves another, against a look at all of them; and prompts in memory."""

from __future__ import annotations

import random
from collections.abc import Sequence

import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import VOCAB, make_model

from mlx_kv import CachePolicy, PromptMemory, make_prompt_cache
from mlx_kv.prefixes.index import MAX_STEPS, MIN_SHARED, Entry, EntryTable, packed, shared
from mlx_kv.prefixes.reader import PromptReader

# Few different tokens on a common beginning, so that sequences share long and short parts, and are often equal.
COMMON = list(range(MIN_SHARED - 1))
TAILS = st.lists(st.integers(0, 1), max_size=8)
SEQUENCES = st.one_of(TAILS.map(lambda tail: COMMON + tail), TAILS, TAILS.map(lambda tail: [2**32 - 1, *COMMON, *tail]))


def same(a: Sequence[int], b: Sequence[int]) -> int:
    count = 0
    while count < min(len(a), len(b)) and a[count] == b[count]:
        count += 1
    return count


@given(SEQUENCES, SEQUENCES)
def test_packed_tokens_sort_and_compare_as_the_tokens(a: list[int], b: list[int]) -> None:
    assert (packed(a) < packed(b)) == (a < b)
    assert shared(packed(a), packed(b)) == same(a, b)


LEASTS = st.just(0) | st.integers(MIN_SHARED - 2, MIN_SHARED + 7)


def table_of(entries: dict[str, Entry]) -> EntryTable[Entry]:
    table = EntryTable[Entry]()
    for name, entry in entries.items():
        table.add(name, entry)
    return table


@given(st.lists(st.tuples(SEQUENCES, LEASTS), max_size=12), SEQUENCES, LEASTS, st.data())
def test_the_index_finds_what_a_look_at_all_finds(
    sequences: list[tuple[list[int], int]], wanted: list[int], least: int, data: st.DataObject
) -> None:
    index, there = EntryTable[Entry](), {}
    for number, (tokens, its_least) in enumerate(sequences):
        its_least = min(its_least, len(tokens))
        index.add(str(number), Entry(packed(tokens), 1, its_least))
        there[str(number)] = (tokens, its_least)
    for gone in data.draw(st.lists(st.sampled_from(sorted(there) or ["none"]), unique=True)):
        index.remove(gone)
        there.pop(gone, None)
    serving = {}
    for name, (tokens, its_least) in there.items():
        count = min(same(tokens, wanted), len(wanted) - 1)
        if count >= max(MIN_SHARED, its_least):
            serving[name] = count
    rest, found = table_of(index.entries()), []
    while (best := rest.best(packed(wanted))) is not None:  # one after the other, as each turns out to be gone
        found.append(best)
        rest.remove(best[0])
    assert dict(found) == serving
    assert [count for _, count in found] == sorted(serving.values(), reverse=True)
    least = min(least, len(wanted))
    entry = Entry(packed(wanted), 1, least)
    covering = {n for n, (t, its_least) in there.items() if t[: len(wanted)] == wanted and its_least <= least}
    assert index.covering(entry) in (covering or {None})
    covered = {n for n, (t, its_least) in there.items() if wanted[: len(t)] == t and its_least >= least}
    assert set(index.covered(entry)) == covered
    assert index.entries().keys() == there.keys()


@pytest.mark.parametrize("least", [0, 1020], ids=["caches that go back", "rings"])
def test_a_lookup_looks_at_few_however_many_there_are(least: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """All share 1,000 tokens: what decides how long it takes is how often two sequences are compared."""
    compared = 0

    def counted(first: bytes, second: bytes) -> int:
        nonlocal compared
        compared += 1
        return shared(first, second)

    monkeypatch.setattr("mlx_kv.prefixes.index.shared", counted)
    index, chance = EntryTable[Entry](), random.Random(0)
    common = packed(range(1000))
    asked = [common + packed([chance.randrange(10**9) for _ in range(30)]) for _ in range(20)]
    for count in (100, 3000):
        while len(index) < count:
            tokens = common + packed([chance.randrange(10**9) for _ in range(30)])
            index.add(str(len(index)), Entry(tokens, 1, least))
        index.add("checkpoint", Entry(common[: 4 * 900], 1, min(least, 900)))
        for tokens in asked:
            compared = 0
            name, found = index.best(tokens) or ("", 0)
            assert found >= (1000 if least == 0 else 900)
            assert (name == "checkpoint") == (least > 0)
            index.covering(Entry(common, 1, 0))
            index.covering(Entry(tokens, 1, min(least, 1030)))
            index.covered(Entry(tokens, 1, least))
            assert compared <= 40


def test_an_entry_that_cannot_go_back_by_one_token_does_not_serve_itself() -> None:
    """The last token of a prompt is always left to be read."""
    index = EntryTable[Entry]()
    index.add("whole", Entry(packed(range(100)), 1, 100))
    assert index.best(packed(range(100))) is None
    assert index.best(packed(range(101))) == ("whole", 100)


def test_a_walk_through_what_only_begins_alike_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many entries part from a prompt one token after the other."""
    compared: list[bytes] = []

    def counted(first: bytes, second: bytes) -> int:
        compared.append(first)
        return shared(first, second)

    monkeypatch.setattr("mlx_kv.prefixes.index.shared", counted)
    index = EntryTable[Entry]()
    for length in range(100, 400):
        index.add(str(length), Entry(packed([*range(1, length), 0, 1]), 1, length + 1))
    assert index.best(packed(range(1, 1000))) is None
    assert MAX_STEPS <= len(compared) <= MAX_STEPS + 2
    index.add("last", Entry(packed(range(1, 396)), 1, 395))
    assert index.best(packed(range(1, 1000))) == ("last", 395)


def prompt(seed: int, length: int = 129) -> list[int]:
    tokens: list[int] = mx.random.randint(1, VOCAB, (length,), key=mx.random.key(seed)).tolist()  # type: ignore[assignment]
    return tokens


@pytest.mark.parametrize("policy", [CachePolicy(), CachePolicy(bits=8, group_size=32), CachePolicy(budget=100)])
def test_memory_hands_out_caches_of_the_askers_own(policy: CachePolicy) -> None:
    """Neither going on with the caches that were kept, nor with those that were found, changes what is kept."""
    model, memory = make_model("llama"), PromptMemory()
    reader = PromptReader(model, make_prompt_cache(model, policy), prompt(0), memory)
    kept = reader.finish()
    wanted = model(mx.array([[7]]), cache=kept)  # kept, and then written on
    for token in (3, 7):
        caches, count = memory.find([*prompt(0)[:128], token])
        assert count == memory.serves([*prompt(0)[:128], token]) == 128
        assert caches[0].offset == 128
        got = model(mx.array([[token]]), cache=caches)
    assert mx.array_equal(got, wanted)


def test_memory_forgets_what_is_of_least_use() -> None:
    model, policy = make_model("llama"), CachePolicy()

    def read(memory: PromptMemory, tokens: list[int]) -> None:
        PromptReader(model, make_prompt_cache(model, policy), tokens, memory).finish()

    probe = PromptMemory()
    read(probe, prompt(0))
    memory = PromptMemory(3 * probe.nbytes)
    for seed in (0, 1, 2):
        read(memory, prompt(seed))
    assert memory.find(prompt(0)) is not None
    read(memory, prompt(3))
    assert [memory.find(prompt(seed)) is not None for seed in range(5)] == [True, False, True, True, False]
    assert (len(memory), memory.nbytes) == (3, 3 * probe.nbytes)
    memory.forget([*prompt(0)[:100], *prompt(9)])  # begins like one that somebody else may want
    memory.forget(prompt(1))  # is not there
    assert len(memory) == 3
    memory.forget([*prompt(0), 7])
    assert (len(memory), memory.find(prompt(0))) == (2, None)
    longer = [*prompt(0), *prompt(9, 10)]
    read(probe, longer)  # serves whatever the first 128 tokens of it do
    assert (len(probe), probe.serves(prompt(0)), probe.serves(longer)) == (1, 128, 138)
    shorter = PromptReader(model, make_prompt_cache(model, policy), prompt(0)).finish()
    assert not probe.keep(prompt(0)[:128], shorter)
    nothing = PromptMemory(0)
    read(nothing, prompt(0))
    assert (len(nothing), nothing.nbytes, nothing.find(prompt(0))) == (0, 0, None)
    assert PromptMemory(2**40).max_bytes == 2**40
    with pytest.raises(ValueError, match="max_bytes is -1: give a number of bytes"):
        PromptMemory(-1)
