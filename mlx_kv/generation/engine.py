"""Engines: what generates for every front end.

One engine serves prompts that are known in advance and requests that arrive at any time, with or without drafts.
Engines are not thread-safe: all calls come from one thread.
"""

from __future__ import annotations

from typing import Any, Protocol

import mlx.core as mx
import mlx.nn as nn

from mlx_kv.cache.checks import whole_number
from mlx_kv.communicator import LOCAL, Communicator
from mlx_kv.generation.batch_engine import BatchEngine
from mlx_kv.generation.decoder import make_decoder
from mlx_kv.generation.distributed_caches import equal_lengths
from mlx_kv.generation.sequence import BatchToken, SequenceProgress, TokenSequence
from mlx_kv.generation.speculation import LOOKUP_MAX, LOOKUP_MIN
from mlx_kv.generation.speculation.drafters import Drafter, Factory
from mlx_kv.generation.speculation.settings import DraftLength, DraftSettings
from mlx_kv.generation.speculation.statistics import SpeculationStatistics
from mlx_kv.generation.two_pass_prefill import NO_INSTRUCTIONS, Instructions
from mlx_kv.mlxlm.batching import check_batches
from mlx_kv.mlxlm.traverse import attention_caches
from mlx_kv.policy import CachePolicy, given_policy


class Engine(Protocol):
    """Continues any number of sequences, at most so many at once."""

    def submit(self, sequence: TokenSequence) -> None:
        """It joins as soon as there is room."""
        ...

    def cancel(self, index: int) -> None:
        """Lets a sequence go, wherever it stands; one that is not there is no error."""
        ...

    def step(self) -> list[BatchToken]:
        """Some work: tokens of rows that decode, in the order of rows, and prompts that are read.

        Nothing where nothing is to be done.
        """
        ...

    @property
    def busy(self) -> bool:
        """Whether any sequence is left."""
        ...

    @property
    def caches(self) -> list[Any]:
        """Those of the rows that decode now, one for each layer, for statistics; empty where there are none."""
        ...

    @property
    def step_size(self) -> int:
        """Tokens of a prompt that are read at once."""
        ...

    @property
    def rows(self) -> list[int]:
        """The index of each sequence that decodes now, in the order of the rows of `caches`."""
        ...

    @property
    def pending(self) -> list[int]:
        """The index of each sequence that does not decode yet: those whose prompts are read, then those that wait."""
        ...

    @property
    def progress(self) -> dict[int, SequenceProgress]:
        """How far each sequence is, by its index."""
        ...

    @property
    def speculation(self) -> SpeculationStatistics | None:
        """What it has drafted so far, filled in as it goes; None where it never drafts."""
        ...

    def make_caches(self) -> list[Any]:
        """New caches for a sequence to bring: of all layers, and then those of the drafter, if it has any."""
        ...

    def read(self, tokens: mx.array, cache: list[Any]) -> Any:
        """Reads tokens (1, n) into such caches."""
        ...

    def trim(self, caches: list[Any], n: int) -> bool:
        """Takes the last n tokens out of such caches; says whether it could, and changes nothing where not."""
        ...

    def extract(self, index: int) -> list[Any] | None:
        """Copies of the caches of a sequence that decodes, evaluated; None if it does not, or they cannot be had.

        Their offset says what they have read. That may be more than what was told: mlx-lm's loop is a step ahead, and
        a draft may have been right beyond the end.
        """
        ...

    def close(self) -> None:
        """Lets all sequences go."""
        ...


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
    most_wait: float | None = None,
) -> Engine:
    """An engine for one model and policy.

    Args:
        ends: ids of tokens that end a sequence.
        return_caches: whether the last token of a sequence brings its caches.
        drafter: as in `speculative_generate`; with it or a draft model, the engine speculates.
        num_draft_tokens, prompt_lookup_min, prompt_lookup_max, draft_length: the same.
        communicator: with the other processes of the model, which all make an engine now. The leader decides whether it
            drafts, by which drafter, and whether caches are returned.
        instructions: before the second reading of a prompt, where the policy wants one.
        most_wait: seconds that rows wait for their next token while prompts are read, as far as the least chunk allows;
            None reads all chunks whole. Not with drafts, several ranks, budgets or a quantized_start, where chunks have
            their size.

    Raises:
        ValueError: what the model or the policy refuses.
    """
    whole_number("max_batch_size", max_batch_size, least=1)
    lookup = prompt_lookup_min, prompt_lookup_max
    drafting = communicator.on_leader(lambda: DraftSettings(drafter, num_draft_tokens, *lookup, draft_length))
    if prefill_step_size is not None:
        whole_number("prefill_step_size", prefill_step_size, least=1)
    if max_batch_size > 1 or return_caches:
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
        most_wait = None
    return BatchEngine(
        decoder, ends, max_batch_size, prefill_step_size, statistics, return_caches, instructions, most_wait, alike
    )
