"""Cases of chat tasks: a context of an exact length, and the questions about it in the turns of a chat.

A case is one context of C tokens with one or more asks: a question of the user, and a reply with given parts and parts
to be found. What must be found is never among the last `keep_recent` tokens of a context, nor among the first ones,
which are those of the chat and of the instruction.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mlx_kv.evaluation.tasks import Tokens, Trial
from mlx_kv.generation.encoding import applied_template

MARKS = ("<first>", "<second>", "<third>")  # in place of the messages, to find what a chat template puts between them


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

    def trial(self, seen: bool) -> Trial:
        """The case as one row.

        Args:
            seen: whether all questions are part of the context and only the replies follow; else questions follow one
                by one, each with its reply.
        """
        turns = self.together if seen else self.apart
        asked = turns.tokens[: turns.asked] if seen else []
        return Trial(
            context=np.array([self.context + asked]),
            questions=np.array([turns.tokens[len(asked) :]]),
            answers=np.array([turns.answers[len(asked) :]]),
            alone=np.array([self.alone + asked]),
        )


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
