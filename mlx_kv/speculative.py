"""Speculative decoding of one sequence: a small model drafts, the model verifies, the caches take back what was wrong.

Decides which drafted tokens are accepted and what is trimmed. The result is the model's own: token for token where it
is greedy, in distribution where it samples. Every trim is checked first; rings are made with the slack that it needs.
Knows nothing about the command line, nor how a cache trims.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import GenerationResponse, generation_stream
from mlx_lm.tokenizer_utils import TokenizerWrapper

from mlx_kv.adapter import can_trim, make_prompt_cache, trim_prompt_cache
from mlx_kv.generation import encode_prompt, prefill_step, reserve_for
from mlx_kv.policy import CachePolicy
from mlx_kv.sampling import TemperatureSampler

Sampler = Callable[[mx.array], mx.array]


@dataclass
class SpeculationStatistics:
    """What one run did, filled in as it goes: verify rounds, tokens drafted, drafted tokens that were accepted.

    `caches` are those of the model, for `cache_statistics`.
    """

    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    caches: list[Any] = field(default_factory=list)

    @property
    def acceptance_rate(self) -> float:
        return self.accepted / self.drafted if self.drafted else 0.0


@dataclass(frozen=True)
class Emitted:
    """One token of the result, the model's log-probabilities (vocab,) at its place, and whether the draft had it."""

    token: int
    logprobs: mx.array
    from_draft: bool


def normalized(logits: mx.array) -> mx.array:
    return logits - mx.logsumexp(logits, axis=-1, keepdims=True)


def as_token(x: mx.array) -> int:
    token: Any = x.item()
    return int(token)


class Decoder:
    """The two models, their caches, and what each of them has yet to read."""

    def __init__(
        self, model: nn.Module, draft_model: nn.Module, policy: CachePolicy, draft_tokens: int, sampler: Sampler | None
    ) -> None:
        # A round writes draft_tokens + 1 tokens and takes back all but one of them at the most.
        policy = replace(policy, max_rollback=max(policy.max_rollback, draft_tokens + 1))
        self.models = (model, draft_model)
        self.caches = (
            make_prompt_cache(model, policy, strict=False),
            make_prompt_cache(draft_model, CachePolicy(max_rollback=draft_tokens + 1), strict=False),
        )
        self.draft_tokens, self.sampler = draft_tokens, sampler
        self.progress: Callable[[int, int], None] = lambda done, total: None
        self.unread: tuple[list[int], list[int]] = ([], [])  # of the model, of the draft

    def prefill(self, tokens: list[int], step: int) -> None:
        """Both models read all but the last token."""
        for model, caches, unread in zip(self.models, self.caches, self.unread, strict=True):
            for first in range(0, len(tokens) - 1, step):
                chunk = tokens[first : min(first + step, len(tokens) - 1)]
                model(mx.array([chunk]), cache=caches)
                mx.eval([cache.state for cache in caches])
                mx.clear_cache()
                if model is self.models[0]:
                    self.progress(first + len(chunk), len(tokens))
            unread[:] = tokens[-1:]
        self.progress(len(tokens), len(tokens))

    def round(self, most: int, statistics: SpeculationStatistics) -> list[Emitted]:
        """Drafts, verifies, and takes back: 1 to `most` tokens of the result."""
        count = min(self.draft_tokens, most - 1)
        drafted, draft_logprobs = self._draft(count)
        caches, draft_caches = self.caches
        logprobs = normalized(self.models[0](mx.array([self.unread[0] + drafted]), cache=caches)[0, -(count + 1) :])
        accepted, last = self._accept(drafted, draft_logprobs, logprobs)
        trim_prompt_cache(caches, count - accepted)
        trim_prompt_cache(draft_caches, max(count - accepted - 1, 0))
        # The draft has read all drafted tokens but the last one: if that was accepted, it is still to be read.
        self.unread[0][:] = [last]
        self.unread[1][:] = [*(drafted[-1:] if accepted == count else []), last]
        statistics.rounds += 1
        statistics.drafted += count
        statistics.accepted += accepted
        tokens = [*drafted[:accepted], last]
        return [Emitted(token, logprobs[i], from_draft=i < accepted) for i, token in enumerate(tokens)]

    def _draft(self, count: int) -> tuple[list[int], list[mx.array]]:
        """`count` tokens of the draft model, and the log-probabilities (vocab,) that each was drawn from."""
        feed, tokens, logprobs = mx.array([self.unread[1]]), [], []
        for _ in range(count):
            row = normalized(self.models[1](feed, cache=self.caches[1])[0, -1])
            if isinstance(self.sampler, TemperatureSampler):
                row = self.sampler.distribution(row)
                token = mx.random.categorical(row)
            else:
                token = mx.argmax(row)  # whatever the model samples, the likeliest token is the best guess
            mx.async_eval(token)  # type: ignore[no-untyped-call]
            tokens.append(token)
            logprobs.append(row)
            feed = token[None, None]
        return [as_token(token) for token in tokens], logprobs

    def _accept(self, drafted: list[int], draft_logprobs: list[mx.array], logprobs: mx.array) -> tuple[int, int]:
        """How many drafted tokens are right, and the token that follows them. logprobs is (len(drafted) + 1, vocab)."""
        if isinstance(self.sampler, TemperatureSampler):
            return reject(drafted, draft_logprobs, self.sampler.distribution(logprobs))
        # Each token is the model's own choice; drafted ones are only right or wrong about it. Exact for any sampler.
        chosen: Any = (mx.argmax(logprobs, axis=-1) if self.sampler is None else self.sampler(logprobs)).tolist()
        accepted = 0
        while accepted < len(drafted) and drafted[accepted] == chosen[accepted]:
            accepted += 1
        return accepted, chosen[accepted]


