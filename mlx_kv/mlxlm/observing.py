"""Caches whose budgets look at attention, and the model whose attention it is.

Decides for which of them the seam is opened, which they carry then, and which models hide what they want to see. Knows
nothing about scores.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.nn as nn

from mlx_kv.mlxlm.attention import AttentionSeam
from mlx_kv.mlxlm.loading import architecture
from mlx_kv.mlxlm.traverse import leaves, parts_of
from mlx_kv.mlxlm.visibility import attention_seen


def show_attention(model: nn.Module, caches: Sequence[Any]) -> None:
    """Has caches that want to see their attention carry a seam of the model, if they carry none.

    Args:
        caches: of this model, one for each layer.

    Raises:
        ValueError: layers that hide it.
    """
    everything = list(leaves(caches))
    wanting = [i for i, cache in enumerate(everything) if any(part.own_hook is not None for part in parts_of(cache))]
    if not wanting:
        return
    sights = attention_seen(model)
    if hidden := [i for i in wanting if i < len(sights) and sights[i] not in ("seen", None)]:
        raise ValueError(
            f"a score of attention needs to see it, and {architecture(model)} shows none of layer "
            f"{', '.join(map(str, hidden))}: choose another score, such as key_diff"
        )
    unseen = [part for i in wanting for part in parts_of(everything[i]) if part.seam is None]
    seam = AttentionSeam(model) if unseen else None
    for part in unseen:
        part.carry(seam)
