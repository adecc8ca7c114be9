"""Text from a prompt: mlx-lm's own loop and samplers over our caches.

Decides what is refused and what is reserved before the loop starts. Knows nothing about the command line; the loop
itself is mlx-lm's.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import GenerationResponse, generate_step, generation_stream
from mlx_lm.generate import stream_generate as stock_stream_generate
from mlx_lm.tokenizer_utils import TokenizerWrapper

from mlx_kv.cache.checks import check_type, shown
from mlx_kv.communicator import LOCAL, Communicator
from mlx_kv.generation.distributed_caches import check_local, given_caches, make_distributed_caches
from mlx_kv.generation.encoding import tokens_of_prompt, wrapped
from mlx_kv.generation.prefill import prefill_step, reserve_for
from mlx_kv.generation.sampling import Sampler, sampler_of_sequence
from mlx_kv.generation.settings import LogitsProcessor, given_processors
from mlx_kv.generation.two_pass_prefill import Instructions, TwoPassPrefill, needs_second_pass
from mlx_kv.mlxlm.convert import check_windows
from mlx_kv.mlxlm.loading import check_model, vocabulary_of
from mlx_kv.mlxlm.observing import show_attention
from mlx_kv.mlxlm.traverse import attention_caches
from mlx_kv.policy import CachePolicy, given_policy

FOR_THE_POLICY = {field.name: field.name for field in fields(CachePolicy)} | {
    "kv_bits": "bits",
    "kv_group_size": "group_size",
    "quantized_kv_start": "quantized_start",
}
ARGUMENTS = {"prompt", "model", "max_tokens", "sampler", "prompt_cache"}
# mlx-lm takes num_draft_tokens without a draft, too.
OPTIONS = {*inspect.signature(generate_step).parameters, "num_draft_tokens"} - ARGUMENTS - FOR_THE_POLICY.keys()


def stream_generate(
    model: nn.Module,
    tokenizer: Any,
    prompt: str | Sequence[int] | mx.array,
    policy: CachePolicy | None = None,
    max_tokens: int = 256,
    sampler: Sampler | None = None,
    prompt_cache: list[Any] | None = None,
    seed: int | None = None,
    group: Communicator | None = None,
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
        group: the ranks of which each has a part of the model, and calls this alike. The leader's prompt, limits and
            sampler count, and where it stops asking for tokens, all end.
        options: the other options of mlx-lm's `generate_step`, such as prefill_step_size and logits_processors.

    Returns:
        An iterator of mlx-lm's `GenerationResponse`, one for each token.

    Raises:
        ValueError: an empty prompt, max_tokens of 0, a policy beside a prompt_cache, a seed for a sampler that is no
            `TemperatureSampler`, token ids that the model does not have, or what `make_prompt_cache` refuses.
        TypeError: an argument of another type, or an option that there is none of.
    """
    check_model("model", model)
    check_type("group", group, Communicator | None, "give what mlx_kv.join_ranks() returns")
    _check_options(options)
    if policy is not None and prompt_cache is not None:
        raise ValueError("got a policy and a prompt_cache, which was made with its own: give one of them")
    policy = given_policy(policy)
    if prompt_cache is not None:
        prompt_cache = given_caches("prompt_cache", model, prompt_cache)
        check_windows(model, prompt_cache)
        show_attention(model, prompt_cache)
    tokenizer = wrapped(tokenizer)
    options["logits_processors"] = list(given_processors(options.get("logits_processors")))
    communicator, step = group or LOCAL, options.get("prefill_step_size")
    told, max_tokens, step = communicator.broadcast(
        lambda: (tokens_of_prompt(tokenizer, prompt, vocabulary_of(model)), _limit(max_tokens), step)
    )
    tokens = mx.array(told)
    _check_embeddings(options.get("input_embeddings"), len(told))
    caches = make_distributed_caches(model, policy, communicator) if prompt_cache is None else prompt_cache
    before = communicator.all_max(max((int(cache.offset) for cache in attention_caches(caches)), default=0))
    if communicator.leads:
        sampler = sampler_of_sequence(sampler, seed, before + tokens.size)
    else:
        sampler = options["logits_processors"] = None
    reserve_for(caches, tokens.size, max_tokens)
    report = options.get("prompt_progress_callback")
    check_type("prompt_progress_callback", report, Callable | None, "give a function (read, total), or None")

    def progress(done: int, total: int) -> None:
        communicator.progress()
        if report is not None:
            report(done, total)

    options["prompt_progress_callback"] = progress
    (options["prefill_step_size"],) = communicator.all_min([prefill_step(model, caches, step)])
    if needs_second_pass(caches) and tokens.size > 1:
        check_local(communicator)
        return _read_twice(model, tokenizer, tokens, caches, max_tokens, sampler, progress, options)
    responses = stock_stream_generate(
        model,
        tokenizer,
        tokens,
        max_tokens=max_tokens,
        sampler=_leader_sampler(communicator, sampler),
        prompt_cache=caches,
        **options,
    )
    return communicator.sync_steps(responses, lambda response: response.token)


