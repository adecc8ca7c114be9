"""Which positions of a prompt each layer keeps under a budget, with their scores and the attention that they receive.

A prompt is read as in generation, so that compactions fall at the same tokens, and then compacted to the budget.
B rows, Hq query heads, H KV heads, S queries, N tokens; H' is the number of KV heads where each keeps its own tokens
(share="head"), else 1.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlx_kv.cache.checks import token_ids
from mlx_kv.cache.kv_cache import KVCache
from mlx_kv.cache.protocol import AttentionCall
from mlx_kv.generation.encoding import tokens_of_prompt
from mlx_kv.generation.prefill import NO_INSTRUCTIONS, Instructions, prefill_all, prefill_step, read_chunk
from mlx_kv.generation.statistics import cache_statistics
from mlx_kv.mlxlm.attention import attention_hooked, attention_modules
from mlx_kv.mlxlm.convert import make_prompt_cache
from mlx_kv.mlxlm.loading import vocabulary_of
from mlx_kv.mlxlm.traverse import attention_caches, compact, leaves
from mlx_kv.policy import CachePolicy


@dataclass(frozen=True)
class KeptTokens:
    """The tokens kept in one layer, or in one head of it.

    Attributes:
        positions: in the text, rising.
        scores: of each token, higher is kept. From `Evictor.live_scores`, computed among the kept tokens; scores that
            compare tokens differ from those among all tokens.
        attention: the share of the attention of the last tokens of the text that these tokens receive with a full
            cache, in this head or over all heads; None where it was not measured or the layer does not expose it.
    """

    positions: tuple[int, ...]
    scores: tuple[float, ...]
    attention: float | None = None


@dataclass(frozen=True)
class KeptLayer:
    """One layer with a budget.

    Attributes:
        index: among the layers with a budget.
        cache: index in the model's list of caches.
        heads: H' of them.
        attention: the share that each token of the text receives, the mean of all heads; as for `KeptTokens`.
    """

    index: int
    cache: int
    heads: tuple[KeptTokens, ...]
    attention: tuple[float, ...] | None = None

    @property
    def kept(self) -> float:
        """Kept tokens, the mean of heads."""
        return sum(len(head.positions) for head in self.heads) / len(self.heads)

    @property
    def attention_kept(self) -> float | None:
        """The share of attention that kept tokens receive, the mean of heads."""
        shares = [head.attention for head in self.heads if head.attention is not None]
        return sum(shares) / len(shares) if shares else None


@dataclass(frozen=True)
class Inspection:
    """What a budget keeps of one prompt.

    Attributes:
        tokens: of the prompt.
        kept, evicted: tokens of a layer and head, the mean where they differ (by `share` and `layers`); their sum is
            `tokens`.
        compactions: the maximum over layers, including the last compaction.
        without_budget: number of caches that are rings, chunks or recurrent state; they are not listed.
        layers: with a budget, in the order of the model.
    """

    tokens: int
    kept: int
    evicted: int
    compactions: int
    without_budget: int
    layers: tuple[KeptLayer, ...]

    def share_evicted(self, layer: int | None = None) -> list[float]:
        """For each position, the share of layers and heads that evicted it: 0 is kept by all, 1 is kept by none.

        Args:
            layer: only the heads of this one, by its index.

        Raises:
            ValueError: there is no such layer.
        """
        if layer is not None and not 0 <= layer < len(self.layers):
            raise ValueError(f"there is no layer {layer} with a budget: give one from 0 to {len(self.layers) - 1}")
        rows = [head for each in self.layers if layer in (None, each.index) for head in each.heads]
        times_kept = [0] * self.tokens
        for row in rows:
            for position in row.positions:
                times_kept[position] += 1
        return [1 - times / len(rows) for times in times_kept]

    @property
    def attention_kept(self) -> float | None:
        """The mean over layers of `KeptLayer.attention_kept`; None where no layer exposes its attention."""
        shares = [layer.attention_kept for layer in self.layers]
        known = [share for share in shares if share is not None]
        return sum(known) / len(known) if known else None

    @property
    def attention(self) -> list[float] | None:
        """The share that each token receives, the mean of the layers that expose their attention; None without any."""
        known = [layer.attention for layer in self.layers if layer.attention is not None]
        return [sum(each) / len(known) for each in zip(*known, strict=True)] if known else None


def inspect_prompt(
    model: nn.Module,
    tokens: Sequence[int],
    policy: CachePolicy,
    *,
    prefill_step_size: int | None = None,
    progress: Callable[[int, int], None] | None = None,
    attention_of: int = 0,
    instructions: Instructions = NO_INSTRUCTIONS,
) -> Inspection:
    """What one policy keeps of a prompt; arguments as for `inspect_policies`."""
    options: Any = {"prefill_step_size": prefill_step_size, "progress": progress, "attention_of": attention_of}
    (inspection,) = inspect_policies(model, tokens, [policy], instructions=[instructions], **options)
    return inspection


def inspect_policies(
    model: nn.Module,
    tokens: Sequence[int],
    policies: Sequence[CachePolicy],
    *,
    prefill_step_size: int | None = None,
    progress: Callable[[int, int], None] | None = None,
    attention_of: int = 0,
    instructions: Sequence[Instructions] | None = None,
) -> list[Inspection]:
    """Reads a prompt under each policy as generation does, and evicts down to its budget.

    Args:
        model: any model of mlx-lm with layers of full attention.
        tokens: ids of one sequence.
        policies: with budgets.
        prefill_step_size: tokens read at once; None is the prefill step of generation.
        progress: called after each chunk with the tokens read and the tokens in all, over all policies.
        attention_of: number of last tokens whose attention is measured, for which the prompt is read once more with a
            full cache; 0 measures none.
        instructions: for each policy, the instructions before the second pass of its score; None is none.

    Raises:
        ValueError: no tokens, a policy without a budget, attention that is not exposed, or what `make_prompt_cache` and
            a score refuse.
    """
    if any(policy.budget is None for policy in policies):
        raise ValueError("this policy has no budget, so nothing is evicted: give CachePolicy(budget=...)")
    tokens = tokens_of_prompt(None, tokens, vocabulary_of(model))
    readings = len(policies) + bool(attention_of)

    def reading(number: int) -> Callable[[int, int], None]:
        total = len(tokens)
        return lambda done, _: None if progress is None else progress(number * total + done, readings * total)

    received: dict[int, np.ndarray] = {}
    if attention_of:
        step = prefill_step(model, make_prompt_cache(model), prefill_step_size)
        received = attention_of_last(model, tokens, attention_of, step, reading(0))
    each_instructions = instructions or [NO_INSTRUCTIONS] * len(policies)
    return [
        _inspected(model, tokens, policy, received, prefill_step_size, reading(number), each)
        for number, (policy, each) in enumerate(zip(policies, each_instructions, strict=True), start=bool(attention_of))
    ]


def _inspected(
    model: nn.Module,
    tokens: Sequence[int],
    policy: CachePolicy,
    received: Mapping[int, np.ndarray],
    prefill_step_size: int | None,
    progress: Callable[[int, int], None],
    instructions: Instructions,
) -> Inspection:
    """What one policy keeps; `received` has the attention of some layers, by index in `attention_caches`."""
    caches, total = make_prompt_cache(model, policy), len(tokens)
    step = prefill_step(model, caches, prefill_step_size)
    prefill_all(model, caches, tokens, step, instructions, lambda done, of: progress(done * total // of, total))
    compact(caches)
    layers: list[KeptLayer] = []
    allowed: list[int] = []
    numbers = count()
    for index, cache in enumerate(caches):
        for each in attention_caches([cache]):
            number = next(numbers)
            if each.evictor is not None:
                layer = KeptLayer(len(layers), index, kept_in(each))
                allowed.append(min(each.evictor.layout.budget, total))
                layers.append(with_attention(layer, received.get(number)))
    assert math.isclose(sum(layer.kept for layer in layers), sum(allowed)), "compact() leaves the budget"
    statistics = cache_statistics(caches)
    kept = round(sum(layer.kept for layer in layers) / len(layers))
    return Inspection(
        tokens=total,
        kept=kept,
        evicted=total - kept,
        compactions=statistics.compactions,
        without_budget=sum(1 for _ in leaves(caches)) - len(layers),
        layers=tuple(layers),
    )


def with_attention(layer: KeptLayer, received: np.ndarray | None) -> KeptLayer:
    """The layer with the attention (H, n) that its tokens receive; None is unknown."""
    if received is None:
        return layer
    of_heads = received if len(layer.heads) == len(received) else received.mean(axis=0, keepdims=True)
    heads = [
        replace(head, attention=float(row[list(head.positions)].sum()))
        for head, row in zip(layer.heads, of_heads, strict=True)
    ]
    return replace(layer, heads=tuple(heads), attention=tuple(received.mean(axis=0).tolist()))


def kept_in(cache: KVCache) -> tuple[KeptTokens, ...]:
    """The kept tokens of the first row of a cache with a budget, for each of H' heads."""
    assert cache.evictor is not None, "a cache with a budget"
    scores = cache.evictor.live_scores(0)
    scores = scores.reshape(-1, scores.shape[-1])  # (H', n), of one row
    positions = mx.broadcast_to(cache.positions[0], scores.shape)  # heads share a row until a token is evicted
    order = mx.argsort(positions, axis=1)
    sorted_positions: Any = mx.take_along_axis(positions, order, axis=1).tolist()
    sorted_scores: Any = mx.take_along_axis(scores, order, axis=1).tolist()
    heads = []
    for head, values in zip(sorted_positions, sorted_scores, strict=True):
        dead = head.count(-1)  # slots without a token of this head come first
        heads.append(KeptTokens(tuple(head[dead:]), tuple(values[dead:])))
    return tuple(heads)


