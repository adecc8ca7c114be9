"""Attention over operands, block by block of queries.

Scores of all queries at once would be far more memory than a CPU's caches hold, and new memory costs more there than
the arithmetic. A causal block skips the keys beyond its last query. On a CPU the softmax uses our own exponential.
B rows, Hq query heads, H KV heads, r = Hq / H, S queries, N slots, D and Dv head dims.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import mlx.core as mx

from mlx_kv.cache.attention.operands import Dense, Operand
from mlx_kv.cache.buffers import on_cpu

# Scores of a block, of all rows and heads: 1 MB, which stays in a CPU's caches; a GPU needs fewer and larger kernels.
BLOCK_SCORES = {mx.DeviceType.cpu: 2**18, mx.DeviceType.gpu: 2**25}
LEAST_QUERIES = 32  # of a block: fewer make poor products
LEAST_ROWS = 96  # of a product, where many query heads have their queries in it
FUSED_QUERIES = 128  # of a block: with fewer, MLX's fused attention has too few parts to occupy a GPU
# Of the exponential.
LOG2_E = 1.4426950408889634
LN_2 = (0.693359375, -2.12194440e-4)  # its first 9 bits, and the rest
ROUNDS = 12582912.0  # 1.5 * 2^23: floats of this size are whole numbers
EXPONENT_OF_1 = 127 << 23
# (e^r - 1 - r) / r^2, the highest power first.
SERIES = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)
# 2^r, the highest power first, for |r| <= 1/2.
SERIES_OF_2 = (
    1.5345811589e-4,
    1.3399931216e-3,
    9.6184889586e-3,
    5.5503287770e-2,
    2.4022646891e-1,
    6.9314720574e-1,
    1.0000000006,
)
LEAST_POWER = -127.0  # the exponent of 0
STRIPES = 16  # of slots, whose maxima are taken side by side
MIN_POWER = -126.0  # 2^y below is not a normal number: 0
MAX_X = 88.0  # e^x above is not a finite float


def attend(
    queries: mx.array,
    keys: Operand,
    values: Operand,
    scale: float,
    mask: mx.array | str | None = None,
    sinks: mx.array | None = None,
) -> mx.array:
    """(B, Hq, S, Dv), in the dtype of the queries: what `mx.fast.scaled_dot_product_attention` makes of the tensors.

    Args:
        queries: (B, Hq, S, D), floating point.
        keys, values: (B, H, N, D) and (B, H, N, Dv).
        mask: "causal" (the last query sees the last slot), booleans or addends that broadcast to (B, Hq, S, N), or to
            (B, H, S, N), or None.
        sinks: (Hq,) logits that take part in each softmax, and have no value.
    """
    (rows, query_heads, new, dim), (_, heads, slots, _) = queries.shape, keys.shape
    queries = queries * scale
    block = max(LEAST_QUERIES, BLOCK_SCORES[mx.default_device().type] // (rows * query_heads * slots))
    outputs = []
    for first in range(0, new, block):
        last = min(first + block, new)
        seen = slots - new + last if isinstance(mask, str) else slots
        own = queries[:, :, first:last].reshape(rows, heads, -1, dim)  # (B, H, r * s, D)
        scores = keys.scores(own, seen).reshape(rows, heads, -1, last - first, seen)
        weights, total = _weights(_masked(scores, mask, first, last), sinks)
        mixed = values.mixed(weights.reshape(rows, heads, -1, seen), seen)  # (B, H, r * s, Dv)
        mixed = mixed if total is None else mixed / total.reshape(rows, heads, -1, 1)
        outputs.append(mixed.reshape(rows, query_heads, last - first, -1))
    return outputs[0] if len(outputs) == 1 else mx.concatenate(outputs, axis=2)


class Partial(NamedTuple):
    """Attention over some of the tokens, to be merged with that over the others.

    Attributes:
        mixed: (B, Hq, S, Dv), attention over these tokens alone.
        level: (B, Hq, S, 1) of float32, the logarithm of the sum of e^score over them: log-sum-exp.
    """

    mixed: mx.array
    level: mx.array


def attend_partly(
    queries: mx.array,
    keys: Operand,
    values: Operand,
    scale: float,
    mask: mx.array | str | None = None,
    slots: int | None = None,
) -> Partial:
    """Attention over some of the tokens that queries see; the arguments are those of `attend`.

    Args:
        slots: first slots to read; None is all.
    """
    (rows, query_heads, new, dim), heads = queries.shape, keys.shape[1]
    slots = keys.shape[2] if slots is None else slots
    # Queries of all query heads of a KV head are one product: with many of them, few queries make a good one.
    least = max(1, LEAST_ROWS * heads // query_heads)
    block = max(least, BLOCK_SCORES[mx.default_device().type] // (rows * query_heads * slots))
    found = []
    for first in range(0, new, block):
        last = min(first + block, new)
        seen = slots - new + last if isinstance(mask, str) else slots
        some = queries[:, :, first:last]
        own = (some * scale).reshape(rows, heads, -1, dim)  # (B, H, r * s, D)
        scores = keys.scores(own, seen).reshape(rows, heads, -1, last - first, seen)
        scores = _masked(scores.astype(mx.float32), mask, first, last)
        if on_cpu():
            largest = _largest(scores)
            weights = softmax_powers(scores, largest)
            total = weights @ mx.ones((seen, 1))  # thrice as fast as a sum
            level = largest + mx.log(total)
            mixed = values.mixed(weights.reshape(rows, heads, -1, seen).astype(queries.dtype), seen)
            mixed = mixed.astype(mx.float32) / total.reshape(rows, heads, -1, 1)
        else:  # fewer calls: a step of a small model takes as long as its calls
            level = mx.logsumexp(scores, axis=-1, keepdims=True)
            if mask is None and last - first >= FUSED_QUERIES and isinstance(keys, Dense) and isinstance(values, Dense):
                mixed = mx.fast.scaled_dot_product_attention(some, keys.first(seen), values.first(seen), scale=scale)
            else:
                weights = mx.softmax(scores, axis=-1).reshape(rows, heads, -1, seen)
                mixed = values.mixed(weights.astype(queries.dtype), seen)
        found.append(Partial(*(x.reshape(rows, query_heads, last - first, -1) for x in (mixed, level))))
    if len(found) == 1:
        return found[0]
    return Partial(*(mx.concatenate(list(same), axis=2) for same in zip(*found, strict=True)))


def merged(parts: Sequence[Partial], sinks: mx.array | None = None) -> mx.array:
    """(B, Hq, S, Dv) of float32: attention over all tokens, of partial results over all of them.

    Args:
        sinks: (Hq,) logits that take part in each softmax, and have no value.
    """
    logits = None if sinks is None else sinks.astype(mx.float32)[:, None, None]
    return (_combined if on_cpu() else _combined_at_once)(list(parts), logits).mixed


def combined(parts: Sequence[Partial]) -> Partial:
    """Attention over several parts of the tokens together."""
    return parts[0] if len(parts) == 1 else _combined(list(parts), None)


def _combined(parts: list[Partial], logits: mx.array | None) -> Partial:
    largest = parts[0].level
    for part in parts[1:]:
        largest = mx.maximum(largest, part.level)
    largest = largest if logits is None else mx.maximum(largest, logits)
    mixed, total = mx.array(0.0), mx.array(0.0) if logits is None else _power(logits - largest)
    for part in parts:
        weight = _power(part.level - largest)
        mixed, total = mixed + part.mixed * weight, total + weight
    return Partial(mixed / total, largest + mx.log(total))


_combined_at_once = mx.compile(_combined, shapeless=True)  # one kernel


def _power(x: mx.array) -> mx.array:
    """e^x of float32 x <= 0."""
    return exponential(x) if on_cpu() else mx.exp(x)


def _masked(scores: mx.array, mask: mx.array | str | None, first: int, last: int) -> mx.array:
    """Scores (B, H, r, s, N) of the queries from first to last, the least number where the mask hides a slot."""
    if isinstance(mask, str):
        queries, slots = scores.shape[3:]
        if queries == 1:
            return scores
        mask = mx.arange(slots) <= mx.arange(slots - queries, slots)[:, None]
    elif mask is None:
        return scores
    else:
        mask = mask.reshape(*(1,) * (4 - mask.ndim), *mask.shape)  # (B or 1, 1 or H or Hq, S or 1, N)
        mask = mask[:, :, first:last] if mask.shape[2] > 1 else mask
        apart = mask.shape[1] not in (1, scores.shape[1])
        heads = scores.shape[1:3] if apart else (mask.shape[1], 1)
        mask = mask.reshape(mask.shape[0], *heads, *mask.shape[2:])
    return scores + mask if mask.dtype != mx.bool_ else mx.where(mask, scores, mx.finfo(scores.dtype).min)


def _weights(scores: mx.array, sinks: mx.array | None) -> tuple[mx.array, mx.array | None]:
    """What scores (B, H, r, s, N) weigh, (B, H, r, s, N), and their sum (B, H, r, s, 1); None where that is 1."""
    logits = None if sinks is None else sinks.astype(scores.dtype).reshape(scores.shape[1], -1, 1, 1)
    if scores.dtype != mx.float32 or not on_cpu():
        if logits is None:
            return mx.softmax(scores, axis=-1, precise=True), None
        all_scores = mx.concatenate([mx.broadcast_to(logits, (*scores.shape[:-1], 1)), scores], axis=-1)
        return mx.softmax(all_scores, axis=-1, precise=True)[..., 1:], None
    largest = _largest(scores)
    largest = largest if logits is None else mx.maximum(largest, logits)
    weights = softmax_powers(scores, largest)
    total = weights @ mx.ones((weights.shape[-1], 1))  # thrice as fast as a sum
    return weights, total if logits is None else total + softmax_powers(logits, largest)


def _largest(scores: mx.array) -> mx.array:
    """The largest of scores (..., N), (..., 1). On a CPU, MLX is twice as fast along any axis but the last."""
    slots = scores.shape[-1]
    each = slots // STRIPES
    if each < STRIPES:
        return scores.max(axis=-1, keepdims=True)
    main = scores if each * STRIPES == slots else scores[..., : each * STRIPES]
    found = main.reshape(*scores.shape[:-1], STRIPES, each).max(axis=-2).max(axis=-1, keepdims=True)
    return found if main is scores else mx.maximum(found, scores[..., each * STRIPES :].max(axis=-1, keepdims=True))


@mx.compile
def softmax_powers(scores: mx.array, largest: mx.array) -> mx.array:
    """e^(scores - largest) of float32 scores <= largest, absolute error below 3e-7; below e^-87.7 exactly 0.

    Two thirds of the operations of `exponential`: with y = x / ln 2, e^x = 2^n 2^(y - n), and a polynomial of degree 6
    for 2^(y - n), relative error 2e-9 (least squares with weights that make the largest error least). The
    rounding of y to 24 bits is a relative error of 6e-8 |x|, which is small where a power counts in a softmax.
    """
    y = mx.maximum((scores - largest) * LOG2_E, LEAST_POWER)
    rounded = y + ROUNDS
    rest = y - (rounded - ROUNDS)
    power = mx.array(SERIES_OF_2[0], mx.float32)
    for factor in SERIES_OF_2[1:]:
        power = factor + rest * power
    return power * ((rounded.view(mx.int32) << 23) + EXPONENT_OF_1).view(mx.float32)


@mx.compile
def exponential(x: mx.array) -> mx.array:
    """e^x of float32 x in [-3e38, MAX_X], relative error below 3e-7; results below e^-87.3 are exactly 0.

    MLX's own takes 17 to 20 ns a number on an x86-64 CPU, nine tenths of its attention over a prompt; this one takes 1
    to 2 ns.

    e^x = 2^n e^r: n is x / ln 2, rounded to a whole number by adding 1.5 * 2^23, after which the lowest bits of the
    float are n; r = x - n ln 2 lies within ln 2 / 2, where Cephes' polynomial of degree 7 suffices; n goes to the
    exponent (Schraudolph 1999). ln 2 is split in two parts, the first of which times n is exact: 2^y with y = x / ln 2
    directly would be off by 4e-6 for large y, because y has only 24 bits.
    """
    y = x * LOG2_E
    rounded = y + ROUNDS
    whole = rounded - ROUNDS
    rest = (x - whole * LN_2[0]) - whole * LN_2[1]
    power = mx.array(SERIES[0], mx.float32)
    for factor in SERIES[1:]:
        power = factor + rest * power
    power = 1.0 + (rest + rest * rest * power)
    scale = ((rounded.view(mx.int32) << 23) + EXPONENT_OF_1).view(mx.float32)
    return mx.where(y < MIN_POWER, 0.0, power * scale)