def reject(drafted: list[int], draft_logprobs: list[mx.array], logprobs: mx.array) -> tuple[int, int]:
    """Rejection sampling (Leviathan, Kalman and Matias 2023, algorithm 1): exactly the model's distribution.

    A token x drawn from q is kept with probability min(1, p(x) / q(x)); the first that is not is replaced by a draw
    from max(0, p - q), normalised; if all are kept, one more is drawn from p.

    Args:
        drafted: n token ids.  draft_logprobs: log q at each, n arrays (vocab,).  logprobs: log p, (n + 1, vocab).

    Returns:
        How many are kept, and the token after them.
    """
    if drafted:
        log_q = mx.stack(draft_logprobs)
        index = mx.array(drafted)[:, None]
        ratio = mx.take_along_axis(logprobs[:-1], index, 1) - mx.take_along_axis(log_q, index, 1)
        kept: Any = (mx.log(mx.random.uniform(shape=ratio.shape)) < ratio)[:, 0].tolist()
        if not all(kept):
            accepted = kept.index(False)
            rest = mx.maximum(mx.exp(logprobs[accepted]) - mx.exp(log_q[accepted]), 0)
            return accepted, as_token(mx.random.categorical(mx.log(rest)))
    return len(drafted), as_token(mx.random.categorical(logprobs[-1]))


def check_pair(model: nn.Module, draft_model: nn.Module) -> None:
    """Both models must speak of the same tokens. Their graphs are built for one token, and not evaluated."""
    sizes = [net(mx.array([[0]])).shape[-1] for net in (model, draft_model)]
    if sizes[0] != sizes[1]:
        raise ValueError(
            f"the draft model has a vocabulary of {sizes[1]:,} tokens, the model one of {sizes[0]:,}: "
            "choose a draft model with the same tokenizer"
        )


def speculative_generate(
    model: nn.Module,
    draft_model: nn.Module,
    tokenizer: Any,
    prompt: str | Sequence[int] | mx.array,
    max_tokens: int = 256,
    num_draft_tokens: int = 3,
    policy: CachePolicy | None = None,
    sampler: Sampler | None = None,
    prefill_step_size: int | None = None,
    statistics: SpeculationStatistics | None = None,
    prompt_progress_callback: Callable[[int, int], None] | None = None,
) -> Iterator[GenerationResponse]:
    """Generates what `stream_generate` would, in fewer passes of the model where the draft is right.

    Args:
        model, draft_model: models with the same tokenizer.
        tokenizer: as from `mlx_lm.load`; None with a prompt of token ids, for responses without text.
        prompt: a text, or token ids.
        max_tokens: tokens to generate, from 1 up.
        num_draft_tokens: K, tokens drafted for each pass of the model, from 1 up.
        policy: how the model's keys and values are kept; rings get room to take back K + 1 tokens.
        sampler: None is greedy, token for token as without a draft. A `TemperatureSampler` is sampled by rejection; any
            other sampler (log-probabilities to tokens) by comparing its choice with the draft. All three are exact.
        prefill_step_size: prompt tokens read at once; by default what `stream_generate` would read.
        statistics: filled in as tokens come.
        prompt_progress_callback: called with the prompt tokens that the model has read, and their number.

    Returns:
        An iterator of mlx-lm's `GenerationResponse`, one for each token.

    Raises:
        ValueError: K or max_tokens below 1, an empty prompt, vocabularies that differ, caches that cannot roll back.
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
    check_pair(model, draft_model)
    decoder = Decoder(model, draft_model, policy or CachePolicy(), num_draft_tokens, sampler)
    for caches in decoder.caches:
        reserve_for(caches, len(tokens), max_tokens + num_draft_tokens)
        if not can_trim(caches, 0):
            kinds = ", ".join(sorted({type(c).__name__ for c in caches if not can_trim([c], 0)}))
            raise ValueError(f"{kinds} cannot take back tokens: generate without a draft model")
    statistics = statistics or SpeculationStatistics()
    statistics.caches[:] = decoder.caches[0]
    decoder.progress = prompt_progress_callback or (lambda done, total: None)
    step = prefill_step([*decoder.caches[0], *decoder.caches[1]], prefill_step_size)
    return _responses(decoder, tokenizer, tokens, max_tokens, step, statistics)


def _responses(
    decoder: Decoder,
    tokenizer: Any,
    tokens: list[int],
    max_tokens: int,
    step: int,
    statistics: SpeculationStatistics,
) -> Iterator[GenerationResponse]:
    detokenizer = None if tokenizer is None else tokenizer.detokenizer
    ends = set() if tokenizer is None else set(tokenizer.eos_token_ids)
    count, started = 0, time.perf_counter()
    prompt_tps, finish = 0.0, None
    with mx.stream(generation_stream):
        decoder.prefill(tokens, step)
    while finish is None:
        with mx.stream(generation_stream):
            emitted = decoder.round(max_tokens - count, statistics)
        if count == 0:
            prompt_tps, started = len(tokens) / (time.perf_counter() - started), time.perf_counter()
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
                prompt_tokens=len(tokens),
                prompt_tps=prompt_tps,
                generation_tokens=count,
                generation_tps=count / (time.perf_counter() - started),
                peak_memory=mx.get_peak_memory() / 1e9,
                finish_reason=finish,
            )
            if finish is not None:
                break