# --- attention --------------------------------------------------------------------------------------------------------


def attention_weights(queries: mx.array, keys: mx.array, scale: float, mask: Any = None) -> mx.array:
    """softmax(scale q k + mask) in float32: queries (B, Hq, S, D), keys (B, H, N, D), to (B, Hq, S, N).

    Args:
        mask: "causal" (the queries are the last S of N tokens), an array of bool or of addends, or None.
    """
    queries, keys = queries.astype(mx.float32), keys.astype(mx.float32)
    products = scale * (queries @ mx.repeat(keys, queries.shape[1] // keys.shape[1], axis=1).swapaxes(2, 3))
    if isinstance(mask, str):
        s, n = products.shape[2:]
        mask = mx.arange(n) <= mx.arange(n - s, n)[:, None]
    if mask is not None:
        products = mx.where(mask, products, -mx.inf) if mask.dtype == mx.bool_ else products + mask
    return mx.softmax(products, axis=-1)


class _Watcher:
    """Records the attention that each call gives to the tokens of its cache, (B, H, N): the mean over the query heads
    of a KV head, the sum over queries."""

    def __init__(self) -> None:
        self.seen: list[tuple[Any, mx.array]] = []

    def attend(self, call: AttentionCall) -> mx.array:
        if isinstance(call.keys, mx.array):  # not packed
            weights = attention_weights(call.queries, call.keys, call.scale, call.mask).sum(axis=2)  # (B, Hq, N)
            received = weights.reshape(weights.shape[0], call.keys.shape[1], -1, weights.shape[2]).mean(axis=2)
            mx.eval(received)
            self.seen.append((call.cache, received))
        return call.forward()


@contextlib.contextmanager
def watched_attention(
    model: nn.Module, caches: Sequence[Any], needed_for: str = "the task correlation"
) -> Iterator[list[tuple[Any, mx.array]]]:
    """Records, while it is open, each attention call over these caches: the cache and the attention received (B, H, N).

    The mean over the query heads of a KV head and the sum over queries, so a row sums to the number of queries.

    Args:
        needed_for: what to leave out, for the error message.

    Raises:
        ValueError: no layer of the model exposes its attention.
    """
    check_attention(model, needed_for)
    watcher = _Watcher()
    with attention_hooked(model, caches, watcher):
        yield watcher.seen


def check_attention(model: nn.Module, needed_for: str = "the task correlation") -> None:
    """Raises ValueError where no layer of a model exposes its attention."""
    if not attention_modules(model):
        raise ValueError(f"{type(model).__module__} hides its attention: leave out {needed_for}")


def attention_of_last(
    model: nn.Module,
    tokens: Sequence[int],
    queries: int = 64,
    step: int = 512,
    progress: Callable[[int, int], None] | None = None,
) -> dict[int, np.ndarray]:
    """The attention from the last tokens of a text to all of its tokens, with a full cache.

    Args:
        tokens: n ids of one sequence.
        queries: number of last tokens.
        step: tokens read at once.
        progress: called with the tokens read and the tokens in all.

    Returns:
        (H, n) by the index of each cache in `attention_caches`: the mean over queries, so a row sums to 1. Caches with
        a window are left out, and those whose layer does not expose its attention.

    Raises:
        ValueError: no layer of the model exposes its attention; token ids outside the vocabulary.
    """
    check_attention(model, "--attention")
    tokens = token_ids(tokens, vocabulary_of(model), "the text")
    caches, total = make_prompt_cache(model), len(tokens)
    first = max(0, total - queries)
    for start in range(0, first, step):
        end = min(start + step, first)
        read_chunk(model, caches, mx.array([tokens[start:end]]))
        if progress is not None:
            progress(end, total)
    with watched_attention(model, caches, "--attention") as seen:
        read_chunk(model, caches, mx.array([tokens[first:]]))
    if progress is not None:
        progress(total, total)
    of_cache = {id(cache): np.array(received[0] / (total - first)) for cache, received in seen}
    numbered = enumerate(attention_caches(caches))
    return {i: of_cache[id(cache)] for i, cache in numbered if cache.max_write is None and id(cache) in of_cache}
