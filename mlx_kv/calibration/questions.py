"""Questions about facts hidden in prose, in the turns of a chat, as token ids.

A case is one context of C tokens with one or more asks: a question of the user, and a reply with given parts and parts
to be found. What must be found is never among the last `keep_recent` tokens of a context, nor among the first ones,
which are those of the chat and of the instruction. The wording was chosen so that SmolLM2-135M-Instruct gives nine of
ten answers right with all of a context in its cache. The prose is the
reference that comes with Python.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

from mlx_kv.generation.encoding import applied_template

Tokens = list[int]

MARKS = ("<first>", "<second>", "<third>")  # in place of the messages, to find what a chat template puts between them


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
        asked: number of tokens before the first reply.
    """

    tokens: Tokens
    answers: Tokens
    asked: int


@dataclass(frozen=True)
class Case:
    """A context and the questions about it.

    Attributes:
        context: C tokens.
        apart: a question, its reply, the next question, ...
        together: all questions in one message, and then all replies.
        alone: the instruction of the context, without its text.
    """

    context: Tokens
    apart: Turns
    together: Turns
    alone: Tokens


class Talk:
    """Encodes the turns of a chat; without a chat template, as questions and answers in a text."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        bos = getattr(tokenizer, "bos_token_id", None)
        self._start = [] if bos is None else [bos]
        self._before, self._answer, self._again = "", "\nAnswer:", "\n\nQuestion: "
        if getattr(tokenizer, "chat_template", None) is not None:
            self._start = []
            roles = ("user", "assistant", "user")
            messages = [{"role": role, "content": mark} for role, mark in zip(roles, MARKS, strict=True)]
            text: str = applied_template(tokenizer, messages, False)
            self._before, _, text = text.partition(MARKS[0])
            self._answer, _, text = text.partition(MARKS[1])
            self._again, _, _ = text.partition(MARKS[2])

    def encode(self, text: str) -> Tokens:
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def decode(self, tokens: Tokens) -> str:
        text: str = self._tokenizer.decode(tokens)
        return text

    def encodes_english(self) -> bool:
        """Whether a sentence is the same after it was encoded and decoded, but for white space."""
        sample = "The number 1234 is here, print(x)."
        return "".join(self.decode(self.encode(sample)).split()) == "".join(sample.split())

    def begun(self, instruction: str) -> Tokens:
        """The beginning of a user's message."""
        return self._start + self.encode(self._before + instruction)

    def exchange(self, message: str, answer: str) -> Tokens:
        """The rest of a user's message, the assistant's answer, and the beginning of the next message."""
        return self.encode(message + self._answer) + self.encode(answer + self._again)

    def question(self, text: str, first: bool) -> Tokens:
        """A question at the end of the first message, or as a message of its own; up to where the answer begins."""
        return self.encode(("\n\n" if first else self._again) + text + self._answer)

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


def take(units: Iterable[Tokens], length: int) -> list[Tokens]:
    """The first units of `length` tokens in all, the last one cut.

    Raises:
        ValueError: there are fewer tokens.
    """
    taken: list[Tokens] = []
    left = length
    for unit in units:
        if left <= 0:
            break
        taken.append(unit[:left])
        left -= len(taken[-1])
    if left > 0:
        raise ValueError(f"{length:,} tokens of text are needed, but {left:,} are missing: give a longer text")
    return taken


def scatter(
    rng: np.random.Generator, filler: Iterator[Tokens], pieces: Sequence[Tokens], length: int, keep_recent: int
) -> Tokens:
    """`length` tokens: pieces, in their order, between units of filler but not in the last `keep_recent` tokens.

    Raises:
        ValueError: the pieces do not fit.
    """
    size = sum(map(len, pieces))
    if length - keep_recent - size < 0:
        raise ValueError(f"{size:,} tokens to be found do not fit into {length - keep_recent:,}: give a longer context")
    units = take(filler, length - size)
    starts = np.cumsum([0, *map(len, units)])[:-1]
    places = int((starts <= length - keep_recent - size).sum())
    before = np.sort(rng.integers(places, size=len(pieces))).tolist()
    text: Tokens = []
    for index, unit in enumerate(units):
        for place, piece in zip(before, pieces, strict=True):
            if place == index:
                text += piece
        text += unit
    return text


def make_case(talk: Talk, instruction: str, text: Tokens, asks: Sequence[Ask]) -> Case:
    """A user's message of an instruction and a text, and the questions about it."""
    begun = talk.begun(instruction)
    return Case(begun + text, turns_apart(talk, asks), turns_together(talk, asks), begun)


def turns_apart(talk: Talk, asks: Sequence[Ask]) -> Turns:
    tokens: Tokens = []
    answers: Tokens = []
    for index, ask in enumerate(asks):
        question = talk.question(ask.question, first=index == 0)
        reply, numbers = talk.reply(ask, max(answers, default=0))
        tokens += question + reply
        answers += [0] * len(question) + numbers
    return Turns(tokens, answers, len(talk.question(asks[0].question, first=True)))


def turns_together(talk: Talk, asks: Sequence[Ask]) -> Turns:
    tokens = talk.question("\n".join(ask.question for ask in asks), first=True)
    asked, answers = len(tokens), [0] * len(tokens)
    for index, ask in enumerate(asks):
        reply, numbers = talk.reply(ask, max(answers), "\n" if index else "")
        tokens, answers = tokens + reply, answers + numbers
    return Turns(tokens, answers, asked)


