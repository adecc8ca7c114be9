"""The evictor of one cache, of one layer: when to compact, and the compaction itself.

Which tokens are evicted is decided by the layer group of their sequence, from the scores of all layers.
B rows, H KV heads; H' is H where every head keeps its own tokens (share="head" or "adaptive"), else 1.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import mlx.core as mx

from mlx_kv.cache.buffers import Buffers, move_slots
from mlx_kv.cache.eviction.allocation import Allocation, Scope, checked_allocation, layer_counts, table_of, uneven_heads
from mlx_kv.cache.eviction.compaction import RowPlan
from mlx_kv.cache.eviction.kept_tokens import OwnMasks
from mlx_kv.cache.eviction.layer_group import LayerGroup, LayerStep
from mlx_kv.cache.eviction.observation import Observation
from mlx_kv.cache.eviction.row_metadata import EvictorState, RowMetadata
from mlx_kv.cache.eviction.scores import Function, Score, find_score
from mlx_kv.cache.eviction.scoring import Scoring
from mlx_kv.cache.eviction.step import CompactionStep
from mlx_kv.cache.eviction.two_pass import SecondPass
from mlx_kv.cache.eviction.weights import Keys, keys_of
from mlx_kv.cache.layout import Budget, Plan, Row
from mlx_kv.cache.protocol import Call
from mlx_kv.communicator import CacheCommunicator
from mlx_kv.settings import SettingError


class Owner(Protocol):
    """The contents of the cache of an evictor: where its rows stand, and the buffers of keys and values."""

    rows: tuple[Row, ...]
    buffers: Buffers | None


class Evictor:
    """Compacts the rows of one cache.

    Args:
        layout: the budget.
        score: what to keep, a name or a function; see `mlx_kv.cache.eviction.scores`.
        scope: the option `share`, what keeps the same tokens: all "layers", a "layer" or a "head"; or "adaptive", heads
            of any length.
        layer_group, layer: the sequence, and which of its layers this is.
        layer_allocation: the option `layers`: "uniform", all layers have the same budget; "pyramid", lower ones more;
            "global", one ranking of the tokens of all heads and layers; or a table of shares, (L, H) or (L, 1)
            (`allocation`).

    Attributes:
        metadata: of the rows.
        observation: of the attention over the tokens; None where the score does not use it.
        paused: whether nothing is evicted for now.

    Raises:
        ValueError: an unknown score, scope or layer_allocation, or two that don't go together.
    """

    def __init__(
        self,
        layout: Budget,
        score: str | Function | Score = "key_diff",
        scope: Scope = "layers",
        layer_group: LayerGroup | None = None,
        layer: int = 0,
        layer_allocation: Allocation = "uniform",
    ) -> None:
        self.layout, self.score, self.scope, self.layer = layout, find_score(score), scope, layer
        self.layer_allocation = checked_allocation(scope, layer_allocation)
        self._table = table_of(scope, self.layer_allocation)
        self.metadata = RowMetadata((layer_group or LayerGroup(),))
        self.metadata.groups[0].join(layer, self)
        wants = self.score.wants
        self.observation = Observation(wants, layout.keep_recent) if wants and wants.observes else None
        self.paused = False
        self._owner: Callable[[], Owner | None] = lambda: None
        self._step: CompactionStep | None = None  # the next compaction, with its scores, while it is valid
        self._masks = OwnMasks(layout)
        self.second_pass: SecondPass | None = None

    def belong_to(self, owner: Owner) -> None:
        """Sets the cache, as a weak reference: the cache references its evictor."""
        self._owner = weakref.ref(owner)

    # --- copies, states and rows ------------------------------------------------------------------------------------

    @property
    def state(self) -> EvictorState:
        """What a loaded cache needs besides its layout."""
        observed = None if self.observation is None else self.observation.state()
        return self.metadata.state(self.score.name, self.scope, self.layer, self.layer_allocation, observed)

    @classmethod
    def from_state(cls, layout: Budget, state: Sequence[Any], score: Score | None = None) -> Evictor:
        """An evictor of copies of the same rows.

        Args:
            state: an `EvictorState`, or a list of the same.
            score: None finds it by its name.

        Raises:
            ValueError: the score is not registered in this process.
        """
        given = EvictorState(*state)
        made = cls(layout, score or given.score, given.share, None, given.layer, given.layers)
        made.metadata = RowMetadata.from_state(given, made)
        if made.observation is not None:
            made.observation.resume(given.observed, len(given.groups))
        return made

    def copied(self, memo: dict[int, Any]) -> Evictor:
        """An evictor for a deep copy of the cache; copies of all layers share layer groups of their own.

        Args:
            memo: deepcopy's.
        """
        return self._copy_with(self.metadata, self.observation and self.observation.copied(), memo)

    def selected(self, rows: Sequence[int]) -> Evictor:
        """An evictor for copies of some rows."""
        return self._copy_with(self.metadata.of_rows(rows), self.observation and self.observation.of_rows(rows))

    def _copy_with(
        self, metadata: RowMetadata, observation: Observation | None, memo: dict[int, Any] | None = None
    ) -> Evictor:
        made = Evictor(self.layout, self.score, self.scope, None, self.layer, self.layer_allocation)
        made.metadata = metadata.copied(self.layer, made, memo)
        made.observation, made.paused = observation, self.paused
        return made

    def reset(self) -> None:
        """Begins a new session, of one sequence until there are more rows."""
        self._forget()
        self.paused = False
        self.metadata = self.metadata.new_session()
        if self.observation is not None:
            self.observation.begin(1)

    def keep(self, chosen: Sequence[int], rows: Sequence[Row]) -> None:
        """Drops all rows but the chosen, which stand at `rows`."""
        self._forget()
        self.metadata = self.metadata.of_rows(chosen).without_evicted(rows)
        self.metadata.kept.compute()
        if self.observation is not None:
            self.observation = self.observation.of_rows(chosen).compute()

    def extend(self, other: Evictor) -> None:
        """Adds copies of another's rows after its own."""
        self._forget()
        if self.observation is not None and other.observation is not None:
            rows, more = len(self.metadata.groups), len(other.metadata.groups)
            self.observation = self.observation.joined(rows, other.observation, more).compute()
        self.metadata = self.metadata.joined(other.metadata, self.layer, self)
        self.metadata.kept.compute()

    def regroup(self, old: LayerGroup, new: LayerGroup) -> None:
        """Makes the sequence of the old group that of the new one, while copies are made (`LayerGroup.of_copy`)."""
        self.metadata = self.metadata.with_group(old, new)

    def trimmed(self, rows: tuple[Row, ...]) -> None:
        """Called after a trim, when the rows stand at `rows`."""
        self._forget()
        self.metadata = self.metadata.standing_at(self.layout, rows)
        if self.observation is not None:
            self.observation.trimmed(rows)

    def _forget(self) -> None:
        """Drops the next compaction of this layer, and the decisions of its groups."""
        self._step = None
        for group in self.metadata.groups:
            group.forget()

    @property
    def communicator(self) -> CacheCommunicator:
        """The processes that hold other parts of the same sequences."""
        return self.metadata.groups[0].communicator

    def set_communicator(self, communicator: CacheCommunicator) -> None:
        """Sets the communicator of all rows."""
        for group in self.metadata.groups:
            group.communicator = communicator

    # --- statistics and tokens --------------------------------------------------------------------------------------

    @property
    def evicted(self) -> int:
        """Tokens that the present rows have evicted."""
        owner = self._owner()
        return 0 if owner is None else sum(max(0, row.evicted) for row in owner.rows)

    @property
    def compactions(self) -> int:
        """The largest number of compactions of any row."""
        return max(row.compactions for row in self.metadata.work)

    @property
    def seconds(self) -> float:
        """Duration of all compactions, for all rows together; see `Work`."""
        return sum(row.seconds for row in self.metadata.work)

    @property
    def nbytes(self) -> int:
        """Bytes of metadata and observed attention."""
        return self.metadata.nbytes + (0 if self.observation is None else self.observation.nbytes)

    def live_positions(self, row: Row, index: int) -> mx.array:
        """The position of each live slot of one row, (H', n); -1 in dead slots."""
        return self.metadata.kept.token_positions(self.layout, row, index)

    def tokens_by_head(self, row: Row, index: int) -> list[int]:
        """The number of tokens in each head of one row; one number where all heads hold the same."""
        own = (self.live_positions(row, index) >= 0).sum(axis=-1)
        return (own + row.shared).tolist()  # type: ignore[return-value]

    def live_scores(self, index: int) -> mx.array:
        """The present scores of all live slots of one row, (H', n)."""
        return self._new_step().scoring.live(index)

    def key_positions(self, plan: Plan) -> mx.array | None:
        """The position of each key that attention reads with the next write: (B, 1, 1, K); None if nothing was evicted.

        Raises:
            ValueError: heads or layers keep different tokens, so one mask cannot serve all of them.
        """
        if all(row.evicted <= 0 for row in plan.rows):
            return None
        if self.scope != "layers":
            raise SettingError(
                "this model requests a window in a layer with a budget and {share:=}, and shares the mask among layers "
                "and heads: use {share:='layers'}",
                share=self.scope,
            )
        return self.metadata.kept.key_positions(self.layout, plan)

    def counts(self, most: int, heads: int) -> Sequence[int]:
        """Evictable tokens that each head of this layer keeps by the table, of `most` that were read."""
        assert self._table is not None, "counts are fixed where there is a table"
        mean = self.layout.budget - self.layout.sinks - self.layout.keep_recent
        first, every = self.communicator.first_head(heads), self.communicator.total_heads(heads)
        return layer_counts(self._table, self.layer, mean, most, range(first, first + heads), every)

    def _keys_for(self, rows: tuple[Row, ...], call: Call | None = None) -> Keys:
        """The tokens that queries attend to, as a call has them or as they are stored."""
        live = [self.live_positions(row, i) for i, row in enumerate(rows)]
        return keys_of(self._contents()[1][0], live, call)

    def _contents(self) -> tuple[tuple[Row, ...], Buffers]:
        """Where the rows of the cache stand, and its buffers."""
        owner = self._owner()
        assert owner is not None
        assert owner.buffers is not None, "nothing was stored yet"
        return owner.rows, owner.buffers

    # --- attention ----------------------------------------------------------------------------------------------------

    @property
    def wants_attention(self) -> bool:
        """Whether attention over the cache must go through `attend`."""
        return self.score.wants is not None or self.own_lengths

    @property
    def own_lengths(self) -> bool:
        """Whether this layer or its heads may hold another number of tokens than others, and need their own mask."""
        return self.scope == "adaptive" or self.layer_allocation != "uniform"

    @property
    def uneven_heads(self) -> bool:
        """Whether heads of this layer may hold different numbers of tokens."""
        return uneven_heads(self.scope, self.layer_allocation)

    def attend(self, call: Call, rows: tuple[Row, ...], counts: tuple[int, ...] | None) -> mx.array:
        """(B, Hq, S, Dv): attention after an update, over what each head holds; observed where the score uses it.

        Args:
            rows: where they stand after the update.
            counts: how many of the S queries are of tokens of each row, padding follows; None is all of all rows.
        """
        call = self.masked(call, rows, counts)
        if self.second_pass is not None:
            return self.second_pass.attend(call, rows[0], self._contents()[1][0])
        return self.observed(call, call.forward(), rows, counts)

    def masked(self, call: Call, rows: tuple[Row, ...], counts: tuple[int, ...] | None) -> Call:
        """The call with the mask of this layer, where its heads may hold another number of tokens than others."""
        return call.changed(mask=self._masks.of(call, rows, counts, self.metadata.kept)) if self.own_lengths else call

    def observed(self, call: Call, answer: mx.array, rows: tuple[Row, ...], counts: tuple[int, ...] | None) -> mx.array:
        """The answer to a call, (B, Hq, S, Dv), whose queries are observed where the score uses them."""
        if self.observation is None:
            return answer
        return self.observation.see(call, answer, rows, counts, lambda: self._keys_for(rows, call))

    # --- two-pass prefill -------------------------------------------------------------------------------------------

    @property
    def wants_second_pass(self) -> bool:
        """Whether the score uses the attention that tokens receive when their text is read a second time."""
        return self.score.wants is not None and self.score.wants.reread

    def begin_second_pass(self, first: int, last: int) -> None:
        """Called before the tokens at positions [first, last) are repeated; all rows stand alike."""
        self.second_pass = SecondPass(self.layout, first, last, self._contents()[0][0].offset)

    def end_second_pass(self, complete: bool = True) -> None:
        """Called after the repetition was trimmed; if it is not complete, its attention is dropped."""
        second_pass, self.second_pass = self.second_pass, None
        if complete and second_pass is not None and second_pass.shares:
            self.metadata = self.metadata.with_second_pass(second_pass.shares)
            self._forget()

    # --- compaction -------------------------------------------------------------------------------------------------

    def compact_if_due(self, rows: tuple[Row, ...], on_demand: bool = False) -> tuple[Row, ...]:
        """Compacts every row that is due, or on demand every row above its budget; returns the rows after it.

        Args:
            rows: where they stand now.
            on_demand: also rows within the margin. Nothing is evicted while the evictor is paused.

        Raises:
            ValueError: a score that cannot be used, layers that have diverged, or layers or heads of different lengths
                without masks of their own; nothing has changed then.
        """
        layout = self.layout
        if len(rows) != len(self.metadata.groups):
            self.metadata = self.metadata.new_batch(len(rows), self.layer, self)
        if self.paused:
            return rows
        due = [i for i, row in enumerate(rows) if (layout.held(row) > layout.budget if on_demand else layout.due(row))]
        if self.own_lengths and not on_demand:
            self._masks.check_requested(bool(due))
        if not due:
            return rows
        assert not any(rows[index].shared for index in due), "see `SegmentedCache.before_write`"
        step = self._next_step()
        mx.eval([buffer.planes for buffer in step.buffers])  # pending computations are not counted in `seconds`
        started = time.perf_counter()
        moves, kept, after = step.result({i: self._plan(step, i) for i in due})
        kept.compute()
        move_slots(step.buffers, *moves)
        self._step = None
        if self.observation is not None:
            self.observation.moved(moves, [row.end for row in after])
        metadata = self.metadata.compacted(due, kept, moves.source.shape[2], time.perf_counter() - started)
        self.metadata = metadata.standing_at(layout, after)
        return after

    def _plan(self, step: CompactionStep, index: int) -> RowPlan:
        """What one row evicts, decided for all layers of its sequence."""
        row, group = step.rows[index], self.metadata.groups[index]
        if self.layer_allocation == "pyramid":  # layers are due at different times
            return step.plan_alone(index)
        if (decision := group.decision_at(row)) is None:
            layers = [
                LayerStep(layer, member._next_step(), member.metadata.groups.index(group))
                for layer, member in group.members(Evictor)
                if member._holds_tokens_of(group)
            ]
            decision = group.decide(row, layers, self.scope, self.layer_allocation)
        return decision.shared or decision.plans.get(self.layer) or step.plan_alone(index)

    def _holds_tokens_of(self, group: LayerGroup) -> bool:
        owner, groups = self._owner(), self.metadata.groups
        if owner is None or owner.buffers is None or group not in groups:
            return False
        return owner.rows[groups.index(group)].offset != 0

    def _next_step(self) -> CompactionStep:
        """The next compaction: the one made before, unless rows or buffers have changed."""
        if self._step is None or not self._step.is_of(*self._contents()):
            self._step = self._new_step()
        return self._step

    def _new_step(self) -> CompactionStep:
        rows, buffers = self._contents()
        if self.observation is not None:
            self.observation.settle(rows, lambda: self._keys_for(rows))
        kept, reread = self.metadata.kept, self.metadata.reread
        scoring = Scoring(
            self.layout, self.score, self.scope, rows, buffers, kept, self.observation, reread, self.layer
        )
        counts = None if self._table is None else self.counts
        return CompactionStep(self.layout, self.scope, rows, buffers, kept, scoring, counts)
