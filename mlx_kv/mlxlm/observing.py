"""Caches whose budgets look at attention, and the model whose attention it is.

Decides for which of them the seam is opened, which they carry then, and which models hide what they want to see. Knows
nothing about scores.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.nn as nn

from mlx_kv.cache.checks import cache_list
from mlx_kv.cache.codecs import Packing, packings_of
from mlx_kv.cache.kv_cache import KVCache
from mlx_kv.mlxlm.attention import AttentionSeam
from mlx_kv.mlxlm.by_class import attends_by_class
from mlx_kv.mlxlm.loading import architecture, check_model
from mlx_kv.mlxlm.quirks import takes_packed
from mlx_kv.mlxlm.traverse import leaves, parts_of
from mlx_kv.mlxlm.turning import ropes
from mlx_kv.mlxlm.visibility import attention_seen


def can_answer(model: nn.Module, packing: Packing) -> bool:
    """Whether every layer hands planes that are packed like these on to attention that can be answered.

    It is asked what it does with planes of mlx-lm's, of as many bits in groups of as many.
    """
    sights = attention_seen(model)
    if not all(sight in ("seen", None) for sight in sights):
        return False
    affine = packing if packing.mode == "affine" else Packing(8, 32)
    return takes_packed(model, affine.group_size, affine.bits)


def _all_can_answer(model: nn.Module, parts: Sequence[KVCache]) -> bool:
    packings = [packings_of(part.view.codecs) for part in parts if not part.view.residual_length]
    return all(each is not None and can_answer(model, each[0]) for each in packings)


def show_attention(model: nn.Module, caches: Sequence[Any]) -> None:
    """Has caches that want to see their attention carry a seam of the model, if they carry none.

    Args:
        caches: of this model, one for each layer.

    Raises:
        ValueError: layers that hide it.
    """
    check_model("model", model)
    everything = list(leaves(cache_list("caches", caches)))
    hooked = [i for i, cache in enumerate(everything) if any(part.own_hook is not None for part in parts_of(cache))]
    if not hooked:
        return
    parts = {i: parts_of(everything[i]) for i in hooked}
    wanting = [i for i in hooked if any(part.evictor and part.evictor.wants_attention for part in parts[i])]
    apart = [i for i in wanting if any(part.evictor and part.evictor.own_lengths for part in parts_of(everything[i]))]
    if apart and not attends_by_class(model):
        raise ValueError(
            f"layers or heads of different lengths each need a mask of their own, and {architecture(model)} does not "
            "attend with the mask that it is given: use layers='uniform', and not share='adaptive'"
        )
    sights = attention_seen(model)
    if hidden := [i for i in wanting if i < len(sights) and sights[i] not in ("seen", None)]:
        raise ValueError(
            f"a score of attention needs to see it, and {architecture(model)} shows none of layer "
            f"{', '.join(map(str, hidden))}: choose another score, such as key_diff"
        )
    residuals = [i for i in hooked if any(part.view.residual_length for part in parts[i])]
    if blind := [i for i in residuals if i < len(sights) and sights[i] not in ("seen", None)]:
        raise ValueError(
            f"newest tokens as they came need attention that can be answered, and {architecture(model)} shows none of "
            f"layer {', '.join(map(str, blind))}: leave out residual_length"
        )
    evictors = [(i, part.evictor) for i in wanting for part in parts_of(everything[i])]
    seen = [(i, evictor.observation) for i, evictor in evictors if evictor is not None]
    if turning := [(i, own) for i, own in seen if own is not None and own.wants_turning]:
        found = ropes(model)
        for i, own in turning:
            if (rope := found[i]) is None:
                raise ValueError(
                    f"this score turns queries back to before RoPE, and {architecture(model)} has none in layer {i} "
                    "that it could be asked for: choose another score, such as key_diff"
                )
            own.turning = rope
    # Those that only want to answer are read as arrays where they cannot.
    carrying = [i for i in hooked if i in wanting or _all_can_answer(model, parts[i])]
    unseen = [part for i in carrying for part in parts[i] if part.seam is None]
    seam = AttentionSeam(model) if unseen else None
    for part in unseen:
        part.carry(seam)
