"""`batch_generate`: text from many prompts at once."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import mlx.nn as nn

from mlx_kv.cache.checks import check_type, whole_numbers
from mlx_kv.communicator import LOCAL, Communicator, Steps
from mlx_kv.generation.encoding import tokens_of_prompt, wrapped
from mlx_kv.generation.engine import Engine, make_engine
from mlx_kv.generation.sampling import Sampler, check_seed, derived_seed, sampler_of_sequence
from mlx_kv.generation.sequence import BatchToken, TokenSequence
from mlx_kv.generation.settings import LogitsProcessor, given_processors
from mlx_kv.generation.speculation import LOOKUP_MAX, LOOKUP_MIN
from mlx_kv.generation.speculation.drafters import Drafter, Factory
from mlx_kv.generation.speculation.settings import DraftLength
from mlx_kv.generation.statistics import SpeculationStatistics
from mlx_kv.generation.two_pass_prefill import Instructions
from mlx_kv.mlxlm.loading import check_model, context_length, vocabulary_of
from mlx_kv.policy import CachePolicy, given_policy
from mlx_kv.settings import whole_number


def batch_generate(
    model: nn.Module,
    tokenizer: Any,
    prompts: Sequence[str | Sequence[int]],
    policy: CachePolicy | None = None,
    max_tokens: int | Sequence[int] = 256,
    draft_model: nn.Module | None = None,
    num_draft_tokens: int | None = None,
    max_batch_size: int = 8,
    sampler: Sampler | None = None,
    prefill_step_size: int | None = None,
    statistics: SpeculationStatistics | None = None,
    seed: int | None = None,
    drafter: str | Factory | Drafter | None = None,
    prompt_lookup_min: int = LOOKUP_MIN,
    prompt_lookup_max: int = LOOKUP_MAX,
    draft_length: DraftLength = "chosen",
    group: Communicator | None = None,
    logits_processors: Sequence[LogitsProcessor] | None = None,
) -> Iterator[BatchToken]:
    """Generates for many prompts at once, with the same tokens for each prompt as alone.

    Args:
        model: any model of mlx-lm whose caches can be batched.
        tokenizer: as from `mlx_lm.load`; None with prompts of token ids, for tokens without text.
        prompts: texts or token ids; those beyond the batch size start when others end.
        policy: settings of the caches; None is `CachePolicy()`.
        max_tokens: tokens to generate, one number for all prompts, or one for each.
        draft_model, num_draft_tokens: for speculation; each row accepts its own number of drafted tokens.
        max_batch_size: maximum rows in the batch.
        sampler: log-probabilities (B, V) to tokens (B,); None is greedy. With a draft model as in
            `speculative_generate`.
        prefill_step_size: prompt tokens of each row read at once; by default what `stream_generate` would read.
        statistics: filled in as tokens come; only with a draft model or a drafter.
        seed: makes a `TemperatureSampler` repeatable. The answer depends on the seed, the prompt and its
            index, not on the other prompts.
        drafter, prompt_lookup_min, prompt_lookup_max, draft_length: as in `speculative_generate`.
        group: the ranks of which each has a part of the model, and calls this alike. The leader's prompts, limits,
            samplers and drafter count, and where it stops asking for tokens, all end.
        logits_processors: as in `speculative_generate`, for each prompt; they must not keep state.

    Returns:
        An iterator of `BatchToken`, in the order in which they come; tokens of one prompt are in order.

    Raises:
        ValueError: no prompt, one that is empty or longer than the model's context (it says which), a number below 1,
            vocabularies that differ, caches that cannot roll back for a draft model, a seed for another sampler, token
            ids that the model does not have.
        TypeError: an argument of another type.
    """
    check_model("model", model)
    policy, processors = given_policy(policy), given_processors(logits_processors)
    check_type("statistics", statistics, SpeculationStatistics | None, "give SpeculationStatistics(), or None")
    tokenizer = None if tokenizer is None else wrapped(tokenizer)
    check_type("group", group, Communicator | None, "give what mlx_kv.join_ranks() returns")
    communicator = group or LOCAL
    sequences: list[TokenSequence] = []  # with the leader's samplers

    def asked() -> tuple[int, int | None, list[tuple[list[int], int]]]:
        whole_number("max_batch_size", max_batch_size, least=1)
        sequences.extend(_sequences(model, tokenizer, prompts, max_tokens, sampler, seed))
        for sequence in sequences:
            sequence.processors = processors
        return max_batch_size, prefill_step_size, [(own.tokens, own.max_tokens) for own in sequences]

    max_batch_size, prefill_step_size, prompts_and_limits = communicator.broadcast(asked)
    if not communicator.leads:
        sequences = [
            TokenSequence(index, tokens, limit, None if tokenizer is None else tokenizer.detokenizer)
            for index, (tokens, limit) in enumerate(prompts_and_limits)
        ]
    ends = set() if tokenizer is None else set(tokenizer.eos_token_ids)
    engine = make_engine(
        model,
        ends,
        policy,
        max_batch_size,
        prefill_step_size,
        draft_model,
        num_draft_tokens,
        statistics,
        drafter=drafter,
        prompt_lookup_min=prompt_lookup_min,
        prompt_lookup_max=prompt_lookup_max,
        draft_length=draft_length,
        communicator=communicator,
        instructions=Instructions.for_policy(policy, tokenizer, model),
    )
    return _tokens(engine, sequences, communicator)


def _tokens(engine: Engine, sequences: Sequence[TokenSequence], communicator: Communicator) -> Iterator[BatchToken]:
    def steps() -> Steps[list[BatchToken]]:
        while engine.busy:
            yield engine.step()

    try:
        for sequence in sequences:
            engine.submit(sequence)
        rounds = communicator.sync_steps(steps(), lambda tokens: [(own.index, own.token) for own in tokens])
        with contextlib.closing(rounds):
            for tokens in rounds:
                yield from tokens
    finally:
        engine.close()


def _sequences(
    model: nn.Module,
    tokenizer: Any,
    prompts: Sequence[str | Sequence[int]],
    max_tokens: int | Sequence[int],
    sampler: Sampler | None,
    seed: int | None,
) -> list[TokenSequence]:
    if isinstance(prompts, str) or (isinstance(prompts, Sequence) and not prompts):
        raise ValueError("prompts is one text or empty: give a list of prompts, at least one")
    check_type("prompts", prompts, Sequence, "give a list of prompts, each a text or token ids")
    check_seed(seed)
    limits, context, vocabulary = whole_numbers(max_tokens, len(prompts)), context_length(model), vocabulary_of(model)
    if len(limits) != len(prompts):
        raise ValueError(f"got {len(limits)} max_tokens for {len(prompts)} prompts: give one number, or one for each")
    found = []
    for index, (prompt, limit) in enumerate(zip(prompts, limits, strict=True)):
        tokens = tokens_of_prompt(tokenizer, prompt, vocabulary, f"prompt {index}")
        if context is not None and len(tokens) >= context:
            raise ValueError(
                f"prompt {index} has {len(tokens):,} tokens, but this model was made for {context:,}: shorten it"
            )
        whole_number(f"max_tokens of prompt {index}", limit, least=1)
        detokenizer = None if tokenizer is None else tokenizer.detokenizer
        own_seed = None if seed is None else derived_seed(seed, index)
        drawing = sampler_of_sequence(sampler, own_seed, len(tokens))
        found.append(TokenSequence(index, tokens, limit, detokenizer, drawing))
    return found
