"""Questions in the turns of a chat: what must be found stands in the context, where a score has to find it."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from characters import Characters

from benchmarks.eval.questions import (
    QUESTIONS,
    Ask,
    Function,
    Room,
    Talk,
    Texts,
    case_of,
    functions_of,
    make_case,
    people,
    python_texts,
    replies_after_all,
)
from mlx_kv.calibration.texts import fact_questions, paragraphs, python_prose, scatter

ROOM = Room(context=1500, keep_recent=64)
FACTS = ("needle", "needles", "many_needles", "tracking", "chat")


LINES = tuple(
    f"Paragraph {name} says a few words about nothing at all, goes on and on, and then at last it ends here."
    for name in "abcdefghijklm"
)
CODE = tuple(
    Function(f"function_{name}", f'def function_{name}(a, b):\n    """Add {name}."""\n    return a + b + 17')
    for name in "abcdefghijklm"
)
SOME = Texts(LINES, CODE)


@pytest.fixture(scope="module")
def texts() -> Texts:
    return python_texts()


@pytest.mark.parametrize("template", [None, "there is one"])
@pytest.mark.parametrize("task", QUESTIONS)
def test_a_case_has_its_length_and_the_same_one_comes_again(task: str, template: str | None) -> None:
    talk = Talk(Characters(template))
    case = case_of(task, talk, SOME, ROOM, 3, 1)
    assert len(case.context) == ROOM.context
    assert case == case_of(task, talk, SOME, ROOM, 3, 1)
    assert case.context != case_of(task, talk, SOME, ROOM, 3, 2).context
    _, replies = replies_after_all(talk, case.asks)
    for turns in (case.turns, replies):
        assert len(turns.tokens) == len(turns.answers)
        assert turns.answers[0] == 0  # what predicts the first answer is given
        assert sorted(set(turns.answers)) == list(range(max(turns.answers) + 1))
    first = len(talk.question(case.asks[0].question, first=True))
    assert case.turns.answers[: first + 1] == [0] * (first + 1)
    assert max(case.turns.answers) == max(replies.answers)
    assert case.context[: len(case.instruction)] == case.instruction


@pytest.mark.parametrize("task", FACTS)
def test_what_must_be_found_stands_in_the_context_and_never_in_what_is_always_kept(task: str) -> None:
    for seed in range(20):
        talk = Talk(Characters("there is one"))
        case = case_of(task, talk, SOME, ROOM, seed, 0)
        text = talk.decode(case.context[len(case.instruction) : -ROOM.keep_recent])
        for turns in (case.turns, replies_after_all(talk, case.asks)[1]):
            numbered = list(zip(turns.tokens, turns.answers, strict=True))
            for number in range(1, max(turns.answers) + 1):
                for word in talk.decode([t for t, n in numbered if n == number]).split():
                    assert f" {word}." in text, (seed, word)


@pytest.mark.parametrize("task", ["passages", "code"])
def test_real_texts_are_asked_for_word_by_word(task: str) -> None:
    talk = Talk(Characters("there is one"))
    case = case_of(task, talk, SOME, ROOM, 0, 0)
    text = talk.decode(case.context[len(case.instruction) : -ROOM.keep_recent])
    _, turns = replies_after_all(talk, case.asks)
    between = "\n```python\n" if task == "code" else "\nParagraph"
    replies = talk.decode(turns.tokens).split(between)
    assert len(replies) == 4
    for reply in replies:
        assert reply.removeprefix("```python\n") in text
    found = talk.decode([t for t, n in zip(turns.tokens, turns.answers, strict=True) if n])
    assert found.isalnum()  # each letter counts for itself, and nothing else
    assert max(turns.answers) == len(found)


def test_a_function_that_is_changed_has_its_new_name_and_its_own_body() -> None:
    talk = Talk(Characters())
    questions, replies = replies_after_all(talk, case_of("editing", talk, SOME, ROOM, 0, 0).asks)
    asked, reply = talk.decode(questions), talk.decode(replies.tokens)
    written = re.findall(r"def (\w+)\(", reply)
    assert len(written) == 4
    for name in written:
        assert name.startswith("new_function_")
        assert f"Copy the function {name.removeprefix('new_')} " in asked
        assert f"rename it to {name}." in asked


def test_a_chat_says_turns_as_its_template_does() -> None:
    talk = Talk(Characters("there is one"))
    asks = [Ask("Who?", ("It is", " me")), Ask("When?", ("At", " one", " or", " two"))]
    case = make_case(talk, "Read. ", talk.encode("Text."), asks)
    begun = "[be kind][user]Read. Text.\n\nWho?"
    assert talk.decode([*case.context, *case.turns.tokens]) == (
        f"{begun}[end][assistant]It is me[end][user]When?[end][assistant]At one or two"
    )
    questions, replies = replies_after_all(talk, asks)
    assert talk.decode([*case.context, *questions, *replies.tokens]) == (
        f"{begun}\nWhen?[end][assistant]It is me\nAt one or two"
    )
    for turns in (case.turns, replies):
        numbered = list(zip(turns.tokens, turns.answers, strict=True))
        assert [talk.decode([t for t, n in numbered if n == i]) for i in (1, 2)] == [" me", " one two"]
    assert talk.decode(questions) == "\n\nWho?\nWhen?[end][assistant]"
    plain = Talk(Characters())
    case = make_case(plain, "Read. ", plain.encode("Text."), [Ask("Who?", ("It is", " me"))] * 2)
    whole = plain.decode([*case.context, *case.turns.tokens])
    assert whole == "Read. Text.\n\nWho?\nAnswer:It is me\n\nQuestion: Who?\nAnswer:It is me"


@pytest.mark.parametrize("template", [None, "there is one"])
def test_the_report_of_a_calibration_asks_for_six_facts(template: str | None) -> None:
    talk = Talk(Characters(template))
    case = people(np.random.default_rng(3), talk, python_prose(), ROOM, 6)
    asked = fact_questions(np.random.default_rng(3), talk, ROOM.context, ROOM.keep_recent)
    assert asked == (case.context, case.turns.tokens, case.turns.answers)


def test_pieces_stand_between_units_and_all_of_them_are_there() -> None:
    def filler() -> Any:
        while True:
            yield [1, 2, 3]

    places = set()
    for seed in range(30):
        text = scatter(np.random.default_rng(seed), filler(), [[7, 7], [8, 8]], 40, 10)
        assert len(text) == 40
        first, second = text.index(7), text.index(8)
        assert first % 3 == 0
        assert first < second < 40 - 10 - 1
        places.add(first)
    assert len(places) > 4
    with pytest.raises(ValueError, match="4 tokens to be found do not fit into 3: give a longer context"):
        scatter(np.random.default_rng(0), filler(), [[7, 7], [8, 8]], 13, 10)


def test_prose_is_without_code_and_tables_and_functions_are_whole(texts: Texts) -> None:
    text = "Title\n*****\n\nOne two three four five six\nseven eight nine.\n\n   code = 1\n\n| a | table of words |\n"
    assert paragraphs(text) == ["One two three four five six seven eight nine."]
    source = "def f(a):\n    b = a\n    c = b\n    return c\n\ndef g(): return 1\n"
    assert functions_of(source) == [Function("f", source.partition("\n\ndef g")[0])]
    assert len(texts.prose) > 300
    assert len(texts.functions) > 150
    assert all(function.source.startswith(f"def {function.name}(") for function in texts.functions)
