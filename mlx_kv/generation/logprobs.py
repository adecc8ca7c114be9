"""What is told of a token that was drawn: its log-probability, and the likeliest tokens at its place.

Decides nothing: these are the model's log-probabilities after logits processors, before a temperature and filters, as
mlx-lm tells them. Knows nothing about rows, samplers or text. V is the vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx


@dataclass(frozen=True)
class TokenScore:
    """Of one token.

    Attributes:
        logprob: natural logarithm; -inf where a processor has excluded it.
        top: the likeliest tokens by id, and the same of each, the likeliest first.
    """

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


def scored(drawn: Iterable[tuple[mx.array, int, int | None]]) -> list[TokenScore | None]:
    """Of log-probabilities (V,), the token that was drawn, and how many likeliest ones are wanted: None is nothing.

    All are worked out at once, and waited for once.
    """
    given = list(drawn)
    found = iter(_scores([(logprobs, token, count) for logprobs, token, count in given if count is not None]))
    return [None if count is None else next(found) for _, _, count in given]


def _scores(drawn: list[tuple[mx.array, int, int]]) -> list[TokenScore]:
    if not drawn:
        return []
    tokens, counts = [token for _, token, _ in drawn], [count for _, _, count in drawn]
    rows = mx.stack([logprobs for logprobs, _, _ in drawn]).astype(mx.float32)  # (n, V)
    own: Any = mx.take_along_axis(rows, mx.array(tokens)[:, None], axis=1)[:, 0]
    most = min(max(counts), rows.shape[1])
    if most == 0:
        return [TokenScore(float(value)) for value in own.tolist()]
    places = mx.argpartition(-rows, kth=most - 1, axis=1)[:, :most]  # (n, most)
    values = mx.take_along_axis(rows, places, axis=1)
    order = mx.argsort(-values, axis=1)
    ids, likeliest = mx.take_along_axis(places, order, axis=1), mx.take_along_axis(values, order, axis=1)
    mx.eval(own, ids, likeliest)
    read: list[Any] = [own.tolist(), ids.tolist(), likeliest.tolist()]
    return [
        TokenScore(value, tuple(zip(which[:count], top[:count], strict=True)))
        for value, which, top, count in zip(*read, counts, strict=True)
    ]
