"""Tasks that put questions to a language model in English: facts hidden in prose, real texts, code, and chats.

The wording was chosen so that SmolLM2-135M-Instruct gives nine of ten answers right with all of a context in its cache.
Prose and code are the reference and the library that come with Python.
"""

from __future__ import annotations

import ast
import importlib.util
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import count
from pathlib import Path

import numpy as np

from mlx_kv.calibration.texts import (
    CITIES,
    FACTS,
    MODULES,
    PEOPLE,
    REMEMBER,
    WORDS,
    Tokens,
    facts_about,
    prose,
    python_prose,
    scatter,
)
from mlx_kv.calibration.texts import Talk as ChatTalk

from .tasks import Trial

# --- cases ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ask:
    """One question.

    Attributes:
        question: of the user.
        reply: of the assistant, given parts and parts to be found in turns: "The sky is", " blue", ...
        by_token: whether each token to be found that has a letter or digit counts as an answer; else each part does.
    """

    question: str
    reply: tuple[str, ...]
    by_token: bool = False


@dataclass(frozen=True)
class Turns:
    """Questions and replies in tokens.

    Attributes:
        tokens: of questions and replies, the parts to be found included.
        answers: the answer that each token belongs to, counted from 1; 0 is none.
    """

    tokens: Tokens
    answers: Tokens


@dataclass(frozen=True)
class Case:
    """A context and the questions about it.

    Attributes:
        context: C tokens.
        instruction: of the context, without its text.
        asks: what is asked.
        turns: the same in tokens: a question, its reply, the next question, ...
    """

    context: Tokens
    instruction: Tokens
    asks: tuple[Ask, ...]
    turns: Turns


class Talk(ChatTalk):
    """Encodes the turns of a chat, and the replies to be found."""

    def reply(self, ask: Ask, last: int, before: str = "") -> tuple[Tokens, Tokens]:
        """A reply, and the answer that each of its tokens belongs to, numbered from `last` + 1."""
        tokens: Tokens = []
        answers: Tokens = []
        for index, text in enumerate(ask.reply):
            part = self.encode(text if index else before + text)
            tokens += part
            if index % 2 == 0:
                answers += [0] * len(part)
            elif ask.by_token:
                answers += self._by_token(part, max([last, *answers]))
            else:
                answers += [last + 1] * len(part)
        return tokens, answers

    def _by_token(self, part: Tokens, last: int) -> Tokens:
        """Each token with a letter or a digit is one answer."""
        counts = [any(letter.isalnum() for letter in self.decode([token])) for token in part]
        return [last + sum(counts[: i + 1]) if counts[i] else 0 for i in range(len(part))]


@dataclass(frozen=True)
class Room:
    """The tokens of a context, and how many of the last ones every policy keeps."""

    context: int
    keep_recent: int


def make_case(talk: Talk, instruction: str, text: Tokens, asks: Sequence[Ask]) -> Case:
    """A user's message of an instruction and a text, and the questions about it."""
    beginning = talk.beginning(instruction)
    tokens: Tokens = []
    answers: Tokens = []
    for index, ask in enumerate(asks):
        question = talk.question(ask.question, first=index == 0)
        reply, numbers = talk.reply(ask, max(answers, default=0))
        tokens += question + reply
        answers += [0] * len(question) + numbers
    return Case(beginning + text, beginning, tuple(asks), Turns(tokens, answers))


def replies_after_all(talk: Talk, asks: Sequence[Ask]) -> tuple[Tokens, Turns]:
    """All questions in one message, and then all replies."""
    turns = Turns([], [])
    for index, ask in enumerate(asks):
        reply, numbers = talk.reply(ask, max(turns.answers, default=0), "\n" if index else "")
        turns = Turns(turns.tokens + reply, turns.answers + numbers)
    return talk.question("\n".join(ask.question for ask in asks), first=True), turns


def trial_of(talk: Talk, case: Case, seen: bool) -> Trial:
    """A case as one row.

    Args:
        seen: whether all questions are part of the context and only the replies follow; else questions follow one by
            one, each with its reply.
    """
    questions, turns = replies_after_all(talk, case.asks) if seen else ([], case.turns)
    return Trial(
        context=np.array([case.context + questions]),
        questions=np.array([turns.tokens]),
        answers=np.array([turns.answers]),
        alone=np.array([case.instruction + questions]),
    )


# --- texts ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Function:
    """A function of a module, with its source."""

    name: str
    source: str


@dataclass(frozen=True)
class Texts:
    """Paragraphs of prose and functions, each in the order of their sources."""

    prose: tuple[str, ...]
    functions: tuple[Function, ...]


FUNCTION_LINES = (4, 40)  # minimum and maximum


def functions_of(source: str) -> list[Function]:
    """The top-level functions of a module with a number of lines within `FUNCTION_LINES`."""
    found, lines = [], source.splitlines()
    min_lines, max_lines = FUNCTION_LINES
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef) and node.end_lineno is not None:
            source_lines = lines[node.lineno - 1 : node.end_lineno]
            if min_lines <= len(source_lines) <= max_lines:
                found.append(Function(node.name, "\n".join(source_lines)))
    return found


@cache
def python_texts() -> Texts:
    """The reference and the library that come with this Python.

    Raises:
        ValueError: this Python comes without them.
    """
    functions: list[Function] = []
    for name in MODULES:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.has_location and spec.origin:
            functions += functions_of(Path(spec.origin).read_text(encoding="utf-8"))
    if not functions:
        raise ValueError("this Python comes without the source of its library")
    return Texts(python_prose(), tuple(functions))


# --- facts in prose ---------------------------------------------------------------------------------------------------

