"""Rounds of a batch: a drafter proposes tokens, one pass of the model decides, and wrong drafts are trimmed.

The tokens are the model's own for any drafter, and do not depend on how many tokens are drafted, or for which other
rows. Without a drafter, each round yields one token of each row, and the next pass begins before its tokens are known.
B rows, V the vocabulary, L the most tokens drafted for a row.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import mlx.core as mx
import mlx.nn as nn

from mlx_kv.communicator import LOCAL, Communicator
from mlx_kv.generation.admission import Admission, Beginnings, PendingRow
from mlx_kv.generation.decode_batch import DecodeBatch
from mlx_kv.generation.prefill import announce, chunk_for, reserve_for
from mlx_kv.generation.sampling import Sampler, SeededSampler, TemperatureSampler, draw
from mlx_kv.generation.sequence import Emitted, TokenSequence
from mlx_kv.generation.speculation import DraftSettings
from mlx_kv.generation.speculation.acceptance import Choice, RowContext, RowContexts, log_probabilities
from mlx_kv.generation.speculation.drafters import Drafter, DrafterContext, RemoteDrafter, find_drafter
from mlx_kv.generation.speculation.pacing import Pace
from mlx_kv.generation.statistics import SpeculationStatistics
from mlx_kv.mlxlm.attention import attach_attention_hooks
from mlx_kv.mlxlm.convert import check_policy
from mlx_kv.mlxlm.loading import vocabulary_of
from mlx_kv.mlxlm.probe import check_model
from mlx_kv.mlxlm.recurrent import lacks_state
from mlx_kv.mlxlm.taps import HiddenTap, states_before
from mlx_kv.mlxlm.vision import text_tokens
from mlx_kv.policy import CachePolicy

Chooser: TypeAlias = Callable[[mx.array, int], mx.array]  # of log-probabilities (B, V) and places ahead, tokens (B,)


class Launched(NamedTuple):
    """A pass that may be on its way: tokens (B,), log-probabilities (B, V), and states (B, 1, width) with a tap."""

    tokens: mx.array
    logprobs: mx.array
    states: mx.array | None

    def rows(self, rows: mx.array) -> Launched:
        """These alone."""
        return Launched(*(None if each is None else each[rows] for each in self))  # type: ignore[arg-type]


class Decoder:
    """The model that decides, and a drafter, with the same rows in the same order.

    Args:
        model: of mlx-lm.
        policy: how the model's keys and values are kept.
        drafter: None for no drafts. It is the leader's alone, and so is the pace.
        draft_tokens: maximum tokens drafted for a row in a round; 0 without a drafter.
        fixed: whether that many are always drafted; else as many as have paid (`pacing`).
        communicator: with the other processes of the model.

    Raises:
        ValueError: a policy that the model refuses, or with a drafter, caches that cannot take back tokens.
    """

    def __init__(
        self,
        model: nn.Module,
        policy: CachePolicy,
        drafter: Drafter | None = None,
        draft_tokens: int = 0,
        fixed: bool = False,
        communicator: Communicator = LOCAL,
    ) -> None:
        self._communicator, self.drafter, self.draft_tokens = communicator, drafter, draft_tokens
        self.target = DecodeBatch(model, policy, draft_tokens, communicator=communicator)
        self.step_size, self.chunk = communicator.all_min([self.target.step_size, chunk_for(model)])
        if drafter is not None:
            if drafter.hidden is not None:
                self.target.tap = HiddenTap(model, drafter.hidden)
            self._vocabulary = vocabulary_of(model)
            self.step_size = min(self.step_size, drafter.step_size or self.step_size)
            self.pace = Pace(draft_tokens, not drafter.proposals_cost, fixed, self.target.replays)
        self.samplers: list[Sampler | None] = []  # by row; None is greedy
        self._contexts = RowContexts()
        # Of all rows, a pass that is on its way: nothing is pending then. Rows that joined since come after them; the
        # token that they read next is pending.
        self._ahead: Launched | None = None
        self._undelivered: list[list[Emitted]] | None = None  # to be emitted next, without a pass
        self.drafted: list[int] = []  # tokens of each row in the last round
        self._launched_two: float | None = None  # seconds of the last round, if it began a pass and the next one ahead
        self.launched = self.stalls = 0  # passes without drafts; those before which the device had nothing to do
        self.idle = False  # whether it has nothing to do although a pass was launched ahead: it was waited for

    # --- rows that come and go ------------------------------------------------------------------------------------

    def make_caches(self) -> list[Any]:
        """New caches of a row: the model's, and then the drafter's."""
        return [*self.target.make_caches(), *([] if self.drafter is None else self.drafter.make_caches())]

    def complete(self, caches: list[Any]) -> list[Any]:
        """Caches of a row, with new ones of a head of the model where there are only the model's.

        The head then guesses by the tokens that come behind them alone.
        """
        if self.drafter is None or self.drafter.hidden is None or len(caches) != self.target.layers:
            return caches
        return [*caches, *self.drafter.make_caches()]

    def read(self, tokens: mx.array, cache: list[Any]) -> None:
        """The model and the drafter read tokens (1, n) into such caches."""
        layers = self.target.layers
        attach_attention_hooks(self.target.model, cache[:layers])
        self.target.forward(tokens, cache[:layers])
        if self.drafter is not None and cache[layers:]:
            listed: Any = tokens.tolist()
            rows = [text_tokens(self.target.model, row) for row in listed]
            states = self.target.states
            before = [] if states is None else [states_before(states)]
            self.drafter.read(rows, cache[layers:], *before)

    def admission(self, batched: bool, by_class: Callable[[list[Any]], list[Any]] = list) -> Admission:
        """Reads the prompts of rows to come; the arguments are those of `Admission`."""
        return Admission(self.target, self.drafter, batched, by_class)

    def beginnings(self, step: int) -> Beginnings:
        """How rows continue from others, in all processes of the model.

        Args:
            step: tokens of a chunk.
        """
        here = Beginnings.of(self.target.make_caches(), step)
        shared, trimmable, by_chunk = self._communicator.all_min([int(here.shared), int(here.trimmable), here.by_chunk])
        return Beginnings(bool(shared), bool(trimmable), by_chunk, step)

    def pending(self, sequence: TokenSequence) -> PendingRow:
        """A row to come, with caches that have room for its prompt and answer."""
        caches = self.make_caches() if sequence.caches is None else sequence.caches
        reserve_for(caches, len(sequence.tokens), sequence.room - sequence.resumed + self.draft_tokens)
        return PendingRow(sequence, caches, kept=len(sequence.before))

    def join(self, sequences: Sequence[TokenSequence], caches: list[Any], drafter_caches: list[Any]) -> None:
        """Adds rows after those that there are; their caches have read all but the last token of their prompts."""
        if not sequences:
            return
        # A batch holds zeros for missing recurrent state, from which some layers do not begin: a pass without it.
        alone = self.drafter is None and bool(self.target.caches) and lacks_state(caches)
        if alone or self.drafter is not None:
            self._flush()
        texts = [text_tokens(self.target.model, [*row.before, *row.tokens]) for row in sequences]
        samplers = [row.sampler for row in sequences]
        if self.drafter is not None:  # a draft guesses by the random keys of the places that it guesses
            samplers = [SeededSampler(s, None, 0) if isinstance(s, TemperatureSampler) else s for s in samplers]
        contexts = [RowContext(row.processors, text) for row, text in zip(sequences, texts, strict=True)]
        first: list[list[Emitted]] = [[] for _ in sequences]
        if alone:
            announce(caches, [1] * len(sequences))
            logits = self.target.forward(mx.array([row.tokens[-1:] for row in sequences]), caches)[:, -1]
            logprobs = log_probabilities(RowContexts(contexts).after(logits, []))
            tokens: Any = self._communicator.leader_tokens(draw(samplers, logprobs)).tolist()
            first = _to_emitted([[token] for token in tokens], logprobs[:, None])
            self._undelivered = [[] for _ in self.samplers] if self._undelivered is None else self._undelivered
        pending = [items[-1].token if items else row.tokens[-1] for items, row in zip(first, sequences, strict=True)]
        self.target.join(caches, [[token] for token in pending])
        if self.drafter is not None:
            self.drafter.join(texts, drafter_caches, *self._last_states(sequences))
            if private := [number for number, row in enumerate(sequences, len(self.samplers)) if row.private]:
                self.drafter.keep_private(private)
            self.pace.join(len(sequences))
        for context, items in zip(contexts, first, strict=True):
            context.add([item.token for item in items])
        self.samplers += samplers
        self._contexts.join(contexts)
        if self._undelivered is not None:
            self._undelivered += first

    def _last_states(self, sequences: Sequence[TokenSequence]) -> list[mx.array]:
        """The state (B, width) of the last token that was read of each, if the drafter reads it."""
        if self.target.tap is None:
            return []
        none = mx.zeros((self.target.tap.width,), self.target.tap.dtype)
        states = [none if row.state is None else row.state for row in sequences]
        for row in sequences:
            row.state = None
        return [mx.stack(states)]

    def keep(self, rows: Sequence[int]) -> None:
        """Removes all other rows."""
        self.target.keep(rows)
        if self.drafter is not None:
            self.drafter.keep(rows)
            self.pace.keep(rows)
        self.samplers = [self.samplers[row] for row in rows]
        self._contexts.keep(rows)
        if self._undelivered is not None:
            self._undelivered = [self._undelivered[row] for row in rows]
        if self._ahead is not None:
            size = self._ahead.tokens.size
            which = [row for row in rows if row < size]
            if len(which) < size:
                self._ahead = self._ahead.rows(mx.array(which)) if which else None

    def extract(self, row: int) -> list[Any] | None:
        """Copies of a row's caches, as of `make_caches`: the model and the drafter have read the same tokens of it.

        None where they cannot be trimmed to that.
        """
        pending = len(self.target.pending[row])
        if self.drafter is None:
            return self.target.extract(row, pending)
        drafter = self.drafter
        # One is trimmed, or the other reads on.
        tried = self._communicator.broadcast(lambda: sorted({pending, drafter.behind(row) or pending}, reverse=True))
        for behind in tried:
            caches, others = self.target.extract(row, behind), drafter.extract(row, behind)
            everywhere = self._communicator.all_min([int(caches is not None and others is not None)])
            if caches is not None and others is not None and everywhere[0]:
                return [*caches, *others]
        return None

    # --- rounds ---------------------------------------------------------------------------------------------------

    def round(self, max_tokens: int, statistics: SpeculationStatistics) -> list[list[Emitted]]:
        """Up to `max_tokens` of each row: one at least, but for rows that joined while the others were a step ahead.

        With a drafter: drafts, verifies, and takes back. Where nothing is drafted, the next pass begins before this
        one's tokens are known.
        """
        if self.drafter is None:
            return self._round_without_drafts()
        if self._undelivered is not None:
            emitted, self._undelivered = self._undelivered, None
            self.drafted = [0] * len(emitted)
            if counted := [list[int]() for row in emitted if row]:
                statistics.note(counted, [0] * len(counted), 0.0, None)  # its time was that of the rounds before
            return emitted
        started = time.perf_counter()
        count = min(self.draft_tokens, max_tokens - 1)
        agreed = self._communicator.leader_tokens
        choice = Choice(self.samplers, self._vocabulary, max(count, 1), agreed, self._contexts)
        room, waiting = self.target.max_drafts(count), self.target.waiting
        drafted, verifies, goes_on = self._communicator.broadcast(lambda: self._plan(max_tokens, room, waiting, choice))
        drafting, was_ahead = time.perf_counter() - started, self._ahead is not None
        if verifies:
            logprobs = log_probabilities(self._contexts.along(self.target.verify(drafted), drafted))  # (B, L + 1, V)
            decided = choice.accept(drafted, logprobs)
            received = [[*row[:right], chosen] for row, (right, chosen) in zip(drafted, decided, strict=True)]
            states = self.target.states
            self.target.accepted(received)
            right = [right for right, _ in decided]
            self.pace.record_acceptance([len(row) for row in drafted], right)
        else:
            right = [0] * len(drafted)
            received, logprobs, states = self._advance(choice.follow, goes_on)
        self._record(received, states)
        self.drafted = [len(row) for row in drafted]
        longest = max(self.drafted)
        seconds = time.perf_counter() - started
        self.pace.record_pass(longest, waiting, self._seconds_a_pass(was_ahead, seconds - drafting), drafting)
        statistics.note(drafted, right, seconds, self.pace.seconds_without(len(received)))
        return _to_emitted(received, logprobs)

    def _round_without_drafts(self) -> list[list[Emitted]]:
        """One token of each row; none of rows that joined while a pass was on its way."""
        self.drafted = [0] * len(self.samplers)
        if self._undelivered is not None:
            emitted, self._undelivered = self._undelivered, None
            self._ahead = self._launch(self._draw, self.target.follow(), [])
            return emitted
        received, logprobs, states = self._advance(self._draw, go_on=True)
        self._record(received, states)
        return _to_emitted(received, logprobs)

    def _draw(self, logprobs: mx.array, ahead: int) -> mx.array:
        """Tokens (B,) of log-probabilities (B, V)."""
        return self._communicator.leader_tokens(draw(self.samplers, logprobs))

    def _seconds_a_pass(self, was_ahead: bool, seconds: float) -> float | None:
        """What one pass took, by what a round took; None where that does not tell.

        A round that begins two passes waits for the first and for much of the second; the rest is the next round's.
        """
        began, self._launched_two = self._launched_two, None
        if self._ahead is not None and not was_ahead:
            self._launched_two = seconds
            return None
        if was_ahead and self._ahead is None:
            return None if began is None else (began + seconds) / 2
        return seconds

    def _plan(self, limit: int, room: list[int], waiting: int, choice: Choice) -> tuple[list[list[int]], bool, bool]:
        """What is drafted for each row, whether a pass verifies it, and if not, whether the next one begins before.

        No pass verifies where one is on its way. A drafter whose proposals cost nothing is called in any case. Where a
        budget evicts, no pass goes beyond the next compaction: what is kept then, and so the text, does not depend on
        how many tokens were drafted.

        Args:
            limit: tokens that there is use for.
            room, waiting: of the model's rows.
        """
        assert self.drafter is not None
        if not self.drafter.proposals_cost:
            proposed = [row[:count] for row, count in zip(self._draft(max(room), choice), room, strict=True)]
            length = self.pace.choose(max(room), waiting, [len(row) for row in proposed])
            if length == 0 or self._ahead is not None:
                self.pace.add_unused(proposed)
            drafted = [row[:length] for row in proposed]
        else:
            length = self.pace.choose(max(room), waiting)
            drafted = self._draft(length if self._ahead is None else 0, choice)
            drafted = [row[:count] for row, count in zip(drafted, room, strict=True)]
        verifies = self._ahead is None and (length > 0 or self.pace.fixed)
        return drafted if verifies else [[] for _ in drafted], verifies, limit > 1 and length == 0 and not waiting

    def _advance(self, choose: Chooser, go_on: bool) -> tuple[list[list[int]], mx.array, mx.array | None]:
        """The next token of each row, by a pass that was launched a round ago, or now; as `_finish`.

        Args:
            go_on: whether to launch the next one before.
        """
        launched = self._ahead or self._launch(choose, self.target.follow(), [])
        tokens = launched.tokens
        joined = [tokens, *(mx.array(row, tokens.dtype) for row in self.target.pending[tokens.size :])]
        following = tokens if len(joined) == 1 else mx.concatenate(joined)
        self._ahead = self._launch(choose, self.target.follow(following), [tokens]) if go_on else None
        return self._finish(launched)

    def _finish(self, launched: Launched) -> tuple[list[list[int]], mx.array, mx.array | None]:
        """Waits for a pass; returns its tokens, which become pending if no next one was launched, and its arrays.

        None of rows that joined behind it.
        """
        known: Any = launched.tokens.tolist()
        received, joined = [[token] for token in known], self.target.pending[len(known) :]
        if self._ahead is None:
            self.target.pending = [*received, *joined]
        return [*received, *([] for _ in joined)], launched.logprobs[:, None], launched.states

    def _launch(self, choose: Chooser, logits: mx.array, unknown: list[mx.array]) -> Launched:
        """Launches a pass, which is not waited for.

        Args:
            unknown: tokens (n,) of passes before it that are on their way, of the first n rows.
        """
        self.launched += 1
        self.stalls += self.idle or not unknown
        self.idle = False
        logprobs = log_probabilities(self._contexts.after(logits, unknown))
        tokens = choose(logprobs, len(unknown))
        mx.async_eval(tokens, logprobs)  # type: ignore[no-untyped-call]
        return Launched(tokens, logprobs, self.target.states)

    def _record(self, received: list[list[int]], states: mx.array | None = None) -> None:
        """Records the new tokens of the rows.

        Args:
            states: (B, n, width) from which they were chosen, if the drafter reads such states.
        """
        self._contexts.record(received)
        if self.drafter is None:
            return
        self.drafter.accepted(received, *([] if states is None else [states]))
        self.pace.match_unused(received)
        for sampler, tokens in zip(self.samplers, received, strict=True):
            if isinstance(sampler, SeededSampler):
                sampler.position += len(tokens)

    def _flush(self) -> None:
        """Waits for the pass that was launched ahead; its tokens are emitted next. Called before rows change."""
        if self._ahead is None:
            return
        pass_ahead, self._ahead, self._launched_two = self._ahead, None, None
        received, logprobs, states = self._finish(pass_ahead)
        self._record(received, states)
        self._undelivered = _to_emitted(received, logprobs)

    def _draft(self, max_tokens: int, choice: Choice) -> list[list[int]]:
        """What the drafter proposes for each row, checked, and cut where grammars exclude it."""
        assert self.drafter is not None
        drafted = [[int(token) for token in row] for row in self.drafter.propose(max_tokens, choice)]
        if len(drafted) != len(self.samplers):
            raise ValueError(f"the drafter proposed for {len(drafted)} rows, but there are {len(self.samplers)}")
        for row in drafted:
            if len(row) > max_tokens:
                raise ValueError(f"the drafter proposed {len(row)} tokens, but was asked for {max_tokens} at the most")
            if row and not 0 <= min(row) <= max(row) < self._vocabulary:
                raise ValueError(
                    f"the drafter proposed {row}, but the vocabulary has {self._vocabulary:,} tokens: "
                    f"propose ids from 0 to {self._vocabulary - 1}"
                )
        return self._contexts.cut(drafted)


def _to_emitted(received: Sequence[Sequence[int]], logprobs: mx.array) -> list[list[Emitted]]:
    """What each row got of a pass, all but the last by the draft, with log-probabilities (B, n, V)."""
    return [
        [Emitted(token, logprobs[row, i], i < len(tokens) - 1) for i, token in enumerate(tokens)]
        for row, tokens in enumerate(received)
    ]


def make_decoder(
    model: nn.Module,
    policy: CachePolicy,
    draft_model: nn.Module | None = None,
    drafting: DraftSettings | None = None,
    communicator: Communicator = LOCAL,
) -> Decoder:
    """A decoder for one model and policy.

    Args:
        drafting: how tokens are drafted; None for no drafts. The leader's counts.

    Raises:
        TypeError: a draft model that is no model.
        ValueError: what the drafter refuses.
    """
    if drafting is None:
        return Decoder(model, policy, communicator=communicator)
    if draft_model is not None:
        check_model("draft_model", draft_model)
    lowest, highest = drafting.prompt_lookup_min, drafting.prompt_lookup_max
    check_policy(model, policy)  # without drafts, whoever makes the caches does
    context = DrafterContext(model, vocabulary_of(model), drafting.draft_tokens, draft_model, lowest, highest, policy)
    instance = communicator.on_leader(lambda: find_drafter(drafting.drafter, context))
    leads = instance or RemoteDrafter(None, False)
    traits: Any = [context.draft_tokens, leads.step_size, leads.equal_rows, leads.hidden]
    draft_tokens, step_size, equal_rows, hidden = communicator.broadcast(lambda: traits)
    drafter = instance or RemoteDrafter(step_size, equal_rows, tuple(hidden) if isinstance(hidden, list) else hidden)
    return Decoder(model, policy, drafter, draft_tokens, drafting.draft_length == "fixed", communicator)
