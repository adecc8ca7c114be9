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

from mlx_kv.generation.encoding import applied_template

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
    """

    question: str
    reply: tuple[str, ...]
    by_token: bool = False


@dataclass(frozen=True)
class Turns:
    """Asks in tokens.

    Attributes:
        tokens: of questions and replies, what must be found included.
        answers: for each of them the answer that it belongs to, from 1 up; 0 is none.
        asked: so many of the first are a question, or all of them, up to where the first reply begins.
    """

    tokens: Tokens
    answers: Tokens
    asked: int


@dataclass(frozen=True)
class Case:
    """A context and what is asked about it.

    Attributes:
        context: C tokens.
        apart: a question, its reply, the next question, ...
        together: all questions in one message, and then all replies.
        alone: the context's instruction, without what is asked for.
    """

    context: Tokens
    apart: Turns
    together: Turns
    alone: Tokens


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
            text: str = applied_template(tokenizer, messages, False)
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

    def question(self, text: str, first: bool) -> Tokens:
        """After an open message of the user, or after the assistant's answer; up to where the answer begins."""
        return self.encode(("\n\n" if first else self._again) + text + self._answer)

    def reply(self, ask: Ask, last: int, before: str = "") -> tuple[Tokens, Tokens]:
        """A reply, and the answers that its tokens belong to, counted on from the last one."""
        tokens: Tokens = []
        answers: Tokens = []
        for index, text in enumerate(ask.reply):
            said = self.encode(text if index else before + text)
            tokens += said
            if index % 2 == 0:
                answers += [0] * len(said)
            elif ask.by_token:
                answers += self._by_token(said, max([last, *answers]))
            else:
                answers += [last + 1] * len(said)
        return tokens, answers

    def _by_token(self, said: Tokens, last: int) -> Tokens:
        """Each token with a letter or a digit is an answer for itself."""
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
