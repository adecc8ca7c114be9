"""Questions about real texts: the words of a passage, functions to be written again or changed, a chat of many turns.

Decides the wording and which passages are asked for. Answers are words that stand in the context. Knows nothing about
models, caches or scores.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import count

import numpy as np

from mlx_kv.evaluation.questions.case import Ask, Case, Room, Talk, Tokens, make_case, strewn
from mlx_kv.evaluation.questions.needles import facts_about
from mlx_kv.evaluation.questions.texts import Function, Texts

ASKED = 4
FRIENDS = 3  # and no numbers of theirs: a small model loses those in a chat
LEAD_WORDS, ANSWER_WORDS = 12, 8
ODD = re.compile(r"[^\w\s.,:;'\u2019\"()*-]|__")  # a paragraph with such characters is left out
GIVEN_TOKENS, FOUND_TOKENS = 32, 32  # of a function that are given, and to be written


def passages(rng: np.random.Generator, talk: Talk, texts: Texts, room: Room) -> Case:
    """Prose; of some passages the beginning, and how they go on."""
    instruction = "Read the text below. I will ask about what it says.\n\n"
    length = room.context - len(talk.begun(instruction))
    taken: list[str] = []
    text: Tokens = []
    lines = [line for line in texts.prose if len(line.split()) >= LEAD_WORDS + 4 and not ODD.search(line)]
    if not lines:
        raise ValueError("the text has no paragraph to ask for: give a longer one")
    first = int(rng.integers(len(lines)))
    for index in count(first):
        line = lines[index % len(lines)]
        text += talk.encode(line + "\n")
        if len(text) >= length:
            break
        if len(text) <= length - room.keep_recent:
            taken.append(line)
    if not taken:
        raise ValueError(f"no paragraph to ask for fits into a context of {room.context:,}: give a longer context")
    asks = []
    for line in rng.permutation(taken)[:ASKED].tolist():
        words = line.split()
        lead, answer = " ".join(words[:LEAD_WORDS]), " ".join(words[LEAD_WORDS:][:ANSWER_WORDS])
        question = f'Copy the paragraph that begins with "{" ".join(words[:4])}", word by word.'
        asks.append(Ask(question, (lead, f" {answer}"), by_token=True))
    return make_case(talk, instruction, text[:length], asks)


def functions(rng: np.random.Generator, talk: Talk, texts: Texts, room: Room, change: bool) -> Case:
    """Code; some functions are to be written again, as they are or under another name."""
    instruction = "Here is the code of a module in Python.\n\n```python\n"
    length = room.context - len(talk.begun(instruction))
    known = texts.functions
    for first in rng.permutation(len(known)).tolist():  # the first from which on any is there to be asked for
        taken: list[Function] = []
        text: Tokens = []
        for index in count(first):
            text += talk.encode(known[index % len(known)].source + "\n\n\n")
            if len(text) >= length:
                break
            if len(text) <= length - room.keep_recent:
                taken.append(known[index % len(known)])
        if taken:
            break
    else:
        raise ValueError(f"no function to ask for fits into a context of {room.context:,}: give a longer context")
    asks = []
    for index in rng.permutation(len(taken))[:ASKED].tolist():
        function = taken[index]
        name = "new_" + function.name if change else function.name
        renamed = f", but rename it to {name}" if change else ""
        question = f"Copy the function {function.name} from the code above, word by word{renamed}."
        source = re.sub(rf"^def {function.name}\b", f"def {name}", function.source)
        tokens = talk.encode(source)
        given = max(GIVEN_TOKENS, len(talk.encode(source.partition("\n")[0])))
        found = talk.decode(tokens[given : given + FOUND_TOKENS])
        asks.append(Ask(question, ("```python\n" + talk.decode(tokens[:given]), found), by_token=True))
    return make_case(talk, instruction, text[:length], asks)


def code(rng: np.random.Generator, talk: Talk, texts: Texts, room: Room) -> Case:
    return functions(rng, talk, texts, room, change=False)


def editing(rng: np.random.Generator, talk: Talk, texts: Texts, room: Room) -> Case:
    return functions(rng, talk, texts, room, change=True)


def chat(rng: np.random.Generator, talk: Talk, texts: Texts, room: Room) -> Case:
    """A chat of many turns, in some of which the user tells about friends; then they are asked for."""
    pieces, asks = [], []
    for name, verb, word, question in facts_about(rng, FRIENDS):
        pieces.append(talk.exchange(f"{name} {verb} {word}.", "Thank you, I will remember it."))
        asks.append(Ask(question.format(name), (f"{name} {verb}", f" {word}")))
    asks = [asks[i] for i in rng.permutation(len(asks)).tolist()]
    first = int(rng.integers(len(texts.prose)))

    def turns() -> Iterator[Tokens]:
        for index in count(first):
            line = texts.prose[index % len(texts.prose)]
            if 12 <= len(line.split()) <= 60:
                yield talk.exchange("Please tell me more about Python.", line)

    instruction = "Hello, I have some questions about Python."
    begun = talk.begun(instruction)
    opening = talk.exchange("", "Hello! I am happy to help.")
    length = room.context - len(begun) - len(opening)
    text = opening + strewn(rng, turns(), pieces, length, room.keep_recent)
    return make_case(talk, instruction, text, asks)
