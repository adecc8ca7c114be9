"""A limit of thinking: what it forces follows from the tokens alone, with drafts, in batches and with grammars."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from engines import make_engine
from hypothesis import example, given
from hypothesis import strategies as st

from mlx_kv import CachePolicy
from mlx_kv.bundled import model_path
from mlx_kv.generation.encoding import ChatSettings
from mlx_kv.generation.generate import speculative_generate, stream_generate
from mlx_kv.generation.sequence import TokenSequence
from mlx_kv.generation.thinking import Marks, ThinkingLimit
from mlx_kv.mlxlm.loading import load

VOCABULARY = 6
START, END, CLOSING = (1,), (2, 3), (4, 5)
PROMPT = [0, 0, 0]


def follow(processor: ThinkingLimit, wishes: list[int]) -> list[int]:
    """An answer of a model that wishes these tokens, and takes another one only where it has to."""
    answer: list[int] = []
    for wish in wishes:
        logits = mx.zeros((1, VOCABULARY)).at[0, wish].add(1.0)
        answer.append(int(mx.argmax(processor(mx.array(PROMPT + answer, dtype=mx.int32), logits)).item()))
    return answer


def reference(wishes: list[int], inside: bool, limit: int, start: tuple[int, ...], end: tuple[int, ...]) -> list[int]:
    """The same, as it is defined: thinking is counted as it comes, and at the limit its end is written."""
    answer: list[int] = []
    thinking, thought, forced, ended = inside, 0, list[int](), 0
    begin = len(answer)
    for wish in wishes:
        answer.append(forced.pop(0) if forced else wish)
        span = answer[begin:]
        if not thinking:
            if tuple(span[-len(start) :]) == start:
                thinking, begin = True, len(answer)
        elif tuple(span[-len(end) :]) == end:
            thought += len(span) - len(end)
            thinking, begin, forced, ended = False, len(answer), [], ended + 1
        if (
            thinking
            and not forced
            and thought + len(answer) - begin >= limit
            and len(answer) - begin <= max(0, limit - thought)
        ):
            span = answer[begin:]
            begun = next((n for n in range(len(end) - 1, 0, -1) if tuple(span[-n:]) == end[:n]), 0)
            forced = list(end[begun:] if begun else end if ended else CLOSING + end)
    return answer


@example([0, 2, 0, 0, 3, 0, 0, 0], True, 2, (1,), (2, 3))  # it has begun to end it
@example([1, 0, 2, 1, 0, 0, 0, 0, 0], False, 2, (1,), (2,))  # and again
@example([0] * 9, True, 2, (1,), (2, 3))
@given(
    wishes=st.lists(st.sampled_from([0, 0, 5, 1, 2, 3, 4]), min_size=8, max_size=24),
    inside=st.booleans(),
    limit=st.integers(0, 5),
    start=st.sampled_from([(1,), (1, 5)]),
    end=st.sampled_from([(2,), (2, 3), (2, 3, 4)]),
)
def test_an_answer_is_what_it_is_by_definition(
    wishes: list[int], inside: bool, limit: int, start: tuple[int, ...], end: tuple[int, ...]
) -> None:
    processor = ThinkingLimit(Marks(start, end, inside), limit, CLOSING, len(PROMPT))
    answer = follow(processor, wishes)
    assert answer == reference_of(wishes, inside, limit, start, end)
    for place in range(len(answer)):  # drafts: what is allowed is what would be said
        drafted = wishes[place:]
        count = processor.allowed(mx.array(PROMPT + answer[:place], dtype=mx.int32), drafted)
        alone = follow_from(processor, answer[:place], drafted)
        assert count == next((i for i, (a, b) in enumerate(zip(alone, drafted, strict=True)) if a != b), len(drafted))


def reference_of(wishes: list[int], inside: bool, limit: int, start: Any, end: Any) -> list[int]:
    """`reference`, where the first token may be forced already."""
    if not (inside and limit == 0):
        return reference(wishes, inside, limit, start, end)
    forced = [*CLOSING, *end]
    first = [*forced[: len(wishes)]]
    rest = wishes[len(forced) :]
    return first + reference_rest(rest, start, end)


def reference_rest(wishes: list[int], start: Any, end: Any) -> list[int]:
    """After a limit of 0 was reached: thinking that begins anew ends at once."""
    answer: list[int] = []
    forced: list[int] = []
    begin = 0
    for wish in wishes:
        answer.append(forced.pop(0) if forced else wish)
        if not forced and tuple(answer[begin:][-len(start) :]) == start:
            forced, begin = list(end), len(answer) + len(end)
    return answer


def follow_from(processor: ThinkingLimit, answer: list[int], wishes: list[int]) -> list[int]:
    said: list[int] = []
    for count, wish in enumerate(wishes):
        tokens = mx.array(PROMPT + answer + wishes[:count], dtype=mx.int32)
        logits = mx.zeros((1, VOCABULARY)).at[0, wish].add(1.0)
        said.append(int(mx.argmax(processor(tokens, logits)).item()))
    return said


@pytest.fixture(scope="module")
def model() -> Any:
    return load(model_path("reference"))


TEXT = "import os\n\ndef main():\n    return os.path.join("


@pytest.mark.parametrize("limit", [0, 5, 23])
def test_drafts_and_batches_say_the_same(model: Any, limit: int) -> None:
    """Thinking that never ends by itself: marks are tokens that the model does not say."""
    network, tokenizer = model
    prompt = tokenizer.encode(TEXT)
    end, closing = (tokenizer.encode("§§")[-1], 77), (99,)
    processor = ThinkingLimit(Marks((1,), end, True), limit, closing, len(prompt))

    def tokens(responses: Any) -> list[int]:
        return [response.token for response in responses]

    options: dict[str, Any] = {"max_tokens": 40, "logits_processors": [processor]}
    wanted = tokens(stream_generate(network, tokenizer, prompt, **options))
    assert wanted[limit : limit + 3] == [*closing, *end]
    free = tokens(stream_generate(network, tokenizer, prompt, max_tokens=40))
    assert (wanted[:limit], wanted[limit + 3 :]) != (free[:limit], free[limit + 3 :])
    assert wanted[:limit] == free[:limit]
    assert tokens(speculative_generate(network, network, tokenizer, prompt, **options)) == wanted
    for policy in (CachePolicy(), CachePolicy(bits=8), CachePolicy(budget=64)):
        alone = None
        for rows in (1, 3):
            engine = make_engine(network, set(), policy)
            said: dict[int, list[int]] = {}
            for number in range(rows):
                sequence = TokenSequence(number, prompt if number == 0 else prompt[number:], 40)
                shown = len(sequence.tokens)
                sequence.processors = (ThinkingLimit(Marks((1,), end, True), limit, closing, shown),)
                engine.submit(sequence)
            while engine.busy:
                for token in engine.step():
                    said.setdefault(token.index, []).append(token.token)
            alone = alone or said[0]
            assert all(each[limit : limit + 3] == [*closing, *end] for each in said.values())
            assert said[0] == alone


def test_a_model_that_does_not_think_has_no_limit(model: Any) -> None:
    assert ThinkingLimit.after(model[1], [1, 2, 3], ChatSettings(thinking_budget=3)) is None


def test_tokens_of_thinking_are_counted() -> None:
    marks = Marks(START, END, False)
    assert [marks.count(each) for each in ([], [0, 1, 4, 4], [1, 4, 2, 3, 4], [1, 2, 3, 1, 5], [4, 4])] == [
        0,
        2,
        1,
        1,
        0,
    ]
    inside = Marks(START, END, True)
    assert [inside.count(each) for each in ([4, 4, 2], [4, 2, 3, 4], [2, 3])] == [3, 1, 0]
    limit = ThinkingLimit(inside, 2, (), 0)
    assert [limit.reached(each) for each in ([4], [4, 4, 2, 3], [4, 2, 3, 4, 4, 4])] == [False, True, False]
    assert np.isneginf(np.array(limit(mx.array([4, 4]), mx.zeros((1, VOCABULARY))))).sum() == VOCABULARY - 1


def test_calls_are_no_thinking_and_nothing_is_forced_into_them() -> None:
    marks, limit = Marks((1,), (2,), False, (8,), (9,)), 3
    in_call, begun_in_thinking = [1, 5, 2, 8, 5, 5, 1, 5, 5, 5, 5, 5, 9, 7], [1, 5, 8, 5, 5, 5, 5, 9, 7, 7]
    assert (marks.count(in_call), marks.count(begun_in_thinking)) == (1, 1)
    processor = ThinkingLimit(marks, limit, (), 0)
    for answer in (in_call, begun_in_thinking):
        for count in range(len(answer)):
            assert processor._forced(answer[:count]) is None
    assert processor._forced([1, 5, 2, 8, 1, 9, 1, 5, 5]) == 2


def test_the_closing_text_has_no_special_tokens(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    class Adding:
        has_thinking = True
        has_tool_calling = False
        tool_call_start_tokens = tool_call_end_tokens = None
        think_start, think_end, think_start_tokens, think_end_tokens = "a", "b", (1,), (2,)

        def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
            return [*([0] if add_special_tokens else []), *map(ord, text)]

        def decode(self, tokens: list[int]) -> str:
            return "x"

    limit = ThinkingLimit.after(Adding(), [1], ChatSettings(thinking_budget=0, thinking_closing="no"))
    assert limit is not None
    assert limit._closing == (ord("n"), ord("o"))
