"""mlx-lm's `BatchGenerator`, with what it does not say: which rows decode now, and what their caches hold.

Uses mlx-lm's privates: `BatchGenerator._generation_batch`, the batch of the rows that decode, is the only place where
they are; `_prompt_batch` and `_unprocessed_sequences` are those that are read, and that wait. Decides nothing: which
sequences are inserted, and when, is the engine's. Rows have numbers that mlx-lm gives. B rows, V the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import BatchGenerator
from mlx_lm.models import cache as stock

from mlx_kv.mlxlm.recurrent import RecurrentState
from mlx_kv.mlxlm.traverse import leaves


class WatchedBatchGenerator:
    """A `BatchGenerator` whose rows can be looked at.

    Args:
        ends: ids of tokens that end a sequence.
        rows: at once.
        prompts: read together.
        step: tokens of a prompt that are read at once.
        agreed: what is made of the tokens of a pass, of all of its rows at once, before they are anybody's; None leaves
            them to the rows' samplers.
    """

    def __init__(
        self,
        model: nn.Module,
        ends: set[int],
        rows: int,
        prompts: int,
        step: int,
        agreed: Callable[[mx.array], mx.array] | None = None,
    ) -> None:
        self._together = None if agreed is None else _SampledTogether(self._rows_of_pass, agreed)
        self._decoding: list[int] = []  # before a step; empty once they have been sampled in it
        self._beginning: list[int] = []  # those that do not decode before a step
        self._generator = BatchGenerator(
            model,
            stop_tokens=[[token] for token in sorted(ends)],
            completion_batch_size=rows,
            prefill_batch_size=prompts,
            prefill_step_size=step,
        )

    def insert(
        self,
        tokens: list[int],
        max_tokens: int,
        caches: list[Any],
        sampler: Any,
        processors: Sequence[Any] = (),
        before: Sequence[int] = (),
    ) -> int:
        """A sequence whose caches have read what comes before its tokens; returns the number of its row.

        Args:
            before: what they have read, which processors are shown as well.
        """
        shared = sampler if self._together is None else self._together
        (number,) = self._generator.insert(
            [tokens],
            [max_tokens],
            [caches],
            all_tokens=[list(before)] if processors else None,
            samplers=[shared],
            logits_processors=[[of_one_type(processors)] if processors else []],
        )
        if self._together is not None:
            self._together.samplers[int(number)] = sampler
        return int(number)

    def read_at_once(self, step: int) -> None:
        """From now on so many tokens of a prompt are read in a pass."""
        self._generator.prefill_step_size = step

    def next(self) -> tuple[list[Any], list[Any]]:
        """mlx-lm's responses: of prompts that are read, and of rows that decode."""
        self._decoding, self._beginning = self.rows, self._not_decoding()
        prompts, rows = self._generator.next()  # type: ignore[no-untyped-call]
        self._forget([row.uid for row in rows if row.finish_reason is not None])
        return prompts, rows

    def _rows_of_pass(self) -> list[int]:
        """Whose tokens are sampled now: first of those that decode, then of those that begin to in the same step."""
        rows, self._decoding = self._decoding, []
        left = set() if rows else set(self._not_decoding())
        return rows or [number for number in self._beginning if number not in left]

    def _not_decoding(self) -> list[int]:
        return [*self._generator._prompt_batch.uids, *(own[0] for own in self._generator._unprocessed_sequences)]

    def _forget(self, numbers: Iterable[int]) -> None:
        if self._together is not None:
            for number in numbers:
                self._together.samplers.pop(number, None)

    def remove(self, numbers: Iterable[int]) -> None:
        gone = list(numbers)
        self._generator.remove(gone)  # type: ignore[no-untyped-call]
        self._forget(gone)

    def close(self) -> None:
        self._generator.close()  # type: ignore[no-untyped-call]

    @property
    def rows(self) -> list[int]:
        """The numbers of the rows that decode now."""
        return list(self._generator._generation_batch.uids)

    @property
    def caches(self) -> list[Any]:
        """Those of these rows, one for each layer; empty where there are none."""
        return list(self._generator._generation_batch.prompt_cache)

    def extract(self, number: int) -> list[Any] | None:
        """Copies of the caches of a row that decodes, evaluated; None if it does not."""
        rows = self.rows
        if number not in rows:
            return None
        return evaluated(self._generator._generation_batch.extract_cache(rows.index(number)))


def of_one_type(processors: Sequence[Any]) -> Callable[[mx.array, mx.array], mx.array]:
    """The processors as one whose logits have the type that they had: else all rows' would be of another."""

    def adjusted(tokens: mx.array, logits: mx.array) -> mx.array:
        found = logits
        for processor in processors:
            found = processor(tokens, found)
        return found.astype(logits.dtype)

    return adjusted


class _SampledTogether:
    """The sampler of all rows: mlx-lm calls it once for all that share it, which is what `agreed` is to be called.

    Attributes:
        samplers: of each row by its number; None is greedy.
    """

    def __init__(self, rows: Callable[[], list[int]], agreed: Callable[[mx.array], mx.array]) -> None:
        self._rows, self._agreed = rows, agreed
        self.samplers: dict[int, Any] = {}

    def __call__(self, logprobs: mx.array) -> mx.array:
        """Tokens (B,) for log-probabilities (B, V)."""
        rows = self._rows()
        assert len(rows) == logprobs.shape[0], f"rows {rows} for log-probabilities of {logprobs.shape[0]}"
        samplers = [self.samplers[row] for row in rows]
        if all(sampler is samplers[0] for sampler in samplers):
            return self._agreed(_drawn(samplers[0], logprobs))
        each = [_drawn(sampler, logprobs[row : row + 1]) for row, sampler in enumerate(samplers)]
        return self._agreed(mx.concatenate([tokens.astype(mx.uint32) for tokens in each]))


def _drawn(sampler: Any, logprobs: mx.array) -> mx.array:
    tokens: mx.array = mx.argmax(logprobs, axis=-1) if sampler is None else sampler(logprobs)
    return tokens


def evaluated(caches: list[Any]) -> list[Any]:
    """Caches of one row that were taken out of a batch, so that they no longer hold on to its buffers."""
    for cache in leaves(caches):
        if isinstance(cache, RecurrentState):
            cache.forget()  # its checkpoints are the batch's
        if isinstance(cache, stock.ArraysCache):  # mlx-lm's have slices of the batch's, which stay that: copy them
            cache.cache = [x if x is None else mx.take(x, mx.array([0]), axis=0) for x in cache.cache]
    mx.eval([cache.state for cache in caches])
    return caches
