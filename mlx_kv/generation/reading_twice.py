"""Sequences whose prompts are read twice before they join others.

Decides whose turn it is: one prompt after the other, a chunk at a time, so that rows that decode go on meanwhile. Knows
nothing about rows, nor what is done with a prompt that was read.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import mlx.core as mx
from mlx_lm.generate import generation_stream

from mlx_kv.generation.prefill import reserve_for
from mlx_kv.generation.rereading import Instructions, Rereading, wants_rereading
from mlx_kv.generation.sequence import TokenSequence


class ReadingTwice:
    """Those that wait for it, and the one that is read.

    Args:
        read: reads tokens (1, n) into the caches of a sequence.
        make_caches: for sequences that bring none.
        step: tokens read at once.
        instructions: before the second reading.
    """

    def __init__(
        self,
        read: Callable[..., Any],
        make_caches: Callable[[], list[Any]],
        step: int,
        instructions: Instructions,
    ) -> None:
        self._read, self._make_caches, self._step, self._instructions = read, make_caches, step, instructions
        self._wanted = wants_rereading(make_caches())
        self._queue: deque[TokenSequence] = deque()
        self._reading: Rereading | None = None  # of the first of them

    def wants(self, sequence: TokenSequence) -> bool:
        """Whether it is to come here first: its last token is read when it has joined, and is all that is left then."""
        return self._wanted and len(sequence.tokens) > 1

    def add(self, sequence: TokenSequence) -> None:
        self._queue.append(sequence)

    def step(self) -> TokenSequence | None:
        """Reads a chunk of the first of them, and returns it when it has been read twice."""
        if not self._queue:
            return None
        sequence = self._queue[0]
        with mx.stream(generation_stream):
            if self._reading is None:
                caches = sequence.caches = sequence.caches or self._make_caches()
                reserve_for(caches, len(sequence.tokens), sequence.max_tokens)
                self._reading = Rereading(self._read, caches, [sequence.tokens[:-1]], self._step, self._instructions)
            self._reading.step()
        if not self._reading.done:
            return None
        self._reading = None
        sequence.before = (*sequence.before, *sequence.tokens[:-1])
        sequence.tokens = sequence.tokens[-1:]
        return self._queue.popleft()

    def cancel(self, index: int) -> None:
        """One that is not here is no error."""
        if self._queue and self._queue[0].index == index:
            self._break_off()
        self._queue = deque(sequence for sequence in self._queue if sequence.index != index)

    def clear(self) -> None:
        self._queue.clear()
        self._break_off()

    def _break_off(self) -> None:
        if self._reading is not None:
            self._reading.close()  # the caches may be somebody's who goes on with them
        self._reading = None

    def __iter__(self) -> Iterator[TokenSequence]:
        return iter(self._queue)

    def __len__(self) -> int:
        return len(self._queue)