# --- texts ------------------------------------------------------------------------------------------------------------

MODULES = (
    *("textwrap", "shlex", "heapq", "bisect", "calendar", "glob", "posixpath", "genericpath", "random"),
    *("statistics", "copy", "fnmatch", "difflib", "inspect", "locale", "pprint", "shutil", "tempfile", "timeit"),
    *("mimetypes", "netrc", "quopri", "base64", "colorsys", "ast", "dis", "gettext", "getopt", "keyword", "linecache"),
)
SENTENCE_WORDS = 8  # minimum words of a paragraph of prose


def paragraphs(text: str) -> list[str]:
    """The paragraphs of prose, each in one line, without headings, tables and code, which are indented or short."""
    found = []
    for block in text.split("\n\n"):
        lines = block.strip("\n").splitlines()
        if lines and not any(line[:1].isspace() or line[:3] in ("***", "===", "---", "| -", "```") for line in lines):
            line = " ".join(" ".join(lines).split())
            if len(line.split()) >= SENTENCE_WORDS and not line.startswith(("|", "#", "-", "*")):
                found.append(line)
    return found


@cache
def python_prose(files: tuple[Path, ...] = ()) -> tuple[str, ...]:
    """Paragraphs of the reference that comes with this Python, or of other files.

    Raises:
        OSError, UnicodeError: a file that cannot be read.
        ValueError: this Python comes without it.
    """
    pages = [path.read_text(encoding="utf-8") for path in files]
    if not pages:
        try:
            from pydoc_data.topics import topics
        except ImportError as error:
            raise ValueError("this Python comes without its reference: give a text") from error
        pages = [topics[name] for name in sorted(topics)]
    return tuple(line for page in pages for line in paragraphs(page))


# --- facts in prose ---------------------------------------------------------------------------------------------------

CITIES = (
    "Paris London Berlin Madrid Rome Vienna Prague Dublin Lisbon Athens Oslo Stockholm Helsinki Warsaw Budapest Moscow "
    "Tokyo Seoul Beijing Delhi Cairo Nairobi Sydney Toronto Chicago Boston Dallas Denver Seattle Havana Lima Quebec"
).split()
WORDS = (
    "apple river stone cloud table chair bread horse mountain garden window candle bridge forest island winter summer "
    "silver copper orange purple yellow guitar pencil basket rabbit tiger dragon castle rocket planet coffee"
).split()
PEOPLE = "Anna Peter Maria David Laura Thomas Sarah Daniel Emma Lucas Julia Simon Helen Martin Alice Robert".split()
# A statement, the question for it, and words to fill in. A context has at most one fact of a kind: a small model
# confuses several of them, even with all of the context in its cache.
FACTS = (
    ("lives in", "Where does {} live?", CITIES),
    ("has lost the", "What has {} lost?", WORDS),
    ("plays the", "What does {} play?", "piano guitar violin trumpet".split()),
    ("has the number", "Which number does {} have?", tuple(map(str, range(1000, 10000, 37)))),
    ("has painted a", "What has {} painted?", "dog cat horse snake bird spider wolf lion".split()),
    ("likes the colour", "Which colour does {} like?", "red blue green yellow orange white black".split()),
)


def prose(rng: np.random.Generator, talk: Talk, lines: Sequence[str]) -> Iterator[Tokens]:
    """Paragraphs in their order, from a random one, repeated without end."""
    first = int(rng.integers(len(lines)))
    for index in count(first):
        yield talk.encode(lines[index % len(lines)] + "\n")


def in_prose(
    rng: np.random.Generator,
    talk: Talk,
    lines: Sequence[str],
    room: Room,
    instruction: str,
    facts: list[str],
    asks: list[Ask],
) -> Case:
    length = room.context - len(talk.begun(instruction))
    pieces = [talk.encode(fact + "\n") for fact in facts]
    text = scatter(rng, prose(rng, talk, lines), pieces, length, room.keep_recent)
    return make_case(talk, instruction, text, asks)


def facts_about(rng: np.random.Generator, count: int) -> list[tuple[str, str, str, str]]:
    """`count` facts of different kinds about different people: name, statement, word, question."""
    names = rng.permutation(PEOPLE)[:count].tolist()
    kinds = [FACTS[i] for i in rng.permutation(count).tolist()]
    return [
        (name, verb, str(rng.choice(words)), asked) for name, (verb, asked, words) in zip(names, kinds, strict=True)
    ]


def people(rng: np.random.Generator, talk: Talk, lines: Sequence[str], room: Room, count: int) -> Case:
    """`count` facts, with a question for each."""
    facts = facts_about(rng, count)
    asks = [
        Ask(asked.format(name), (f"{name} {verb}", f" {word}"))
        for name, verb, word, asked in [facts[i] for i in rng.permutation(count).tolist()]
    ]
    instruction = "Read the text below. Somewhere in it stands something about people. Remember it.\n\n"
    return in_prose(
        rng, talk, lines, room, instruction, [f"{name} {verb} {word}." for name, verb, word, _ in facts], asks
    )
