"""Rounds: a drafter guesses how several sequences go on, the model decides, the caches take back what was wrong.

Decides what one pass of the model reads, and what each row trims afterwards. The result is the model's own, token for
token, for any drafter, and nobody can tell how many tokens were drafted, or for whom else. Every trim is checked first;
rings are made with the slack that it needs. Knows nothing about text, ends of sequences or when rows come and go, nor
how a cache trims or how guesses are made.
B rows, V the vocabulary, L the most tokens that were drafted for a row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_kv.generation.prefill import reserve_for
from mlx_kv.generation.sampling import Sampler, SeededSampler, TemperatureSampler
from mlx_kv.generation.speculation.acceptance import Choice, normalized
from mlx_kv.generation.speculation.drafters import Drafter, DrafterContext, Factory, find_drafter
from mlx_kv.generation.speculation.joining import Joining, NewRow
from mlx_kv.generation.speculation.model_rows import ModelRows, merged
from mlx_kv.generation.speculation.statistics import SpeculationStatistics
from mlx_kv.mlxlm.convert import check_policy
from mlx_kv.policy import CachePolicy


@dataclass(frozen=True)
class Emitted:
    """One token of the result, the model's log-probabilities (V,) at its place, and whether the draft had it."""

    token: int
    logprobs: mx.array
    from_draft: bool


class Decoder:
    """The model that decides, and a drafter, with the same rows in the same order.

    Args:
        context: of the drafter, with the model.
        drafter: as for `find_drafter`.
        policy: how the model's keys and values are kept.

    Raises:
        ValueError: a policy that the model refuses, caches that cannot take back tokens, or what the drafter refuses.
    """

    def __init__(self, context: DrafterContext, drafter: str | Factory | Drafter | None, policy: CachePolicy) -> None:
        check_policy(context.model, policy)
        self._vocabulary, self.draft_tokens = context.vocabulary, context.draft_tokens
        self.drafter = find_drafter(drafter, context)
        self.target = ModelRows(context.model, policy, context.draft_tokens)
        steps = (self.target.step_size, self.drafter.step_size)
        self.step_size = min(step for step in steps if step is not None)
        self.samplers: list[Sampler | None] = []  # by row; None is greedy
        self.by_class: Callable[[list[Any]], list[Any]] = list  # what is done to the model's caches of a row that joins

    # --- rows that come and go ------------------------------------------------------------------------------------

    def make_caches(self) -> list[Any]:
        """New caches of a row: the model's, and then the drafter's."""
        return [*self.target.make_caches(), *self.drafter.make_caches()]

    def read(self, tokens: mx.array, cache: list[Any]) -> None:
        """The model and the drafter read tokens (1, n) into such caches."""
        self.target.model(tokens, cache=cache[: self.target.layers])
        if own := cache[self.target.layers :]:
            rows: Any = tokens.tolist()
            self.drafter.read(rows, own)

    def begin(self, rows: Sequence[NewRow], step: int | None = None) -> Joining:
        """New rows, to come after those that there are. Nothing is read yet: `read_on` does that.

        Args:
            step: tokens of each prompt read at once; None is what the model and the drafter would read.
        """
        each = [self.make_caches() if row.caches is None else row.caches for row in rows]
        for row, own in zip(rows, each, strict=True):
            reserve_for(own, len(row.prompt), row.max_tokens + self.draft_tokens)
        caches = merged([self.by_class(own[: self.target.layers]) for own in each])
        drafters = merged([own[self.target.layers :] for own in each])
        step = self.step_size if step is None else step
        return Joining(list(rows), self.target.model, self.drafter, caches, drafters, step)

    def read_on(self, joining: Joining) -> bool:
        """Reads a chunk of their prompts; True when the rows have joined, after those that there are."""
        if not joining.read_on():
            return False
        self.target.join(joining.caches, [[row.prompt[-1]] for row in joining.rows])
        self.drafter.join([[*row.before, *row.prompt] for row in joining.rows], joining.drafter_caches)
        self.samplers.extend(
            SeededSampler(row.sampler, None, 0) if isinstance(row.sampler, TemperatureSampler) else row.sampler
            for row in joining.rows
        )
        return True

    def keep(self, rows: Sequence[int]) -> None:
        """Lets all other rows go."""
        self.target.keep(rows)
        self.drafter.keep(rows)
        self.samplers = [self.samplers[row] for row in rows]

    def extract(self, row: int) -> list[Any] | None:
        """Copies of a row's caches, as of `make_caches`: the model and the drafter have read the same tokens of it.

        None where they cannot be trimmed to that.
        """
        own, other = len(self.target.pending[row]), self.drafter.behind(row)
        for behind in sorted({own, other or own}, reverse=True):  # one is trimmed, or the other reads on
            caches, others = self.target.extract(row, behind), self.drafter.extract(row, behind)
            if caches is not None and others is not None:
                return [*caches, *others]
        return None

    # --- rounds ---------------------------------------------------------------------------------------------------

    def round(self, most: int, statistics: SpeculationStatistics) -> list[list[Emitted]]:
        """Drafts, verifies, and takes back: 1 to `most` tokens of each row."""
        may_draft = self.target.may_draft
        count = min(self.draft_tokens, most - 1) if any(may_draft) else 0
        choice = Choice(self.samplers, self._vocabulary, count)
        drafted = [row if may else [] for row, may in zip(self._drafted(count, choice), may_draft, strict=True)]
        logprobs = normalized(self.target.verify(drafted))  # (B, L + 1, V)
        decided = choice.accept(drafted, logprobs)
        got = [[*row[:right], own] for row, (right, own) in zip(drafted, decided, strict=True)]
        self.target.accepted(got)
        self.drafter.accepted(got)
        for sampler, tokens in zip(self.samplers, got, strict=True):
            if isinstance(sampler, SeededSampler):
                sampler.position += len(tokens)
        statistics.rounds += 1
        statistics.drafted += sum(map(len, drafted))
        statistics.accepted += sum(right for right, _ in decided)
        return [
            [Emitted(token, logprobs[row, i], i < len(tokens) - 1) for i, token in enumerate(tokens)]
            for row, tokens in enumerate(got)
        ]

    def _drafted(self, most: int, choice: Choice) -> list[list[int]]:
        """What the drafter proposes for each row, checked: a drafter may be anybody's."""
        drafted = [list(row) for row in self.drafter.propose(most, choice)]
        if len(drafted) != len(self.samplers):
            raise ValueError(f"the drafter proposed for {len(drafted)} rows, but there are {len(self.samplers)}")
        for row in drafted:
            if len(row) > most:
                raise ValueError(f"the drafter proposed {len(row)} tokens, but was asked for {most} at the most")
            if row and not 0 <= min(row) <= max(row) < self._vocabulary:
                raise ValueError(
                    f"the drafter proposed {row}, but the vocabulary has {self._vocabulary:,} tokens: "
                    f"propose ids from 0 to {self._vocabulary - 1}"
                )
        return drafted


def make_decoder(
    model: nn.Module,
    policy: CachePolicy,
    draft_model: nn.Module | None,
    drafter: str | Factory | Drafter | None,
    num_draft_tokens: int,
) -> Decoder:
    """A decoder for one model and policy; the arguments are those of `make_engine`."""
    vocabulary = int(model(mx.array([[0]])).shape[-1])  # the graph is built for one token, and not evaluated
    return Decoder(DrafterContext(model, vocabulary, num_draft_tokens, draft_model), drafter, policy)
