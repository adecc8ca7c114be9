"""Contexts and questions in token ids: what a cache should still let a model find.

A trial is B rows of a context of C tokens, which is compressed, and of Q tokens that are read only then, answers
included. What must be found never lies among the first `sinks` tokens or the last `keep_recent` ones, which every
policy keeps. Words are those of the bundled recall model, or English for any other tokenizer:

    <end> f017 f101 set k05 v33 f020 .. set k61 v02 f007 .. get k61 v02 get k05 v33      recall, queries at the end
    <end> f017 .. copy f090 f003 f111 f054 f099 .. again f090 f003 f111 f054             copy
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from mlx_kv.calibration.texts import Tokens
from mlx_kv.settings import SettingError

# --- the words of the recall model ------------------------------------------------------------------------------------

KEYS, VALUES, SUCCESSORS = 64, 64, 4
VOCAB_SIZE = 256
END, SET, GET, COPY, AGAIN = range(5)
FIRST_KEY = 5
FIRST_VALUE = FIRST_KEY + KEYS
FIRST_FILLER = FIRST_VALUE + VALUES
FILLERS = VOCAB_SIZE - FIRST_FILLER
WORDS = (
    *("<end>", "set", "get", "copy", "again"),
    *(f"k{i:02}" for i in range(KEYS)),
    *(f"v{i:02}" for i in range(VALUES)),
    *(f"f{i:03}" for i in range(FILLERS)),
)
FILLER_POOL = (FIRST_FILLER, VOCAB_SIZE)

# (FILLERS, SUCCESSORS): the words that may follow a filler word. Columns are permutations: all are equally frequent.
FOLLOWS = np.stack([np.random.default_rng(64 + i).permutation(FILLERS) for i in range(SUCCESSORS)], 1)


def filler_rows(rng: np.random.Generator, rows: int, length: int) -> np.ndarray:
    """(rows, length) token ids: random walks on `FOLLOWS`, log(4) nats per word at best."""
    chosen = rng.integers(SUCCESSORS, size=(length, rows))
    walk = np.empty((length, rows), dtype=np.int64)
    current = rng.integers(FILLERS, size=rows)
    for position in range(length):
        walk[position] = current
        current = FOLLOWS[current, chosen[position]]
    return FIRST_FILLER + walk.T


# --- trials -----------------------------------------------------------------------------------------------------------

DEPTHS = (0.0, 0.25, 0.5, 0.75, 0.95)
PAIRS = (4, 16, 32)
QUARTERS = ("first quarter", "second quarter", "third quarter", "last quarter")
COPIED_SHARE = 8  # an eighth of the tokens of a context is copied
JITTER = 64  # a passkey lies within 1/64 of the context around its depth: rows differ for scores by position

Pair = tuple[Tokens, Tokens, Tokens]  # the statement, the question, the answer


@dataclass(frozen=True)
class ContextShape:
    """The rows and tokens of a context, and how many of its first and last tokens are kept by any policy."""

    rows: int
    context: int
    sinks: int
    keep_recent: int


@dataclass(frozen=True)
class Trial:
    """What a model reads, before and after compression, and should answer.

    Attributes:
        context: (B, C) token ids that are compressed.
        questions: (B, Q) token ids that are read then, right answers included.
        answers: (B, Q), the answer that each token of `questions` belongs to, counted from 1; 0 is none. All rows have
            equally many answers. The first column is 0.
        parts: (B, A) indices into `names` for each answer of a row; None where there is one part.
        names: of the parts: depths, quarters.
        alone: (1, P), of a chat: the context without its text. Answers that are right after this do not count.
        targets: (B, Q), of a text: the token that follows each of `questions`.
    """

    context: np.ndarray
    questions: np.ndarray
    answers: np.ndarray
    parts: np.ndarray | None = None
    names: tuple[str, ...] = ("all",)
    alone: np.ndarray | None = None
    targets: np.ndarray | None = None


class Language(Protocol):
    """What tasks are worded in, for one tokenizer."""

    start: Tokens  # a context begins with these
    copy: Tokens  # before the string to copy
    again: Tokens  # before the copy

    def filler(self, rng: np.random.Generator, rows: int, length: int) -> np.ndarray:
        """(rows, length) tokens without information."""

    def pairs(self, rng: np.random.Generator, count: int) -> list[Pair]:
        """`count` pairs with distinct keys."""

    def string(self, rng: np.random.Generator, length: int) -> Tokens:
        """Tokens that cannot be guessed."""


class RecallLanguage:
    """The 256 words of the bundled recall model."""

    start, copy, again = [END], [COPY], [AGAIN]

    def filler(self, rng: np.random.Generator, rows: int, length: int) -> np.ndarray:
        return filler_rows(rng, rows, length)

    def pairs(self, rng: np.random.Generator, count: int) -> list[Pair]:
        keys = FIRST_KEY + rng.permutation(KEYS)[:count]
        values = FIRST_VALUE + rng.integers(VALUES, size=count)
        return [([SET, k, v], [GET, k], [v]) for k, v in zip(keys.tolist(), values.tolist(), strict=True)]

    def string(self, rng: np.random.Generator, length: int) -> Tokens:
        return rng.integers(*FILLER_POOL, size=length).tolist()  # type: ignore[no-any-return]


SENTENCES = (
    *("The grass is green.", "The sky is blue.", "The sun is warm today.", "Here we go again.", "There and back."),
    *("A river runs to the sea.", "Birds sing in the morning.", "The road is long.", "Rain falls on the hills."),
)
PLACES = "river garden castle harbor meadow bridge forest island market temple valley window"
COLOURS = "amber black blue bronze copper green golden grey ivory red silver white"
COPIED = "one two three four five six seven eight nine ten sun moon tree stone fire wind cat dog bird fish"


class TextLanguage:
    """English sentences, for any tokenizer of text."""

    def __init__(self, tokenizer: Any) -> None:
        def encode(text: str) -> Tokens:
            return list(tokenizer.encode(text, add_special_tokens=False))

        self.encode = encode
        bos = getattr(tokenizer, "bos_token_id", None)
        self.start = [] if bos is None else [bos]
        self.copy, self.again = encode("\nRemember:"), encode("\nOnce more:")
        self.sentences = [encode(" " + sentence) for sentence in SENTENCES]
        self.words = [encode(" " + word) for word in COPIED.split()]

    def filler(self, rng: np.random.Generator, rows: int, length: int) -> np.ndarray:
        return np.array([draw_tokens(rng, self.sentences, length) for _ in range(rows)], np.int64).reshape(rows, length)

    def pairs(self, rng: np.random.Generator, count: int) -> list[Pair]:
        places, colours = PLACES.split(), COLOURS.split()
        which = rng.permutation(len(places) * len(colours))[:count]
        made = []
        for index in which.tolist():
            key = f"{colours[index % len(colours)]} {places[index // len(colours)]}"
            question, answer = self.encode(f"\nThe value of the {key} is"), self.encode(f" {rng.integers(100, 1000)}")
            made.append((question + answer + self.encode("."), question, answer))
        return made

    def string(self, rng: np.random.Generator, length: int) -> Tokens:
        return draw_tokens(rng, self.words, length)


def draw_tokens(rng: np.random.Generator, pieces: Sequence[Tokens], length: int) -> Tokens:
    """Pieces one after another, drawn at random, cut off at so many tokens."""
    tokens: Tokens = []
    while len(tokens) < length:
        tokens += pieces[int(rng.integers(len(pieces)))]
    return tokens[:length]


def find_language(tokenizer: Any) -> Language:
    """The words of the recall model if each is one token of this tokenizer; else English."""
    probe = [SET, GET, FIRST_KEY, FIRST_VALUE, FIRST_FILLER]
    if tokenizer.encode(" ".join(WORDS[i] for i in probe), add_special_tokens=False) == probe:
        return RecallLanguage()
    return TextLanguage(tokenizer)


def assemble(
    rng: np.random.Generator,
    language: Language,
    shape: ContextShape,
    pairs: Sequence[Sequence[Pair]],
    starts: Callable[[int], np.ndarray],
    parts: np.ndarray | None = None,
    names: tuple[str, ...] = ("all",),
) -> Trial:
    """Pairs of each row in filler, and a question for each, in another order.

    Args:
        starts: maps the number of free tokens to how many of them come before each pair of a row, rising.

    Raises:
        ValueError: the pairs do not fit into the context.
    """
    contexts, questions, answers = [], [], []
    first = max(shape.sinks, len(language.start))
    for row in pairs:
        size = sum(len(statement) for statement, _, _ in row)
        free = shape.context - first - shape.keep_recent - size
        if free < 0:
            raise SettingError(
                "{} pairs of {} tokens in all do not fit into a context of {} with {} sinks and {keep_recent:=}: give "
                "a longer context",
                *(len(row), size, shape.context, shape.sinks),
                keep_recent=shape.keep_recent,
            )
        filler = [*language.start, *language.filler(rng, 1, shape.context - size)[0].tolist()]
        context, taken = [], 0
        for (statement, _, _), start in zip(row, (first + starts(free)).tolist(), strict=True):
            context += filler[taken:start] + statement
            taken = start
        contexts.append((context + filler[taken:])[: shape.context])
        row_questions: Tokens = []
        row_answers: Tokens = []
        for number, index in enumerate(rng.permutation(len(row)).tolist(), start=1):
            _, question, answer = row[index]
            row_questions += question + answer
            row_answers += [0] * len(question) + [number] * len(answer)
        questions.append(row_questions)
        answers.append(row_answers)
    longest = max(map(len, questions))
    questions = [row + row[-1:] * (longest - len(row)) for row in questions]
    answers = [row + [0] * (longest - len(row)) for row in answers]
    return Trial(np.array(contexts), np.array(questions), np.array(answers), parts, names)


def passkey(rng: np.random.Generator, language: Language, shape: ContextShape) -> Trial:
    """One pair per row, at the depths of `DEPTHS` in turn."""
    which = np.arange(shape.rows) % len(DEPTHS)
    jitter = shape.context // JITTER
    depths = iter(which.tolist())

    def start(free: int) -> np.ndarray:
        wanted = round(DEPTHS[next(depths)] * free) + rng.integers(-jitter, jitter + 1, size=1)
        return np.clip(wanted, 0, free)

    pairs = [language.pairs(rng, 1) for _ in range(shape.rows)]
    names = tuple(f"depth {depth:g}" for depth in DEPTHS[: shape.rows])
    return assemble(rng, language, shape, pairs, start, which[:, None], names)


def recall(rng: np.random.Generator, language: Language, shape: ContextShape, count: int) -> Trial:
    """`count` pairs anywhere, with a question for each."""
    pairs = [language.pairs(rng, count) for _ in range(shape.rows)]

    def starts(free: int) -> np.ndarray:
        return np.sort(rng.integers(free + 1, size=count))

    return assemble(rng, language, shape, pairs, starts)


def copy(rng: np.random.Generator, language: Language, shape: ContextShape) -> Trial:
    """A random string anywhere, an eighth of the context, to be repeated; every token is an answer."""
    size = shape.context // COPIED_SHARE
    if size < len(QUARTERS):
        raise ValueError(f"nothing can be copied in a context of {shape.context}: give one from 32 tokens up")
    strings = [language.string(rng, size) for _ in range(shape.rows)]
    blocks = [[(language.copy + string, language.again, string)] for string in strings]
    quarters = np.tile(np.arange(size) * len(QUARTERS) // size, (shape.rows, 1))
    trial = assemble(rng, language, shape, blocks, lambda free: rng.integers(free + 1, size=1), quarters, QUARTERS)
    return replace(trial, answers=trial.answers.cumsum(axis=1))


def windows(rng: np.random.Generator, tokens: Sequence[int], rows: int, length: int) -> np.ndarray:
    """(rows, length) windows of a text from random positions.

    Raises:
        ValueError: the text is shorter than that.
    """
    if len(tokens) < length:
        raise ValueError(f"the text has {len(tokens):,} tokens, but {length:,} are read: give a longer text")
    starts = rng.integers(len(tokens) - length + 1, size=rows)
    read: np.ndarray = np.asarray(tokens, np.int64)[starts[:, None] + np.arange(length)]
    return read
