"""Facts hidden in prose: a number, several facts, many, and two that must be joined.

Decides the wording, which was chosen so that SmolLM2-135M-Instruct, seeing all of its context, is right nine times out
of ten. Knows nothing about models, caches or scores.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

import numpy as np

from mlx_kv.evaluation.questions.case import Ask, Case, Room, Talk, Tokens, make_case, strewn
from mlx_kv.evaluation.questions.texts import Texts

CITIES = (
    "Paris London Berlin Madrid Rome Vienna Prague Dublin Lisbon Athens Oslo Stockholm Helsinki Warsaw Budapest Moscow "
    "Tokyo Seoul Beijing Delhi Cairo Nairobi Sydney Toronto Chicago Boston Dallas Denver Seattle Havana Lima Quebec"
).split()
WORDS = (
    "apple river stone cloud table chair bread horse mountain garden window candle bridge forest island winter summer "
    "silver copper orange purple yellow guitar pencil basket rabbit tiger dragon castle rocket planet coffee"
).split()
PEOPLE = "Anna Peter Maria David Laura Thomas Sarah Daniel Emma Lucas Julia Simon Helen Martin Alice Robert".split()
# What people do, how one asks for it, and words for it. Of one kind there is one in a context: a small model mixes up
# who of several has what, also with all of the context in sight.
FACTS = (
    ("lives in", "Where does {} live?", CITIES),
    ("has lost the", "What has {} lost?", WORDS),
    ("plays the", "What does {} play?", "piano guitar violin trumpet".split()),
    ("has the number", "Which number does {} have?", tuple(map(str, range(1000, 10000, 37)))),
    ("has painted a", "What has {} painted?", "dog cat horse snake bird spider wolf lion".split()),
    ("likes the colour", "Which colour does {} like?", "red blue green yellow orange white black".split()),
)
CHAINS = (
    ("has lost", "was found in", "Where was found what {} has lost?"),
    ("has found", "was sold to a museum in", "Where was sold what {} has found?"),
)


def prose(rng: np.random.Generator, talk: Talk, texts: Texts) -> Iterator[Tokens]:
    """Paragraphs from anywhere in the texts on, around and around."""
    first = int(rng.integers(len(texts.prose)))
    for index in count(first):
        yield talk.encode(texts.prose[index % len(texts.prose)] + "\n")


def in_prose(
    rng: np.random.Generator, talk: Talk, texts: Texts, room: Room, instruction: str, facts: list[str], asks: list[Ask]
) -> Case:
    length = room.context - len(talk.begun(instruction))
    pieces = [talk.encode(fact + "\n") for fact in facts]
    text = strewn(rng, prose(rng, talk, texts), pieces, length, room.keep_recent)
    return make_case(talk, instruction, text, asks)


def needle(rng: np.random.Generator, talk: Talk, texts: Texts, room: Room) -> Case:
    """One number."""
    name, number = str(rng.choice(CITIES)), str(rng.integers(1000, 10000))
    ask = Ask(f"What is the secret number of {name}?", (f"The secret number of {name} is", f" {number}"))
    instruction = "Read the text below. Somewhere in it stands the secret number of a city. Remember it.\n\n"
    return in_prose(rng, talk, texts, room, instruction, [f"The secret number of {name} is {number}."], [ask])


def facts_about(rng: np.random.Generator, count: int) -> list[tuple[str, str, str, str]]:
    """So many facts of different kinds about different people: who, what they do, the word for it, the question."""
    names = rng.permutation(PEOPLE)[:count].tolist()
    kinds = [FACTS[i] for i in rng.permutation(count).tolist()]
    return [
        (name, verb, str(rng.choice(words)), asked) for name, (verb, asked, words) in zip(names, kinds, strict=True)
    ]


def people(rng: np.random.Generator, talk: Talk, texts: Texts, room: Room, count: int) -> Case:
    """So many facts, all of them asked for."""
    facts = facts_about(rng, count)
    asks = [
        Ask(asked.format(name), (f"{name} {verb}", f" {word}"))
        for name, verb, word, asked in [facts[i] for i in rng.permutation(count).tolist()]
    ]
    instruction = "Read the text below. Somewhere in it stands something about people. Remember it.\n\n"
    return in_prose(
        rng, talk, texts, room, instruction, [f"{name} {verb} {word}." for name, verb, word, _ in facts], asks
    )


def needles(rng: np.random.Generator, talk: Talk, texts: Texts, room: Room) -> Case:
    """Four people, all asked about."""
    return people(rng, talk, texts, room, 4)


def many_needles(rng: np.random.Generator, talk: Talk, texts: Texts, room: Room) -> Case:
    """Six people, all asked about."""
    return people(rng, talk, texts, room, len(FACTS))


def tracking(rng: np.random.Generator, talk: Talk, texts: Texts, room: Room) -> Case:
    """Two chains: what a person has, and where that is; of each person, the thing and then the place."""
    names, places = rng.permutation(PEOPLE)[:2].tolist(), rng.permutation(CITIES)[:2].tolist()
    things = rng.permutation(WORDS)[:2].tolist()
    said: list[list[str]] = [[], []]
    asks = []
    for name, thing, place, (has, is_in, question) in zip(names, things, places, CHAINS, strict=True):
        said[0].append(f"{name} {has} the {thing}.")
        said[1].append(f"The {thing} {is_in} {place}.")
        reply = (f"{name} {has} the", f" {thing}", f". The {thing} {is_in}", f" {place}")
        asks.append(Ask(question.format(name), reply))
    instruction = "Read the text below. Somewhere in it stands something about people. Remember it.\n\n"
    return in_prose(rng, talk, texts, room, instruction, said[0] + said[1], asks)
