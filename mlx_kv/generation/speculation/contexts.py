"""Logits processors of rows, in rounds that decide several places at once: each place gets the tokens before it.

Rows without processors cost nothing. B rows, V the vocabulary, L the most tokens drafted for a row.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import mlx.core as mx

from mlx_kv.generation.settings import LogitsProcessor
from mlx_kv.mlxlm.batching import of_one_type


class RowContext:
    """All tokens of one row, and what is made of the logits that follow them.

    Args:
        tokens: of the prompt, what was read before among them; not needed without processors.
    """

    def __init__(self, processors: Sequence[LogitsProcessor], tokens: Sequence[int]) -> None:
        self.processors = tuple(processors)
        self.adjusted = of_one_type(self.processors)  # logits (1, V) of what comes after tokens (n,)
        self._tokens = mx.array(list(tokens) if self.processors else [], dtype=mx.int32)

    def add(self, tokens: Sequence[int]) -> None:
        """Adds tokens that the row got."""
        if not (self.processors and tokens):
            return
        self._tokens = self.followed([mx.array(list(tokens))])
        mx.async_eval(self._tokens)  # type: ignore[no-untyped-call]  # a processor that never looks would chain them

    def followed(self, more: Sequence[mx.array]) -> mx.array:
        """Its tokens (n,), and others (m,) after them, which need not be known yet."""
        return mx.concatenate([self._tokens, *(own.reshape(-1).astype(mx.int32) for own in more)])

    def allowed(self, drafted: Sequence[int]) -> int:
        """How many drafted tokens can stand, by those processors that can say so."""
        count = len(drafted)
        for processor in self.processors:
            ask: Any = getattr(processor, "allowed", None)
            if ask is not None and count:
                count = min(count, int(ask(self._tokens, list(drafted[:count]))))
        return count


class RowContexts:
    """Those of all rows, in their order."""

    def __init__(self, rows: Iterable[RowContext] = ()) -> None:
        self._rows = list(rows)

    def join(self, rows: Sequence[RowContext]) -> None:
        self._rows += rows

    def keep(self, rows: Sequence[int]) -> None:
        self._rows = [self._rows[row] for row in rows]

    def took(self, tokens: Sequence[Sequence[int]]) -> None:
        """What each row got."""
        for row, got in zip(self._rows, tokens, strict=True):
            row.add(got)

    @property
    def any(self) -> bool:
        """Whether any row has processors."""
        return any(row.processors for row in self._rows)

    def cut(self, drafted: Sequence[list[int]]) -> list[list[int]]:
        """What is left of drafts where their rows' processors say that no more can stand."""
        return [
            own[: row.allowed(own)] if row.processors else own for row, own in zip(self._rows, drafted, strict=True)
        ]

    def after(self, logits: mx.array, more: Sequence[mx.array]) -> mx.array:
        """Logits (B, V) of what comes after each row's tokens and then `more` of it, each (B,), known or not."""
        if not self.any:
            return logits
        each = []
        for index, row in enumerate(self._rows):
            own = logits[index : index + 1]
            each.append(row.adjusted(row.followed([one[index] for one in more]), own) if row.processors else own)
        return mx.concatenate(each)

    def along(self, logits: mx.array, drafted: Sequence[Sequence[int]]) -> mx.array:
        """Logits (B, L + 1, V) at the places of drafted tokens and of the one after them: all of a row's own places."""
        if not self.any:
            return logits
        each = []
        for index, (row, own) in enumerate(zip(self._rows, drafted, strict=True)):
            here = logits[index]  # (L + 1, V)
            if row.processors:
                tokens = row.followed([mx.array(list(own))] if own else [])
                known = tokens.size - len(own)
                places = range(len(own) + 1)
                done = [row.adjusted(tokens[: known + place], here[place : place + 1]) for place in places]
                here = mx.concatenate([*done, here[len(done) :]])
            each.append(here)
        return mx.stack(each)
