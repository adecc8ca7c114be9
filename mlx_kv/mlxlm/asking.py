"""Questions that are asked of a model once, and their answers, kept for as long as the model lives."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar

import mlx.nn as nn

P = ParamSpec("P")
T = TypeVar("T")
_answers: dict[int, dict[Any, Any]] = {}


def asked_once(question: Callable[Concatenate[nn.Module, P], T]) -> Callable[Concatenate[nn.Module, P], T]:
    """A question whose answer is kept for as long as the model lives."""

    @functools.wraps(question)
    def answered(model: nn.Module, *details: P.args, **named: P.kwargs) -> T:
        if id(model) not in _answers:  # models compare and hash as the dicts that they are
            _answers[id(model)] = {}
            weakref.finalize(model, _answers.pop, id(model), None)
        known, key = _answers[id(model)], (question.__name__, details, tuple(named.items()))
        if key not in known:
            known[key] = question(model, *details, **named)
        answer: T = known[key]
        return answer

    return answered  # type: ignore[return-value]


def answer_as(model: nn.Module, other: nn.Module, *questions: Callable[[nn.Module], Any]) -> None:
    """Has a model answer such questions, asked once, as another does: it may not be able to later on itself."""
    for question in questions:
        answer = question(other)
        asked_once(_named(question.__name__, answer))(model)


def _named(name: str, answer: T) -> Callable[[nn.Module], T]:
    def known(model: nn.Module) -> T:
        return answer

    known.__name__ = name
    return known
