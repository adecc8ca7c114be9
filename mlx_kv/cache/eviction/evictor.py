"""The part of a cache that evicts: has its tokens scored, agrees with other layers, and moves what is left.

One evictor belongs to one cache, of one layer. Decides when to compact, and who decides which tokens go: the layer
group, or this layer alone. Knows nothing about updates, masks or growth, nor how a decision comes about (`step`), or
what rows bring along (`membership`).
B rows, H KV heads; H' is H where every head keeps its own tokens (share="head"), else 1.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import mlx.core as mx

from mlx_kv.cache.buffers import move_slots
from mlx_kv.cache.eviction.compaction import Moves
from mlx_kv.cache.eviction.granularity import Granularity, check_granularity
from mlx_kv.cache.eviction.layer_group import LayerGroup
from mlx_kv.cache.eviction.membership import EvictorState, Membership, Work
from mlx_kv.cache.eviction.peers import ALONE, Peers
from mlx_kv.cache.eviction.rereading import Listener
from mlx_kv.cache.eviction.scores import Function, Score, find_score
from mlx_kv.cache.eviction.step import CompactionStep, Held
from mlx_kv.cache.layout import Budget, Plan, Row
from mlx_kv.cache.protocol import Call


class Owner(Protocol):
    """The cache that an evictor belongs to."""

    @property
    def view(self) -> Held: ...


class Evictor:
    """Compacts the rows of one cache.

    Args:
        layout: the budget.
        score: what to keep, a name or a function; see `mlx_kv.cache.eviction.scores`.
        granularity: which tokens are kept together: the same in all "layers", in each "layer" or each "head" its own.
        layer_group, layer: the sequence, and which of its layers this is.

    Raises:
        ValueError: an unknown score or granularity.
    """

    def __init__(
        self,
        layout: Budget,
        score: str | Function | Score = "key_diff",
        granularity: Granularity = "layers",
        layer_group: LayerGroup | None = None,
        layer: int = 0,
    ) -> None:
        check_granularity(granularity)
        self.layout, self.score, self.granularity, self.layer = layout, find_score(score), granularity, layer
        self.members = Membership((layer_group or LayerGroup(),))
        self.members.groups[0].join(layer, self)
        self._owner: Callable[[], Owner | None] = lambda: None
        self.holds = False  # whether nothing is evicted for now
        self._listener: Listener | None = None  # while a text is read again
        self._step: CompactionStep | None = None  # worked out for the compaction that comes, if anything was

    # --- belonging ------------------------------------------------------------------------------------------------

    def belong_to(self, owner: Owner) -> None:
        self._owner = weakref.ref(owner)

    @property
    def state(self) -> EvictorState:
        """What a loaded cache needs besides its layout."""
        return self._state_of(self.members)

    def _state_of(self, members: Membership) -> EvictorState:
        names = [group.name for group in members.groups]
        reread = [None if own is None else list(own) for own in members.reread] if members.reread else None
        return EvictorState(
            self.score.name, self.granularity, self.layer, names, *members.kept, list(members.work), reread
        )

    @classmethod
    def from_state(
        cls,
        layout: Budget,
        state: Sequence[Any],
        score: Score | None = None,
        memo: dict[int, Any] | None = None,
        peers: Peers = ALONE,
    ) -> Evictor:
        """An evictor of copies of the same rows.

        Args:
            state: an `EvictorState`, or a list of the same.
            score: None finds it by its name.
            memo: deepcopy's.
            peers: who has other parts of the same sequences.

        Raises:
            ValueError: the score is one that nobody registered here.
        """
        told = EvictorState(*state)
        made = cls(layout, score or told.score, told.share, LayerGroup(peers), told.layer)
        made.members = Membership.from_state(told, made, memo, peers)
        return made

    def copied(self, memo: dict[int, Any]) -> Evictor:
        """An evictor for a deep copy of the cache; copies of all layers share layer groups of their own.

        Args:
            memo: deepcopy's.
        """
        copied = Evictor.from_state(self.layout, self.state, self.score, memo, self.peers)
        copied.holds = self.holds
        return copied

    def selected(self, rows: Sequence[int]) -> Evictor:
        """An evictor for copies of some rows."""
        state = self._state_of(self.members.of_rows(rows))
        return Evictor.from_state(self.layout, state, self.score, peers=self.peers)

    def reset(self) -> None:
        """A new session begins, of one sequence until more are seen."""
        self.forget()
        self.holds = False
        self.members = self.members.first()

    def keep(self, chosen: Sequence[int], rows: Sequence[Row]) -> None:
        """Lets all rows go but the chosen, which then stand as `rows` say."""
        self.forget()
        self.members = self.members.of_rows(chosen).without_evicted(rows)
        self.members.kept.compute()

    def extend(self, other: Evictor) -> None:
        """Takes copies of another's rows, after its own."""
        self.forget()
        self.members = self.members.joined(other.members, self.layer, self)
        self.members.kept.compute()

    def trimmed(self, rows: Sequence[Row]) -> None:
        """Tokens were taken back: its rows stand here now."""
        self.forget()
        self.members = self.members.where_they_stand(self.layout, rows)

    def hear_from(self, peers: Peers) -> None:
        """These have other parts of the same sequences from now on."""
        for group in self.members.groups:
            group.peers = peers

    @property
    def peers(self) -> Peers:
        """Who has other parts of the same sequences."""
        return self.members.groups[0].peers

    def forget(self) -> None:
        """Tokens were taken back: nothing that was worked out for the next compaction holds."""
        self._step = None
        for group in self.members.groups:
            group.forget()

    # --- what it did and knows ----------------------------------------------------------------------------------------

    @property
    def layer_groups(self) -> tuple[LayerGroup, ...]:
        """The sequence of each row."""
        return self.members.groups

    @property
    def work(self) -> tuple[Work, ...]:
        """What compactions did for each row."""
        return self.members.work

    @property
    def evicted(self) -> int:
        """Tokens that the rows of now have evicted."""
        owner = self._owner()
        return 0 if owner is None else sum(max(0, -row.start) for row in owner.view.rows)

    @property
    def moved(self) -> int:
        """Slots that were moved, for all rows together."""
        return sum(row.moved for row in self.work)

    @property
    def compactions(self) -> int:
        """Those that the busiest row took part in."""
        return max(row.compactions for row in self.work)

    @property
    def seconds(self) -> float:
        """That compactions took, for all rows together."""
        return sum(row.seconds for row in self.work)

    @property
    def nbytes(self) -> int:
        return self.members.kept.nbytes

    def live_positions(self, row: Row, index: int) -> mx.array:
        """The position of each live slot of one row, (H', n)."""
        return self.members.kept.live_positions(self.layout, row, index)

    def live_scores(self, index: int) -> mx.array:
        """The scores of all live slots of one row, (H', n), as they are now."""
        return self._step_from(self._view()).scoring.live(index)

    def key_positions(self, plan: Plan) -> mx.array | None:
        """The position of each key that attention reads with the next write: (B, 1, 1, K); None if nothing was evicted.

        Raises:
            ValueError: heads or layers keep different tokens, and one mask for all of them cannot say so.
        """
        if all(row.start >= 0 for row in plan.rows):
            return None
        if self.granularity != "layers":
            raise ValueError(
                f"this model asks for a window in a layer with a budget and share={self.granularity!r}, and shares the "
                "mask among layers and heads: use share='layers'"
            )
        return self.members.kept.key_positions(self.layout, plan)

    # --- attention ----------------------------------------------------------------------------------------------------

    @property
    def wants_attention(self) -> bool:
        """Whether the attention over the cache is to be shown to `attend`."""
        return self.score.wants is not None

    def attend(self, call: Call, rows: tuple[Row, ...], counts: tuple[int, ...] | None) -> mx.array:
        """(B, Hq, S, Dv): attention after an update, seen on its way.

        Args:
            rows: where they stand after the update.
            counts: how many of the S queries are of tokens of each row, padding follows; None is all of all rows.
        """
        if self._listener is not None:
            return self._listener.attend(call)
        return call.hand_on()

    # --- texts that are read again ------------------------------------------------------------------------------------

    @property
    def wants_rereading(self) -> bool:
        """Whether the score is of what tokens receive when their text is read once more."""
        return self.score.wants is not None and self.score.wants.reread

    def listen(self, first: int, last: int) -> None:
        """What is read from now on repeats the tokens at positions [first, last) of rows that stand alike."""
        owner = self._owner()
        assert owner is not None, "an evictor is asked by its cache, or through it"
        self._listener = Listener(owner, self.layout, first, last)

    def stop_listening(self, heard: bool = True) -> None:
        """The repetition is over, and has been taken back; or it was broken off, and was not heard."""
        listener, self._listener = self._listener, None
        if heard and listener is not None and listener.reread:
            self.members = self.members.with_reread(listener.reread)
            self.forget()

    # --- compaction -------------------------------------------------------------------------------------------------

    def compact_if_due(self, rows: tuple[Row, ...], on_demand: bool = False) -> tuple[Row, ...]:
        """Compacts every row that is due, or on demand all of more tokens than the budget; returns where rows stand.

        Args:
            rows: where they stand now.

        Raises:
            ValueError: a score that cannot be used, or layers that have diverged; nothing has changed then.
        """
        layout = self.layout
        if len(rows) != len(self.members.groups):
            self.members = self.members.new_batch(len(rows), self.layer, self)
        due = [i for i, row in enumerate(rows) if (row.end > layout.budget if on_demand else layout.due(row))]
        if not due or self.holds:
            return rows
        step = self._next_step()
        mx.eval([buffer.planes for buffer in step.buffers])  # what is still to be computed is no part of a compaction
        started = time.perf_counter()
        moves, kept = step.all_moves({i: self._moves(step, i) for i in due})
        kept.compute()
        move_slots(step.buffers, *moves)
        self._step = None
        self.members = self.members.compacted(due, kept, moves.source.shape[2], time.perf_counter() - started)
        stand = tuple([layout.compacted(row) if i in due else row for i, row in enumerate(rows)])
        self.members = self.members.where_they_stand(layout, stand)
        return stand

    def _moves(self, step: CompactionStep, index: int) -> Moves:
        """What moves into the holes of one row, once all layers of its sequence have decided."""
        row, group = step.view.rows[index], self.members.groups[index]
        nbytes = sum(buffer.nbytes for buffer in step.buffers)
        if self.granularity == "layers":
            return group.decide_together(row, lambda scores: step.moves_for(scores, index), nbytes)
        group.decide_each(row, self.granularity, nbytes)
        return step.own_moves(index)

    def _next_step(self) -> CompactionStep:
        """What was worked out for the next compaction, if it still holds."""
        view = self._view()
        if self._step is None or not self._step.is_of(view):
            self._step = self._step_from(view)
        return self._step

    def _step_from(self, view: Held) -> CompactionStep:
        return CompactionStep(self.layout, self.score, self.granularity, view, self.members)

    def _view(self) -> Held:
        owner = self._owner()
        assert owner is not None, "an evictor is asked by its cache, or through it"
        return owner.view

    # --- a member of layer groups -------------------------------------------------------------------------------------

    def row(self, group: LayerGroup) -> Row:
        owner = self._owner()
        if owner is None or owner.view.buffers is None or group not in self.members.groups:
            return Row()
        return owner.view.rows[self.members.groups.index(group)]

    def own_scores(self, group: LayerGroup) -> mx.array | None:
        return self._next_step().scoring.own(self.members.groups.index(group))

    def hear(self, group: LayerGroup, scores: mx.array) -> None:
        self._next_step().scoring.hear(self.members.groups.index(group), scores)

    def evictable_scores(self, group: LayerGroup) -> mx.array:
        return self._next_step().scoring.standardised(self.members.groups.index(group))

    def decide(self, group: LayerGroup) -> None:
        self._next_step().own_moves(self.members.groups.index(group))

    def change(self, old: LayerGroup, new: LayerGroup) -> None:
        self.members = self.members.with_group(old, new)
