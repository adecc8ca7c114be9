"""The rows of one model that decode: their caches, and the tokens that the model has yet to read of each.

After a pass, wrong drafts are trimmed. Recurrent state whose pass was not recorded (`mlxlm.replay`) can only return to
before it: then all layers of a row do, and the accepted tokens are read again before the drafts of the next pass, or in
a pass of their own if they are many.
B rows, V the vocabulary, L the most tokens drafted for a row.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_kv.cache.eviction.calibration import Calibration
from mlx_kv.cache.layout import NO_LIMIT, Budget
from mlx_kv.communicator import LOCAL, Communicator
from mlx_kv.generation.prefill import announce, check_local, prefill_step, read_ragged
from mlx_kv.mlxlm.convert import make_prompt_cache
from mlx_kv.mlxlm.recurrent import is_recurrent, mark_last, with_checkpoints
from mlx_kv.mlxlm.replay import PassRecorder, can_replay
from mlx_kv.mlxlm.taps import HiddenTap
from mlx_kv.mlxlm.traverse import attention_caches, can_trim, leaves, places_of, trim_all, trim_prompt_cache
from mlx_kv.policy import CachePolicy


class DecodeBatch:
    """Rows of one model: the model that decides, or a draft model.

    Args:
        draft_tokens: maximum tokens drafted for a row at once; 0 for a batch without drafts, whose caches need not be
            able to take back tokens.
        checkpoints: passes that can be taken back one by one, if the model is recurrent.
        communicator: with the processes that have other layers of the model: what those need, all rows do.

    Attributes:
        caches: of all rows, one for each layer; empty where there are no rows.
        layers: how many caches a row has.
        pending: of each row, the tokens that the model has yet to read.
        embeddings: (n, hidden size) of the next n tokens that a single row reads; None for the model's own.
        tap: brings the hidden states of passes; None for none.
        states: (B, n, width) of the last pass, with a tap; of `verify`, where the logits are that it returns.
        replays: whether a row of which a token was wrong reads the pass again: a layer is recurrent, and cannot apply
            fewer tokens of a pass that was recorded.

    Raises:
        ValueError: the model has caches that cannot take back tokens.
    """

    def __init__(
        self,
        model: nn.Module,
        policy: CachePolicy,
        draft_tokens: int = 0,
        checkpoints: int = 1,
        communicator: Communicator = LOCAL,
    ) -> None:
        self.model, self._drafts, self._communicator = model, draft_tokens > 0, communicator
        self._max_waiting = draft_tokens + 1
        recurrent = self._drafts and is_recurrent(model)
        self._recorder = PassRecorder(model) if recurrent and can_replay(model) else None
        (self.replays,) = communicator.all_any(recurrent and self._recorder is None)
        # Of a pass all but one of its tokens may be trimmed. Where they are read again they may all be, and beside the
        # drafts as many as may wait for them.
        longest = draft_tokens + 1 + (draft_tokens if self.replays else 0)
        self._limits = longest, checkpoints
        if self._drafts:
            policy = replace(policy, max_rollback=max(policy.max_rollback, longest))
        # Making caches may probe what a model's attention can read: it is done once, rows get copies.
        self._empty = make_distributed_caches(model, policy, communicator, strict=not self._drafts)
        self.caches: list[Any] = []
        self.pending: list[list[int]] = []
        self._drafted: list[int] = []  # of each row, how many in the pass that is to be accepted
        self.layers = len(self._empty)
        self.embeddings: mx.array | None = None
        self.tap: HiddenTap | None = None
        self.states: mx.array | None = None
        self._evicts = self._gathers = False
        if self._drafts:
            self._empty = with_checkpoints(self._empty, *self._limits)
            mark_last(model, self._empty)
            probe = self.make_caches()
            here = any(isinstance(cache.view.layout, Budget) for cache in attention_caches(probe))
            self._evicts, elsewhere, fixed = communicator.all_any(here, not here, not can_trim(probe, 0))
            self._gathers = self._evicts and elsewhere  # layers that evict and layers that don't are not together
            if fixed:
                kinds = {type(cache).__name__ for cache in leaves(probe) if not can_trim([cache], 0)}
                subject = ", ".join(sorted(kinds)) or "a layer of another rank"
                raise ValueError(f"{subject} cannot take back tokens: generate without a draft model")

    @property
    def step_size(self) -> int:
        """Tokens of a prompt that are read at once in this process."""
        return prefill_step(self.model, self._empty, None)

    def make_caches(self) -> list[Any]:
        """New caches of one row."""
        return copy.deepcopy(self._empty)

    def join(self, caches: list[Any], pending: Sequence[list[int]]) -> None:
        """Rows that come after those that there are, with what is yet to be read of them."""
        if self._drafts:
            caches = with_checkpoints(caches, *self._limits)  # those from a file have none
            mark_last(self.model, caches)
        for cache, other in zip(self.caches, caches, strict=False):
            cache.extend(other)
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

    def forward(self, tokens: mx.array, cache: list[Any]) -> mx.array:
        """One pass over tokens (B, n): logits (B, n, V)."""
        options, count = {}, tokens.shape[1]
        if self.embeddings is not None and self.embeddings.shape[0]:
            options, self.embeddings = {"input_embeddings": self.embeddings[None, :count]}, self.embeddings[count:]
        if self.tap is not None:
            logits, self.states = self.tap(tokens, cache=cache, **options)
        else:
            logits = self.model(tokens, cache=cache, **options)
        return logits

    def read(self, rows: Sequence[Sequence[int]]) -> mx.array:
        """One pass over some tokens of each row, any number from 1 up: logits (B, longest, V)."""
        return read_ragged(self.forward, self.caches, rows)

    def step(self, tokens: mx.array) -> mx.array:
        """One pass over one token of each row, (B,): logits (B, V)."""
        announce(self.caches, [1] * len(self.pending))
        return self.forward(tokens[:, None], self.caches)[:, -1]

    @property
    def waiting(self) -> int:
        """Tokens that are read again before new ones, of the row that has most of them."""
        return max([0, *(len(tokens) - 1 for tokens in self.pending)])

    def verify(self, drafted: Sequence[Sequence[int]]) -> mx.array:
        """One pass over what is pending and the drafted tokens of each row.

        Returns:
            Logits (B, L + 1, V), from the last pending token of each row on; what stands after a row's own is not
            looked at.
        """
        self._drafted = [len(row) for row in drafted]
        self._read_to_compaction()
        rows = [[*pending, *row] for pending, row in zip(self.pending, drafted, strict=True)]
        recorder = self._recorder if max(self._drafted) else None
        with contextlib.nullcontext() if recorder is None else recorder.recording(self.caches):
            logits = self.read(rows)
        first, count = [len(pending) - 1 for pending in self.pending], max(self._drafted) + 1

        def from_last(x: mx.array) -> mx.array:
            if len(set(first)) == 1:
                return x[:, first[0] : first[0] + count]
            places = mx.minimum(mx.array(first)[:, None] + mx.arange(count), x.shape[1] - 1)
            return mx.take_along_axis(x, places[..., None], axis=1)

        if self.states is not None:
            self.states = from_last(self.states)
        return from_last(logits)

    def _max_to_read(self) -> list[int] | None:
        """How many tokens a pass can read of each row, so that evictions come when they would token by token.

        None where nothing is evicted.
        """
        if not self._evicts:
            return None
        by_row: list[list[int]] = [[] for _ in self.pending]
        for cache in leaves(self.caches):
            for row, (part, index) in enumerate(places_of(cache)):
                if isinstance(part.view.layout, Budget):
                    by_row[row].append(part.view.layout.before_due(part.view.rows[index]))
        limits = [min(counts, default=NO_LIMIT) for counts in by_row]
        limits = self._communicator.all_min(limits) if self._gathers else limits
        return None if NO_LIMIT in limits else limits

    def max_drafts(self, count: int) -> list[int]:
        """How many drafted tokens the next pass can read of each row, `count` of them or fewer.

        None where too many tokens wait: after a pass over those alone, none do.
        """
        room = [count if len(pending) <= self._max_waiting else 0 for pending in self.pending]
        if (limits := self._max_to_read()) is not None:
            rows = zip(room, limits, self.pending, strict=True)
            room = [min(drafts, max(0, limit - len(pending))) for drafts, limit, pending in rows]
        return room

    def _read_to_compaction(self) -> None:
        """Reads what is pending up to the next compaction, where that is not all: it would come too late."""
        while (limits := self._max_to_read()) is not None:
            rows = zip(self.pending, limits, strict=True)
            pieces = [pending[:limit] if len(pending) > limit else [] for pending, limit in rows]
            if not any(pieces):
                break
            self.read(pieces)
            self.pending = [pending[len(piece) :] for pending, piece in zip(self.pending, pieces, strict=True)]

    def follow(self, tokens: mx.array | None = None) -> mx.array:
        """One pass over what is pending, or over tokens (B,) that need not be known yet; nothing is pending then.

        Returns:
            Logits (B, V) of what comes next, not evaluated.
        """
        none = [list[int]() for _ in self.pending]
        logits = self.verify(none)[:, 0] if tokens is None else self.step(tokens)
        self.pending = none
        return logits

    def accepted(self, tokens: Sequence[Sequence[int]]) -> None:
        """What each row got of the pass of `verify`: the drafted tokens that were right, and one that is yet unread."""
        counts = []
        for row, (drafted, received) in enumerate(zip(self._drafted, tokens, strict=True)):
            wrong = drafted + 1 - len(received)
            if wrong and self.replays:
                counts.append(len(self.pending[row]) + drafted)
                self.pending[row] = [*self.pending[row], *received]
            else:
                counts.append(wrong)
                self.pending[row] = list(received[-1:])
        trim_prompt_cache(self.caches, counts, strict=True)

    def extract(self, row: int, behind: int) -> list[Any] | None:
        """Copies of a row's caches, without its last `behind` tokens; None where they cannot be trimmed to that.

        Where more are pending than that, some of them are read.
        """
        each = [cache.extract(row) for cache in self.caches]
        beyond = behind - len(self.pending[row])
        if beyond < 0:
            read_ragged(self.model, each, [self.pending[row][:-beyond]])
        return each if trim_all(each, max(0, beyond)) else None


# --- caches of a model in several processes ---------------------------------------------------------------------------


def make_distributed_caches(
    model: nn.Module, policy: CachePolicy, communicator: Communicator = LOCAL, *, strict: bool = True
) -> list[Any]:
    """New caches of the layers of this process, whose budgets keep the same tokens on all ranks.

    Args:
        strict: as for `make_prompt_cache`.

    Raises:
        ValueError: another policy than the leader's, or what `make_prompt_cache` refuses.
    """
    if communicator.distributed:
        _check_same(policy, communicator)
        if policy.reads_twice:
            check_local(communicator)
    return make_prompt_cache(model, policy, strict=strict, peers=communicator.for_caches(model))


def _check_same(policy: CachePolicy, communicator: Communicator) -> None:
    """Raises ValueError where a policy is not the leader's, as far as its settings are plain values."""
    settings = {each.name: _plain(getattr(policy, each.name)) for each in fields(policy)}
    leaders = communicator.broadcast(lambda: settings)
    if leaders != settings:
        names = [name for name in settings if leaders[name] != settings[name]]
        theirs, here = (", ".join(f"{name}={each[name]!r}" for name in names) for each in (leaders, settings))
        raise ValueError(f"the leader's policy has {theirs}, that of this rank {here}: give all ranks the same")


def _plain(value: Any) -> Any:
    """A setting as the link between ranks sends it; tables and calibrations by their digest, other objects as None."""
    if isinstance(value, Calibration):
        return value.name
    if isinstance(value, tuple) and all(isinstance(one, tuple) for one in value):
        return f"table {hashlib.blake2b(repr(value).encode(), digest_size=6).hexdigest()}"
    listed = list(value) if isinstance(value, tuple) else [value]
    if not all(isinstance(one, int | float | str | None) for one in listed):
        return None
    return listed if isinstance(value, tuple) else value
