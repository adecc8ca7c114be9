"""Rounds: a drafter guesses how several sequences go on, the model decides, the caches take back what was wrong.

Decides what one pass of the model reads, what each row trims afterwards, and when a pass begins before the last one's
tokens are known. How many tokens are drafted is the pace's affair. The result is the model's own, token for
token, for any drafter, and nobody can tell how many tokens were drafted, or for whom else. Every trim is checked first;
rings are made with the slack that it needs. Knows nothing about text, ends of sequences or when rows come and go, nor
how a cache trims or how guesses are made.
B rows, V the vocabulary, L the most tokens that were drafted for a row.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_kv.communicator import LOCAL, Communicator
from mlx_kv.generation.prefill import reserve_for
from mlx_kv.generation.sampling import Sampler, SeededSampler, TemperatureSampler
from mlx_kv.generation.speculation.acceptance import Choice, normalized
from mlx_kv.generation.speculation.contexts import RowContext, RowContexts
from mlx_kv.generation.speculation.drafters import Drafter, DrafterContext, Factory, find_drafter
from mlx_kv.generation.speculation.drafters.elsewhere import Elsewhere
from mlx_kv.generation.speculation.joining import Joining, NewRow
from mlx_kv.generation.speculation.model_rows import ModelRows, merged
from mlx_kv.generation.speculation.pacing import Pace
from mlx_kv.generation.speculation.settings import DraftSettings
from mlx_kv.generation.speculation.statistics import SpeculationStatistics
from mlx_kv.mlxlm.convert import check_policy
from mlx_kv.mlxlm.loading import check_model, vocabulary_of
from mlx_kv.mlxlm.observing import show_attention
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
        fixed: as many tokens are drafted as may be, always; else as many as have paid (`pacing`).
        communicator: with the other processes of the model. Drafter and pace are the leader's alone: it broadcasts the
            drafts, and the model's tokens in its pass.

    Raises:
        ValueError: a policy that the model refuses, caches that cannot take back tokens, or what the drafter refuses.
    """

    def __init__(
        self,
        context: DrafterContext,
        drafter: str | Factory | Drafter | None,
        policy: CachePolicy,
        fixed: bool = False,
        communicator: Communicator = LOCAL,
    ) -> None:
        check_policy(context.model, policy)
        self._communicator, self._vocabulary = communicator, context.vocabulary
        self.drafter, self.draft_tokens = _drafter(drafter, context, communicator)
        self.target = ModelRows(context.model, policy, self.draft_tokens, communicator=communicator)
        steps = (self.target.step_size, self.drafter.step_size)
        self.step_size = min(step for step in steps if step is not None)
        self.samplers: list[Sampler | None] = []  # by row; None is greedy
        self._contexts = RowContexts()
        self.pace = Pace(self.draft_tokens, not self.drafter.proposals_cost, fixed, self.target.replays)
        # Of all rows, tokens (B,) and log-probabilities (B, V) of a pass that is on its way: nothing is pending then.
        self._ahead: tuple[mx.array, mx.array] | None = None
        self._known: list[list[Emitted]] | None = None  # to be emitted next, without a pass
        self.drafted: list[int] = []  # tokens of each row in the last round
        self._two_began: float | None = None  # seconds of the last round, if it began a pass and the next one ahead
        self.by_class: Callable[[list[Any]], list[Any]] = list  # what is done to the model's caches of a row that joins

    # --- rows that come and go ------------------------------------------------------------------------------------

    def make_caches(self) -> list[Any]:
        """New caches of a row: the model's, and then the drafter's."""
        return [*self.target.make_caches(), *self.drafter.make_caches()]

    def read(self, tokens: mx.array, cache: list[Any]) -> None:
        """The model and the drafter read tokens (1, n) into such caches."""
        show_attention(self.target.model, cache[: self.target.layers])
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
        self._land()
        self.target.join(joining.caches, [[row.prompt[-1]] for row in joining.rows])
        self.drafter.join([[*row.before, *row.prompt] for row in joining.rows], joining.drafter_caches)
        if private := [row for row, new in enumerate(joining.rows, len(self.samplers)) if new.private]:
            self.drafter.keep_private(private)
        self.samplers.extend(
            SeededSampler(row.sampler, None, 0) if isinstance(row.sampler, TemperatureSampler) else row.sampler
            for row in joining.rows
        )
        self._contexts.join([RowContext(row.processors, [*row.before, *row.prompt]) for row in joining.rows])
        self.pace.join(len(joining.rows))
        if self._known is not None:
            self._known += [[] for _ in joining.rows]
        return True

    def keep(self, rows: Sequence[int]) -> None:
        """Lets all other rows go."""
        self.target.keep(rows)
        self.drafter.keep(rows)
        self.samplers = [self.samplers[row] for row in rows]
        self._contexts.keep(rows)
        self.pace.keep(rows)
        if self._known is not None:
            self._known = [self._known[row] for row in rows]
        if self._ahead is not None and list(rows) != list(range(self._ahead[0].size)):
            which = mx.array(list(rows))
            self._ahead = (self._ahead[0][which], self._ahead[1][which]) if rows else None

    def extract(self, row: int) -> list[Any] | None:
        """Copies of a row's caches, as of `make_caches`: the model and the drafter have read the same tokens of it.

        None where they cannot be trimmed to that.
        """
        own = len(self.target.pending[row])
        # One is trimmed, or the other reads on.
        tried = self._communicator.broadcast(lambda: sorted({own, self.drafter.behind(row) or own}, reverse=True))
        for behind in tried:
            caches, others = self.target.extract(row, behind), self.drafter.extract(row, behind)
            everywhere = self._communicator.all_min([int(caches is not None and others is not None)])
            if caches is not None and others is not None and everywhere[0]:
                return [*caches, *others]
        return None

    # --- rounds ---------------------------------------------------------------------------------------------------

    def round(self, most: int, statistics: SpeculationStatistics) -> list[list[Emitted]]:
        """Up to `most` tokens of each row: one at least, but for rows that joined while the others were a step ahead.

        Drafts, verifies, and takes back. Where nothing is drafted, the next step begins before this one's tokens are
        known, as in mlx-lm's loop.
        """
        if self._known is not None:
            emitted, self._known = self._known, None
            self.drafted = [0] * len(emitted)
            if landed := [list[int]() for row in emitted if row]:
                statistics.note(landed, [0] * len(landed), 0.0, None)  # its time was that of the rounds before
            return emitted
        started = time.perf_counter()
        count = min(self.draft_tokens, most - 1)
        choice = Choice(
            self.samplers, self._vocabulary, max(count, 1), self._communicator.leader_tokens, self._contexts
        )
        room, waiting = self.target.most_drafts(count), self.target.waiting
        drafted, verifies, goes_on = self._communicator.broadcast(lambda: self._planned(most, room, waiting, choice))
        drafting, was_ahead = time.perf_counter() - started, self._ahead is not None
        if verifies:
            logprobs = normalized(self._contexts.along(self.target.verify(drafted), drafted))  # (B, L + 1, V)
            decided = choice.accept(drafted, logprobs)
            got = [[*row[:right], own] for row, (right, own) in zip(drafted, decided, strict=True)]
            self.target.accepted(got)
            right = [right for right, _ in decided]
            self.pace.judged([len(row) for row in drafted], right)
        else:
            right = [0] * len(drafted)
            got, logprobs = self._followed(choice, goes_on)
        self._take(got)
        self.drafted = [len(row) for row in drafted]
        longest = max(self.drafted)
        seconds = time.perf_counter() - started
        self.pace.passed(longest, waiting, self._seconds_a_pass(was_ahead, seconds - drafting), drafting)
        statistics.note(drafted, right, seconds, self.pace.seconds_without(len(got)))
        return _emitted(got, logprobs)

    def _seconds_a_pass(self, was_ahead: bool, seconds: float) -> float | None:
        """What one pass took, by what a round took; None where that does not tell.

        A round that begins two passes waits for the first and for much of the second; the rest is the next round's.
        """
        began, self._two_began = self._two_began, None
        if self._ahead is not None and not was_ahead:
            self._two_began = seconds
            return None
        if was_ahead and self._ahead is None:
            return None if began is None else (began + seconds) / 2
        return seconds

    def _planned(self, most: int, room: list[int], waiting: int, choice: Choice) -> tuple[list[list[int]], bool, bool]:
        """What is drafted for each row, whether a pass verifies it, and if not, whether the next one begins before.

        Args:
            most: tokens that there is use for.
            room, waiting: of the model's rows.
        """
        drafted, wanted = self._wanted(room, waiting, choice)
        verifies = self._ahead is None and (wanted or self.pace.fixed)
        return drafted if verifies else [[] for _ in drafted], verifies, most > 1 and not wanted and not waiting

    def _wanted(self, room: list[int], waiting: int, choice: Choice) -> tuple[list[list[int]], bool]:
        """What is drafted for each row, and whether a pass is to verify it: it cannot, where one is on its way.

        A drafter whose proposals cost nothing is asked in any case. Where a budget evicts, no pass goes beyond the next
        compaction: what is kept then, and so the text, does not depend on how many tokens were drafted.
        """
        most = max(room)
        if not self.drafter.proposals_cost:
            proposed = [row[:count] for row, count in zip(self._drafted(most, choice), room, strict=True)]
            length = self.pace.choose(most, waiting, [len(row) for row in proposed])
            if length == 0 or self._ahead is not None:
                self.pace.unused(proposed)
            drafted = [row[:length] for row in proposed]
        else:
            length = self.pace.choose(most, waiting)
            drafted = self._drafted(length if self._ahead is None else 0, choice)
            drafted = [row[:count] for row, count in zip(drafted, room, strict=True)]
        return drafted, length > 0

    def _followed(self, choice: Choice, go_on: bool) -> tuple[list[list[int]], mx.array]:
        """The next token of each row, and log-probabilities (B, 1, V), by a pass that was begun a round ago, or now.

        Args:
            go_on: whether to begin the next one before.
        """
        tokens, logprobs = self._ahead or self._begun(choice, self.target.follow(), [])
        self._ahead = self._begun(choice, self.target.follow(tokens), [tokens]) if go_on else None
        return self._arrived(tokens, logprobs)

    def _arrived(self, tokens: mx.array, logprobs: mx.array) -> tuple[list[list[int]], mx.array]:
        """The same of a pass; where no other has begun, its tokens are yet to be read."""
        known: Any = tokens.tolist()
        if self._ahead is None:
            self.target.pending = [[token] for token in known]
        return [[token] for token in known], logprobs[:, None]

    def _begun(self, choice: Choice, logits: mx.array, unknown: list[mx.array]) -> tuple[mx.array, mx.array]:
        """The tokens (B,) and log-probabilities (B, V) that a pass gives, which is under way when this returns.

        Args:
            unknown: tokens (B,) of passes before it that are on their way.
        """
        logprobs = normalized(self._contexts.after(logits, unknown))
        tokens = choice.follow(logprobs, len(unknown))
        mx.async_eval(tokens, logprobs)  # type: ignore[no-untyped-call]
        return tokens, logprobs

    def _take(self, got: list[list[int]]) -> None:
        """Tells everybody what the rows got."""
        self.drafter.accepted(got)
        self._contexts.took(got)
        self.pace.told(got)
        for sampler, tokens in zip(self.samplers, got, strict=True):
            if isinstance(sampler, SeededSampler):
                sampler.position += len(tokens)

    def _land(self) -> None:
        """What is on its way is waited for, and emitted next: the rows are about to change."""
        if self._ahead is None:
            return
        arriving, self._ahead, self._two_began = self._ahead, None, None
        got, logprobs = self._arrived(*arriving)
        self._take(got)
        self._known = _emitted(got, logprobs)

    def _drafted(self, most: int, choice: Choice) -> list[list[int]]:
        """What the drafter proposes for each row, checked: a drafter may be anybody's. Some of it may not stand."""
        drafted = [[int(token) for token in row] for row in self.drafter.propose(most, choice)]
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
        return self._contexts.cut(drafted)


