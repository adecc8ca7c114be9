"""The keys and values of a text, and the attention that each token receives when the text is read again (KVzip).

H KV heads, n tokens, Dk and Dv head dims of keys and values, L layers of full attention.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn

from mlx_kv.cache.buffers import SlotBuffer
from mlx_kv.cache.kv_cache import KVCache
from mlx_kv.cache.layout import Row
from mlx_kv.generation.prefill import Instructions, TwoPassPrefill, prefill_step
from mlx_kv.mlxlm.convert import make_prompt_cache
from mlx_kv.mlxlm.probe import Ropes, architecture, cache_ropes
from mlx_kv.mlxlm.traverse import is_ours, leaves
from mlx_kv.policy import CachePolicy
from mlx_kv.settings import MOST_TOKENS

POLICY = CachePolicy(budget=MOST_TOKENS, score="kvzip", share="head")  # a budget that evicts nothing


class LayerReading(NamedTuple):
    """One text in one layer.

    Attributes:
        keys: (1, H, n, Dk), as the cache holds them.
        values: (1, H, n, Dv).
        shares: (H, n) of float32, the largest share of attention that each token received.
    """

    keys: mx.array
    values: mx.array
    shares: mx.array


def read_twice(model: nn.Module, tokens: Sequence[int], instructions: Instructions) -> list[LayerReading]:
    """A text in each layer of full attention, in order.

    Raises:
        ValueError: the model has no such layer, or one that hides its attention.
    """
    caches = _empty_caches(model)
    TwoPassPrefill(model, caches, [tokens], prefill_step(model, caches, None), instructions).finish()
    readings = []
    for _, cache in budgeted(caches):
        evictor, buffers, row = cache.evictor, cache.view.buffers, cache.view.rows[0]
        assert evictor is not None
        assert buffers is not None
        reread = evictor.metadata.reread[0]
        assert reread is not None
        assert reread.received.shape[1] == len(tokens), "all of the text was read again"
        keys, values = (_decoded(buffer, row) for buffer in buffers)
        mx.eval(keys, values)
        readings.append(LayerReading(keys, values, reread.received))
    return readings


def _empty_caches(model: nn.Module) -> list[Any]:
    """Raises ValueError where a model hides its attention, or has nothing that a budget applies to."""
    try:
        return make_prompt_cache(model, POLICY)
    except ValueError as error:
        reason = str(error).partition(":")[0]
        raise ValueError(
            f"cannot calibrate a model of {architecture(model)}: {reason}. Its budgets work without a calibration"
        ) from error


def _decoded(buffer: SlotBuffer, row: Row) -> mx.array:
    """(1, H, n, D) of all tokens; nothing was evicted, so they lie in their order."""
    return buffer.decode(buffer.read(((row.start, row.start + row.offset),)))


def budgeted(caches: Sequence[Any]) -> list[tuple[int, KVCache]]:
    """The caches that a budget applies to, with their indices in the order of `leaves`, in the order of layers."""
    found = [(i, cache) for i, cache in enumerate(leaves(caches)) if is_ours(cache) and cache.evictor is not None]
    return sorted(found, key=lambda pair: pair[1].evictor.layer)  # type: ignore[union-attr]


def ropes_of(model: nn.Module) -> tuple[Ropes, ...]:
    """The RoPE of keys and of values, for each layer of full attention.

    Raises:
        ValueError: there is no such layer, or its RoPE cannot be found.
    """
    which = tuple(index for index, _ in budgeted(_empty_caches(model)))
    if not which:
        raise ValueError(f"{architecture(model)} has no layer of full attention, so nothing to calibrate")
    return cache_ropes(model, which)
