"""The part of a cache that evicts: has its tokens scored, agrees with other layers, and moves what is left.

One evictor belongs to one cache, of one layer. Decides when to compact, and who decides which tokens go: the layer
group, or this layer alone. Knows nothing about updates, masks or growth, nor how a decision comes about (`step`), or
what rows bring along (`membership`).
B rows, H KV heads; H' is H where every head keeps its own tokens (share="head" or "adaptive"), else 1.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from mlx_kv.cache.buffers import move_slots
from mlx_kv.cache.eviction.allocation import Allocation, Granularity
from mlx_kv.cache.eviction.compaction import Moves
from mlx_kv.cache.eviction.layer_group import LayerGroup
from mlx_kv.cache.eviction.masks import OwnMasks
from mlx_kv.cache.eviction.member import GroupMember
from mlx_kv.cache.eviction.membership import EvictorState, Membership, Work
from mlx_kv.cache.eviction.observed.observation import Observation
from mlx_kv.cache.eviction.observed.state import ObservedState, go_on_from, state_of
from mlx_kv.cache.eviction.peers import ALONE, Peers
from mlx_kv.cache.eviction.rereading import Listener
from mlx_kv.cache.eviction.scores import Function, Score
from mlx_kv.cache.eviction.step import CompactionStep
from mlx_kv.cache.layout import Budget, Plan, Row
from mlx_kv.cache.protocol import Call


class Evictor(GroupMember):
    """Compacts the rows of one cache.

    Args:
        layout: the budget.
        score: what to keep, a name or a function; see `mlx_kv.cache.eviction.scores`.
        granularity: what keeps the same tokens: all "layers", a "layer", a "head"; or "adaptive", heads of any length.
        layer_group, layer: the sequence, and which of its layers this is.
        layers: "uniform", all layers of the sequence have the same budget; "pyramid", lower ones more; "global", one
            ranking of the tokens of all heads and layers; or a table of shares, (L, H) or (L, 1) (`allocation`).

    Raises:
        ValueError: an unknown score, granularity or layers, or two that don't go together.
    """

    def __init__(
        self,
        layout: Budget,
        score: str | Function | Score = "key_diff",
        granularity: Granularity = "layers",
        layer_group: LayerGroup | None = None,
        layer: int = 0,
        layers: Allocation = "uniform",
    ) -> None:
        super().__init__(layout, score, granularity, layer_group or LayerGroup(), layer, layers)
        self._masks = OwnMasks(layout)
        self.paused = False  # nothing is evicted for now
        self._listener: Listener | None = None  # while a text is read again

    # --- belonging ------------------------------------------------------------------------------------------------

    @property
    def state(self) -> EvictorState:
        """What a loaded cache needs besides its layout."""
        return self._state_of(self.members, None if self.observation is None else state_of(self.observation))

    def _state_of(self, members: Membership, observed: ObservedState | None = None) -> EvictorState:
        names, kept = [group.name for group in members.groups], members.kept
        reread = [None if own is None else list(own) for own in members.reread] if members.reread else None
        layers: Any = self.layers if isinstance(self.layers, str) else [list(row) for row in self.layers]
        known = names, kept.positions, kept.scores, list(members.work), kept.dead, layers, observed, reread
        return EvictorState(self.score.name, self.granularity, self.layer, *known)

    @classmethod
    def from_state(
        cls,
        layout: Budget,
        state: Sequence[Any],
        score: Score | None = None,
        memo: dict[int, Any] | None = None,
        peers: Peers = ALONE,
        seen: Observation | None = None,
    ) -> Evictor:
        """An evictor of copies of the same rows.

        Args:
            state: an `EvictorState`, or a list of the same.
            score: None finds it by its name.
            memo: deepcopy's.
            peers: who has other parts of the same sequences.
            seen: what was seen of their attention; None finds it in the state.

        Raises:
            ValueError: the score is one that nobody registered here.
        """
        told = EvictorState(*state)
        made = cls(layout, score or told.score, told.share, LayerGroup(peers), told.layer, told.layers)
        made.members = Membership.from_state(told, made, memo, peers)
        if seen is not None:
            made.observation = seen
        elif made.observation is not None:
            go_on_from(made.observation, told.observed, len(told.groups))
        return made

    def copied(self, memo: dict[int, Any]) -> Evictor:
        """An evictor for a deep copy of the cache; copies of all layers share layer groups of their own.

        Args:
            memo: deepcopy's.
        """
        seen = None if self.observation is None else self.observation.copied()
        return self._copy_of(self.members, seen, memo)

    def selected(self, rows: Sequence[int]) -> Evictor:
        """An evictor for copies of some rows."""
        seen = None if self.observation is None else self.observation.of_rows(rows)
        return self._copy_of(self.members.of_rows(rows), seen)

    def _copy_of(self, members: Membership, seen: Observation | None, memo: dict[int, Any] | None = None) -> Evictor:
        made = Evictor.from_state(self.layout, self._state_of(members), self.score, memo, self.peers, seen)
        made.paused = self.paused
        return made

    def reset(self) -> None:
        """A new session begins, of one sequence until more are seen."""
        self.forget()
        self.paused = False
        self.members = self.members.first()
        if self.observation is not None:
            self.observation.begin(1)

    def keep(self, chosen: Sequence[int], rows: Sequence[Row]) -> None:
        """Lets all rows go but the chosen, which then stand as `rows` say."""
        self.forget()
        self.members = self.members.of_rows(chosen).without_evicted(rows)
        self.members.kept.compute()
        if self.observation is not None:
            self.observation = self.observation.of_rows(chosen).compute()

    def extend(self, other: Evictor) -> None:
        """Takes copies of another's rows, after its own."""
        self.forget()
        if self.observation is not None and other.observation is not None:
            rows, more = len(self.members.groups), len(other.members.groups)
            self.observation = self.observation.joined(rows, other.observation, more).compute()
        self.members = self.members.joined(other.members, self.layer, self)
        self.members.kept.compute()

    def hear_from(self, peers: Peers) -> None:
        """These have other parts of the same sequences from now on."""
        for group in self.members.groups:
            group.peers = peers

    def trimmed(self, rows: tuple[Row, ...]) -> None:
        """Tokens were taken back, and rows stand here now."""
        self.forget()
        self.members = self.members.where_they_stand(self.layout, rows)
        if self.observation is not None:
            self.observation.trimmed(rows)

    def forget(self) -> None:
        """Nothing that was worked out for the next compaction holds."""
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
        return 0 if owner is None else sum(max(0, row.evicted) for row in owner.view.rows)

    @property
    def moved(self) -> int:
        """Slots that were moved in each head, for all rows together; see `Work`."""
        return sum(row.moved for row in self.work)

    @property
    def compactions(self) -> int:
        """Those that the busiest row took part in."""
        return max(row.compactions for row in self.work)

    @property
    def seconds(self) -> float:
        """That compactions took, for all rows together; see `Work`."""
        return sum(row.seconds for row in self.work)

    @property
    def nbytes(self) -> int:
        return self.members.nbytes + (0 if self.observation is None else self.observation.nbytes)

    def tokens_by_head(self, row: Row, index: int) -> list[int]:
        """How many tokens each head of one row holds; one number where all hold the same."""
        return (self.live_positions(row, index) >= 0).sum(axis=-1).tolist()  # type: ignore[return-value]

    def live_scores(self, index: int) -> mx.array:
        """The scores of all live slots of one row, (H', n), as they are now."""
        return self._step_from(self._cache().view).scoring.live(index)

    def key_positions(self, plan: Plan) -> mx.array | None:
        """The position of each key that attention reads with the next write: (B, 1, 1, K); None if nothing was evicted.

        Raises:
            ValueError: heads or layers keep different tokens, and one mask for all of them cannot say so.
        """
        if all(row.evicted <= 0 for row in plan.rows):
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
        return self.score.wants is not None or self.own_lengths

    @property
    def own_lengths(self) -> bool:
        """Whether this layer, or each of its heads, holds another number of tokens than others: it has its own mask."""
        return self.granularity == "adaptive" or self.layers != "uniform"

    @property
    def uneven_heads(self) -> bool:
        """Whether heads of this layer may hold different numbers of tokens."""
        return self.granularity == "adaptive" or (self.granularity == "head" and self._table is not None)

    def attend(self, call: Call, rows: tuple[Row, ...], counts: tuple[int, ...] | None) -> mx.array:
        """(B, Hq, S, Dv): attention after an update, seen on its way; over what each head holds.

        Args:
            rows: where they stand after the update.
            counts: how many of the S queries are of tokens of each row, padding follows; None is all of all rows.
        """
        if self.own_lengths:
            call = call.changed(mask=self._masks.of(call, rows, counts, self.members.kept))
        if self._listener is not None:
            return self._listener.attend(call)
        answer = call.hand_on()
        if self.observation is None:
            return answer
        return self.observation.see(call, answer, rows, counts, lambda: self._keys_for(rows, call))

    # --- texts that are read again ------------------------------------------------------------------------------------

    @property
    def wants_rereading(self) -> bool:
        """Whether the score is of what tokens receive when their text is read once more."""
        return self.score.wants is not None and self.score.wants.reread

    def listen(self, first: int, last: int) -> None:
        """What is read from now on repeats the tokens at positions [first, last) of rows that stand alike."""
        self._listener = Listener(self._cache(), self.layout, first, last)

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
            on_demand: also rows within the margin. Nothing goes while all is held for a second reading.

        Raises:
            ValueError: a score that cannot be used, layers that have diverged, or masks of layers or heads of different
                lengths that nobody asks for; nothing has changed then.
        """
        layout = self.layout
        if len(rows) != len(self.members.groups):
            self.members = self.members.new_batch(len(rows), self.layer, self)
        if self.paused:
            return rows
        due = [i for i, row in enumerate(rows) if (layout.held(row) > layout.budget if on_demand else layout.due(row))]
        if self.own_lengths and not on_demand:
            self._masks.check_asked(bool(due))
        if not due:
            return rows
        step = self._next_step()
        mx.eval([buffer.planes for buffer in step.buffers])  # what is still to be computed is no part of a compaction
        started = time.perf_counter()
        decided = {i: self._moves(step, i) for i in due}
        moves, kept, after = step.all_moves(decided)
        kept.compute()
        move_slots(step.buffers, *moves)
        self._step = None
        if self.observation is not None:
            self.observation.moved(moves, [row.end for row in after])
        self.members = self.members.compacted(due, kept, moves.source.shape[2], time.perf_counter() - started)
        self.members = self.members.where_they_stand(layout, after)
        return after

    def _moves(self, step: CompactionStep, index: int) -> Moves:
        """What moves into the holes of one row, once all layers of its sequence have decided."""
        row, group = step.view.rows[index], self.members.groups[index]
        nbytes = sum(buffer.nbytes for buffer in step.buffers)
        if self.granularity == "layers":
            return group.decide_together(row, lambda scores: step.moves_for(scores, index), nbytes)
        if self.layers == "global":
            group.decide_globally(row, nbytes)
        elif self.layers != "pyramid":  # whose layers are due at different times
            group.decide_each(row, self.granularity, nbytes)
        return step.own_moves(index)
