"""Contexts of an exact length and the questions about them, in the turns of a chat.

Decides where a question and its answer stand in a chat, where in a context stands what is asked for, and which tokens
count. What is asked, the tasks decide. Knows nothing about models, caches or scores.

A case is one context of C tokens, and asks, one after another: a question in the user's words, and a reply of which
parts are given and parts must be found. What must be found never lies among the last `keep_recent` tokens of a context,
nor among the first ones, which are those of the chat and of the instruction.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

Tokens = list[int]
MARKS = ("<first>", "<second>", "<third>")  # stand for what is said, in a chat template


@dataclass(frozen=True)
class Ask:
    """One question.

    Attributes:
        question: what the user asks.
        reply: what the assistant says, in turns what is given and what it must find: "The sky is", " blue", ...
        by_token: whether each token with a letter that must be found counts for itself; else the reply is right when
            all of them are.
        part: where a task has parts, which of them this is.
    """

    question: str
    reply: tuple[str, ...]
    by_token: bool = False
    part: str = ""


@dataclass(frozen=True)
class Turn:
    """An ask in tokens: `tokens` of all of it, and for each the answer that it belongs to, from 1 up; 0 is none.

    Attributes:
        seen: so many of them are the question, up to where the assistant's turn begins.
    """

    tokens: Tokens
    answers: Tokens
    seen: int
    part: str


@dataclass(frozen=True)
class Case:
    """A context and what is asked about it.

    Attributes:
        context: C tokens.
        first: the turn of each ask if it is the first one after the context.
        later: the same if other turns precede it.
        alone: the context's instruction, without what is asked for.
    """

    context: Tokens
    first: tuple[Turn, ...]
    later: tuple[Turn, ...]
    alone: Tokens

    def chain(self) -> tuple[np.ndarray, np.ndarray, list[str]]:
        """All asks one after another: (Q,) tokens, (Q,) answers counted through, and the part of each answer."""
        tokens: Tokens = []
        answers: Tokens = []
        parts: list[str] = []
        for index, turn in enumerate((self.first[0], *self.later[1:])):
            before = max(answers, default=0)
            tokens += turn.tokens
            answers += [before + number if number else 0 for number in turn.answers]
            parts += [self.first[index].part] * max(turn.answers)
        return np.array(tokens), np.array(answers), parts


class Talk:
    """How a tokenizer says turns of a chat; without a chat template, as questions and answers in a text."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        bos = getattr(tokenizer, "bos_token_id", None)
        self._start = [] if bos is None else [bos]
        self._before, self._answer, self._again = "", "\nAnswer:", "\n\nQuestion: "
        if getattr(tokenizer, "chat_template", None) is not None:
            self._start = []
            roles = ("user", "assistant", "user")
            messages = [{"role": role, "content": mark} for role, mark in zip(roles, MARKS, strict=True)]
            text: str = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
            self._before, _, text = text.partition(MARKS[0])
            self._answer, _, text = text.partition(MARKS[1])
            self._again, _, _ = text.partition(MARKS[2])

    def encode(self, text: str) -> Tokens:
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def decode(self, tokens: Tokens) -> str:
        text: str = self._tokenizer.decode(tokens)
        return text

    def begun(self, instruction: str) -> Tokens:
        """A user's message that is not ended."""
        return self._start + self.encode(self._before + instruction)

    def exchange(self, said: str, answered: str) -> Tokens:
        """The end of a user's message, the answer to it, and the beginning of the next message."""
        return self.encode(said + self._answer) + self.encode(answered + self._again)

    def turn(self, ask: Ask, first: bool) -> Turn:
        """An ask, after an open message of the user, or after the assistant's answer."""
        seen = self.encode(("\n\n" if first else self._again) + ask.question + self._answer)
        tokens, answers = list(seen), [0] * len(seen)
        for index, text in enumerate(ask.reply):
            said = self.encode(text)
            tokens += said
            answers += self._numbers(said, ask.by_token, max(answers)) if index % 2 else [0] * len(said)
        return Turn(tokens, answers, len(seen), ask.part)

    def _numbers(self, said: Tokens, by_token: bool, last: int) -> Tokens:
        """The answers that tokens belong to."""
        if not by_token:
            return [1] * len(said)
        counts = [any(letter.isalnum() for letter in self.decode([token])) for token in said]
        return [last + sum(counts[: i + 1]) if counts[i] else 0 for i in range(len(said))]


@dataclass(frozen=True)
class Room:
    """How long a context is, and how much of its end every policy keeps."""

    context: int
    keep_recent: int


def filled(units: Iterable[Tokens], length: int) -> list[Tokens]:
    """Units from the first on, the last one cut, of `length` tokens in all.

    Raises:
        ValueError: there are not so many.
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


def strewn(
    rng: np.random.Generator, filler: Iterator[Tokens], pieces: Sequence[Tokens], length: int, keep_recent: int
) -> Tokens:
    """Pieces, in their order, anywhere between units of filler but not in the last `keep_recent` of `length` tokens.

    Raises:
        ValueError: the pieces do not fit.
    """
    size = sum(map(len, pieces))
    if length - keep_recent - size < 0:
        raise ValueError(f"{size:,} tokens to be found do not fit into {length - keep_recent:,}: give a longer context")
    units = filled(filler, length - size)
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
    """A user's message of an instruction and a text, and what is asked then."""
    return Case(
        talk.begun(instruction) + text,
        tuple(talk.turn(ask, first=True) for ask in asks),
        tuple(talk.turn(ask, first=False) for ask in asks),
        talk.begun(instruction),
    )
