"""Speculative decoding of one sequence, as a stream of text: a batch of one for the `Decoder`.

Decides what a response says and when the sequence ends. Knows nothing about the command line, nor which drafted tokens
are accepted.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import GenerationResponse, generation_stream

from mlx_kv.cache.checks import cache_list, check_type, token_ids, whole_number
from mlx_kv.communicator import LOCAL, Communicator, Steps
from mlx_kv.generation.distributed_caches import check_local
from mlx_kv.generation.encoding import tokens_of_prompt, wrapped
from mlx_kv.generation.prefill import prefill_step, reserve_for
from mlx_kv.generation.sampling import Sampler, sampler_of_sequence
from mlx_kv.generation.settings import LogitsProcessor, given_processors
from mlx_kv.generation.speculation import LOOKUP_MAX, LOOKUP_MIN
from mlx_kv.generation.speculation.decoder import Decoder, make_decoder
from mlx_kv.generation.speculation.drafters import Drafter, Factory
from mlx_kv.generation.speculation.joining import NewRow
from mlx_kv.generation.speculation.settings import DraftLength, DraftSettings
from mlx_kv.generation.speculation.statistics import SpeculationStatistics
from mlx_kv.generation.two_pass_prefill import Instructions, TwoPassPrefill, needs_second_pass
from mlx_kv.mlxlm.convert import check_windows
from mlx_kv.mlxlm.loading import check_model, vocabulary_of
from mlx_kv.mlxlm.observing import show_attention
from mlx_kv.mlxlm.traverse import attention_caches, can_trim
from mlx_kv.policy import CachePolicy, given_policy


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
    """Generates what `stream_generate` would, in fewer passes of the model where the draft is right.

    Args:
        model, draft_model: models with the same tokenizer; no draft model where the drafter needs none.
        tokenizer: as from `mlx_lm.load`; None with a prompt of token ids, for responses without text.
        prompt: a text, or token ids.
        max_tokens: tokens to generate, from 1 up.
        num_draft_tokens: K, tokens drafted for each pass of the model, from 1 up; None is 3, and 10 for `ngram`,
            `suffix` and `auto`.
        policy: how the model's keys and values are kept; rings get room to take back K + 1 tokens.
        sampler: None is greedy, token for token as without a draft. With a `TemperatureSampler` the draft guesses by
            the same random keys, with any other (log-probabilities to tokens) the likeliest. All three are exact.
        prefill_step_size: prompt tokens read at once; by default what `stream_generate` would read.
        statistics: filled in as tokens come.
        prompt_progress_callback: called with the prompt tokens that the model has read, and their number.
        seed: as in `stream_generate`, which gives the same tokens.
        drafter: who proposes tokens instead of the draft model: a name of `drafter_names()`, a factory as
            `register_drafter` takes it, or a `Drafter`, which is for this call alone. `ngram`, `suffix` and `auto` need
            no model.
        prompt_lookup_min, prompt_lookup_max: how many last tokens must have been there before for `ngram` and `suffix`
            to propose what followed them, and how many `ngram` looks for at the most.
        draft_length: "chosen" drafts as many of the K tokens as have paid so far on this machine, or none; "fixed"
            always all of them.
        prompt_cache: caches to go on from, made by `make_prompt_cache`; they are updated in place, and may have read
            more than was told if a token ends the sequence. Instead of a policy; not with a draft model.
        before: the tokens that they have read, as far as they are known, for processors and drafters that look at them.
        group: as in `stream_generate`. Drafts are the leader's: the others need no draft model and no drafter.
        logits_processors: mlx-lm's, such as `make_logits_processors` gives: of tokens (n,) so far and logits (1, V) of
            the next one they make other logits. Each place of a draft is shown the tokens before it.

    Returns:
        An iterator of mlx-lm's `GenerationResponse`, one for each token.

    Raises:
        ValueError: K or max_tokens below 1, an empty prompt, vocabularies that differ, caches that cannot roll back, a
            seed for a sampler that is no `TemperatureSampler`, neither a draft model nor a drafter, a policy beside a
            prompt_cache, token ids that the model does not have.
        TypeError: an argument of another type.
    """
    check_model("model", model)
    if policy is not None and prompt_cache is not None:
        raise ValueError("got a policy and a prompt_cache, which was made with its own: give one of them")
    policy, given = given_policy(policy), given_processors(logits_processors)
    check_type("statistics", statistics, SpeculationStatistics | None, "give SpeculationStatistics(), or None")
    check_type(
        "prompt_progress_callback", prompt_progress_callback, Callable | None, "give a function (read, total), or None"
    )
    check_type("group", group, Communicator | None, "give what mlx_kv.join_ranks() returns")
    tokenizer = None if tokenizer is None else wrapped(tokenizer)
    communicator, drafting = group or LOCAL, (drafter, num_draft_tokens, prompt_lookup_min, prompt_lookup_max)
    settings = communicator.on_leader(lambda: DraftSettings(*drafting, draft_length))
    vocabulary = vocabulary_of(model)
    before = token_ids(before, vocabulary, "before")
    tokens, max_tokens, prefill_step_size = communicator.broadcast(
        lambda: _asked(tokens_of_prompt(tokenizer, prompt, vocabulary), max_tokens, prefill_step_size)
    )
    decoder = make_decoder(model, policy, draft_model, settings or DraftSettings(), communicator)
    statistics = statistics or SpeculationStatistics()
    read = 0
    if prompt_cache is not None:
        prompt_cache = cache_list("prompt_cache", prompt_cache)
        read = communicator.all_max(_check_cache(model, decoder, prompt_cache))
        (prefill_step_size,) = communicator.all_min([prefill_step(model, prompt_cache, prefill_step_size)])
    drawing = sampler_of_sequence(sampler, seed, read + len(tokens)) if communicator.leads else None
    processors = given if communicator.leads else ()
    progress = prompt_progress_callback or (lambda done, total: None)

    def prefill() -> None:
        row = NewRow(tokens, max_tokens, drawing, prompt_cache, before, processors)
        if policy.reads_twice if prompt_cache is None else needs_second_pass(prompt_cache):
            check_local(communicator)
            row = _read_twice(decoder, row, prefill_step_size, Instructions.of(tokenizer, model), progress)
        joining = decoder.begin([row], prefill_step_size)
        while not decoder.read_on(joining):
            communicator.progress()
            progress(joining.read, joining.longest)
        progress(joining.longest, joining.longest)
        statistics.caches[:] = decoder.target.caches

    responses = _responses(decoder, tokenizer, len(tokens), max_tokens, prefill, statistics)
    return communicator.sync_steps(responses, lambda response: response.token)


def _read_twice(
    decoder: Decoder,
    row: NewRow,
    step: int | None,
    instructions: Instructions,
    progress: Callable[[int, int], None],
) -> NewRow:
    """A row of which all but the last token has been read, twice."""
    if len(row.prompt) == 1:
        return row
    caches, told = row.caches or decoder.make_caches(), row.prompt[:-1]
    reserve_for(caches, len(row.prompt), row.max_tokens)
    reading = TwoPassPrefill(decoder.read, caches, [told], step or decoder.step_size, instructions)
    reading.finish(lambda done, _: progress(done, len(row.prompt)))
    return replace(row, prompt=row.prompt[-1:], caches=caches, before=[*row.before, *told])


def _asked(tokens: list[int], max_tokens: int, step: int | None) -> tuple[list[int], int, int | None]:
    """The tokens of a prompt, and the limits."""
    whole_number("max_tokens", max_tokens, least=1)
    if step is not None:
        whole_number("prefill_step_size", step, least=1)
    return tokens, max_tokens, step


def _check_cache(model: nn.Module, decoder: Decoder, caches: list[Any]) -> int:
    """How many tokens caches have read, if a decoder can go on with them."""
    check_windows(model, caches)
    show_attention(model, caches)
    wanted = len(decoder.make_caches())
    if len(caches) != wanted:
        raise ValueError(
            f"the prompt_cache has {len(caches)} layers, the model and what drafts for it {wanted}: "
            "use make_prompt_cache, and a drafter without a model"
        )
    if not can_trim(caches, 0):
        raise ValueError("the prompt_cache cannot take back tokens: generate without a draft")
    attention = list(attention_caches(caches))
    planned = min((cache.max_write for cache in attention if cache.max_write is not None), default=None)
    if planned is not None and planned <= decoder.draft_tokens:
        raise ValueError(
            f"the prompt_cache plans for writes of {planned} tokens, and so can take back no draft of "
            f"{decoder.draft_tokens}: use num_draft_tokens={max(1, planned - 1)}, or caches of a larger max_write"
        )
    return max((int(cache.offset) for cache in attention), default=0)


def _responses(
    decoder: Decoder,
    tokenizer: Any,
    prompt_tokens: int,
    max_tokens: int,
    prefill: Callable[[], None],
    statistics: SpeculationStatistics,
) -> Steps[GenerationResponse]:
    detokenizer = None if tokenizer is None else tokenizer.detokenizer
    ends = set() if tokenizer is None else set(tokenizer.eos_token_ids)
    count, started = 0, time.perf_counter()
    prompt_tps, finish = 0.0, None
    with mx.stream(generation_stream):
        prefill()
    while finish is None:
        with mx.stream(generation_stream):
            (emitted,) = decoder.round(max_tokens - count, statistics)
        if count == 0:
            prompt_tps, started = prompt_tokens / (time.perf_counter() - started), time.perf_counter()
        for item in emitted:
            count += 1
            finish = "stop" if item.token in ends else "length" if count == max_tokens else None
            if detokenizer is not None and finish != "stop":
                detokenizer.add_token(item.token)
            if detokenizer is not None and finish is not None:
                detokenizer.finalize()
            yield GenerationResponse(
                text="" if detokenizer is None else detokenizer.last_segment,
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
            if finish is not None:
                break
