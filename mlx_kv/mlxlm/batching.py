"""Batches of a model of mlx-lm: which caches can be rows of one, and what padding does to recurrent layers.

B rows, V the vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.generate import generation_stream
from mlx_lm.models import cache as stock

from mlx_kv.cache.kv_cache import KVCache
from mlx_kv.cache.rows import check_joinable
from mlx_kv.cache.segmented import SegmentedCache
from mlx_kv.communicator import Communicator
from mlx_kv.mlxlm.attention import AttentionPatch, attends_by_class
from mlx_kv.mlxlm.convert import make_prompt_cache
from mlx_kv.mlxlm.probe import ATTENTION, cached_per_model, refuses_ragged
from mlx_kv.mlxlm.recurrent import RecurrentState
from mlx_kv.mlxlm.traverse import is_ours, kind_of, leaves, mapped

# Of two rows, for the probe of padding: as many as it takes to see a state that fades with every token.
TOKENS, PADDING = 3, 13
# Padding that is read changes a state by as much as tokens in its place would (0.96 to 1.3 of it, in nine families);
# sums in another order, by 1e-6 of it in float32, and in 16 bits still by little.
MAX_ROUNDING = 0.1


# --- caches as rows ---------------------------------------------------------------------------------------------------


def check_same_kinds(first: Sequence[Any], others: Sequence[Any]) -> None:
    """Raises ValueError unless two lists of caches of a model can be one batch."""
    pairs = list(zip(leaves(first), leaves(others), strict=False))
    if len(first) != len(others):
        raise ValueError(f"got {len(others)} caches for a model that has {len(first)}: use make_prompt_cache")
    for expected, other in pairs:
        if isinstance(expected, KVCache):
            check_joinable(1, expected, other)
        elif kind_of(expected) is not kind_of(other):
            raise ValueError(f"got a {kind_of(other).__name__} where the model has a {kind_of(expected).__name__}")


def rows_are_alone(model: nn.Module) -> bool:
    """Whether rows cannot be read together in passes of another number of tokens for each."""
    return refuses_ragged(model) is not None or (not only_attention(model) and padding_is_read(model))


def only_attention(model: nn.Module) -> bool:
    """Whether a model has no layer with state of another kind."""
    return all(type(cache) in ATTENTION for cache in leaves(stock.make_prompt_cache(model)))


@cached_per_model
def padding_is_read(model: nn.Module) -> bool:
    """Whether padding changes the state of recurrent layers, if there are any.

    Models use the announced lengths fully, in part, or not at all, so a few tokens are read and evaluated: also the
    logits, since other processes may have the last layers. Rows that decode have one token each, and no padding.
    """
    rows = mx.arange(2 * (TOKENS + PADDING)).reshape(2, -1)  # as many ids as any model has

    def state(tokens: mx.array, lengths: list[int] | None = None) -> list[mx.array]:
        """Of the second row."""
        caches = make_prompt_cache(model)
        caches = [cache.merge([cache, copy]) for cache, copy in zip(caches, make_prompt_cache(model), strict=True)]
        if lengths is not None:
            for cache in caches:
                cache.prepare(lengths=lengths, right_padding=[tokens.shape[1] - length for length in lengths])
        logits = model(tokens, cache=caches)
        mx.eval(logits, [cache.state for cache in caches])
        recurrent = [cache.state for cache in leaves(caches) if not isinstance(cache, KVCache)]
        flat: Any = tree_flatten(recurrent)
        return [array[1].astype(mx.float32) for _, array in flat if isinstance(array, mx.array) and array.ndim > 1]

    longer, shorter = state(rows), state(rows[:, :TOKENS])
    padded = state(rows, [TOKENS + PADDING, TOKENS])
    changes = zip(longer, shorter, padded, strict=True)
    return not all(
        bool(mx.abs(pad - alone).max() <= MAX_ROUNDING * mx.abs(full - alone).max()) for full, alone, pad in changes
    )


def equal_lengths(model: nn.Module, communicator: Communicator) -> tuple[bool, bool]:
    """Whether rows of a batch must always have the same length; and if not, whether prompts read together must."""
    rows, others = communicator.all_any(refuses_ragged(model) is not None, not only_attention(model))
    with mx.stream(generation_stream):  # a probe runs on all ranks or on none
        (prompts,) = communicator.all_any(others and not rows and padding_is_read(model))
    return rows, prompts


class RowsByClass:
    """Makes caches whose batches keep rows by capacity class (`cache.segments`), and opens the patch that they need.

    Args:
        model: of mlx-lm. Where it does not support such caches, they stay as they are.
        rows: maximum of a batch; one row needs no classes.
    """

    def __init__(self, model: nn.Module, rows: int) -> None:
        self._patch = AttentionPatch(model) if rows > 1 and attends_by_class(model) else None

    def of(self, caches: Sequence[Any]) -> list[Any]:
        """The caches of a sequence, ready to be joined with those of others."""
        if self._patch is None:
            return list(caches)
        numbers, split = count(), set[int]()
        return mapped(caches, lambda cache: SegmentedCache(cache, next(numbers), split) if is_ours(cache) else cache)

    def close(self) -> None:
        """Closes the patch: no batch keeps rows by class any more, and new sequences keep their caches."""
        patch, self._patch = self._patch, None
        if patch is not None:
            patch.close()


def evaluate_caches(caches: list[Any], wait: bool = True) -> list[Any]:
    """Evaluates caches of one row of a batch, so that they no longer reference the batch's buffers.

    Args:
        wait: whether that is done when this returns; else it is on its way.
    """
    for cache in leaves(caches):
        if isinstance(cache, RecurrentState):
            cache.forget()  # its checkpoints are the batch's
        if isinstance(cache, stock.ArraysCache):  # mlx-lm's have slices of the batch's, which stay that: copy them
            cache.cache = [x if x is None else mx.take(x, mx.array([0]), axis=0) for x in cache.cache]
    (mx.eval if wait else mx.async_eval)([cache.state for cache in caches])
    return caches
