"""Prefill: chunk sizes, room for prompts and answers, and passes over rows of unequal length.

B rows, V the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_kv.cache.segmented import SegmentedCache
from mlx_kv.mlxlm.loading import number_of_weights
from mlx_kv.mlxlm.recurrent import RecurrentState
from mlx_kv.mlxlm.traverse import attention_caches, leaves
from mlx_kv.settings import whole_number

# Room is made ahead for at most this many generated tokens: a high max_tokens is often only a safety limit, and slots
# that are reserved are allocated at once. Longer answers grow from there.
MOST_TOKENS_AHEAD = 8192
PREFILL_STEP = 2048
MOST_PROMPTS_AT_ONCE = 8  # read together; mlx-lm's number
CHUNKS_AT_ONCE = 4  # in one pass, however long prompts are: other rows wait meanwhile
# On a CPU, where nothing else happens while a chunk is read: no Ctrl-C is heard and no other row served, so it is to
# take a second at the most. Small chunks are faster there, too; below the least of these, weights are read too often.
CPU_STEPS = (512, 256, 128, 64)
CPU_WORK = 32e9  # weights times tokens, of a chunk


def reserve_for(caches: Iterable[Any], prompt_tokens: int, max_tokens: int) -> None:
    """Announces a prompt and its answer to our caches, on top of what they hold; max_tokens below 0 is unknown."""
    for cache in attention_caches(caches):
        cache.reserve(cache.size() + prompt_tokens + min(max(max_tokens, 0), MOST_TOKENS_AHEAD))


def chunk_for(model: Any) -> int:
    """Tokens that a model is given at once: mlx-lm's 2,048 on a GPU; on a CPU fewer, the more weights a model has.

    It follows from model and device alone: where a budget evicts, chunks decide what is kept. All experts of a mixture
    count, as the tokens of a chunk meet most of them.
    """
    if mx.default_device().type != mx.DeviceType.cpu:
        return PREFILL_STEP
    weights = number_of_weights(model) if isinstance(model, nn.Module) else 0
    return next((step for step in CPU_STEPS if step * weights <= CPU_WORK), CPU_STEPS[-1])


def prefill_step(model: Any, caches: Iterable[Any], wanted: int | None) -> int:
    """Prompt tokens to read at once: what was asked for, else `chunk_for` the model, less where rings plan for less."""
    if wanted is not None:
        return whole_number("prefill_step_size", wanted, least=1)
    planned = [cache.max_write for cache in attention_caches(caches) if cache.max_write is not None]
    return min([chunk_for(model), *planned])


def chunk_end(read: int, tokens: int, step: int) -> int:
    """Up to where the next chunk of a prompt goes, of which so many tokens are read.

    The last token is never in it: what is read next begins with it, for the logits of what comes after the prompt.
    """
    return max(read, min(read + step, tokens - 1))


def announce(caches: Iterable[Any], lengths: Sequence[int]) -> None:
    """Prepares all layers for the next pass.

    Args:
        lengths: tokens that it reads of each row, without padding.
    """
    for cache in leaves(caches):
        if isinstance(cache, RecurrentState):
            cache.announce(lengths)
        elif isinstance(cache, SegmentedCache):
            cache.before_write()


def read_chunk(model: Callable[..., Any], caches: Sequence[Any], rows: Sequence[Sequence[int]] | mx.array) -> None:
    """Puts tokens into caches, for nothing but their keys and values, which are computed when this returns.

    Args:
        model: or anything else that reads tokens (B, n) into caches.
        rows: tokens (B, n), or lists of any lengths, some of which may be empty.
    """
    if isinstance(rows, mx.array):
        announce(caches, [rows.shape[1]] * rows.shape[0])
        model(rows, cache=caches)
    else:
        read_ragged(model, caches, rows)
    mx.eval([cache.state for cache in caches])  # the logits are never computed
    mx.clear_cache()


def prefill(
    model: Callable[..., Any],
    caches: Sequence[Any],
    tokens: mx.array,
    step: int,
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Puts all tokens (B, n) of prompts into caches, as generation does: in chunks, the last token alone.

    Compactions happen at the same positions as in generation. After each chunk, `progress` receives the number of
    tokens read and the total.
    """
    done, total = 0, tokens.shape[1]
    while done < total:
        end = max(done + 1, chunk_end(done, total, step))
        read_chunk(model, caches, tokens[:, done:end])
        done = end
        if progress is not None:
            progress(done, total)


def read_ragged(model: Callable[..., Any], caches: Sequence[Any], rows: Sequence[Sequence[int]]) -> mx.array:
    """One pass over rows of any lengths, shorter ones padded on the right: logits (B, longest, V)."""
    lengths = [len(row) for row in rows]
    announce(caches, lengths)
    longest = max(lengths)
    ragged = min(lengths) < longest
    if ragged:
        for cache in caches:
            cache.prepare(lengths=lengths, right_padding=[longest - length for length in lengths])
    try:
        logits: mx.array = model(mx.array([[*row, *[0] * (longest - len(row))] for row in rows]), cache=caches)
    finally:
        if ragged:
            for cache in caches:
                cache.finalize()
    return logits
