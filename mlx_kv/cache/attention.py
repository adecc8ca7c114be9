"""Attention in MLX operations: over tensors that MLX's fused attention cannot read, and where its softmax is slow.

Operands are keys or values in the form in which they are stored (dense, joined or packed). Attention runs over them
block by block of queries. Partial results over several sets of slots are merged by the log-sum-exp of their scores.
B rows, Hq query heads, H KV heads, r = Hq / H, S queries, N slots, D and Dv head dims.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

import mlx.core as mx

from mlx_kv.cache.buffers import on_cpu
from mlx_kv.cache.codecs import Codec, Packing, Planes, in_rows, rotated
from mlx_kv.cache.mask import Mask, key_positions, visible
from mlx_kv.cache.protocol import Call
from mlx_kv.cache.residual import Places, Residual

# --- operands ---------------------------------------------------------------------------------------------------------

# Operands of attention: keys or values in the form in which they are stored (dense, joined or packed).
#
# Packed planes are multiplied as they are: on a GPU by `mx.quantized_matmul`. On a CPU that is several times slower
# than a product of floats, so there, in float32, affine integers of 2, 4 and 8 bits become floats block by block,
# without scales and biases: these are the same for all elements of a group and apply to the products. (mxfp8 is
# decoded; other formats use `mx.quantized_matmul` as on a GPU.) With q of one query, c the integers of a slot, s and
# b of group g:
#
#     q . (s c + b) = sum over g of s_g (q_g . c_g) + b_g sum(q_g)
#
# A centre that was subtracted from the tensor adds a constant to the scores of a query, or to its weighted sum.
#
# B rows, H KV heads, N slots, D head dim, G groups, m queries of all query heads that share a KV head.


BLOCK_ELEMENTS = 2**19  # converted to floats at a time, of all rows and heads: 2 MB
WHOLE_IN_BYTES = (2, 4, 8)  # bits: a byte holds a whole number of elements
# Measured on a CPU: with 16 queries of 2,000 slots, decoding first takes 1.4 times as long in 4 and 8 bits, with 64 as
# long or less, with 640 half as long; in 3 bits a fifth with 16. A GPU decodes within its product: as many as a batch
# that decodes has (not measured).
MAX_PACKED, MAX_PACKED_PRODUCT, MAX_PACKED_GPU = 32, 3, 512
DECODED_ON_CPU = ("mxfp8",)  # the packed product takes twice as long as decoding first


class Operand(Protocol):
    """One tensor (B, H, N, D), as keys and as values."""

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(B, H, N, D)."""
        ...

    def scores(self, queries: mx.array, slots: int) -> mx.array:
        """(B, H, m, slots): the products of queries (B, H, m, D) with the first slots, as keys."""
        ...

    def mixed(self, weights: mx.array, slots: int) -> mx.array:
        """(B, H, m, D): the first slots, as values, weighted by (B, H, m, slots) and added up."""
        ...


class Operands(NamedTuple):
    """What attention reads: keys and values of n tokens, and a mask that broadcasts to (B, Hq, S, n), or None."""

    keys: Operand
    values: Operand
    mask: Mask


class Dense:
    """A tensor as it is.

    Attributes:
        tensor: (B, H, N, D).
    """

    def __init__(self, tensor: mx.array) -> None:
        self.tensor = tensor

    @property
    def shape(self) -> tuple[int, int, int, int]:
        rows, heads, slots, dim = self.tensor.shape
        return rows, heads, slots, dim

    def scores(self, queries: mx.array, slots: int) -> mx.array:
        return queries @ self.first(slots).swapaxes(2, 3)

    def mixed(self, weights: mx.array, slots: int) -> mx.array:
        return weights @ self.first(slots)

    def first(self, slots: int) -> mx.array:
        """(B, H, slots, D)."""
        return self.tensor if slots == self.tensor.shape[2] else self.tensor[:, :, :slots]


