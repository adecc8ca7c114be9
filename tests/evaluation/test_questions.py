"""Questions in the turns of a chat: what must be found stands in the context, where a score has to find it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from characters import Characters

from mlx_kv.evaluation.questions.case import Ask, Room, Talk, make_case, strewn
from mlx_kv.evaluation.questions.tasks import QUESTIONS, case_of
from mlx_kv.evaluation.questions.texts import Function, Texts, functions_of, paragraphs, python_texts

ROOM = Room(context=1500, keep_recent=64)
FACTS = ("needle", "needles", "many_needles", "tracking", "chat")


LINES = tuple(
    f"Paragraph {name} says a few words about nothing at all, goes on and on, and then at last it ends here."
    for name in "abcdefghijklm"
)
CODE = tuple(
    Function(
        f"function_{name}", ("a", "b"), f'def function_{name}(a, b):\n    """Add {name}."""\n    return a + b + 17'
    )
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
    tokens, answers, parts = case.chain()
    assert len(tokens) == len(answers)
    assert answers[0] == 0
    assert sorted(set(answers.tolist())) == list(range(len(parts) + 1))
    assert case.context[: len(case.alone)] == case.alone


@pytest.mark.parametrize("task", FACTS)
def test_what_must_be_found_stands_in_the_context_and_never_in_what_is_always_kept(task: str) -> None:
    for seed in range(20):
        talk = Talk(Characters("there is one"))
        case = case_of(task, talk, SOME, ROOM, seed, 0)
        text = talk.decode(case.context[len(case.alone) : -ROOM.keep_recent])
        for turn in case.first:
            numbers = np.array(turn.answers)
            starts = np.flatnonzero(numbers[1:] * (numbers[:-1] != numbers[1:]))
            answer = talk.decode([token for token, number in zip(turn.tokens, turn.answers, strict=True) if number])
            assert starts.size
            for word in answer.split():
                assert word in text, (seed, answer)


@pytest.mark.parametrize("task", ["passages", "code"])
def test_real_texts_are_asked_for_word_by_word(task: str) -> None:
    talk = Talk(Characters("there is one"))
    case = case_of(task, talk, SOME, ROOM, 0, 0)
    text = talk.decode(case.context[len(case.alone) : -ROOM.keep_recent])
    for turn in case.first:
        reply = talk.decode(turn.tokens[turn.seen :]).removeprefix("```python\n")
        assert reply in text
        words = [talk.decode([token]).isalnum() for token in turn.tokens[turn.seen :]]
        assert max(turn.answers) == sum(map(bool, turn.answers))  # each letter counts for itself, and nothing else
        found = turn.answers[turn.seen :]
        last = max(i for i, number in enumerate(found) if not number and words[i])  # of what is given
        assert [bool(number) for number in found[last + 1 :]] == words[last + 1 :]


def test_a_function_that_is_changed_has_its_new_name_and_its_own_body() -> None:
    talk = Talk(Characters())
    for turn in case_of("editing", talk, SOME, ROOM, 0, 0).first:
        asked, reply = talk.decode(turn.tokens[: turn.seen]), talk.decode(turn.tokens[turn.seen :])
        name = reply.split("def ")[1].split("(")[0]
        assert name.startswith("new_function_")
        assert f"rename it to {name}" in asked
        assert name.removeprefix("new_") in asked


def test_a_chat_says_turns_as_its_template_does() -> None:
    talk = Talk(Characters("there is one"))
    case = make_case(
        talk, "Read. ", talk.encode("Text."), [Ask("Who?", ("It is", " me")), Ask("When?", ("At", " one"))]
    )
    chain, answers, _ = case.chain()
    whole = talk.decode([*case.context, *chain.tolist()])
    assert whole == "[be kind][user]Read. Text.\n\nWho?[end][assistant]It is me[end][user]When?[end][assistant]At one"
    assert talk.decode(chain[answers == 2]) == " one"
    plain = Talk(Characters())
    case = make_case(plain, "Read. ", plain.encode("Text."), [Ask("Who?", ("It is", " me"))] * 2)
    whole = plain.decode([*case.context, *case.chain()[0].tolist()])
    assert whole == "Read. Text.\n\nWho?\nAnswer:It is me\n\nQuestion: Who?\nAnswer:It is me"


def test_pieces_stand_between_units_and_all_of_them_are_there() -> None:
    def filler() -> Any:
        while True:
            yield [1, 2, 3]

    places = set()
    for seed in range(30):
        text = strewn(np.random.default_rng(seed), filler(), [[7, 7], [8, 8]], 40, 10)
        assert len(text) == 40
        first, second = text.index(7), text.index(8)
        assert first % 3 == 0
        assert first < second < 40 - 10 - 1
        places.add(first)
    assert len(places) > 4
    with pytest.raises(ValueError, match="4 tokens to be found do not fit into 3: give a longer context"):
        strewn(np.random.default_rng(0), filler(), [[7, 7], [8, 8]], 13, 10)


def test_prose_is_without_code_and_tables_and_functions_are_whole(texts: Texts) -> None:
    text = "Title\n*****\n\nOne two three four five six\nseven eight nine.\n\n   code = 1\n\n| a | table of words |\n"
    assert paragraphs(text) == ["One two three four five six seven eight nine."]
    source = "def f(a):\n    b = a\n    c = b\n    return c\n\ndef g(): return 1\n"
    assert functions_of(source) == [Function("f", ("a",), source.partition("\n\ndef g")[0])]
    assert len(texts.prose) > 300
    assert len(texts.functions) > 150
    assert all(function.source.startswith(f"def {function.name}(") for function in texts.functions)
