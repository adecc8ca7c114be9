"""Text from many prompts at once: rows join when there is room, and leave when they are done.

Decides which prompts share a batch, when a sequence ends, and what is told of each token. Without a draft model the
loop is mlx-lm's `BatchGenerator` over our caches; with one it is the `Decoder`'s rounds. Knows nothing about files or
the command line, nor how rows are kept.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import BatchGenerator, generation_stream
from mlx_lm.tokenizer_utils import TokenizerWrapper

from mlx_kv.adapter import check_batches, context_length, make_prompt_cache
from mlx_kv.decoder import Decoder, Sampler, SpeculationStatistics
from mlx_kv.generation import encode_prompt, prefill_step, reserve_for
from mlx_kv.policy import CachePolicy

MOST_PROMPTS_AT_ONCE = 8  # read together; mlx-lm's number


@dataclass(frozen=True)
class BatchToken:
    """One token of one sequence.

    Attributes:
        index: which prompt it continues.
        text: what can be said now: tokens that end within a character or a word wait for the next. Empty without a
            tokenizer, and for the token that ends a sequence.
        token: its id.
        finish_reason: "stop" or "length" with the last token of a sequence, else None.
        from_draft: whether the draft model had proposed it.
    """

    index: int
    text: str
    token: int
    finish_reason: str | None
    from_draft: bool = False


@dataclass
class _Sequence:
    """What is known of one prompt while it is continued."""

    index: int
    tokens: list[int]
    max_tokens: int
    detokenizer: Any
    emitted: int = 0

    def emit(self, token: int, finish: str | None, from_draft: bool = False) -> BatchToken:
        self.emitted += 1
        text = ""
        if self.detokenizer is not None:
            if finish != "stop":
                self.detokenizer.add_token(token)
            if finish is not None:
                self.detokenizer.finalize()
            text = self.detokenizer.last_segment
        return BatchToken(self.index, text, token, finish, from_draft)


@dataclass
class _Job:
    """All that a run needs to know besides its prompts."""

    model: nn.Module
    ends: set[int]
    policy: CachePolicy
    sampler: Sampler | None
    max_batch_size: int
    prefill_step_size: int | None
    waiting: deque[_Sequence] = field(default_factory=deque)


def batch_generate(
    model: nn.Module,
    tokenizer: Any,
    prompts: Sequence[str | Sequence[int]],
    policy: CachePolicy | None = None,
    max_tokens: int | Sequence[int] = 256,
    draft_model: nn.Module | None = None,
    num_draft_tokens: int = 3,
    max_batch_size: int = 8,
    sampler: Sampler | None = None,
    prefill_step_size: int | None = None,
    statistics: SpeculationStatistics | None = None,
) -> Iterator[BatchToken]:
    """Continues many prompts at once; each gets the tokens that it would get alone.

    Args:
        model: any model of mlx-lm whose caches can be batched.
        tokenizer: as from `mlx_lm.load`; None with prompts of token ids, for tokens without text.
        prompts: texts or token ids; more than fit into a batch take the place of those that are done.
        policy: how keys and values are kept; None is `CachePolicy()`.
        max_tokens: tokens to generate, one number for all prompts, or one for each.
        draft_model, num_draft_tokens: to speculate with: each row accepts its own number of drafted tokens.
        max_batch_size: rows at once.
        sampler: log-probabilities (B, V) to tokens (B,); None is greedy. With a draft model as in
            `speculative_generate`.
        prefill_step_size: prompt tokens of each row read at once; by default what `stream_generate` would read.
        statistics: filled in as tokens come; only with a draft model.

    Returns:
        An iterator of `BatchToken`, in the order in which they come; tokens of one prompt are in order.

    Raises:
        ValueError: no prompt, one that is empty or longer than the model's context (it says which), a number below 1,
            vocabularies that differ, caches that cannot roll back for a draft model.
    """
    for name, value in (("num_draft_tokens", num_draft_tokens), ("max_batch_size", max_batch_size)):
        if value < 1:
            raise ValueError(f"{name} is {value}: give a number from 1 up")
    if tokenizer is not None and not isinstance(tokenizer, TokenizerWrapper):
        tokenizer = TokenizerWrapper(tokenizer)
    check_batches(model, max_batch_size)
    waiting = _sequences(tokenizer, prompts, max_tokens, context_length(model))
    ends = set() if tokenizer is None else set(tokenizer.eos_token_ids)
    job = _Job(model, ends, policy or CachePolicy(), sampler, max_batch_size, prefill_step_size, waiting)
    if draft_model is None:
        make_prompt_cache(model, job.policy)  # refuses what no layer can honour before anything is read
        return _plain(job)
    decoder = Decoder(model, draft_model, job.policy, num_draft_tokens, sampler)
    return _speculative(job, decoder, statistics or SpeculationStatistics())


def _sequences(
    tokenizer: Any, prompts: Sequence[str | Sequence[int]], max_tokens: int | Sequence[int], context: int | None
) -> deque[_Sequence]:
    if isinstance(prompts, str) or not prompts:
        raise ValueError("prompts is one text or empty: give a list of prompts, at least one")
    limits = [max_tokens] * len(prompts) if isinstance(max_tokens, int) else list(max_tokens)
    if len(limits) != len(prompts):
        raise ValueError(f"got {len(limits)} max_tokens for {len(prompts)} prompts: give one number, or one for each")
    found: deque[_Sequence] = deque()
    for index, (prompt, limit) in enumerate(zip(prompts, limits, strict=True)):
        if isinstance(prompt, str) and tokenizer is None:
            raise ValueError(f"prompt {index} is a text, but there is no tokenizer: give one, or token ids")
        tokens = encode_prompt(tokenizer, prompt) if isinstance(prompt, str) else [int(token) for token in prompt]
        if not tokens:
            raise ValueError(f"prompt {index} is empty: give at least one token")
        if context is not None and len(tokens) >= context:
            raise ValueError(
                f"prompt {index} has {len(tokens):,} tokens, but this model was made for {context:,}: shorten it"
            )
        if limit < 1:
            raise ValueError(f"max_tokens of prompt {index} is {limit}: give a number from 1 up")
        found.append(_Sequence(index, tokens, limit, None if tokenizer is None else tokenizer.detokenizer))
    return found


def _plain(job: _Job) -> Iterator[BatchToken]:
    """mlx-lm's continuous batching over our caches."""
    probe = make_prompt_cache(job.model, job.policy)
    generator = BatchGenerator(
        job.model,
        stop_tokens=[[token] for token in sorted(job.ends)],
        sampler=job.sampler,
        completion_batch_size=job.max_batch_size,
        prefill_batch_size=min(MOST_PROMPTS_AT_ONCE, job.max_batch_size),
        prefill_step_size=prefill_step(probe, job.prefill_step_size),
    )
    active: dict[int, _Sequence] = {}
    try:
        while job.waiting or active:
            while job.waiting and len(active) < job.max_batch_size:
                sequence = job.waiting.popleft()
                caches = make_prompt_cache(job.model, job.policy)
                reserve_for(caches, len(sequence.tokens), sequence.max_tokens)
                (uid,) = generator.insert([sequence.tokens], [sequence.max_tokens], [caches])
                active[uid] = sequence
            for response in generator.next_generated():  # type: ignore[no-untyped-call]
                yield active[response.uid].emit(response.token, response.finish_reason)
                if response.finish_reason is not None:
                    del active[response.uid]
    finally:
        generator.close()  # type: ignore[no-untyped-call]


