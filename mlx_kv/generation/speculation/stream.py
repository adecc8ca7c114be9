"""Speculative decoding of one sequence, as a stream of text: a batch of one for the `Decoder`.

Decides what a response says and when the sequence ends. Knows nothing about the command line, nor which drafted tokens
are accepted.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import GenerationResponse, generation_stream
from mlx_lm.tokenizer_utils import TokenizerWrapper

from mlx_kv.cache.checks import whole_number
from mlx_kv.generation.encoding import encode_prompt
from mlx_kv.generation.sampling import Sampler, sampler_of_sequence
from mlx_kv.generation.speculation import DRAFT_TOKENS
from mlx_kv.generation.speculation.decoder import Decoder, make_decoder
from mlx_kv.generation.speculation.drafters import Drafter, Factory
from mlx_kv.generation.speculation.joining import NewRow
from mlx_kv.generation.speculation.statistics import SpeculationStatistics
from mlx_kv.policy import CachePolicy


def speculative_generate(
    model: nn.Module,
    draft_model: nn.Module | None,
    tokenizer: Any,
    prompt: str | Sequence[int] | mx.array,
    max_tokens: int = 256,
    num_draft_tokens: int = DRAFT_TOKENS,
    policy: CachePolicy | None = None,
    sampler: Sampler | None = None,
    prefill_step_size: int | None = None,
    statistics: SpeculationStatistics | None = None,
    prompt_progress_callback: Callable[[int, int], None] | None = None,
    seed: int | None = None,
    drafter: str | Factory | Drafter | None = None,
) -> Iterator[GenerationResponse]:
    """Generates what `stream_generate` would, in fewer passes of the model where the draft is right.

    Args:
        model, draft_model: models with the same tokenizer; no draft model where the drafter needs none.
        tokenizer: as from `mlx_lm.load`; None with a prompt of token ids, for responses without text.
        prompt: a text, or token ids.
        max_tokens: tokens to generate, from 1 up.
        num_draft_tokens: K, tokens drafted for each pass of the model, from 1 up.
        policy: how the model's keys and values are kept; rings get room to take back K + 1 tokens.
        sampler: None is greedy, token for token as without a draft. With a `TemperatureSampler` the draft guesses by
            the same random keys, with any other (log-probabilities to tokens) the likeliest. All three are exact.
        prefill_step_size: prompt tokens read at once; by default what `stream_generate` would read.
        statistics: filled in as tokens come.
        prompt_progress_callback: called with the prompt tokens that the model has read, and their number.
        seed: as in `stream_generate`, which gives the same tokens.
        drafter: who proposes tokens instead of the draft model: a name of `drafter_names()`, a factory as
            `register_drafter` takes it, or a `Drafter`, which is for this call alone.

    Returns:
        An iterator of mlx-lm's `GenerationResponse`, one for each token.

    Raises:
        ValueError: K or max_tokens below 1, an empty prompt, vocabularies that differ, caches that cannot roll back, a
            seed for a sampler that is no `TemperatureSampler`, neither a draft model nor a drafter.
    """
    for name, value in (("num_draft_tokens", num_draft_tokens), ("max_tokens", max_tokens)):
        if value < 1:
            raise ValueError(f"{name} is {value}: give a number from 1 up")
    if isinstance(prompt, str) and tokenizer is None:
        raise ValueError("the prompt is a text, but there is no tokenizer: give one, or token ids")
    if tokenizer is not None and not isinstance(tokenizer, TokenizerWrapper):
        tokenizer = TokenizerWrapper(tokenizer)
    tokens = encode_prompt(tokenizer, prompt) if isinstance(prompt, str) else [int(t) for t in prompt]
    if not tokens:
        raise ValueError("the prompt is empty: give at least one token")
    if prefill_step_size is not None:
        whole_number("prefill_step_size", prefill_step_size, least=1)
    decoder = make_decoder(model, policy or CachePolicy(), draft_model, drafter, num_draft_tokens)
    statistics = statistics or SpeculationStatistics()
    drawing = sampler_of_sequence(sampler, seed, len(tokens))
    progress = prompt_progress_callback or (lambda done, total: None)

    def prefill() -> None:
        joining = decoder.begin([NewRow(tokens, max_tokens, drawing)], prefill_step_size)
        while not decoder.read_on(joining):
            progress(joining.read, joining.longest)
        progress(joining.longest, joining.longest)
        statistics.caches[:] = decoder.target.caches

    return _responses(decoder, tokenizer, len(tokens), max_tokens, prefill, statistics)


def _responses(
    decoder: Decoder,
    tokenizer: Any,
    prompt_tokens: int,
    max_tokens: int,
    prefill: Callable[[], None],
    statistics: SpeculationStatistics,
) -> Iterator[GenerationResponse]:
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
