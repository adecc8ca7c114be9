"""Rows by class where tests are too small for classes to pay: a rule that puts rows anywhere, and a layer that asks.

Whatever the rule says, each row is what it would be alone.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import count
from typing import Any

import mlx.core as mx
from mlx_lm.models.base import scaled_dot_product_attention

from mlx_kv.cache.row_classes import RowClasses
from mlx_kv.mlxlm.attention import HOOK, AttentionCall

Rule = Callable[[tuple[int, ...], RowClasses, RowClasses, int], RowClasses]


def anywhere(seed: int) -> Rule:
    """A rule that puts rows anywhere, into up to three classes, the same in layers that stand alike."""

    def settled(needs: tuple[int, ...], held: RowClasses, coming: RowClasses, min_saving: int) -> RowClasses:
        drawn = random.Random(repr((needs, held, coming, seed)))
        if drawn.random() < 0.3:
            return tuple(sorted((*held, *coming)))
        classes: dict[int, list[int]] = {}
        for row in range(len(needs)):
            classes.setdefault(drawn.randrange(3), []).append(row)
        return tuple(sorted(map(tuple, classes.values())))

    return settled


def anywhere_in_each_layer(seed: int) -> Rule:
    """The same, but each layer has its own: as where heads keep different numbers of tokens."""
    calls = count()

    def settled(needs: tuple[int, ...], held: RowClasses, coming: RowClasses, min_saving: int) -> RowClasses:
        number = next(calls)
        if number % 3 == 0:  # all rows together
            return (tuple(range(len(needs))),)
        return anywhere(seed + number % 3)(needs, held, coming, min_saving)

    return settled


def attend(cache: Any, q: mx.array, k: mx.array, v: mx.array, window: int | None = None) -> mx.array:
    """One layer's attention through a cache, as mlx-lm's models ask for it where it is patched. 1 / sqrt(D) scales."""
    mask = cache.make_mask(q.shape[2], window_size=window)
    keys, values = cache.update_and_fetch(k, v)
    named = {"cache": cache, "scale": q.shape[3] ** -0.5, "mask": mask}
    hook = getattr(cache, HOOK, None)
    if hook is None:
        return scaled_dot_product_attention(q, keys, values, **named)
    answer: mx.array = hook.attend(AttentionCall(scaled_dot_product_attention, (q, keys, values), named))
    return answer
