"""Operands of attention: keys or values in the form in which they are stored (dense, joined or packed).

Packed planes are multiplied as they are: on a GPU by `mx.quantized_matmul`. On a CPU that is several times slower than
a product of floats, so there, in float32, affine integers of 2, 4 and 8 bits become floats block by block, without
scales and biases: these are the same for all elements of a group and apply to the products. (mxfp8 is decoded;
other formats use `mx.quantized_matmul` as on a GPU.) With q of one query, c the integers of a slot, s and b of group g:

    q . (s c + b) = sum over g of s_g (q_g . c_g) + b_g sum(q_g)

A centre that was subtracted from the tensor adds a constant to the scores of a query, or to its weighted sum.

B rows, H KV heads, N slots, D head dim, G groups, m queries of all query heads that share a KV head.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import mlx.core as mx

from mlx_kv.cache.buffers import on_cpu
from mlx_kv.cache.codecs import Codec, Packing, Planes, in_rows
from mlx_kv.cache.codecs.rotation import rotated

BLOCK_ELEMENTS = 2**19  # converted to floats at a time, of all rows and heads: 2 MB
WHOLE_IN_BYTES = (2, 4, 8)  # bits: a byte holds a whole number of elements
# Measured on a CPU: with 16 queries of 2,000 slots, decoding first takes 1.4 times as long in 4 and 8 bits, with 64 as
# long or less, with 640 half as long; in 3 bits a fifth with 16. On a GPU not measured.
MOST_PACKED, MOST_PACKED_PRODUCT = 32, 3
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
    if packing is None or queries > _most_packed(packing):
        return Dense(codec.decode(planes, dtype))
    return Packed(planes, packing)


def _most_packed(packing: Packing) -> int:
    """Queries above which a tensor is decoded once, and not for each block of them."""
    whole = packing.mode == "affine" and packing.bits in WHOLE_IN_BYTES
    return MOST_PACKED if whole or not on_cpu() else MOST_PACKED_PRODUCT


class Packed:
    """A tensor (B, H, N, D) in its planes.

    Args:
        planes: (B, H, N, width) each.
        packing: how they are packed.
    """

    def __init__(self, planes: Planes, packing: Packing) -> None:
        self._planes, self._packing = planes, packing

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
            scaled = _grouped(products, groups) * scales.swapaxes(2, 3)[:, :, :, None]  # (B, H, G, m, n)
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
            own = _own_groups(_grouped(products, groups))  # (B, H, m, G, D / G)
            mixed = (own + (part @ biases)[..., None]).reshape(rows, heads, -1, dim)
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
        words, scales, *biases = self._part(0, slots)
        if mode in DECODED_ON_CPU and on_cpu():
            tensor = mx.dequantize(words, scales, group_size=group_size, bits=bits, mode=mode, dtype=x.dtype)
            return x @ (tensor.swapaxes(2, 3) if transpose else tensor)
        return mx.quantized_matmul(x, words, scales, biases[0] if biases else None, transpose, group_size, bits, mode)


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
    own = (mx.arange(dim) // (dim // groups) == mx.arange(groups)[:, None])[:, None]  # (G, 1, D)
    return mx.where(own, queries[:, :, None], 0.0).reshape(rows, heads, -1, dim)


def _grouped(x: mx.array, groups: int) -> mx.array:
    """(B, H, G m, n) as (B, H, G, m, n)."""
    rows, heads, _, last = x.shape
    return x.reshape(rows, heads, groups, -1, last)


def _own_groups(x: mx.array) -> mx.array:
    """Of (B, H, G, m, D) the channels of each group in its own line: (B, H, m, G, D / G)."""
    groups, dim = x.shape[2], x.shape[4]
    if groups == 1:
        return x.swapaxes(2, 3)
    lines = [x[:, :, g, :, g * dim // groups : (g + 1) * dim // groups] for g in range(groups)]
    return mx.stack(lines, axis=3)