class Joined:
    """Several tensors, the slots of one after those of the other.

    Args:
        parts: of the same B, H and D.
        counts: first slots of each part that are used.
    """

    def __init__(self, parts: Sequence[Operand], counts: Sequence[int]) -> None:
        self._parts, self._counts = parts, counts

    @staticmethod
    def of(parts: Sequence[Operand], counts: Sequence[int]) -> Operand:
        """The same; one part alone stays what it is."""
        return parts[0] if len(parts) == 1 else Joined(parts, counts)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        rows, heads, _, dim = self._parts[0].shape
        return rows, heads, sum(self._counts), dim

    def scores(self, queries: mx.array, slots: int) -> mx.array:
        each = [part.scores(queries, last - first) for part, first, last in self._used(slots)]
        return each[0] if len(each) == 1 else mx.concatenate(each, axis=-1)

    def mixed(self, weights: mx.array, slots: int) -> mx.array:
        each = [part.mixed(weights[..., first:last], last - first) for part, first, last in self._used(slots)]
        return sum(each[1:], each[0])

    def _used(self, slots: int) -> Iterator[tuple[Operand, int, int]]:
        """The parts that have the first slots, each with its range of them."""
        first = 0
        for part, count in zip(self._parts, self._counts, strict=True):
            last = min(first + count, slots)
            if last > first:
                yield part, first, last
            first = last


def operand_of(codec: Codec, planes: Planes, dtype: mx.Dtype, queries: int = 1) -> Operand:
    """A stored tensor as an operand: packed where its codec can be read so, and so many queries gain by it."""
    packing = codec.packed
    if packing is None:
        return Dense(codec.decode(planes, dtype))
    whole = packing.mode == "affine" and packing.bits in WHOLE_IN_BYTES
    # With more queries it is decoded once, and not for each block of them.
    if queries > (MAX_PACKED_GPU if not on_cpu() else MAX_PACKED if whole else MAX_PACKED_PRODUCT):
        return Dense(codec.decode(planes, dtype))
    return Packed(planes, packing)


