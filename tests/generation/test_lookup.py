"""Drafters that look into text: what they propose, against searches of the whole text that are slow and obvious."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from mlx_kv.generation.speculation.drafters import (
    BETWEEN,
    LEAD,
    DrafterContext,
    LookupDrafter,
    Matcher,
    NgramDrafter,
    RecentAnswers,
    SuffixAutomaton,
    SuffixDrafter,
    repeat_from,
)

NOBODY: Any = None  # a model that nobody asks
TEXTS = st.one_of(
    st.lists(st.integers(0, 1), max_size=40),
    st.lists(st.integers(0, 3), max_size=60),
    st.builds(  # in circles
        lambda part, times, rest: part * times + rest,
        st.lists(st.integers(0, 2), max_size=6),
        st.integers(0, 8),
        st.lists(st.integers(0, 2), max_size=6),
    ),
)


def made(kind: type[LookupDrafter], least: int = 2, most: int = 4) -> LookupDrafter:
    return kind(DrafterContext(NOBODY, 96, 10, lookup_min=least, lookup_max=most))


def proposed(drafter: LookupDrafter, most: int) -> list[list[int]]:
    return drafter.propose(most, NOBODY)


def places(text: Sequence[int], wanted: Sequence[int], before: int | None = None) -> list[int]:
    """Each place of a text after which it has just said this, the last first; `before` one of its places."""
    end = len(text) if before is None else before - 1
    return [at for at in range(end, len(wanted) - 1, -1) if list(text[at - len(wanted) : at]) == list(wanted)]


def cyclic(text: Sequence[int], start: int, count: int) -> list[int]:
    longer = list(text)
    while len(longer) < start + count:
        longer.append(longer[len(longer) - (len(text) - start)])
    return longer[start : start + count]


def ngram_reference(text: list[int], least: int, most_alike: int, most: int) -> list[int]:
    for length in range(min(most_alike, len(text)), least - 1, -1):
        found = places(text, text[-length:], before=len(text))
        if found:
            return cyclic(text, found[0], most)
    return []


def longest_before(text: Sequence[int]) -> int:
    """Tokens of the longest suffix that was there before."""
    return max(n for n in range(len(text) or 1) if n == 0 or places(text, text[-n:], before=len(text)))


def longest_within(text: Sequence[int], other: Sequence[int]) -> int:
    """Tokens of the longest suffix of a text that is in another."""
    return max(n for n in range(len(text) + 1) if n == 0 or places(other, text[-n:]))


@given(TEXTS, st.integers(1, 3), st.integers(0, 3), st.integers(0, 12), st.integers(0, 60))
def test_ngrams_against_a_search(text: list[int], least: int, more: int, most: int, prompt: int) -> None:
    drafter = made(NgramDrafter, least, least + more)
    cut = max(1, min(prompt, len(text)))
    drafter.join([text[:cut] or [0]], [])
    for end in range(cut, len(text) + 1):
        assert proposed(drafter, most) == [ngram_reference(text[:end] or [0], least, least + more, most)]
        assert proposed(drafter, most) == proposed(drafter, most), "it may be asked for nothing"
        drafter.accepted([text[end : end + 1]])


@given(TEXTS, st.integers(1, 3), st.integers(0, 12), st.integers(1, 60))
def test_suffixes_against_a_search(text: list[int], least: int, most: int, prompt: int) -> None:
    drafter = made(SuffixDrafter, least)
    cut = max(1, min(prompt, len(text)))
    drafter.join([text[:cut] or [0]], [])
    for end in range(cut, len(text) + 1):
        (got,), so_far = proposed(drafter, most), text[:end]
        length = longest_before(so_far)
        if length < least:
            assert got == []
        else:
            each = places(so_far, so_far[-length:], before=end)
            assert got in [cyclic(so_far, place, min(length, most)) for place in each]
        drafter.accepted([text[end : end + 1]])


@given(TEXTS)
def test_an_automaton_has_all_substrings_and_no_others(text: list[int]) -> None:
    automaton = SuffixAutomaton()
    automaton.extend(text)
    assert len(automaton.lengths) <= 2 * len(text) + 2
    random_words = random.Random(len(text))
    words = [text[i:j] for i in range(len(text)) for j in range(i + 1, min(i + 5, len(text) + 1))]
    words += [random_words.choices(range(4), k=random_words.randint(1, 6)) for _ in range(20)]
    for word in words:
        state = 1
        for token in word:
            state = state and automaton.step(state, token)
        assert bool(state) == bool(places(text, word))
        if state:
            assert automaton.ends[state] in places(text, word)


@example([(True, [0, 1, 2]), (False, [2]), (True, [2, 1, 2, 0]), (False, [0])])  # split twice, where it stands
@given(st.lists(st.tuples(st.booleans(), st.lists(st.integers(0, 2), min_size=1, max_size=12)), max_size=12))
def test_a_match_in_a_text_that_grows_meanwhile(parts: list[tuple[bool, list[int]]]) -> None:
    """States are split under it. What it says is there; as much as came since the other last grew is found for sure."""
    other = SuffixAutomaton()
    mine = Matcher(other)
    text: list[int] = []
    since = 0
    for grows, tokens in parts:
        if grows:
            other.extend(tokens)
            since = 0
        else:
            for token in tokens:
                mine.extend([token])
                text.append(token)
                since += 1
        assert longest_within(text[len(text) - since :], other.text) <= mine.matched <= longest_within(text, other.text)
        assert mine.matched == 0 or mine.after in places(other.text, text[len(text) - mine.matched :])


@given(
    st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=30), min_size=1, max_size=10), TEXTS, st.integers(1, 9)
)
def test_recent_answers_against_a_search(answers: list[list[int]], text: list[int], most: int) -> None:
    """They were there before the row came: then the longest match of all is found, and no draft goes past an answer."""
    drafter = made(SuffixDrafter, 2)
    for answer in answers:
        drafter.join([[3]], [])
        drafter.accepted([answer])
        drafter.keep([])
    drafter.join([[4]], [])
    said = [4]
    for token in text:
        drafter.accepted([[token]])
        said.append(token)
        (got,) = proposed(drafter, most)
        own = longest_before(said)
        shared = max(longest_within(said, [3, *answer]) for answer in answers)
        wanted = []
        if own >= max(shared, 2):
            each = places(said, said[-own:], before=len(said))
            wanted = [cyclic(said, place, min(own, most)) for place in each]
        elif shared >= 2:
            ends = [(answer, place) for answer in answers for place in places([3, *answer], said[-shared:])]
            wanted = [[3, *answer][place : place + min(shared, most)] for answer, place in ends]
            if [] in wanted and own >= 2:  # an answer ends there
                each = places(said, said[-own:], before=len(said))
                wanted += [cyclic(said, place, min(own, most)) for place in each]
        assert got in (wanted or [[]])


class Reference:
    """Rows, and what those that are gone have said; lists, and searches of all of them."""

    def __init__(self) -> None:
        self.rows: list[tuple[list[int], int]] = []  # the text, and how much of it the prompt is
        self.gone: list[list[int]] = []

    def keep(self, rows: list[int]) -> None:
        for row in set(range(len(self.rows))) - set(rows):
            text, prompt = self.rows[row]
            self.gone.append(text[max(0, prompt - LEAD) :])
        self.rows = [self.rows[row] for row in rows]

    def check(self, text: list[int], got: list[int], least: int, most: int) -> None:
        own = longest_before(text)
        if got == []:
            assert own < least or most == 0
            return
        said = [(cyclic(text, place, min(own, most)), own) for place in places(text, text[-own:], before=len(text))]
        for source in self.gone:
            for length in range(max(own, least), longest_within(text, source) + 1):
                ends = places(source, text[len(text) - length :])
                said += [(source[place : place + min(length, most)], length) for place in ends]
        assert any(length >= least and got == tokens for tokens, length in said)


@given(st.randoms(use_true_random=False), st.sampled_from([NgramDrafter, SuffixDrafter]), st.integers(2, 4))
def test_rows_that_come_and_go(rng: random.Random, kind: type[LookupDrafter], alphabet: int) -> None:
    drafter, known = made(kind, 2), Reference()

    def words(least: int, most: int) -> list[int]:
        return [rng.randrange(alphabet) for _ in range(rng.randint(least, most))]

    for _ in range(12):
        if rng.random() < 0.4:
            prompts = [words(1, 2 * LEAD) for _ in range(rng.randint(1, 2))]
            drafter.join(prompts, [])
            known.rows += [(list(prompt), len(prompt)) for prompt in prompts]
        if rng.random() < 0.3:
            staying = rng.sample(range(len(known.rows)), rng.randint(0, len(known.rows)))
            drafter.keep(staying)
            known.keep(staying)
        most = rng.randint(0, 12)
        drafts = proposed(drafter, most)
        assert len(drafts) == len(known.rows)
        for (text, _), got in zip(known.rows, drafts, strict=True):
            if kind is NgramDrafter:
                assert got == ngram_reference(text, 2, 4, most)
            else:
                known.check(text, got, 2, most)
        new = [words(1, 4) for _ in known.rows]
        drafter.accepted(new)
        for (text, _), got in zip(known.rows, new, strict=True):
            text += got


@example([1, 1], 3)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=30), st.integers(2, 24))
def test_recent_answers_are_bounded(lengths: list[int], most: int) -> None:
    recent, token = RecentAnswers(most), 0
    for length in lengths:
        answer = list(range(token, token + length))
        token += length
        recent.add(answer)
        assert 1 <= len(recent.generations) <= 2
        assert all(len(each.text) <= most for each in recent.generations)
        kept = min(length, most - 1)
        assert places(recent.generations[0].text, [*answer[length - kept :], BETWEEN]), "the newest is there whole"


def test_the_most_recent_place_is_taken() -> None:
    for kind in (NgramDrafter, SuffixDrafter):
        drafter = made(kind)
        drafter.join([[1, 2, 7, 1, 2, 8, 1, 2]], [])
        assert proposed(drafter, 1) == [[8]]


@pytest.mark.parametrize("kind", [NgramDrafter, SuffixDrafter])
def test_rows_that_stay_keep_their_texts(kind: type[LookupDrafter]) -> None:
    drafter = made(kind)
    drafter.join([[row, row + 10, row + 20, row, row + 10] for row in range(4)], [])
    drafter.keep([3, 1])
    assert proposed(drafter, 1) == [[23], [21]]


def test_a_continuation_goes_on_in_a_circle() -> None:
    drafter = made(NgramDrafter)
    drafter.join([[9, 1, 2, 3, 1, 2, 3, 1, 2]], [])
    assert proposed(drafter, 7) == [[3, 1, 2, 3, 1, 2, 3]]
    assert repeat_from([5, 6, 7], 2, 3) == [7, 7, 7]


def test_an_answer_is_drafted_from_that_of_another_row() -> None:
    """From its first token on, where prompts end alike; and only from rows that are gone."""
    drafter, prompt, answer = made(SuffixDrafter), [50, 51, 52, 53], [*range(1, 40)]
    drafter.join([prompt, [60, *prompt[1:]], [61]], [])
    drafter.accepted([answer, [90], [62, 63]])
    drafter.join([[70, *prompt[1:]]], [])
    assert proposed(drafter, 10)[3] == []
    drafter.keep([1])  # the third one's answer comes after the first one's
    drafter.join([[70, *prompt[1:]]], [])
    assert proposed(drafter, 10) == [[], answer[:3]]
    drafter.accepted([[91], answer[:20]])
    assert proposed(drafter, 10)[1] == answer[20:30]
    drafter.accepted([[91], answer[20:36]])
    assert proposed(drafter, 10)[1] == answer[36:], "and no further"


@pytest.mark.parametrize("kind", [NgramDrafter, SuffixDrafter])
def test_no_draft_model_beside_them(kind: type[LookupDrafter]) -> None:
    with pytest.raises(ValueError, match=f"the drafter {kind.name} drafts without a model: leave out draft_model"):
        kind(DrafterContext(NOBODY, 96, 10, draft_model=object()))  # type: ignore[arg-type]
