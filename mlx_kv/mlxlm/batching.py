"""Whether caches of a model can be rows of one batch, and whether its rows and prompts may differ in length.

Some of it a model says when it is asked (`quirks`); what padding does to recurrent layers is tried. Knows nothing about
the loops that make batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.models import cache as stock

from mlx_kv.cache.kv_cache import KVCache
from mlx_kv.cache.rows import check_joinable
from mlx_kv.mlxlm.asking import asked_once
from mlx_kv.mlxlm.convert import make_prompt_cache
from mlx_kv.mlxlm.loading import architecture
from mlx_kv.mlxlm.quirks import refuses_ragged
from mlx_kv.mlxlm.stand_ins import ATTENTION
from mlx_kv.mlxlm.traverse import kind_of, leaves

# Two rows of a batch, when it is tried what padding does to recurrent layers: as many tokens as it takes for a state
# that fades with every token.
TOKENS, PADDING = 3, 13
# Padding that is read changes a state by as much as tokens in its place would (0.96 to 1.3 of it, in nine families);
# sums in another order, by 1e-6 of it in float32, and in 16 bits still by little.
MOST_ROUNDING = 0.1


def check_alike(first: Sequence[Any], others: Sequence[Any]) -> None:
    """Raises ValueError unless two lists of caches of a model can be one batch."""
    pairs = list(zip(leaves(first), leaves(others), strict=False))
    if len(first) != len(others):
        raise ValueError(f"got {len(others)} caches for a model that has {len(first)}: use make_prompt_cache")
    for own, other in pairs:
        if isinstance(own, KVCache):
            check_joinable(1, own, other)
        elif kind_of(own) is not kind_of(other):
            raise ValueError(f"got a {kind_of(other).__name__} where the model has a {kind_of(own).__name__}")


def check_batches(model: nn.Module) -> None:
    """Raises ValueError where the caches of a model of mlx-lm cannot become rows of a batch, not even one alone."""
    kinds = {type(cache) for cache in leaves(stock.make_prompt_cache(model)) if not hasattr(cache, "merge")}
    if kinds - ATTENTION:
        raise ValueError(
            f"mlx-lm's {architecture(model)} has caches of its own ({', '.join(sorted(k.__name__ for k in kinds))}), "
            "which cannot be rows of a batch: generate from one prompt at a time"
        )


def rows_must_be_equal(model: nn.Module) -> bool:
    """Whether rows of a batch must always be of one length: prompts that are read together, and all that comes."""
    return refuses_ragged(model) is not None


def rows_are_alone(model: nn.Module) -> bool:
    """Whether rows cannot be read together in passes of another number of tokens for each."""
    return rows_must_be_equal(model) or prompts_must_be_equal(model)


def prompts_must_be_equal(model: nn.Module) -> bool:
    """Whether prompts of different lengths cannot be read together, since recurrent layers would read the padding."""
    return not only_attention(model) and padding_is_read(model)


def only_attention(model: nn.Module) -> bool:
    """Whether a model has no layer with state of another kind."""
    return all(type(cache) in ATTENTION for cache in leaves(stock.make_prompt_cache(model)))


@asked_once
def padding_is_read(model: nn.Module) -> bool:
    """Whether padding changes the state of recurrent layers, if there are any.

    Some look at the lengths that are announced to them, some in part, some not at all: so it is tried, with a few
    tokens, which are evaluated to the end: other processes may have other layers of this model. Rows that decode are of
    one token each, and need no padding.
    """
    rows = mx.arange(2 * (TOKENS + PADDING)).reshape(2, -1)  # as many ids as any model has

    def state(tokens: mx.array, lengths: list[int] | None = None) -> list[mx.array]:
        """Of the second row."""
        own = make_prompt_cache(model)
        caches = [cache.merge([cache, copy]) for cache, copy in zip(own, make_prompt_cache(model), strict=True)]
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
        bool(mx.abs(pad - own).max() <= MOST_ROUNDING * mx.abs(full - own).max()) for full, own, pad in changes
    )