class Packed:
    """A tensor (B, H, N, D) in its planes.

    Args:
        planes: (B, H, N, width) each.
        packing: how they are packed.
        whole: (B, H, C, width), planes whose first N slots these are, to be read in their place (`whole_planes`).
    """

    def __init__(self, planes: Planes, packing: Packing, whole: Planes | None = None) -> None:
        self._planes, self._packing, self._whole = planes, packing, whole

    @property
    def shape(self) -> tuple[int, int, int, int]:
        rows, heads, slots, words = self._planes[0].shape
        return rows, heads, slots, words * 32 // self._packing.bits

    def scores(self, queries: mx.array, slots: int) -> mx.array:
        scores = self._scores(queries, slots)
        if self._packing.centre is None:
            return scores
        return scores + (queries * self._centre_of(queries.dtype)).sum(axis=-1, keepdims=True)

    def _scores(self, queries: mx.array, slots: int) -> mx.array:
        queries = rotated(queries) if self._packing.rotated else queries
        if not self._by_integers(queries):
            return self._product(queries, slots, transpose=True)
        block, (rows, heads, _, dim) = self._block, self.shape
        groups = dim // self._packing.group_size
        sums = queries.reshape(rows, heads, -1, groups, dim // groups).sum(axis=-1)  # (B, H, m, G)
        spread = _apart(queries, groups)
        blocks = []
        for first in range(0, slots, block):
            words, scales, biases = self._part(first, min(slots, first + block))
            products = _times_keys(spread, words, self._packing.bits)
            products = products.reshape(rows, heads, groups, -1, words.shape[2])
            scaled = products * scales.swapaxes(2, 3)[:, :, :, None]  # (B, H, G, m, n)
            blocks.append((scaled[:, :, 0] if groups == 1 else scaled.sum(axis=2)) + sums @ biases.swapaxes(2, 3))
        return blocks[0] if len(blocks) == 1 else mx.concatenate(blocks, axis=-1)

    def mixed(self, weights: mx.array, slots: int) -> mx.array:
        if self._by_integers(weights):
            mixed = self._mixed_by_integers(weights, slots)
        else:
            mixed = self._product(weights, slots, transpose=False)
        mixed = rotated(mixed) if self._packing.rotated else mixed
        if self._packing.centre is None:
            return mixed
        return mixed + weights.sum(axis=-1, keepdims=True) * self._centre_of(weights.dtype)

    def _centre_of(self, dtype: mx.Dtype) -> mx.array:
        """The centre that was subtracted, (H, 1, D)."""
        assert self._packing.centre is not None
        return self._packing.centre.array(dtype)

    def _mixed_by_integers(self, weights: mx.array, slots: int) -> mx.array:
        block, (rows, heads, _, dim) = self._block, self.shape
        groups = dim // self._packing.group_size
        total: mx.array | None = None
        for first in range(0, slots, block):
            last = min(slots, first + block)
            words, scales, biases = self._part(first, last)
            part = weights if last - first == slots else weights[..., first:last]  # (B, H, m, n)
            scaled = part[:, :, None] * scales.swapaxes(2, 3)[:, :, :, None]  # (B, H, G, m, n)
            products = _times_values(scaled.reshape(rows, heads, -1, last - first), words, self._packing.bits)
            by_group = _group_channels(products.reshape(rows, heads, groups, -1, dim))  # (B, H, m, G, D / G)
            mixed = (by_group + (part @ biases)[..., None]).reshape(rows, heads, -1, dim)
            total = mixed if total is None else total + mixed
        assert total is not None, "there is a slot"
        return total

    def _by_integers(self, x: mx.array) -> bool:
        if self._packing.mode != "affine" or self._packing.bits not in WHOLE_IN_BYTES or x.dtype != mx.float32:
            return False
        return on_cpu() and bool(self._planes[1].dtype == mx.float32)

    @property
    def _block(self) -> int:
        rows, heads, _, dim = self.shape
        return max(256, BLOCK_ELEMENTS // (rows * heads * dim))

    def _part(self, first: int, last: int) -> Planes:
        if (first, last) == (0, self._planes[0].shape[2]):
            return self._planes
        return in_rows(tuple([plane[:, :, first:last] for plane in self._planes]))

    def _product(self, x: mx.array, slots: int, transpose: bool) -> mx.array:
        bits, group_size, mode, *_ = self._packing
        words, scales, *biases = self._part(0, slots) if self._whole is None else self._whole
        if (unused := words.shape[2] - slots) and not transpose:
            x = mx.pad(x, [(0, 0), (0, 0), (0, 0), (0, unused)])
        if mode in DECODED_ON_CPU and on_cpu():
            tensor = mx.dequantize(words, scales, group_size=group_size, bits=bits, mode=mode, dtype=x.dtype)
            return x @ (tensor.swapaxes(2, 3) if transpose else tensor)
        biases_of = biases[0] if biases else None
        product = mx.quantized_matmul(x, words, scales, biases_of, transpose, group_size, bits, mode)
        return product[..., :slots] if unused and transpose else product


def _pieces(words: mx.array, bits: int) -> list[mx.array]:
    """The integers of packed words (B, H, n, W) as floats: piece i of k has the channels i, i + k, i + 2k, ..."""
    packed = words.view(mx.uint8)
    if bits == 8:
        return [packed.astype(mx.float32)]
    return [((packed >> shift) & (2**bits - 1)).astype(mx.float32) for shift in range(0, 8, bits)]


def _times_keys(queries: mx.array, words: mx.array, bits: int) -> mx.array:
    """(B, H, m, n): products of queries (B, H, m, D) with integers."""
    pieces = _pieces(words, bits)
    products = [queries[..., i :: len(pieces)] @ piece.swapaxes(2, 3) for i, piece in enumerate(pieces)]
    return sum(products[1:], products[0])


def _times_values(weights: mx.array, words: mx.array, bits: int) -> mx.array:
    """(B, H, m, D): integers weighted by (B, H, m, n)."""
    products = [weights @ piece for piece in _pieces(words, bits)]
    return products[0] if len(products) == 1 else mx.stack(products, axis=-1).flatten(-2)


def _apart(queries: mx.array, groups: int) -> mx.array:
    """Queries (B, H, m, D) once for each group, of which alone each then has its numbers: (B, H, G m, D)."""
    if groups == 1:
        return queries
    rows, heads, _, dim = queries.shape
    in_group = (mx.arange(dim) // (dim // groups) == mx.arange(groups)[:, None])[:, None]  # (G, 1, D)
    return mx.where(in_group, queries[:, :, None], 0.0).reshape(rows, heads, -1, dim)


def _group_channels(x: mx.array) -> mx.array:
    """Of (B, H, G, m, D) the channels of each group in its own line: (B, H, m, G, D / G)."""
    groups, dim = x.shape[2], x.shape[4]
    if groups == 1:
        return x.swapaxes(2, 3)
    lines = [x[:, :, g, :, g * dim // groups : (g + 1) * dim // groups] for g in range(groups)]
    return mx.stack(lines, axis=3)


# --- attention by blocks ----------------------------------------------------------------------------------------------

# Attention over operands, block by block of queries.
#
# Scores of all queries at once would be far more memory than a CPU's caches hold, and new memory costs more there
# than the arithmetic. A causal block skips the keys beyond its last query. On a CPU the softmax uses our own
# exponential. B rows, Hq query heads, H KV heads, r = Hq / H, S queries, N slots, D and Dv head dims.


# Scores of a block, of all rows and heads: 1 MB, which stays in a CPU's caches; a GPU needs fewer and larger kernels.
BLOCK_SCORES = {mx.DeviceType.cpu: 2**18, mx.DeviceType.gpu: 2**25}
MIN_BLOCK_QUERIES = 32  # of a block: fewer make poor products
MIN_PRODUCT_ROWS = 96  # of a product, where many query heads have their queries in it
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
ZERO_POWER = -127.0  # the exponent of 0
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
    block = max(MIN_BLOCK_QUERIES, BLOCK_SCORES[mx.default_device().type] // (rows * query_heads * slots))
    outputs = []
    for first in range(0, new, block):
        last = min(first + block, new)
        seen = slots - new + last if isinstance(mask, str) else slots
        block_queries = queries[:, :, first:last].reshape(rows, heads, -1, dim)  # (B, H, r * s, D)
        scores = keys.scores(block_queries, seen).reshape(rows, heads, -1, last - first, seen)
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
    least = max(1, MIN_PRODUCT_ROWS * heads // query_heads)
    block = max(least, BLOCK_SCORES[mx.default_device().type] // (rows * query_heads * slots))
    partials = []
    for first in range(0, new, block):
        last = min(first + block, new)
        seen = slots - new + last if isinstance(mask, str) else slots
        some = queries[:, :, first:last]
        block_queries = (some * scale).reshape(rows, heads, -1, dim)  # (B, H, r * s, D)
        scores = keys.scores(block_queries, seen).reshape(rows, heads, -1, last - first, seen)
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
        partials.append(Partial(*(x.reshape(rows, query_heads, last - first, -1) for x in (mixed, level))))
    if len(partials) == 1:
        return partials[0]
    return Partial(*(mx.concatenate(list(same), axis=2) for same in zip(*partials, strict=True)))


def attend_beside(
    shared: Sequence[Operands], own: Operands, queries: mx.array, scale: float, sinks: mx.array | None = None
) -> mx.array:
    """(B, Hq, S, Dv): attention over tokens that rows share, and over their own, by one softmax of all scores.

    For few queries on a GPU, where a step takes as long as its calls: half as many as for partial results.

    Args:
        shared: (1, H, n, D) and (1, H, n, Dv) each; masks (B, 1, 1, n), or None where all rows see all.
        own: (B, H, N, D) and (B, H, N, Dv).
        queries, scale, sinks: as of `attend`.
    """
    rows, query_heads, new, dim = queries.shape
    heads, queries = own.keys.shape[1], queries * scale

    def by_row(x: mx.array) -> mx.array:  # (1, H, r B S, n) as (B, H, r, S, n)
        return x.reshape(heads, -1, rows, new, x.shape[3]).transpose(2, 0, 1, 3, 4)

    everything = [*shared, own]
    counts = [each.keys.shape[2] for each in everything]
    together = queries.swapaxes(0, 1).reshape(1, heads, -1, dim)
    scores = [by_row(each.keys.scores(together, count)) for each, count in zip(shared, counts, strict=False)]
    apart = own.keys.scores(queries.reshape(rows, heads, -1, dim), counts[-1])
    scores.append(apart.reshape(rows, heads, -1, new, counts[-1]))
    seen = [_masked(each, operands.mask, 0, new) for each, operands in zip(scores, everything, strict=True)]
    weights, total = _weights(mx.concatenate(seen, axis=-1), sinks)
    *of_shared, of_own = mx.split(weights, list(itertools.accumulate(counts[:-1])), axis=-1)
    mixed = own.values.mixed(of_own.reshape(rows, heads, -1, counts[-1]), counts[-1])
    mixed = mixed.reshape(rows, heads, -1, new, mixed.shape[3])
    for each, some, count in zip(shared, of_shared, counts, strict=False):
        product = some.transpose(1, 2, 0, 3, 4).reshape(1, heads, -1, count)
        mixed = mixed + by_row(each.values.mixed(product, count))
    return (mixed if total is None else mixed / total).reshape(rows, query_heads, new, -1)


def merged(parts: Sequence[Partial], sinks: mx.array | None = None) -> mx.array:
    """(B, Hq, S, Dv) of float32: attention over all tokens, of partial results over all of them.

    Args:
        sinks: (Hq,) logits that take part in each softmax, and have no value.
    """
    nothing = () if sinks is None else (Partial(mx.array(0.0), sinks.astype(mx.float32)[:, None, None]),)
    return combined([*parts, *nothing]).mixed


def combined(parts: Sequence[Partial]) -> Partial:
    """Attention over several parts of the tokens together."""
    return functools.reduce(lambda one, other: Partial(*_combined(one, other)), parts)


@functools.partial(mx.compile, shapeless=True)
def _combined(one: Partial, other: Partial) -> tuple[mx.array, mx.array]:
    """Two calls, and one for the level where it is used: the two weigh e^level each."""
    share = mx.sigmoid(one.level - other.level)
    return other.mixed + share * (one.mixed - other.mixed), mx.logaddexp(one.level, other.level)


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
    highest = main.reshape(*scores.shape[:-1], STRIPES, each).max(axis=-2).max(axis=-1, keepdims=True)
    return highest if main is scores else mx.maximum(highest, scores[..., each * STRIPES :].max(axis=-1, keepdims=True))


@mx.compile
def softmax_powers(scores: mx.array, largest: mx.array) -> mx.array:
    """e^(scores - largest) of float32 scores <= largest, absolute error below 3e-7; below e^-87.7 exactly 0.

    Two thirds of the operations of `exponential`: with y = x / ln 2, e^x = 2^n 2^(y - n), and a polynomial of degree 6
    for 2^(y - n), relative error 2e-9 (least squares with weights that make the largest error least). The
    rounding of y to 24 bits is a relative error of 6e-8 |x|, which is small where a power counts in a softmax.
    """
    y = mx.maximum((scores - largest) * LOG2_E, ZERO_POWER)
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


# --- beside a residual, and over planes that mlx-lm cannot read -------------------------------------------------------

# Attention that mlx-lm cannot compute: over planes that it cannot read, and over slots beside a residual.
#
# With a residual, two sets of keys stand side by side: those of the slots, and those of the residual. The mask lets
# each query see each token in exactly one of the two. B rows, H KV heads, S queries, K slots that are read, m tokens
# of the residual.


class PackedAttention:
    """Attention over packed keys and values.

    Args:
        keys, values: how each of them is packed.
        whole: planes of all slots of both, to be read in place of those of the call (`whole_planes`).
    """

    def __init__(self, keys: Packing, values: Packing, whole: tuple[Planes, Planes] | None = None) -> None:
        self._keys, self._values, self._whole = keys, values, whole or (None, None)

    def attend(self, call: Call) -> mx.array:
        """(B, Hq, S, Dv)."""
        keys, values, mask = self.operands(call)
        return attend(call.queries, keys, values, call.scale, mask, call.sinks)

    def operands(self, call: Call) -> Operands:
        """What it reads."""
        keys, values = self._whole
        return Operands(Packed(call.keys, self._keys, keys), Packed(call.values, self._values, values), call.mask)


class ResidualAttention:
    """Attention over slots and a residual.

    Args:
        residual: after the write whose queries attend.
        places: of its tokens.
        packings: how keys and values of the slots are packed; None where attention gets arrays.
        whole: as of `PackedAttention`.
    """

    def __init__(
        self,
        residual: Residual,
        places: Places,
        packings: tuple[Packing, Packing] | None,
        whole: tuple[Planes, Planes] | None = None,
    ) -> None:
        self._residual, self._places, self._packings = residual, places, packings
        self._whole = whole or (None, None)

    def attend(self, call: Call) -> mx.array:
        """(B, Hq, S, Dv)."""
        keys, values, mask = self.operands(call)
        if self._packings is None and isinstance(keys, Dense) and isinstance(values, Dense):
            return call.forward(keys=keys.tensor, values=values.tensor, mask=mask)
        return attend(call.queries, keys, values, call.scale, mask, call.sinks)

    def operands(self, call: Call) -> Operands:
        """What it reads: some first slots, and after them tokens of the residual."""
        slots = int((call.keys if self._packings is None else call.keys[0]).shape[2])
        plan, mask = self._places.plan, None
        if call.mask is None and plan.new == 1 and plan.uniform and plan.ordered and len(plan.ranges) == 1:
            # One query sees the last slots as they came, and all slots before them as they are stored.
            count = min(self._places.length, slots)
            newest = self._residual.newest(plan.rows[0].offset + 1, count)
            slots -= count
        else:
            mask = self._places.mask(call.mask, lambda: self._mask(call))
            newest = self._residual.read()
        if self._packings is None:
            stored = (x[:, :, :slots] for x in (call.keys, call.values))
            keys, values = (Dense(mx.concatenate(list(pair), axis=2)) for pair in zip(stored, newest, strict=True))
            return Operands(keys, values, mask)
        if slots == 0:
            return Operands(Dense(newest[0]), Dense(newest[1]), mask)
        both_keys, both_values = (
            Joined([Packed(planes, packing, whole), Dense(new)], [slots, int(new.shape[2])])
            for planes, packing, whole, new in zip(
                (call.keys, call.values), self._packings, self._whole, newest, strict=True
            )
        )
        return Operands(both_keys, both_values, mask)

    def _mask(self, call: Call) -> mx.array:
        """(B or 1, 1 or more, S, K + m)."""
        places = self._places
        plan, length = places.plan, places.length
        offsets = mx.array([row.offset for row in plan.distinct])[:, None, None, None]
        queries = offsets + mx.arange(plan.new)[:, None]  # (B, 1, S, 1)
        slots = key_positions(plan)
        slots = slots[None, None, None] if slots.ndim == 1 else slots  # (B, 1, 1, K)
        beside = mx.array(places.positions)[:, None, None]  # (B, 1, 1, m)
        near = slots > queries - length  # hidden: they are read from the residual, which holds all (`max_trim`)
        layout = plan.layout
        shown = visible(beside, queries, layout.window, layout.sinks, layout.chunk_size)
        shown = shown & (beside > queries - length)
        mask = call.mask
        if not isinstance(mask, mx.array):  # each query sees all up to itself
            return mx.concatenate([(slots >= 0) & (slots <= queries) & ~near, shown], axis=-1)
        mask = mask.reshape(*(1,) * (4 - mask.ndim), *mask.shape)
        columns = mx.array(places.columns)[:, None, None]  # (B, 1, 1, m)
        rows = max(mask.shape[0], columns.shape[0])
        index = mx.broadcast_to(columns, (rows, *mask.shape[1:3], columns.shape[3]))
        over = mx.take_along_axis(mx.broadcast_to(mask, (rows, *mask.shape[1:])), index, axis=-1)
        if mask.dtype == mx.bool_:
            parts = [mask & ~near, over & shown]
        else:
            least = mx.finfo(mask.dtype).min
            parts = [mx.where(near, least, mask), mx.where(shown, over, least)]
        shape = tuple(max(sizes) for sizes in zip(*(part.shape[:3] for part in parts), strict=True))
        return mx.concatenate([mx.broadcast_to(part, (*shape, part.shape[3])) for part in parts], axis=-1)
