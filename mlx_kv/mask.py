"""Who may attend to whom: the only mask formula.

Decides, from a plan made of integers, whether attention needs a mask at all. Knows nothing about caches or models.
Masks are boolean, True where a query may look: (S, K), or (B, 1, S, K) where rows differ.
"""

from __future__ import annotations

from typing import Literal

import mlx.core as mx

from mlx_kv.layout import Plan

Mask = mx.array | Literal["causal"] | None


def visible(key_positions: mx.array, query_positions: mx.array, window: int | None) -> mx.array:
    """Whether a query at position q sees a key at position p: p >= 0, p <= q and, in a window, q - p < window.

    Args:
        key_positions: (..., 1, K).  query_positions: (..., S, 1).

    Returns:
        (..., S, K), boolean.
    """
    seen = (key_positions >= 0) & (key_positions <= query_positions)
    return seen if window is None else seen & (query_positions - key_positions < window)


def make_mask(plan: Plan, window: int | None = None, return_array: bool = False) -> Mask:
    """The mask for the new tokens of a plan over slots [0, plan.needed).

    None for one token that sees every slot, "causal" where the new tokens are the last slots in order and see all
    before them: the fast paths of every device. An array wherever one of these would be wrong.

    Args:
        window: each query sees this many tokens, itself included.
        return_array: the model reads the mask as an array; one token that sees all still gets None, as from mlx-lm.
    """
    sees_all = plan.uniform and plan.starts[0] == 0 and (window is None or plan.needed <= window)
    if sees_all and plan.new == 1:
        return None
    if sees_all and not return_array:
        return "causal"
    slots, new = mx.arange(plan.needed), mx.arange(plan.new)[:, None]  # (K,), (S, 1)
    if plan.uniform:
        return visible(slots - plan.starts[0], new + (plan.ends[0] - plan.starts[0]), window)
    starts = mx.array(plan.starts)[:, None, None, None]
    offsets = mx.array([end - start for start, end in zip(plan.starts, plan.ends, strict=True)])[:, None, None, None]
    return visible(slots - starts, new + offsets, window)  # (B, 1, S, K)
