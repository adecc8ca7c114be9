"""Attention of a model in float32 on a CPU, with NumPy's exponential in MLX's place: to measure quality, not speed.

Nine tenths of what MLX's attention takes on a CPU without vector instructions of its own is the exponential: 26 ns a
number here, where NumPy takes 0.8. A table of thousands of answers is measured in a fourth of the time. What comes out
differs in the last bits: `check` says by how much, and no benchmark that tells of time may use this.
"""

from __future__ import annotations

import math
from typing import Any

import mlx.core as mx
import numpy as np

LARGEST_DIFFERENCE = 1e-3  # of logits, which are tens


def softmax_in_place(products: mx.array, unseen: np.ndarray | None) -> mx.array:
    """Over the last axis of an array that nobody else has."""
    mx.eval(products)
    numbers = np.array(products, copy=False)
    if unseen is not None:
        np.copyto(numbers, -math.inf, where=unseen)
    numbers -= numbers.max(axis=-1, keepdims=True)
    np.exp(numbers, out=numbers)
    numbers /= numbers.sum(axis=-1, keepdims=True)
    return products


def attention(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    *,
    scale: float,
    mask: Any = None,
    sinks: Any = None,
    **more: Any,
) -> mx.array:
    """As `mx.fast.scaled_dot_product_attention`, which does what isn't done here."""
    if queries.dtype != mx.float32 or sinks is not None or (isinstance(mask, mx.array) and mask.dtype != mx.bool_):
        return _mlx_attention(queries, keys, values, scale=scale, mask=mask, sinks=sinks, **more)
    rows, heads, count, total = keys.shape[0], keys.shape[1], queries.shape[2], keys.shape[2]
    grouped = (queries * scale).reshape(rows, heads, -1, queries.shape[3])  # (B, H, g * S, D)
    products = (grouped @ keys.swapaxes(2, 3)).reshape(rows, heads, -1, count, total)
    unseen = None
    if isinstance(mask, str) and count > 1:
        unseen = np.arange(total) > np.arange(total - count, total)[:, None]
    elif isinstance(mask, mx.array):
        allowed = np.array(mask)
        if allowed.ndim == 4:  # (B, 1 or Hq, S, K)
            allowed = allowed[:, None] if allowed.shape[1] == 1 else allowed.reshape(rows, heads, -1, count, total)
        unseen = ~allowed
    shares = softmax_in_place(products, unseen).reshape(rows, heads, -1, total)
    return (shares @ values).reshape(rows, queries.shape[1], count, values.shape[3])


_mlx_attention = mx.fast.scaled_dot_product_attention


def install() -> None:
    """From now on, in this process, where the device is a CPU."""
    if mx.default_device().type == mx.DeviceType.cpu:
        mx.fast.scaled_dot_product_attention = attention


def check(model: Any, tokens: list[int]) -> float:
    """The largest difference of logits between MLX's attention and this one.

    Raises:
        ValueError: it is more than rounding makes.
    """
    text, used = mx.array([tokens]), mx.fast.scaled_dot_product_attention
    own = model(text)
    mx.eval(own)
    mx.fast.scaled_dot_product_attention = _mlx_attention
    try:
        difference = mx.abs(model(text) - own).max().item()
    finally:
        mx.fast.scaled_dot_product_attention = used
    if not difference < LARGEST_DIFFERENCE:
        raise ValueError(f"logits differ by {difference}: this attention is wrong for this model")
    return float(difference)
