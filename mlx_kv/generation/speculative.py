"""Rows with speculation: rounds of a decoder.

Decides which prompts are read together, when a row ends, and that prompts are read between rounds. Knows nothing about
drafts, nor how rows are kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.generate import generation_stream

from mlx_kv.generation.logprobs import scored
from mlx_kv.generation.prefill import CHUNKS_AT_ONCE, MOST_PROMPTS_AT_ONCE
from mlx_kv.generation.progress import SequenceProgress
from mlx_kv.generation.sequence import BatchToken, TokenSequence, Waiting
from mlx_kv.generation.speculation.decoder import Decoder
from mlx_kv.generation.speculation.joining import Joining, NewRow
from mlx_kv.generation.speculation.statistics import SpeculationStatistics
from mlx_kv.generation.two_pass_prefill import NO_INSTRUCTIONS, Instructions, TwoPassQueue
from mlx_kv.mlxlm.batching import RowsByClass, evaluated
from mlx_kv.mlxlm.observing import show_attention
from mlx_kv.mlxlm.traverse import trim_all


class SpeculativeEngine:
    """Rounds of a decoder: a pass of the draft for each drafted token, and one of the model, for all rows."""

    def __init__(
        self,
        decoder: Decoder,
        ends: set[int],
        max_batch_size: int,
        prefill_step_size: int | None,
        statistics: SpeculationStatistics | None = None,
        return_caches: bool = False,
        instructions: Instructions = NO_INSTRUCTIONS,
    ) -> None:
        self._decoder, self._ends, self._return_caches = decoder, ends, return_caches
        # Only statistics that somebody asked for keep the caches of the last batch.
        self._statistics, self._watched = statistics or SpeculationStatistics(), statistics is not None
        self._max_batch_size = max_batch_size
        self._by_class = RowsByClass(decoder.target.model, max_batch_size)
        decoder.by_class = self._by_class.of
        self._waiting = Waiting(decoder.make_caches)
        self._active: list[TokenSequence] = []
        self._joining: Joining | None = None
        self._reading: list[TokenSequence] = []  # the rows that join
        self.step_size = decoder.step_size if prefill_step_size is None else prefill_step_size
        self._most_tokens = CHUNKS_AT_ONCE * decoder.step_size
        self._twice = TwoPassQueue(decoder.read, decoder.make_caches, self.step_size, instructions)

    def submit(self, sequence: TokenSequence) -> None:
        self._waiting.submit(sequence, self._twice)
        show_attention(self._decoder.target.model, (sequence.caches or [])[: self._decoder.target.layers])

    def cancel(self, index: int) -> None:
        self._waiting.cancel(index)
        self._twice.cancel(index)
        staying = [row for row, sequence in enumerate(self._reading) if sequence.index != index]
        self._reading, before = [self._reading[row] for row in staying], len(self._reading)
        if not staying:
            self._joining = None
        elif self._joining is not None and len(staying) < before:
            self._joining.keep(staying)  # what is left is read no longer than the longest of them takes
        self._keep([row for row, sequence in enumerate(self._active) if sequence.index != index])

    def _keep(self, rows: Sequence[int]) -> None:
        self._decoder.keep(rows)
        self._active = [self._active[row] for row in rows]

    def step(self) -> list[BatchToken]:
        self._waiting.take(self._twice.step())
        with mx.stream(generation_stream):
            self._join()
            if not self._active:
                return []
            left = max(sequence.max_tokens - sequence.emitted for sequence in self._active)
            emitted = self._decoder.round(left, self._statistics)
        for sequence, drafted in zip(self._active, self._decoder.drafted, strict=True):
            sequence.drafted = drafted
        tokens, staying = [], []
        pairs = [(sequence, item) for sequence, items in zip(self._active, emitted, strict=True) for item in items]
        scores = iter(scored((item.logprobs, item.token, sequence.top_logprobs) for sequence, item in pairs))
        for row, (sequence, items) in enumerate(zip(self._active, emitted, strict=True)):
            finish = None
            for item, score in [(item, next(scores)) for item in items]:
                last = sequence.emitted + 1 == sequence.max_tokens
                finish = "stop" if item.token in self._ends else "length" if last else None
                held = self._extracted(row) if finish is not None and self._return_caches else None
                tokens.append(sequence.emit(item.token, finish, item.from_draft, held, score))
                if finish is not None:
                    break
            if finish is None:
                staying.append(row)
        self._keep(staying)
        return tokens

    def _join(self) -> None:
        """Reads a chunk of the prompts whose turn it is; when all of them are read, they are rows."""
        if self._joining is None:
            self._begin()
        if self._joining is None or not self._decoder.read_on(self._joining):
            return
        self._active += self._reading
        self._joining, self._reading = None, []
        if self._watched:
            self._statistics.caches[:] = self._decoder.target.caches

    def _begin(self) -> None:
        room = min(self._max_batch_size - len(self._active), MOST_PROMPTS_AT_ONCE, len(self._waiting))
        joining: list[TokenSequence] = []
        while len(joining) < room:
            longest = max(len(sequence.tokens) for sequence in (*joining, self._waiting.first))
            if joining and (len(joining) + 1) * min(longest, self.step_size) > self._most_tokens:
                break
            joining.append(self._waiting.next())
        if joining:
            self._joining = self._decoder.begin(
                [
                    NewRow(own.tokens, own.max_tokens, own.sampler, own.caches, own.before, own.processors, own.private)
                    for own in joining
                ],
                self.step_size,
            )
            for sequence in joining:
                sequence.caches = None  # the batch has them now
            self._reading = joining

    @property
    def busy(self) -> bool:
        return bool(self._waiting or self._twice or self._reading or self._active)

    @property
    def caches(self) -> list[Any]:
        return list(self._decoder.target.caches)

    @property
    def rows(self) -> list[int]:
        return [sequence.index for sequence in self._active]

    @property
    def pending(self) -> list[int]:
        return [sequence.index for sequence in (*self._reading, *self._waiting, *self._twice)]

    @property
    def progress(self) -> dict[int, SequenceProgress]:
        read = 0 if self._joining is None else self._joining.read
        told = {own.index: SequenceProgress(len(own.tokens)) for own in (*self._waiting, *self._twice)}
        told |= {own.index: SequenceProgress(max(0, len(own.tokens) - 1 - read)) for own in self._reading}
        return told | {own.index: SequenceProgress(0, own.drafted, own.accepted) for own in self._active}

    @property
    def speculation(self) -> SpeculationStatistics:
        return self._statistics

    def make_caches(self) -> list[Any]:
        return self._decoder.make_caches()

    def read(self, tokens: mx.array, cache: list[Any]) -> Any:
        return self._decoder.read(tokens, cache)

    def trim(self, caches: list[Any], n: int) -> bool:
        return trim_all(caches, n)

    def extract(self, index: int) -> list[Any] | None:
        for row, sequence in enumerate(self._active):
            if sequence.index == index:
                return self._extracted(row)
        return None

    def _extracted(self, row: int) -> list[Any] | None:
        with mx.stream(generation_stream):  # what was accepted may have to be read first
            held = self._decoder.extract(row)
        return held and evaluated(held)

    def close(self) -> None:
        self._decoder.keep([])
        self._joining, self._reading = None, []
        self._active.clear()
        self._waiting.clear()
        self._twice.clear()
        self._by_class.close()
