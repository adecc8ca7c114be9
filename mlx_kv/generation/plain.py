"""Rows without speculation: mlx-lm's continuous batching over our caches.

Decides which prompts are read together, and which sequences a model can take beside others. The loop is mlx-lm's, a
step ahead of what it tells. Knows nothing about files or requests, nor how rows are kept.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_kv.communicator import LOCAL, Communicator
from mlx_kv.generation.distributed_caches import equal_lengths, make_distributed_caches
from mlx_kv.generation.logprobs import scored
from mlx_kv.generation.prefill import CHUNKS_AT_ONCE, MOST_PROMPTS_AT_ONCE, chunk_for, prefill_step, reserve_for
from mlx_kv.generation.prefill_pacing import PrefillPace
from mlx_kv.generation.progress import SequenceProgress
from mlx_kv.generation.sequence import BatchToken, TokenSequence, Waiting
from mlx_kv.generation.two_pass_prefill import NO_INSTRUCTIONS, Instructions, TwoPassQueue
from mlx_kv.mlxlm.batching import RowsByClass, WatchedBatchGenerator, evaluated
from mlx_kv.mlxlm.observing import show_attention
from mlx_kv.mlxlm.traverse import attention_caches, trim_all
from mlx_kv.policy import CachePolicy

# Tokens of prompts read together, and no more than two chunks. More would keep the device no busier, but all rows
# waiting: those that decode for their next token, and the first of the prompts for the last. mlx-lm reads up to 2,048
# tokens of one prompt in one pass, which is what is let through elsewhere.
MOST_TOKENS_AT_ONCE = {mx.DeviceType.cpu: 1024, mx.DeviceType.gpu: 2048}


class PlainEngine:
    """mlx-lm's continuous batching over our caches."""

    def __init__(
        self,
        model: nn.Module,
        ends: set[int],
        policy: CachePolicy,
        max_batch_size: int,
        prefill_step_size: int | None,
        return_caches: bool = False,
        communicator: Communicator = LOCAL,
        instructions: Instructions = NO_INSTRUCTIONS,
        most_wait: float | None = None,
    ) -> None:
        self.model, self._return_caches = model, return_caches
        self._empty = make_distributed_caches(model, policy, communicator)  # refuses what no layer can honour
        step, chunk = prefill_step(model, self._empty, prefill_step_size), chunk_for(model)
        self.step_size, chunk = communicator.all_min([step, chunk])
        together = min(MOST_PROMPTS_AT_ONCE, max_batch_size)
        agreed = communicator.leader_tokens if communicator.distributed else None
        self._generator = WatchedBatchGenerator(model, ends, max_batch_size, together, self.step_size, agreed)
        self._max_batch_size = max_batch_size
        self._by_class = RowsByClass(model, max_batch_size)
        # Asked here, where an error is that of the model alone: in a step it would end all rows.
        alike = equal_lengths(model, communicator) if max_batch_size > 1 else (False, False)
        self._equal_rows, self._equal_prompts = alike
        self._waiting = Waiting(lambda: self._empty)
        self._twice = TwoPassQueue(self.read, self.make_caches, self.step_size, instructions)
        self._active: dict[int, TokenSequence] = {}  # by mlx-lm's number for it
        self._reading: dict[int, int] = {}  # by the same, those that have prompt tokens left to read, and how many
        self._most_tokens = min(MOST_TOKENS_AT_ONCE[mx.default_device().type], 2 * chunk)
        by_chunk = policy.quantized_start or any(own.evictor is not None for own in attention_caches(self._empty))
        paced = most_wait is not None and not communicator.distributed and not by_chunk
        self._pace = PrefillPace(most_wait or 0.0, self.step_size) if paced else None
        self._most_long = max(2, CHUNKS_AT_ONCE * chunk // self.step_size)

    def submit(self, sequence: TokenSequence) -> None:
        self._waiting.submit(sequence, self._twice)
        show_attention(self.model, sequence.caches or [])

    def cancel(self, index: int) -> None:
        self._waiting.cancel(index)
        self._twice.cancel(index)
        for uid in [uid for uid, sequence in self._active.items() if sequence.index == index]:
            self._generator.remove([uid])
            self._reading.pop(uid, None)
            del self._active[uid]

    def step(self) -> list[BatchToken]:
        self._waiting.take(self._twice.step())
        self._join()
        if not self._active:
            return []
        tokens = []
        prompts, responses = self._next()
        for response in prompts:
            read, everything = response.progress
            self._reading[response.uid] = max(0, everything - read - 1)  # the last is read with the first step
            if everything == read:
                del self._reading[response.uid]
        wanted = [(one, self._active[one.uid].top_logprobs) for one in responses]
        scores = scored((one.logprobs, one.token, count) for one, count in wanted)
        for response, score in zip(responses, scores, strict=True):
            finish = response.finish_reason
            held: Any = response.prompt_cache if self._return_caches else None
            if held is not None:
                evaluated(held)
            tokens.append(self._active[response.uid].emit(response.token, finish, caches=held, score=score))
            if finish is not None:
                del self._active[response.uid]
        return tokens

    def _next(self) -> tuple[list[Any], list[Any]]:
        """A step of mlx-lm's loop; prompts that are read in it keep rows that decode waiting only for so long."""
        if self._pace is None or not self._reading:
            return self._generator.next()
        step = self._pace.chunk(len(self._reading)) if self._generator.rows else self.step_size
        self._generator.read_at_once(step)
        tokens, started = sum(min(step, left) for left in self._reading.values()), time.perf_counter()
        told = self._generator.next()
        self._pace.took(tokens, time.perf_counter() - started)
        return told

    def _join(self) -> None:
        """Hands sequences to mlx-lm's loop, as many as may be read together."""
        began: list[TokenSequence] = []  # in this very step
        while self._waiting and len(self._active) < self._max_batch_size:
            if not self._may_join(self._waiting.first, began):
                break
            together = sum(self._reading.values()) + len(self._waiting.first.tokens)
            # A prompt that takes several passes does not keep others from joining in them. Each has rows as long as it.
            several = self._reading and max(self._reading.values()) > self.step_size
            if self._reading and (len(self._reading) >= self._most_long if several else together > self._most_tokens):
                break
            sequence = self._waiting.next()
            caches = sequence.caches or self.make_caches()
            reserve_for(caches, len(sequence.tokens), sequence.max_tokens)
            uid = self._generator.insert(
                sequence.tokens,
                sequence.max_tokens,
                self._by_class.of(caches),
                sequence.sampler,
                sequence.processors,
                sequence.before,
            )
            self._active[uid], self._reading[uid] = sequence, len(sequence.tokens)
            began.append(sequence)
        for sequence in began:
            sequence.caches = None  # the batch has its own copy

    def _may_join(self, sequence: TokenSequence, began: Sequence[TokenSequence]) -> bool:
        """Whether the model can take a sequence beside those that there are; `began` are those of this step."""
        alike = len(began) < MOST_PROMPTS_AT_ONCE and all(_tokens(other) == _tokens(sequence) for other in began)
        if self._equal_rows:  # all that decode together began in one step, and were read as one batch
            return alike and len(began) == len(self._active)
        if not self._reading or (alike and len(began) == len(self._reading)):
            return True
        return not self._equal_prompts

    @property
    def busy(self) -> bool:
        return bool(self._waiting or self._twice or self._active)

    @property
    def caches(self) -> list[Any]:
        return self._generator.caches

    @property
    def rows(self) -> list[int]:
        return [self._active[uid].index for uid in self._generator.rows]

    @property
    def pending(self) -> list[int]:
        rows = set(self._generator.rows)
        reading = [sequence.index for uid, sequence in self._active.items() if uid not in rows]
        return [*reading, *(sequence.index for sequence in (*self._waiting, *self._twice))]

    @property
    def progress(self) -> dict[int, SequenceProgress]:
        began = {own.index: SequenceProgress(self._reading.get(uid, 0)) for uid, own in self._active.items()}
        return began | {own.index: SequenceProgress(len(own.tokens)) for own in (*self._waiting, *self._twice)}

    @property
    def speculation(self) -> None:
        return None

    def make_caches(self) -> list[Any]:
        return copy.deepcopy(self._empty)  # making them may try out what the model's attention can read

    def read(self, tokens: mx.array, cache: list[Any]) -> Any:
        show_attention(self.model, cache)
        return self.model(tokens, cache=cache)

    def trim(self, caches: list[Any], n: int) -> bool:
        return trim_all(caches, n)

    def extract(self, index: int) -> list[Any] | None:
        numbers = [uid for uid, sequence in self._active.items() if sequence.index == index]
        return self._generator.extract(numbers[0]) if numbers else None

    def close(self) -> None:
        self._generator.remove(self._active)
        self._active.clear()
        self._reading.clear()
        self._waiting.clear()
        self._twice.clear()
        self._generator.close()
        self._by_class.close()


def _tokens(sequence: TokenSequence) -> tuple[int, int]:
    """Tokens that were read of a sequence, and those that are not."""
    held = max((int(cache.offset) for cache in attention_caches(sequence.caches or [])), default=0)
    return len(sequence.before) or held, len(sequence.tokens)