def _emitted(got: Sequence[Sequence[int]], logprobs: mx.array) -> list[list[Emitted]]:
    """What each row got of a pass, all but the last by the draft, with log-probabilities (B, n, V)."""
    return [
        [Emitted(token, logprobs[row, i], i < len(tokens) - 1) for i, token in enumerate(tokens)]
        for row, tokens in enumerate(got)
    ]


def _drafter(
    drafter: str | Factory | Drafter | None, context: DrafterContext, communicator: Communicator
) -> tuple[Drafter, int]:
    """The leader's drafter, or what stands for it, and how many tokens it drafts at the most."""
    found = communicator.on_leader(lambda: find_drafter(drafter, context))
    own = (1, None, False) if found is None else (context.draft_tokens, found.step_size, found.equal_rows)
    draft_tokens, step_size, equal_rows = communicator.broadcast(lambda: own)
    return found or Elsewhere(step_size, equal_rows), draft_tokens


def make_decoder(
    model: nn.Module,
    policy: CachePolicy,
    draft_model: nn.Module | None,
    drafting: DraftSettings,
    communicator: Communicator = LOCAL,
) -> Decoder:
    """A decoder for one model and policy.

    Raises:
        TypeError: a draft model that is no model.
        ValueError: what the drafter refuses.
    """
    if draft_model is not None:
        check_model("draft_model", draft_model)
    least, most = drafting.prompt_lookup_min, drafting.prompt_lookup_max
    context = DrafterContext(model, vocabulary_of(model), drafting.draft_tokens, draft_model, least, most)
    return Decoder(context, drafting.drafter, policy, drafting.draft_length == "fixed", communicator)
