"""Text from a prompt: mlx-lm's own loop and samplers over our caches.

Decides what is reserved before the loop starts, and sums up afterwards what the caches did. Knows nothing about the
command line; the loop itself is mlx-lm's.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import GenerationResponse
from mlx_lm.generate import stream_generate as stock_stream_generate
from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.utils import get_total_parameters

from mlx_kv.cache.checks import whole_number
from mlx_kv.generation.sampling import Sampler, sampler_of_sequence
from mlx_kv.mlxlm.convert import attention_caches, check_windows, leaves, make_prompt_cache
from mlx_kv.policy import CachePolicy

# Room is made ahead for at most this many generated tokens: a high max_tokens is often only a safety limit, and slots
# that are reserved are allocated at once. Longer answers grow from there.
MOST_TOKENS_AHEAD = 8192
PREFILL_STEP = 2048
# On a CPU, where nothing else happens while a chunk is read: no Ctrl-C is heard and no other row served, so it is to
# take a second at the most. Small chunks are faster there, too; below the least of these, weights are read too often.
CPU_STEPS = (512, 256, 128, 64)
CPU_WORK = 32e9  # weights times tokens, of a chunk
FOR_THE_POLICY = {
    "kv_bits": "bits",
    "kv_group_size": "group_size",
    "quantized_kv_start": "quantized_start",
    "max_kv_size": "max_kv_size",
}


@dataclass(frozen=True)
class CacheStatistics:
    """What the caches of one model hold, and what they did.

    Attributes:
        bytes_live: of tokens that can still be seen.
        bytes_allocated: dead slots included.
        bytes_full: what all tokens up to here would take, with none evicted or overwritten.
        growths: reallocations of the busiest layer.
        tokens_evicted: by all rows of the busiest layer.
        compactions: that the busiest row of the busiest layer took part in.
        compaction_seconds: of all layers together.
    """

    bytes_live: int
    bytes_allocated: int
    growths: int
    bytes_full: int
    tokens_evicted: int
    compactions: int
    compaction_seconds: float


def cache_statistics(caches: Iterable[Any]) -> CacheStatistics:
    """Sums over all layers; a cache that is not ours counts as wholly live."""
    everything = list(leaves(caches))
    ours = attention_caches(everything)
    evictors = [cache.evictor for cache in ours if cache.evictor is not None]
    return CacheStatistics(
        bytes_live=sum(getattr(cache, "nbytes_live", cache.nbytes) for cache in everything),
        bytes_allocated=sum(cache.nbytes for cache in everything),
        growths=max((cache.growths for cache in ours), default=0),
        bytes_full=sum(getattr(cache, "nbytes_full", cache.nbytes) for cache in everything),
        tokens_evicted=max((evictor.evicted for evictor in evictors), default=0),
        compactions=max((evictor.compactions for evictor in evictors), default=0),
        compaction_seconds=sum(evictor.seconds for evictor in evictors),
    )


def encode_prompt(tokenizer: Any, prompt: str) -> list[int]:
    """Token ids of a text, by mlx-lm's rule: special tokens are added unless the text begins with one."""
    bos = tokenizer.bos_token
    ids: list[int] = tokenizer.encode(prompt, add_special_tokens=bos is None or not prompt.startswith(bos))
    return ids


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
    weights: int = get_total_parameters(model) if isinstance(model, nn.Module) else 0  # type: ignore[no-untyped-call]
    return next((step for step in CPU_STEPS if step * weights <= CPU_WORK), CPU_STEPS[-1])


def prefill_step(model: Any, caches: Iterable[Any], wanted: int | None) -> int:
    """Prompt tokens to read at once: what was asked for, else `chunk_for` the model, less where rings plan for less."""
    if wanted is not None:
        return whole_number("prefill_step_size", wanted, least=1)
    planned = [cache.max_write for cache in attention_caches(caches) if cache.max_write is not None]
    return min([chunk_for(model), *planned])


def stream_generate(
    model: nn.Module,
    tokenizer: Any,
    prompt: str | Sequence[int] | mx.array,
    policy: CachePolicy | None = None,
    max_tokens: int = 256,
    sampler: Sampler | None = None,
    prompt_cache: list[Any] | None = None,
    seed: int | None = None,
    **options: Any,
) -> Iterator[GenerationResponse]:
    """Generates text with mlx-lm's loop, keys and values living in our caches.

    Args:
        model, tokenizer: as from `mlx_lm.load`.
        prompt: a text, or token ids.
        policy: how keys and values are kept; None is `CachePolicy()`.
        max_tokens: tokens to generate, -1 for no limit. Room for prompt and max_tokens is reserved.
        sampler: log-probabilities (B, vocab) to token ids (B,), such as mlx-lm's `make_sampler` gives; None is greedy.
        prompt_cache: caches to go on from, made by `make_prompt_cache`; they are updated in place. Instead of a policy.
        seed: makes a `TemperatureSampler` repeatable: each position of the sequence, counted from the first token that
            the caches have read, has random numbers of its own.
        options: the other options of mlx-lm's `generate_step`, such as prefill_step_size and logits_processors.

    Returns:
        An iterator of mlx-lm's `GenerationResponse`, one for each token.

    Raises:
        ValueError: an empty prompt, max_tokens of 0, a policy beside a prompt_cache, a seed for a sampler that is no
            `TemperatureSampler`, or what `make_prompt_cache` refuses.
    """
    for name in options.keys() & FOR_THE_POLICY.keys():
        raise ValueError(f"{name} is mlx-lm's way to say it: use policy=CachePolicy({FOR_THE_POLICY[name]}=...)")
    if "draft_model" in options:
        raise ValueError("draft_model is for speculative_generate: call that")
    if policy is not None and prompt_cache is not None:
        raise ValueError("got a policy and a prompt_cache, which was made with its own: give one of them")
    if prompt_cache is not None:
        check_windows(model, prompt_cache)
    if not isinstance(max_tokens, int) or max_tokens == 0 or max_tokens < -1:
        raise ValueError(f"max_tokens is {max_tokens}: give a number from 1 up, or -1 for no limit")
    if not isinstance(tokenizer, TokenizerWrapper):
        tokenizer = TokenizerWrapper(tokenizer)
    if isinstance(prompt, mx.array):
        tokens = prompt
    else:
        tokens = mx.array(encode_prompt(tokenizer, prompt) if isinstance(prompt, str) else list(prompt))
    if tokens.ndim != 1 and tokens.size:
        raise ValueError(f"the prompt has shape {tokens.shape}: give one sequence of token ids")
    if tokens.size == 0:
        raise ValueError("the prompt is empty: give at least one token")
    caches = make_prompt_cache(model, policy) if prompt_cache is None else prompt_cache
    before = max((int(cache.offset) for cache in attention_caches(caches)), default=0)
    drawing = sampler_of_sequence(sampler, seed, before + tokens.size)
    reserve_for(caches, tokens.size, max_tokens)
    options["prefill_step_size"] = prefill_step(model, caches, options.get("prefill_step_size"))
    return stock_stream_generate(
        model, tokenizer, tokens, max_tokens=max_tokens, sampler=drawing, prompt_cache=caches, **options
    )
