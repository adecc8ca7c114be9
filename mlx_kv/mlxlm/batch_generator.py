"""mlx-lm's `BatchGenerator`, with what it does not say: which rows decode now, and what their caches hold.

Uses mlx-lm's privates: `BatchGenerator._generation_batch`, the batch of the rows that decode, is the only place where
they are. Decides nothing: which sequences are inserted, and when, is the engine's. Rows have numbers that mlx-lm gives.
"""

from __future__ import annotations

from collections.abc import Iterable
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
    """

    def __init__(self, model: nn.Module, ends: set[int], rows: int, prompts: int, step: int) -> None:
        self._generator = BatchGenerator(
            model,
            stop_tokens=[[token] for token in sorted(ends)],
            completion_batch_size=rows,
            prefill_batch_size=prompts,
            prefill_step_size=step,
        )

    def insert(self, tokens: list[int], max_tokens: int, caches: list[Any], sampler: Any) -> int:
        """A sequence whose caches have read what comes before its tokens; returns the number of its row."""
        (number,) = self._generator.insert([tokens], [max_tokens], [caches], samplers=[sampler])
        return int(number)

    def next(self) -> tuple[list[Any], list[Any]]:
        """mlx-lm's responses: of prompts that are read, and of rows that decode."""
        prompts, rows = self._generator.next()  # type: ignore[no-untyped-call]
        return prompts, rows

    def remove(self, numbers: Iterable[int]) -> None:
        self._generator.remove(list(numbers))  # type: ignore[no-untyped-call]

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


def evaluated(caches: list[Any]) -> list[Any]:
    """Caches of one row that were taken out of a batch, so that they no longer hold on to its buffers."""
    for cache in leaves(caches):
        if isinstance(cache, RecurrentState):
            cache.forget()  # its checkpoints are the batch's
        if isinstance(cache, stock.ArraysCache):  # mlx-lm's have slices of the batch's, which stay that: copy them
            cache.cache = [x if x is None else mx.take(x, mx.array([0]), axis=0) for x in cache.cache]
    mx.eval([cache.state for cache in caches])
    return caches
