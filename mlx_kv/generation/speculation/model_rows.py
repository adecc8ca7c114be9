"""One model, the caches of all its rows, and what it has yet to read of each: the model that decides, or a draft model.

Decides how caches of single rows become those of a batch, and what is taken back of a copy. Knows nothing about drafts,
samplers or the other model. B rows, V the vocabulary.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_kv.cache.layout import Budget
from mlx_kv.generation.prefill import prefill_step, read_ragged
from mlx_kv.mlxlm.convert import make_prompt_cache
from mlx_kv.mlxlm.traverse import leaves, places_of
from mlx_kv.mlxlm.trimming import can_trim, trim_prompt_cache
from mlx_kv.policy import CachePolicy


class ModelRows:
    """Rows of one model.

    Attributes:
        caches: of all rows, one for each layer; empty where there are no rows.
        layers: how many caches a row has.
        pending: of each row, the tokens that the model has yet to read.
        step_size: tokens of a prompt that are read at once.

    Raises:
        ValueError: the model has caches that cannot take back tokens.
    """

    def __init__(self, model: nn.Module, policy: CachePolicy) -> None:
        self.model = model
        # Making caches may try out what a model's attention can read: it is done once, rows get copies.
        self._empty = make_prompt_cache(model, policy, strict=False)
        self._evicts = policy.budget is not None
        self.caches: list[Any] = []
        self.pending: list[list[int]] = []
        self._drafted: list[int] = []  # of each row, in the pass that is to be accepted
        self.layers = len(self._empty)
        self.step_size = prefill_step(model, self._empty, None)
        probe = self.make_caches()
        if not can_trim(probe, 0):
            kinds = ", ".join(sorted({type(cache).__name__ for cache in leaves(probe) if not can_trim([cache], 0)}))
            raise ValueError(f"{kinds} cannot take back tokens: generate without a draft model")

    def make_caches(self) -> list[Any]:
        """New caches of one row."""
        return copy.deepcopy(self._empty)

    def join(self, caches: list[Any], pending: Sequence[list[int]]) -> None:
        """Rows that come after those that there are, with what is yet to be read of them."""
        for own, other in zip(self.caches, caches, strict=False):
            own.extend(other)
        self.caches = self.caches or caches
        self.pending.extend(pending)

    def keep(self, rows: Sequence[int]) -> None:
        """Lets all other rows go."""
        if not rows:
            self.caches = []
        elif list(rows) != list(range(len(self.pending))):
            for cache in self.caches:
                cache.filter(list(rows))
        self.pending = [self.pending[row] for row in rows]

    def read(self, rows: Sequence[Sequence[int]]) -> mx.array:
        """One pass over some tokens of each row, any number from 1 up: logits (B, longest, V)."""
        return read_ragged(self.model, self.caches, rows)

    def take_back(self, counts: Sequence[int]) -> None:
        """The last tokens of each row are as if they had not been read."""
        trim_prompt_cache(self.caches, counts)

    def verify(self, drafted: Sequence[Sequence[int]]) -> mx.array:
        """One pass over what is pending and the drafted tokens of each row.

        Returns:
            Logits (B, L + 1, V), from the last pending token of each row on; what stands after a row's own is not
            looked at.
        """
        self._drafted = [len(row) for row in drafted]
        return self.read([[*own, *row] for own, row in zip(self.pending, drafted, strict=True)])

    def most_to_read(self) -> list[int] | None:
        """How many tokens a pass can read of each row, so that evictions come when they would token by token.

        None where nothing is evicted.
        """
        if not self._evicts:
            return None
        most: list[list[int]] = [[] for _ in self.pending]
        for cache in leaves(self.caches):
            for row, (own, index) in enumerate(places_of(cache)):
                if isinstance(own.view.layout, Budget):
                    most[row].append(own.view.layout.before_due(own.view.rows[index]))
        return list(map(min, most)) if all(most) else None

    def step(self, tokens: mx.array | None = None) -> mx.array:
        """One pass over what is pending, or over tokens (B,) that need not be known yet; nothing is pending then.

        Returns:
            Logits (B, V) of what comes next, not evaluated.
        """
        none = [list[int]() for _ in self.pending]
        logits: mx.array = self.verify(none) if tokens is None else self.model(tokens[:, None], cache=self.caches)
        self.pending = none
        return logits[:, 0]

    def accepted(self, tokens: Sequence[Sequence[int]]) -> None:
        """What each row got of the pass of `verify`: the drafted tokens that were right, and one that is yet unread."""
        self.take_back([count + 1 - len(got) for count, got in zip(self._drafted, tokens, strict=True)])
        self.pending = [list(got[-1:]) for got in tokens]

    def extract(self, row: int, behind: int) -> list[Any] | None:
        """Copies of a row's caches, without its last `behind` tokens; None where they cannot be trimmed to that."""
        each = [cache.extract(row) for cache in self.caches]
        beyond = behind - len(self.pending[row])
        if not can_trim(each, beyond):
            return None
        trim_prompt_cache(each, beyond)
        return each


def merged(caches: Sequence[list[Any]]) -> list[Any]:
    """Caches of single rows as those of one batch; one row alone stays what it is."""
    return caches[0] if len(caches) == 1 else [same[0].merge(list(same)) for same in zip(*caches, strict=True)]