CHAINS = (
    ("has lost", "was found in", "Where was found what {} has lost?"),
    ("has found", "was sold to a museum in", "Where was sold what {} has found?"),
)


def in_prose(
    rng: np.random.Generator,
    talk: Talk,
    lines: Sequence[str],
    room: Room,
    instruction: str,
    facts: list[str],
    asks: list[Ask],
) -> Case:
    length = room.context - len(talk.beginning(instruction))
    pieces = [talk.encode(fact + "\n") for fact in facts]
    text = scatter(rng, prose(rng, talk, lines), pieces, length, room.keep_recent)
    return make_case(talk, instruction, text, asks)


def people(rng: np.random.Generator, talk: Talk, lines: Sequence[str], room: Room, count: int) -> Case:
    """`count` facts, with a question for each."""
    facts = facts_about(rng, count)
    asks = [
        Ask(question.format(name), (f"{name} {verb}", f" {word}"))
        for name, verb, word, question in [facts[i] for i in rng.permutation(count).tolist()]
    ]
    stated = [f"{name} {verb} {word}." for name, verb, word, _ in facts]
    return in_prose(rng, talk, lines, room, REMEMBER, stated, asks)


def needle(rng: np.random.Generator, talk: Talk, texts: Texts, room: Room) -> Case:
    """One number to be found."""
    name, number = str(rng.choice(CITIES)), str(rng.integers(1000, 10000))
    ask = Ask(f"What is the secret number of {name}?", (f"The secret number of {name} is", f" {number}"))
    instruction = "Read the text below. Somewhere in it stands the secret number of a city. Remember it.\n\n"
    return in_prose(rng, talk, texts.prose, room, instruction, [f"The secret number of {name} is {number}."], [ask])


def needles(rng: np.random.Generator, talk: Talk, texts: Texts, room: Room) -> Case:
    """Four facts."""
    return people(rng, talk, texts.prose, room, 4)


def many_needles(rng: np.random.Generator, talk: Talk, texts: Texts, room: Room) -> Case:
    """Six facts."""
    return people(rng, talk, texts.prose, room, len(FACTS))


def tracking(rng: np.random.Generator, talk: Talk, texts: Texts, room: Room) -> Case:
    """Two chains of facts: the thing that a person has, and the place of that thing; both must be found."""
    names, places = rng.permutation(PEOPLE)[:2].tolist(), rng.permutation(CITIES)[:2].tolist()
    things = rng.permutation(WORDS)[:2].tolist()
    about_people: list[str] = []
    about_things: list[str] = []
    asks = []
    for name, thing, place, (has, is_in, question) in zip(names, things, places, CHAINS, strict=True):
        about_people.append(f"{name} {has} the {thing}.")
        about_things.append(f"The {thing} {is_in} {place}.")
        reply = (f"{name} {has} the", f" {thing}", f". The {thing} {is_in}", f" {place}")
        asks.append(Ask(question.format(name), reply))
    return in_prose(rng, talk, texts.prose, room, REMEMBER, about_people + about_things, asks)


# --- real texts, code and chats ---------------------------------------------------------------------------------------

ASKED = 4
FRIENDS = 3  # of the first kinds of facts: no numbers, which a small model loses in a chat
LEAD_WORDS, ANSWER_WORDS = 12, 8
UNUSUAL = re.compile(r"[^\w\s.,:;'\u2019\"()*-]|__")  # paragraphs with such characters are left out
GIVEN_TOKENS, FOUND_TOKENS = 32, 32  # of a function that are given, and to be written


def passages(rng: np.random.Generator, talk: Talk, texts: Texts, room: Room) -> Case:
    """Prose; some paragraphs are given up to a word and must be continued."""
    instruction = "Read the text below. I will ask about what it says.\n\n"
    length = room.context - len(talk.beginning(instruction))
    taken: list[str] = []
    text: Tokens = []
    lines = [line for line in texts.prose if len(line.split()) >= LEAD_WORDS + 4 and not UNUSUAL.search(line)]
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
    """Code; some functions must be copied, as they are or under another name."""
    instruction = "Here is the code of a module in Python.\n\n```python\n"
    length = room.context - len(talk.beginning(instruction))
    all_functions = texts.functions
    for first in rng.permutation(len(all_functions)).tolist():  # until a whole function fits
        taken: list[Function] = []
        text: Tokens = []
        for index in count(first):
            text += talk.encode(all_functions[index % len(all_functions)].source + "\n\n\n")
            if len(text) >= length:
                break
            if len(text) <= length - room.keep_recent:
                taken.append(all_functions[index % len(all_functions)])
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
    """A chat of many turns, some of which are facts about friends to be found."""
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
    begun = talk.beginning(instruction)
    opening = talk.exchange("", "Hello! I am happy to help.")
    length = room.context - len(begun) - len(opening)
    text = opening + scatter(rng, turns(), pieces, length, room.keep_recent)
    return make_case(talk, instruction, text, asks)


# --- all of them ------------------------------------------------------------------------------------------------------

CaseMaker = Callable[[np.random.Generator, Talk, Texts, Room], Case]

QUESTIONS: dict[str, CaseMaker] = {
    "needle": needle,
    "needles": needles,
    "many_needles": many_needles,
    "tracking": tracking,
    "passages": passages,
    "code": code,
    "editing": editing,
    "chat": chat,
}


def case_of(task: str, talk: Talk, texts: Texts, room: Room, seed: int, row: int) -> Case:
    """One case of a task; the same for the same seed and row.

    Raises:
        ValueError: a context that is too short for the task.
    """
    return QUESTIONS[task](np.random.default_rng([seed, row]), talk, texts, room)
