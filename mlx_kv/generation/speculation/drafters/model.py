"""The draft model: a small model with the same tokenizer, which reads the accepted tokens and proposes the next ones.

B rows, V the vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from mlx_kv.generation.decode_batch import DecodeBatch
from mlx_kv.generation.prefill import read_chunk
from mlx_kv.generation.speculation.acceptance import Choice
from mlx_kv.generation.speculation.drafters.protocol import Drafter, DrafterContext
from mlx_kv.mlxlm.batching import rows_are_alone
from mlx_kv.policy import CachePolicy


class ModelDrafter(Drafter):
    """As many tokens for every row as it is asked for: one pass for each of them.

    Raises:
        ValueError: no draft model, one with another vocabulary, or with caches that cannot take back tokens.
    """

    def __init__(self, context: DrafterContext) -> None:
        if context.draft_model is None:
            raise ValueError("the drafter model drafts with a model of its own: give a draft_model")
        check_vocabulary(context)
        # It reads all drafts but the last one by one, and goes back to before any of them.
        self._rows = DecodeBatch(context.draft_model, CachePolicy(), context.draft_tokens, context.draft_tokens - 1)
        self.step_size = self._rows.step_size
        self._drafted: list[list[int]] = []  # of each row, in this round
        self._draft_tokens = context.draft_tokens

    @property
    def equal_rows(self) -> bool:  # type: ignore[override]
        return rows_are_alone(self._rows.model)

    def join(self, prompts: Sequence[Sequence[int]], caches: list[Any]) -> None:
        self._rows.join(caches, [[prompt[-1]] for prompt in prompts])
        self._drafted += [[] for _ in prompts]

    def keep(self, rows: Sequence[int]) -> None:
        self._rows.keep(rows)
        self._drafted = [self._drafted[row] for row in rows]

    def propose(self, most: int, choice: Choice) -> list[list[int]]:
        pending = self._rows.pending
        if most == 0:
            self._drafted = [[] for _ in pending]
            return self._drafted
        self._catch_up()
        pending = self._rows.pending
        lengths = [len(tokens) for tokens in pending]
        logits = self._rows.read(pending)
        here = mx.take_along_axis(logits, (mx.array(lengths) - 1)[:, None, None], axis=1)[:, 0]  # (B, V)
        tokens: list[mx.array] = []
        for ahead in range(most):
            if ahead:
                here = self._rows.step(tokens[-1])
            tokens.append(choice.guess(here, ahead))
            mx.async_eval(tokens[-1])  # type: ignore[no-untyped-call]
        by_row: Any = mx.stack(tokens, axis=1).tolist()
        self._drafted = list(by_row)
        return self._drafted

    def accepted(self, tokens: Sequence[Sequence[int]]) -> None:
        # It has read all drafted tokens but the last one: if that was accepted, it is still to be read.
        pairs = list(zip(self._drafted, tokens, strict=True))
        self._rows.take_back([max(len(drafted) - len(got), 0) for drafted, got in pairs])
        for row, (drafted, got) in enumerate(pairs):
            unread = drafted[-1:] if drafted else self._rows.pending[row]
            self._rows.pending[row] = [*(unread if len(got) > len(drafted) else []), got[-1]]
        self._drafted = [[] for _ in tokens]

    @property
    def caches(self) -> list[Any]:
        """Of all rows, one for each layer."""
        return self._rows.caches

    def make_caches(self) -> list[Any]:
        return self._rows.make_caches()

    def read(self, rows: Sequence[Sequence[int]], caches: list[Any]) -> None:
        read_chunk(self._rows.model, caches, rows)

    def behind(self, row: int) -> int:
        self._catch_up()
        return len(self._rows.pending[row])

    def _catch_up(self) -> None:
        """Reads what came while nothing was drafted, but for a few tokens: a pass over those is no longer."""
        few, step = self._draft_tokens + 1, self._rows.step_size
        while (longest := max((len(tokens) for tokens in self._rows.pending), default=0)) > few:
            count = min(longest - 1, step)
            read_chunk(self._rows.model, self._rows.caches, [tokens[:-1][:count] for tokens in self._rows.pending])
            self._rows.pending = [[*tokens[:-1][count:], tokens[-1]] for tokens in self._rows.pending]

    def extract(self, row: int, behind: int) -> list[Any] | None:
        return self._rows.extract(row, behind)


def check_vocabulary(context: DrafterContext) -> None:
    """Both models must speak of the same tokens. The draft's graph is built for one token, and not evaluated."""
    assert context.draft_model is not None
    size = context.draft_model(mx.array([[0]])).shape[-1]
    if size != context.vocabulary:
        raise ValueError(
            f"the draft model has a vocabulary of {size:,} tokens, the model one of {context.vocabulary:,}: "
            "choose a draft model with the same tokenizer"
        )