def _read_twice(
    model: nn.Module,
    tokenizer: TokenizerWrapper,
    tokens: mx.array,
    caches: list[Any],
    max_tokens: int,
    sampler: Any,
    progress: Callable[[int, int], None],
    options: dict[str, Any],
) -> Iterator[GenerationResponse]:
    """All of the prompt but its last token is read twice, the rest is as ever."""
    told: Any = tokens.tolist()
    started = time.perf_counter()
    step = options["prefill_step_size"]
    with mx.stream(generation_stream):
        reading = TwoPassPrefill(model, caches, [told[:-1]], step, Instructions.of(tokenizer, model))
        reading.finish(lambda done, _: progress(done, len(told)))
    seconds = time.perf_counter() - started
    rest = options | {"prompt_progress_callback": lambda done, total: progress(len(told) - total + done, len(told))}
    rest["logits_processors"] = [shown_before(own, told[:-1]) for own in options.get("logits_processors") or ()]
    for response in stock_stream_generate(
        model, tokenizer, tokens[-1:], max_tokens=max_tokens, sampler=sampler, prompt_cache=caches, **rest
    ):
        speed = len(told) / (seconds + 1 / max(response.prompt_tps, 1e-9))
        yield replace(response, prompt_tokens=len(told), prompt_tps=speed)


def _leader_sampler(communicator: Communicator, sampler: Sampler | None) -> Sampler | None:
    """A sampler whose tokens are the leader's, in all processes."""
    if not communicator.distributed:
        return sampler

    def draw(logprobs: mx.array) -> mx.array:
        return communicator.leader_tokens(mx.argmax(logprobs, axis=-1) if sampler is None else sampler(logprobs))

    return draw


def shown_before(processor: LogitsProcessor, before: Sequence[int]) -> LogitsProcessor:
    """The processor for a loop that knows nothing of the tokens that come before its own."""
    if not before:
        return processor
    known = mx.array(list(before))

    def adjusted(tokens: mx.array, logits: mx.array) -> mx.array:
        return processor(mx.concatenate([known, tokens]), logits)

    return adjusted


def check_policy_options(options: Mapping[str, Any]) -> None:
    """Raises ValueError for options that a `CachePolicy` has."""
    for name, value in options.items():
        if name in FOR_THE_POLICY:
            raise ValueError(f"{name} is for the policy: use policy=CachePolicy({FOR_THE_POLICY[name]}={shown(value)})")


def _check_options(options: Mapping[str, Any]) -> None:
    check_policy_options(options)
    if "draft_model" in options:
        raise ValueError("draft_model is for speculative_generate: call that")
    if unknown := sorted(set(options) - OPTIONS):
        raise TypeError(f"there is no option {unknown[0]}: leave it out, or give one of {', '.join(sorted(OPTIONS))}")


def _check_embeddings(embeddings: Any, tokens: int) -> None:
    check_type("input_embeddings", embeddings, mx.array | None, "give an mx.array (tokens, hidden size), or None")
    if embeddings is not None and (embeddings.ndim != 2 or embeddings.shape[0] != tokens):
        raise ValueError(f"input_embeddings have shape {embeddings.shape}: give ({tokens} tokens, hidden size)")


def _limit(max_tokens: int) -> int:
    if not isinstance(max_tokens, int) or max_tokens == 0 or max_tokens < -1:
        raise ValueError(f"max_tokens is {shown(max_tokens)}: give a number from 1 up, or -1 for no limit")
    return max_tokens
