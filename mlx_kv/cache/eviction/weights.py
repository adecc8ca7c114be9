"""Attention weights of some queries over the tokens of a cache, in blocks: the matrix is never materialised.

Softmax over all tokens that a query sees, by their positions, in whatever slots they lie. Encoded keys are decoded in
blocks.
B rows, Hq query heads, H KV heads, g = Hq / H, D head dim; m queries, n tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from mlx_kv.cache.buffers import SlotBuffer, on_cpu
from mlx_kv.cache.codecs import are_plain
from mlx_kv.cache.protocol import Call

# Of the weights of one block, for one row and KV head: so the blocks of a row are the same in every batch, and however
# heads are split.
WEIGHT_BYTES = {mx.DeviceType.cpu: 2**21, mx.DeviceType.gpu: 2**24}
LEAST_QUERIES = 8
DECODED_TOKENS = 1024  # at a time
UNSEEN = -1e30  # a product without weight in a softmax, and finite


class Keys(NamedTuple):
    """The keys of a cache.

    Attributes:
        shape: (B, H, n, D).
        part: some of the tokens, (B, H, some, D), decoded.
        positions: (B, 1 or H, n), below 0 where there is no token.
        encoded: whether reading them decodes them.
    """

    shape: tuple[int, ...]
    part: Callable[[slice], mx.array]
    positions: mx.array
    encoded: bool = False


class Queries(NamedTuple):
    """Queries of all rows.

    Attributes:
        queries: (B, Hq, m, D), after RoPE.
        positions: (B, m), below 0 where there is no query.
        scale: of the products.
        sinks: (Hq,), logits of attention sinks, or None.
    """

    queries: mx.array
    positions: mx.array
    scale: float
    sinks: mx.array | None = None

    def columns(self, first: int, last: int) -> Queries:
        return self._replace(queries=self.queries[:, :, first:last], positions=self.positions[:, first:last])


def stored_keys(buffer: SlotBuffer, row: int | None, n: int, positions: mx.array) -> Keys:
    """The first n tokens of a row, or of all rows, as they are stored.

    Args:
        positions: (B or 1, 1 or H, n).
    """
    rows, heads, dim, _ = buffer.signature

    def part(which: slice) -> mx.array:
        read = buffer.read(((which.start, min(which.stop, n)),))
        return buffer.decode(read if row is None else tuple([plane[row : row + 1] for plane in read]))

    encoded = not are_plain((buffer.codec, buffer.codec))
    return Keys((rows if row is None else 1, heads, n, dim), part, positions, encoded)


def keys_of(buffer: SlotBuffer, live: Sequence[mx.array], call: Call | None = None) -> Keys:
    """The live tokens of all rows: from a call if it has decoded ones, else as they are stored.

    Args:
        live: the positions of each row's slots, (1 or H, n of its own); below 0 where a head has no token.
    """
    given = None if call is None or not isinstance(call.keys, mx.array) else call.keys
    n = max([line.shape[1] for line in live]) if given is None else given.shape[2]
    heads = max([line.shape[0] for line in live])
    padded = [mx.pad(line, [(0, 0), (0, n - line.shape[1])], constant_values=mx.array(-1)) for line in live]
    positions = mx.stack([mx.broadcast_to(line, (heads, n)) for line in padded])
    if given is None:
        return stored_keys(buffer, None, n, positions)
    return Keys(given.shape, lambda which: given[:, :, which], positions)


def at_once(keys: Keys, queries: mx.array) -> int:
    """The number of queries in a block."""
    group = queries.shape[1] // keys.shape[1]
    most = WEIGHT_BYTES[mx.default_device().type] // (4 * max(1, group * keys.shape[2]))
    return max(LEAST_QUERIES, 1 << max(0, most.bit_length() - 1))


def blocks(queries: Queries, keys: Keys) -> Iterator[tuple[int, int]]:
    """The columns [first, last) of each block."""
    width, some = queries.queries.shape[2], at_once(keys, queries.queries)
    for first in range(0, width, some):
        yield first, min(width, first + some)


def products(queries: Queries, keys: Keys) -> mx.array:
    """Scaled products of queries and keys, (B, H, g, m, n) in float32; `UNSEEN` where a query does not see a token."""
    rows, heads, n, dim = keys.shape
    scaled = queries.queries.astype(mx.float32) * queries.scale
    count = scaled.shape[2]
    scaled = scaled.reshape(rows, heads, -1, dim)  # (B, H, g * m, D)
    some = DECODED_TOKENS if keys.encoded else n
    parts = [
        scaled @ keys.part(slice(first, first + some)).astype(mx.float32).swapaxes(2, 3) for first in range(0, n, some)
    ]
    made = (parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=3)).reshape(rows, heads, -1, count, n)
    return hidden(made, seen(queries, keys)[:, :, None])


def hidden(made: mx.array, seen: mx.array) -> mx.array:
    """The same products, (B, H, g, m, n), but `UNSEEN` where `seen`, (B, 1 or H, 1, m, n), is False.

    On a CPU in place, evaluated: `mx.where` takes as long there as the products do, and most tokens are seen by all
    queries.
    """
    if not on_cpu():
        return mx.where(seen, made, UNSEEN)
    view, visible = np.array(made, copy=False), np.array(seen, copy=False)
    columns = np.flatnonzero(~visible.all(axis=(0, 1, 2, 3)))
    if columns.size:
        view[..., columns] = np.where(visible[..., columns], view[..., columns], np.float32(UNSEEN))
    return made


def seen(queries: Queries, keys: Keys) -> mx.array:
    """Whether a query sees a token, (B, 1 or H, m, n)."""
    positions = keys.positions[:, :, None]
    return (positions >= 0) & (positions <= queries.positions[:, None, :, None])


def log_sums(products: mx.array, sinks: mx.array | None) -> mx.array:
    """Log-sum-exps, (B, H, g, m), of products (B, H, g, m, n)."""
    largest = products.max(axis=-1, keepdims=True)
    made = largest[..., 0] + mx.log(exponential(products - largest).sum(axis=-1))
    if sinks is None:
        return made
    return mx.logaddexp(made, sinks.astype(mx.float32).reshape(1, *made.shape[1:3], 1))


def weights(products: mx.array, sums: mx.array, is_query: mx.array) -> mx.array:
    """The weight of each token for each query, (B, H, g, m, n); 0 where there is no query.

    Args:
        sums: (B, H, g, m), as of `log_sums`.
        is_query: (B, m).
    """
    return exponential(products - sums[..., None]) * is_query[:, None, None, :, None]


def received_weights(queries: Queries, sums: mx.array, keys: Keys) -> mx.array:
    """(B, H, n): the weights of each token, summed over queries, averaged over query heads. Evaluated block by block.

    Args:
        sums: (B, Hq, m), log-sum-exps.
    """
    rows, heads, n, _ = keys.shape
    total = mx.zeros((rows, heads, n))
    for first, last in blocks(queries, keys):
        block = queries.columns(first, last)
        made = products(block, keys)
        own = sums[:, :, first:last].reshape(made.shape[:4])
        total = total + weights(made, own, block.positions >= 0).sum(axis=3).mean(axis=2)
        mx.eval(total)
    return total


def exponential(x: mx.array) -> mx.array:
    """e to the power of x, float32. On a CPU by NumPy, evaluated: 1 ns per number, where MLX takes 20."""
    return mx.array(np.exp(np.array(x, copy=False))) if on_cpu() else mx.exp(x)


def mean_weights(queries: Queries, keys: Keys) -> mx.array:
    """(B, Hq, n): the weight of each token, averaged over all queries. Evaluated block by block."""
    rows, _heads, n, _dim = keys.shape
    total = mx.zeros((rows, queries.queries.shape[1], n))
    for first, last in blocks(queries, keys):
        some = queries.columns(first, last)
        total = total + summed_weights(products(some, keys), queries.sinks).reshape(rows, -1, n)
        mx.eval(total)
    return total / queries.queries.shape[2]


def summed_weights(products: mx.array, sinks: mx.array | None) -> mx.array:
    """(B, H, g, n): the weights of each token, summed over queries, of products (B, H, g, m, n).

    On a CPU by NumPy, in place of the products, which are not used again: its exponential and maximum are several times
    as fast, and new memory costs more than the computation.
    """
    cpu = on_cpu()
    made: Any = np.array(products, copy=False) if cpu else products
    largest = made.max(axis=-1, keepdims=True)
    made -= largest
    parts = np.exp(made, out=made) if cpu else mx.exp(made)
    whole = parts.sum(axis=-1)  # (B, H, g, m)
    if sinks is not None:
        own = sinks.astype(mx.float32).reshape(1, *whole.shape[1:3], 1)
        whole = whole + (np.exp(np.array(own) - largest[..., 0]) if cpu else mx.exp(own - largest[..., 0]))
    return mx.array(((1 / whole)[..., None, :] @ parts)[..., 0, :])
