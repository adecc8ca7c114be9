"""Text from one prompt, as a stream: a batch of one, with or without drafts."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import GenerationResponse

from mlx_kv.cache.checks import cache_list, check_type, token_ids
from mlx_kv.communicator import LOCAL, Communicator, Steps
from mlx_kv.generation.batch_engine import BatchEngine
from mlx_kv.generation.decoder import Decoder, make_decoder
from mlx_kv.generation.distributed_caches import check_local, given_caches
from mlx_kv.generation.encoding import tokens_of_prompt, wrapped
from mlx_kv.generation.prefill import prefill_step
from mlx_kv.generation.sampling import Sampler, sampler_of_sequence
from mlx_kv.generation.sequence import UNLIMITED, TokenSequence
from mlx_kv.generation.settings import LogitsProcessor, given_processors
from mlx_kv.generation.speculation import LOOKUP_MAX, LOOKUP_MIN
from mlx_kv.generation.speculation.drafters import Drafter, Factory
from mlx_kv.generation.speculation.settings import DraftLength, DraftSettings
from mlx_kv.generation.statistics import SpeculationStatistics
from mlx_kv.generation.two_pass_prefill import NO_INSTRUCTIONS, Instructions, needs_second_pass
from mlx_kv.mlxlm.convert import check_windows
from mlx_kv.mlxlm.loading import check_model, vocabulary_of
from mlx_kv.mlxlm.observing import show_attention
from mlx_kv.mlxlm.traverse import attention_caches, can_trim
from mlx_kv.policy import CachePolicy, given_policy
from mlx_kv.settings import shown, whole_number

FOR_THE_POLICY = {field.name: field.name for field in fields(CachePolicy)} | {
    "kv_bits": "bits",
    "kv_group_size": "group_size",
    "quantized_kv_start": "quantized_start",
}
# Of mlx-lm's stream_generate, which takes num_draft_tokens without a draft, too.
OPTIONS = (
    *("input_embeddings", "logits_processors", "num_draft_tokens", "prefill_step_size", "prompt_progress_callback"),
    "stream",
)


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
    """Generates text token by token, with the caches of this package.

    Args:
        model, tokenizer: as from `mlx_lm.load`.
        prompt: a text, or token ids.
        policy: settings of the caches; None is `CachePolicy()`.
        max_tokens: maximum tokens to generate, -1 for no limit. The caches reserve memory for prompt and max_tokens.
        sampler: log-probabilities (B, vocab) to token ids (B,), such as mlx-lm's `make_sampler` gives; None is greedy.
        prompt_cache: caches to continue from, made by `make_prompt_cache`, and updated in place. Replaces `policy`.
        seed: makes a `TemperatureSampler` repeatable: each position of the sequence, counted from the first token that
            the caches have read, has random numbers of its own.
        group: ranks that each have a part of the model and make the same call. The prompt, limits and sampler of the
            leader apply, and all ranks stop when the leader stops iterating.
        options: those of mlx-lm's `generate_step`: prefill_step_size, logits_processors, prompt_progress_callback,
            input_embeddings and stream.

    Returns:
        An iterator of mlx-lm's `GenerationResponse`, one for each token.

    Raises:
        ValueError: an empty prompt, max_tokens of 0, a policy beside a prompt_cache, a seed for a sampler that is no
            `TemperatureSampler`, token ids that the model does not have, or what `make_prompt_cache` refuses.
        TypeError: an argument of another type, or an unknown option.
    """
    check_model("model", model)
    _check_options(options)
    embeddings = options.get("input_embeddings")
    check_type("input_embeddings", embeddings, mx.array | None, "give an mx.array (tokens, hidden size), or None")
    if prompt_cache is not None and policy is None:
        check_windows(model, given_caches("prompt_cache", model, prompt_cache))

    def limit() -> int:
        if not isinstance(max_tokens, int) or max_tokens == 0 or max_tokens < -1:
            raise ValueError(f"max_tokens is {shown(max_tokens)}: give a number from 1 up, or -1 for no limit")
        return max_tokens

    return _stream(
        model,
        wrapped(tokenizer),
        prompt,
        policy,
        limit,
        sampler=sampler,
        seed=seed,
        prompt_cache=prompt_cache,
        prefill_step_size=options.get("prefill_step_size"),
        progress=options.get("prompt_progress_callback"),
        group=group,
        processors=options.get("logits_processors"),
        embeddings=embeddings,
        device_stream=options.get("stream"),
    )


def speculative_generate(
    model: nn.Module,
    draft_model: nn.Module | None,
    tokenizer: Any,
    prompt: str | Sequence[int] | mx.array,
    max_tokens: int = 256,
    num_draft_tokens: int | None = None,
    policy: CachePolicy | None = None,
    sampler: Sampler | None = None,
    prefill_step_size: int | None = None,
    statistics: SpeculationStatistics | None = None,
    prompt_progress_callback: Callable[[int, int], None] | None = None,
    seed: int | None = None,
    drafter: str | Factory | Drafter | None = None,
    prompt_lookup_min: int = LOOKUP_MIN,
    prompt_lookup_max: int = LOOKUP_MAX,
    draft_length: DraftLength = "chosen",
    prompt_cache: list[Any] | None = None,
    before: Sequence[int] = (),
    group: Communicator | None = None,
    logits_processors: Sequence[LogitsProcessor] | None = None,
) -> Iterator[GenerationResponse]:
    """Generates the same text as `stream_generate`, with fewer passes of the model where drafted tokens are accepted.

    Args:
        model, draft_model: models with the same tokenizer; no draft model where the drafter needs none.
        tokenizer: as from `mlx_lm.load`; None with a prompt of token ids, for responses without text.
        prompt: a text, or token ids.
        max_tokens: tokens to generate, from 1 up.
        num_draft_tokens: K, tokens drafted for each pass of the model, from 1 up; None is 3, and 10 for `ngram`,
            `suffix` and `auto`.
        policy: settings of the model's caches; rings reserve slots to roll back K + 1 tokens.
        sampler: None is greedy, with the same tokens as without a draft. With a `TemperatureSampler` the draft model
            uses the same random keys; with any other sampler it proposes the likeliest tokens. All three are exact.
        prefill_step_size: prompt tokens read at once; by default what `stream_generate` would read.
        statistics: filled in as tokens come.
        prompt_progress_callback: called with the prompt tokens that the model has read, and their number.
        seed: as in `stream_generate`, which gives the same tokens.
        drafter: proposes tokens instead of the draft model: a name of `drafter_names()`, a factory as
            `register_drafter` takes it, or a `Drafter`, for this call only. `ngram`, `suffix` and `auto` need no
            model.
        prompt_lookup_min, prompt_lookup_max: minimum number of last tokens that must occur earlier in the text for
            `ngram` and `suffix` to propose what followed them, and the maximum that `ngram` searches for.
        draft_length: "chosen" drafts up to K tokens, as many as made generation faster so far, or none; "fixed" always
            drafts K.
        prompt_cache: caches to continue from, made by `make_prompt_cache`, and updated in place; they may hold more
            tokens than were returned if a token ends the sequence. Replaces `policy`; not with a draft model.
        before: the tokens in `prompt_cache`, if known, for processors and drafters that use them.
        group: as in `stream_generate`. Drafts are the leader's: the others need no draft model and no drafter.
        logits_processors: functions of mlx-lm's form, such as those of `make_logits_processors`: they take the tokens
            (n,) so far and the logits (1, V) of the next one, and return logits. They run at each drafted position.

    Returns:
        An iterator of mlx-lm's `GenerationResponse`, one for each token.

    Raises:
        ValueError: K or max_tokens below 1, an empty prompt, vocabularies that differ, caches that cannot roll back, a
            seed for a sampler that is no `TemperatureSampler`, neither a draft model nor a drafter, a policy beside a
            prompt_cache, token ids that the model does not have.
        TypeError: an argument of another type.
    """
    check_model("model", model)
    check_type("statistics", statistics, SpeculationStatistics | None, "give SpeculationStatistics(), or None")
    return _stream(
        model,
        None if tokenizer is None else wrapped(tokenizer),
        prompt,
        policy,
        lambda: whole_number("max_tokens", max_tokens, least=1),
        sampler=sampler,
        seed=seed,
        prompt_cache=prompt_cache,
        before=before,
        prefill_step_size=prefill_step_size,
        progress=prompt_progress_callback,
        group=group,
        processors=logits_processors,
        statistics=statistics or SpeculationStatistics(),
        draft_model=draft_model,
        drafting=lambda: DraftSettings(drafter, num_draft_tokens, prompt_lookup_min, prompt_lookup_max, draft_length),
    )


def _stream(
    model: nn.Module,
    tokenizer: Any,
    prompt: Any,
    policy: CachePolicy | None,
    limit: Callable[[], int],
    *,
    sampler: Sampler | None,
    seed: int | None,
    prompt_cache: list[Any] | None,
    prefill_step_size: int | None,
    progress: Callable[[int, int], None] | None,
    group: Communicator | None,
    processors: Sequence[LogitsProcessor] | None,
    before: Sequence[int] = (),
    embeddings: mx.array | None = None,
    device_stream: Any = None,
    statistics: SpeculationStatistics | None = None,
    draft_model: nn.Module | None = None,
    drafting: Callable[[], DraftSettings] | None = None,
) -> Steps[GenerationResponse]:
    """What both functions have in common.

    Args:
        limit: checks and returns max_tokens, on the leader.
        drafting: the same of the drafts; None for none.
    """
    if policy is not None and prompt_cache is not None:
        raise ValueError("got a policy and a prompt_cache, which was made with its own: give one of them")
    check_type("group", group, Communicator | None, "give what mlx_kv.join_ranks() returns")
    check_type("prompt_progress_callback", progress, Callable | None, "give a function (read, total), or None")
    communicator, given = group or LOCAL, given_processors(processors)
    policy, vocabulary = given_policy(policy), vocabulary_of(model)
    settings = None if drafting is None else communicator.on_leader(drafting) or DraftSettings()
    before = token_ids(before, vocabulary, "before")

    def asked() -> tuple[list[int], int, int | None]:
        if prefill_step_size is not None:
            whole_number("prefill_step_size", prefill_step_size, least=1)
        return tokens_of_prompt(tokenizer, prompt, vocabulary), limit(), prefill_step_size

    tokens, max_tokens, step = communicator.broadcast(asked)
    if embeddings is not None and (embeddings.ndim != 2 or embeddings.shape[0] != len(tokens)):
        raise ValueError(f"input_embeddings have shape {embeddings.shape}: give ({len(tokens)} tokens, hidden size)")
    decoder = make_decoder(model, policy, draft_model, settings, communicator)
    read = 0
    if prompt_cache is not None:
        _check_cache(model, decoder, prompt_cache)
        offsets = [int(cache.offset) for cache in attention_caches(prompt_cache)]
        read = communicator.all_max(max(offsets, default=0))
        (step,) = communicator.all_min([prefill_step(model, prompt_cache, step)])
    if needs_second_pass(decoder.make_caches() if prompt_cache is None else prompt_cache):
        check_local(communicator)
        instructions = Instructions.of(tokenizer, model)
    else:
        instructions = NO_INSTRUCTIONS
    sampler = sampler_of_sequence(sampler, seed, read + len(tokens)) if communicator.leads else None
    sequence = TokenSequence(
        0, tokens, UNLIMITED if max_tokens == -1 else max_tokens, None, sampler, prompt_cache, before
    )
    sequence.processors = given if communicator.leads else ()
    decoder.target.embeddings = embeddings
    ends = set() if tokenizer is None else set(tokenizer.eos_token_ids)
    engine = BatchEngine(decoder, ends, 1, step, statistics, instructions=instructions)
    if device_stream is not None:
        engine.stream = device_stream
    responses = _responses(engine, sequence, tokenizer, communicator, progress)
    return communicator.sync_steps(responses, lambda response: response.token)


def _responses(
    engine: BatchEngine,
    sequence: TokenSequence,
    tokenizer: Any,
    communicator: Communicator,
    report: Callable[[int, int], None] | None,
) -> Steps[GenerationResponse]:
    detokenizer = None if tokenizer is None else tokenizer.detokenizer
    sequence.detokenizer = detokenizer
    prompt_tokens, prompt_tps, count, started = len(sequence.tokens), 0.0, 0, time.perf_counter()

    def progress(read: int) -> None:
        communicator.progress()
        if report is not None:
            report(read, prompt_tokens)

    engine.submit(sequence)
    try:
        progress(0)
        last = 0
        while engine.busy:
            emitted = engine.step_scored()
            if count == 0:
                left = engine.progress[0].left if engine.busy else 0
                read = prompt_tokens - 1 if emitted else prompt_tokens - left - 1
                if read > last:
                    progress(read)
                last = read
            for _, item, finish, _ in emitted:
                if count == 0:
                    progress(prompt_tokens)
                    prompt_tps, started = prompt_tokens / (time.perf_counter() - started), time.perf_counter()
                count += 1
                token = sequence.emit(item.token, finish, item.from_draft)
                yield GenerationResponse(
                    text=token.text,
                    token=item.token,
                    logprobs=item.logprobs,
                    from_draft=item.from_draft,
                    prompt_tokens=prompt_tokens,
                    prompt_tps=prompt_tps,
                    generation_tokens=count,
                    generation_tps=count / (time.perf_counter() - started),
                    peak_memory=mx.get_peak_memory() / 1e9,
                    finish_reason=finish,
                )
    finally:
        engine.close()


def _check_cache(model: nn.Module, decoder: Decoder, caches: list[Any]) -> None:
    """Raises ValueError for a prompt_cache that the model, or its drafts, cannot continue."""
    caches, wanted = cache_list("prompt_cache", caches), len(decoder.make_caches())
    if len(caches) != wanted:
        raise ValueError(
            f"the prompt_cache has {len(caches)} layers, the model and its drafter {wanted}: use make_prompt_cache, "
            "and a drafter without a model"
        )
    check_windows(model, caches)
    show_attention(model, caches)
    if decoder.drafter is None:
        return
    if not can_trim(caches, 0):
        raise ValueError("the prompt_cache cannot take back tokens: generate without a draft")
    planned = [cache.max_write for cache in attention_caches(caches) if cache.max_write is not None]
    if planned and min(planned) <= decoder.draft_tokens:
        raise ValueError(
            f"the prompt_cache plans for writes of {min(planned)} tokens, and so can take back no draft of "
            f"{decoder.draft_tokens}: use num_draft_tokens={max(1, min(planned) - 1)}, or caches of a larger max_write"
        )


def shown_before(processor: LogitsProcessor, before: Sequence[int]) -> LogitsProcessor:
    """The processor for a loop that is given only its own tokens, not those before."""
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
    if unknown := sorted(set(options) - set(OPTIONS)):
        raise TypeError(f"there is no option {unknown[0]}: leave it out, or give one of {', '.join(OPTIONS)}")