def _speculative(job: _Job, decoder: Decoder, statistics: SpeculationStatistics) -> Iterator[BatchToken]:
    """Rounds of the decoder: one pass of the draft for each drafted token, and one of the model, for all rows."""
    active: list[_Sequence] = []
    while job.waiting or active:
        with mx.stream(generation_stream):
            room = min(job.max_batch_size - len(active), MOST_PROMPTS_AT_ONCE)
            joining = [job.waiting.popleft() for _ in range(min(room, len(job.waiting)))]
            if joining:
                most = max(sequence.max_tokens for sequence in joining)
                decoder.add([sequence.tokens for sequence in joining], most, job.prefill_step_size)
                active += joining
                statistics.caches[:] = decoder.caches[0]
            left = max(sequence.max_tokens - sequence.emitted for sequence in active)
            emitted = decoder.round(left, statistics)
        staying = []
        for row, (sequence, items) in enumerate(zip(active, emitted, strict=True)):
            finish = None
            for item in items:
                last = sequence.emitted + 1 == sequence.max_tokens
                finish = "stop" if item.token in job.ends else "length" if last else None
                yield sequence.emit(item.token, finish, item.from_draft)
                if finish is not None:
                    break
            if finish is None:
                staying.append(row)
        decoder.keep(staying)
        active = [active[row] for row in staying]
