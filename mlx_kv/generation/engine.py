"""Engines: what generates for every front end.

One engine serves prompts that are known in advance and requests that arrive at any time, with or without drafts.
Engines are not thread-safe: all calls come from one thread.
"""

from __future__ import annotations

import mlx.nn as nn

from mlx_kv.communicator import LOCAL, Communicator
from mlx_kv.generation.batch_engine import BatchEngine
from mlx_kv.generation.decoder import make_decoder
from mlx_kv.generation.distributed_caches import equal_lengths
from mlx_kv.generation.speculation import LOOKUP_MAX, LOOKUP_MIN, DraftLength, DraftSettings
from mlx_kv.generation.speculation.drafters import Drafter, Factory
from mlx_kv.generation.statistics import SpeculationStatistics
from mlx_kv.generation.two_pass_prefill import NO_INSTRUCTIONS, Instructions
from mlx_kv.mlxlm.batching import check_batches
from mlx_kv.mlxlm.traverse import attention_caches
from mlx_kv.policy import CachePolicy, given_policy
from mlx_kv.settings import whole_number

Engine = BatchEngine


def make_engine(
    model: nn.Module,
    ends: set[int],
    policy: CachePolicy | None = None,
    max_batch_size: int = 8,
    prefill_step_size: int | None = None,
    draft_model: nn.Module | None = None,
    num_draft_tokens: int | None = None,
    statistics: SpeculationStatistics | None = None,
    return_caches: bool = False,
    drafter: str | Factory | Drafter | None = None,
    prompt_lookup_min: int = LOOKUP_MIN,
    prompt_lookup_max: int = LOOKUP_MAX,
    draft_length: DraftLength = "chosen",
    communicator: Communicator = LOCAL,
    instructions: Instructions = NO_INSTRUCTIONS,
    max_wait: float | None = None,
) -> Engine:
    """An engine for one model and policy.

    Args:
        ends: ids of tokens that end a sequence.
        return_caches: whether the last token of a sequence carries its caches.
        draft_model, drafter: as in `speculative_generate`; without both, nothing is drafted.
        num_draft_tokens, prompt_lookup_min, prompt_lookup_max, draft_length: the same.
        communicator: with the other processes of the model, which all make an engine now. The leader decides whether it
            drafts, by which drafter, and whether caches are returned.
        instructions: for policies that read prompts in two passes.
        max_wait: maximum seconds between two tokens of a row while prompts are read, as far as the smallest chunk
            allows; None reads whole chunks. Ignored with drafts, several processes, budgets or a quantized_start, which
            need whole chunks.

    Raises:
        ValueError: what the model or the policy refuses.
    """
    whole_number("max_batch_size", max_batch_size, least=1)
    lookup = prompt_lookup_min, prompt_lookup_max
    drafting = communicator.on_leader(lambda: DraftSettings(drafter, num_draft_tokens, *lookup, draft_length))
    if prefill_step_size is not None:
        whole_number("prefill_step_size", prefill_step_size, least=1)
    check_batches(model)
    policy = given_policy(policy)
    wanted = draft_model is not None or drafter is not None, return_caches
    drafts, return_caches = communicator.broadcast(lambda: wanted)
    settings = (drafting or DraftSettings()) if drafts else None
    decoder = make_decoder(model, policy, draft_model, settings, communicator)
    alike = equal_lengths(model, communicator) if max_batch_size > 1 else (False, False)
    if decoder.drafter is not None and (any(alike) or decoder.drafter.equal_rows):
        max_batch_size, alike = 1, (False, False)  # in a round, rows accept different numbers of tokens
    by_chunk = policy.quantized_start or any(own.evictor is not None for own in attention_caches(decoder.make_caches()))
    if drafts or communicator.distributed or by_chunk:
        max_wait = None
    return BatchEngine(
        decoder, ends, max_batch_size, prefill_step_size, statistics, return_caches, instructions, max_wait, alike
    )
