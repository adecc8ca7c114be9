"""The evictors of the layers of a sequence: when to compact, the decision what goes, and the compaction.

Each cache has an `Evictor`. A `LayerGroup` stands for one sequence. Its members are the evictors of that sequence, one
for each layer; the evictor of a batch is a member of one group per row.

The group decides once per compaction: the first layer that is due passes the next compaction steps of all layers, and
the others use the plans that result. So no layer has changed when the scores of one cannot be used. Where other
processes hold heads or layers of the sequence, the scores of all are gathered first.

mlx-lm merges and extracts caches layer by layer, so copies find their group by a rule: layers are copied in ascending
order, one copy of the sequence after the other. Layer 4 joins the copy that ends with layer 3 or lower; layer 0 begins
the next copy. All that one deepcopy copies stays together, in any order. A copy that lacks layers of its sequence
raises where all layers must decide together.
B rows, H KV heads; H' is H where every head keeps its own tokens (share="head" or "adaptive"), else 1.
"""

from __future__ import annotations

import time
import uuid
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Annotated, Any, ClassVar, NamedTuple, Protocol

import mlx.core as mx
from msgspec import Meta

from mlx_kv.cache.buffers import Buffers, move_slots
from mlx_kv.cache.checks import Count
from mlx_kv.cache.eviction.allocation import Allocation, Scope, checked_allocation, table_of, token_counts, uneven_heads
from mlx_kv.cache.eviction.compaction import CompactionStep, RowPlan
from mlx_kv.cache.eviction.scores import Function, Score, evaluate_together, find_score
from mlx_kv.cache.eviction.scoring import Observation, ObservedState, Scoring, SecondPass, SecondPassShares
from mlx_kv.cache.eviction.slot_tokens import LayerMasks, SlotTokens
from mlx_kv.cache.layout import Budget, Row
from mlx_kv.cache.plan import Plan
from mlx_kv.cache.protocol import Call
from mlx_kv.communicator import LOCAL, CacheCommunicator
from mlx_kv.settings import SettingError

TOGETHER_BYTES = 2**22  # of the layers whose scores are evaluated at once


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
        layer_allocation: the option `layers`: "uniform", all layers have the same budget; or a table of shares, (L, H)
            or (L, 1) (`allocation`).

    Attributes:
        metadata: of the rows.
        table: the share of each head, or of each layer where its heads keep the same tokens; None without a table.
        observation: of the attention over the tokens; None where the score does not use it.
        paused: whether nothing is evicted for now.

    Raises:
        ValueError: an unknown score. `allocation.checked_allocation` checks the scope and the allocation together.
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
        self.layer_allocation = layer_allocation
        self.table = table_of(scope, self.layer_allocation)
        self.metadata = RowMetadata((layer_group or LayerGroup(),))
        self.metadata.groups[0].join(layer, self)
        wants = self.score.wants
        self.observation = Observation(wants, layout.keep_recent) if wants and wants.observes else None
        self.paused = False
        self._owner: Callable[[], Owner | None] = lambda: None
        self._step: CompactionStep | None = None  # the next compaction, with its scores, while it is valid
        self._masks = LayerMasks(layout)
        self.second_pass: SecondPass | None = None

    def belong_to(self, owner: Owner) -> None:
        """Sets the cache, as a weak reference: the cache references its evictor."""
        self._owner = weakref.ref(owner)

    # --- copies, states and rows ------------------------------------------------------------------------------------

    @property
    def state(self) -> EvictorState:
        """What a loaded cache needs besides its layout."""
        rows, allocation = self.metadata, self.layer_allocation
        return EvictorState(
            self.score.name,
            self.scope,
            self.layer,
            [group.name for group in rows.groups],
            rows.kept.positions,
            rows.kept.scores,
            list(rows.work),
            rows.kept.dead,
            allocation if isinstance(allocation, str) else [list(row) for row in allocation],
            None if self.observation is None else self.observation.state(),
            list(rows.reread) if rows.reread else None,
        )

    @classmethod
    def from_state(cls, layout: Budget, state: Sequence[Any], score: Score | None = None) -> Evictor:
        """An evictor of copies of the same rows, in copies of their sequences.

        Args:
            state: an `EvictorState`, or a list of the same.
            score: None finds it by its name.

        Raises:
            ValueError: the score is not registered in this process.
        """
        saved = EvictorState(*state)
        allocation = checked_allocation(saved.share, saved.layers)
        evictor = cls(layout, score or saved.score, saved.share, None, saved.layer, allocation)
        evictor.metadata = RowMetadata(
            tuple([LayerGroup.of_copy(name, saved.layer, evictor) for name in saved.groups]),
            saved.work_by_row(),
            SlotTokens(saved.positions, saved.scores, saved.dead),
            tuple([None if shares is None else SecondPassShares(*shares) for shares in saved.reread or ()]),
        )
        if evictor.observation is not None:
            evictor.observation.resume(saved.observed, len(saved.groups))
        return evictor

    def copied(self, memo: dict[int, Any]) -> Evictor:
        """An evictor for a deep copy of the cache; copies of all layers share layer groups of their own.

        Args:
            memo: deepcopy's.
        """
        return self._copy_with(self.metadata, self.observation and self.observation.copy(), memo)

    def selected(self, rows: Sequence[int]) -> Evictor:
        """An evictor for copies of some rows."""
        return self._copy_with(self.metadata.of_rows(rows), self.observation and self.observation.of_rows(rows))

    def _copy_with(
        self, metadata: RowMetadata, observation: Observation | None, memo: dict[int, Any] | None = None
    ) -> Evictor:
        evictor = Evictor(self.layout, self.score, self.scope, None, self.layer, self.layer_allocation)
        groups = [
            LayerGroup.of_copy(group.name, self.layer, evictor, memo, group.communicator) for group in metadata.groups
        ]
        evictor.metadata = metadata._replace(groups=tuple(groups))
        evictor.observation, evictor.paused = observation, self.paused
        return evictor

    def reset(self) -> None:
        """Begins a new session, of one sequence until there are more rows: that of the first row."""
        self._forget()
        self.paused = False
        self.metadata = RowMetadata(self.metadata.groups[:1])
        if self.observation is not None:
            self.observation.begin(1)

    def keep(self, chosen: Sequence[int], rows: Sequence[Row]) -> None:
        """Drops all rows but the chosen, which stand at `rows`."""
        self._forget()
        self.metadata = self.metadata.of_rows(chosen)
        if all(row.evicted <= 0 for row in rows):
            self.metadata = self.metadata._replace(kept=SlotTokens())
        self.metadata.kept.compute()
        if self.observation is not None:
            self.observation = self.observation.of_rows(chosen).compute()

    def extend(self, other: Evictor) -> None:
        """Adds copies of another's rows after its own."""
        self._forget()
        if self.observation is not None and other.observation is not None:
            rows, more = len(self.metadata.groups), len(other.metadata.groups)
            self.observation = self.observation.join(rows, other.observation, more).compute()
        copies = [
            LayerGroup.of_copy(group.name, self.layer, self, communicator=self.communicator)
            for group in other.metadata.groups
        ]
        self.metadata = self.metadata.join(other.metadata, copies)
        self.metadata.kept.compute()

    def trimmed(self, rows: tuple[Row, ...]) -> None:
        """Called after a trim, when the rows stand at `rows`."""
        self._forget()
        self.metadata = self.metadata.standing_at(self.layout, rows)
        if self.observation is not None:
            self.observation.trim(rows)

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
        kept = self.metadata.kept
        positions = kept.live_positions(self.layout, row, index)
        if kept.dead is None:
            return positions
        return mx.where(kept.alive(self.layout, row, index, positions.shape[1]), positions, -1)

    def tokens_by_head(self, row: Row, index: int) -> list[int]:
        """The number of tokens in each head of one row; one number where all heads hold the same."""
        counts = (self.live_positions(row, index) >= 0).sum(axis=-1)
        return (counts + row.shared).tolist()  # type: ignore[return-value]

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
        """Evictable tokens that each head of this layer keeps by the table, of `most` that were read.

        Raises:
            ValueError: a table for another number of heads.
        """
        assert self.table is not None, "counts are fixed where there is a table"
        mean = self.layout.budget - self.layout.sinks - self.layout.keep_recent
        head_counts = token_counts(self.table, mean, most)[self.layer]
        first, every = self.communicator.first_head(heads), self.communicator.total_heads(heads)
        if len(head_counts) not in (1, every):
            raise ValueError(
                f"the table of budgets has {len(head_counts)} numbers in a row, and a layer has {every} KV heads: give "
                "a number for each head, or one for all of them"
            )
        return head_counts * heads if len(head_counts) == 1 else head_counts[first : first + heads]

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
        return self.score.wants is not None or self.ragged_heads

    @property
    def ragged_heads(self) -> bool:
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
        return call.changed(mask=self._masks.of(call, rows, counts, self.metadata.kept)) if self.ragged_heads else call

    def observed(self, call: Call, answer: mx.array, rows: tuple[Row, ...], counts: tuple[int, ...] | None) -> mx.array:
        """The answer to a call, (B, Hq, S, Dv), whose queries are observed where the score uses them."""
        if self.observation is None:
            return answer
        return self.observation.see(call, answer, rows, counts)

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
            groups = [self.metadata.groups[0].of_row(index) for index in range(len(rows))]
            for group in groups:
                group.join(self.layer, self)
            self.metadata = RowMetadata(tuple(groups), (Work(),) * len(rows))
        if self.paused:
            return rows
        due = [
            i
            for i, row in enumerate(rows)
            if (layout.visible_tokens(row) > layout.budget if on_demand else layout.due(row))
        ]
        if self.ragged_heads and not on_demand:
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
        metadata = self.metadata.compacted(due, kept, moves.source.shape[2], time.perf_counter() - started)
        self.metadata = metadata.standing_at(layout, after)
        return after

    def _plan(self, step: CompactionStep, index: int) -> RowPlan:
        """What one row evicts, decided for all layers of its sequence."""
        row, group = step.rows[index], self.metadata.groups[index]
        if (decision := group.decision_at(row)) is None:
            layers = [
                LayerStep(layer, member._next_step(), member.metadata.groups.index(group))
                for layer, member in group.members()
                if member._holds_tokens_of(group)
            ]
            decision = group.decide(row, layers, self.scope)
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
            self.observation.settle(rows)
        cache = self.layout, self.score, self.scope, rows, buffers, self.metadata.kept
        scoring = Scoring(*cache, self.observation, self.metadata.reread, self.layer)
        return CompactionStep(scoring, None if self.table is None else self.counts)


# --- the rows of one evictor ------------------------------------------------------------------------------------------


class Work(NamedTuple):
    """What compactions did for one row.

    Attributes:
        moved: slots of one head: as many as of the row and head of the batch of which most were moved.
        compactions: that it took part in.
        seconds: of them, shared among the rows that took part; without what the device copies after that.
    """

    moved: int = 0
    compactions: int = 0
    seconds: float = 0.0


class EvictorState(NamedTuple):
    """What a loaded evictor needs besides its layout. Files hold it as a list of the same order, checked by msgspec.

    Attributes:
        score: its name.
        share: which heads and layers keep the same tokens.
        layer: which of its sequences' layers it evicts from.
        groups: the names of the layer groups, by row.
        positions, scores: as in `SlotTokens`.
        work: by row, each as in `Work`; of all rows together, as version 0.1.0 counted, three numbers.
        dead: as in `SlotTokens`.
        layers: "uniform", or a table of shares (L, H).
        observed: what was observed of attention, as in `ObservedState`; None where nothing was.
        reread: by row, each as in `SecondPassShares`, or None; None where no row has any.
    """

    score: str
    share: Scope
    layer: Count
    groups: list[str]
    positions: mx.array | None
    scores: mx.array | None
    work: Annotated[list[Any], Meta(min_length=1)]
    dead: mx.array | None = None
    layers: str | list[list[float]] = "uniform"
    observed: ObservedState | None = None
    reread: list[SecondPassShares | None] | None = None

    def work_by_row(self) -> tuple[Work, ...]:
        if isinstance(self.work[0], Sequence):
            return tuple([Work(*row) for row in self.work])
        moved, compactions, seconds = self.work
        return Work(moved, compactions, seconds), *[Work(0, compactions)] * (len(self.groups) - 1)


class RowMetadata(NamedTuple):
    """The rows of one evictor.

    Attributes:
        groups: the sequence of each row.
        work: of its compactions, by row.
        kept: positions and scores of the tokens before the cut.
        reread: what tokens from the cut on received in a second pass, by row; empty where no row had one.
    """

    groups: tuple[LayerGroup, ...]
    work: tuple[Work, ...] = (Work(),)
    kept: SlotTokens = SlotTokens()
    reread: tuple[SecondPassShares | None, ...] = ()

    @property
    def nbytes(self) -> int:
        """Of all arrays."""
        return self.kept.nbytes + sum(shares.received.nbytes for shares in self.reread if shares is not None)

    @property
    def _reread_by_row(self) -> tuple[SecondPassShares | None, ...]:
        return self.reread or (None,) * len(self.groups)

    # --- rows that come and go --------------------------------------------------------------------------------------

    def of_rows(self, chosen: Sequence[int]) -> RowMetadata:
        """Some of the rows, in this order."""
        groups, work = tuple([self.groups[row] for row in chosen]), tuple([self.work[row] for row in chosen])
        reread = tuple([self.reread[row] for row in chosen]) if self.reread else ()
        return RowMetadata(groups, work, self.kept.of_rows(chosen), reread)

    def join(self, other: RowMetadata, copies: Sequence[LayerGroup]) -> RowMetadata:
        """These rows, and after them copies of others, in other groups."""
        rows, more = len(self.groups), len(other.groups)
        reread = self._reread_by_row + other._reread_by_row if self.reread or other.reread else ()
        kept = self.kept.joined(rows, other.kept, more)
        return RowMetadata((*self.groups, *copies), self.work + other.work, kept, reread)

    # --- tokens that come and go ------------------------------------------------------------------------------------

    def compacted(self, due: Sequence[int], kept: SlotTokens, moved: int, seconds: float) -> RowMetadata:
        """The same rows after a compaction of some.

        Args:
            due: the rows that were compacted.
            moved: slots of each of them.
            seconds: that it took for all of them.
        """
        work = [
            Work(row.moved + moved, row.compactions + 1, row.seconds + seconds / len(due)) if i in due else row
            for i, row in enumerate(self.work)
        ]
        return self._replace(work=tuple(work), kept=kept)

    def with_second_pass(self, reread: Sequence[SecondPassShares]) -> RowMetadata:
        """The same rows after a second pass over some tokens of each, which follow those of earlier passes."""
        pairs = zip(self._reread_by_row, reread, strict=True)
        return self._replace(reread=tuple([new if before is None else before.then(new) for before, new in pairs]))

    def standing_at(self, layout: Budget, rows: Sequence[Row]) -> RowMetadata:
        """The same rows after tokens were trimmed or evicted, without the second pass of tokens that are gone.

        Scores of tokens before the cut of a row that has evicted are in `kept`.
        """
        if not self.reread:
            return self
        pairs = zip(self.reread, rows, strict=True)
        reread = tuple([shares and shares.between(layout.ordered_from(row), row.offset) for shares, row in pairs])
        return self._replace(reread=reread if any(reread) else ())


# --- the layers of one sequence ---------------------------------------------------------------------------------------


class LayerStep(NamedTuple):
    """One layer, as input of a decision.

    Attributes:
        layer: its number.
        step: its next compaction.
        row_index: the row of that step that is the sequence.
    """

    layer: int
    step: CompactionStep
    row_index: int

    @property
    def row(self) -> Row:
        """Where the sequence stands in this layer."""
        return self.step.rows[self.row_index]


class Decision(NamedTuple):
    """What the layers of a sequence evict.

    Attributes:
        row: where they stand before it.
        shared: the plan of every layer, also of one that held no tokens when it was made; None where plans differ.
        plans: by layer, where they differ.
    """

    row: Row
    shared: RowPlan | None
    plans: Mapping[int, RowPlan]


class LayerGroup:
    """The layers of one sequence.

    Attributes:
        name: unique; copies and files refer to the sequence by it.
        communicator: with the processes that hold other parts of the sequence; copies have the same.
    """

    def __init__(self, communicator: CacheCommunicator = LOCAL, source: SequenceCopies | None = None) -> None:
        """
        Args:
            communicator: as the attribute.
            source: the copies of which this is one, if it is a copy.
        """
        self.name, self.communicator = uuid.uuid4().hex, communicator
        # Weak: evictors reference their groups, and the memory of a cache is to be freed without a garbage collection.
        self._members: dict[int, weakref.ref[Evictor]] = {}  # by layer, also of caches that were deleted
        self._required = frozenset() if source is None else frozenset(source.layers)
        self._copies = SequenceCopies(self.name, self._required)
        self._source = source  # kept alive: the next layer of this copy finds it by its name
        self._decision: Decision | None = None
        # The groups of a new batch's other rows, by row: every layer gets the same.
        self._of_rows: weakref.WeakValueDictionary[int, LayerGroup] = weakref.WeakValueDictionary()

    # --- members ----------------------------------------------------------------------------------------------------

    def join(self, layer: int, member: Evictor) -> None:
        """Makes an evictor the member of one layer."""
        self._members[layer] = weakref.ref(member)
        self._copies.layers.add(layer)

    def members(self) -> list[tuple[int, Evictor]]:
        """The layers that still exist, in ascending order, and their evictors."""
        members = [(layer, ref()) for layer, ref in sorted(self._members.items())]
        return [(layer, member) for layer, member in members if member is not None]

    def of_row(self, index: int) -> LayerGroup:
        """The group of another row of a new batch that has this group in its first row; the same in every layer."""
        if index == 0:
            return self
        group = self._of_rows.get(index) or LayerGroup(self.communicator)
        self._of_rows[index] = group
        return group

    # --- copies -----------------------------------------------------------------------------------------------------

    @classmethod
    def of_copy(
        cls,
        name: str,
        layer: int,
        member: Evictor,
        memo: dict[Any, Any] | None = None,
        communicator: CacheCommunicator = LOCAL,
    ) -> LayerGroup:
        """The group for a copy of one layer of the sequence `name`, by the rule at the top of this module.

        Args:
            memo: deepcopy's, which is the same for all layers that one call copies: such layers stay together. If
                the copy already has one of them, all of them move to a new copy.
            communicator: of the sequence.
        """
        copies = SequenceCopies.named(name)
        together: dict[int, Evictor] = {}  # the layers that this deepcopy has copied so far
        if memo is not None and name in memo:
            group: LayerGroup
            group, together = memo[name]
        else:
            group = copies.group_for(layer, member, communicator)
        if layer in group._members:
            previous, group = group, copies.begin(communicator)
            for other, copied in together.items():
                del previous._members[other]
                group.join(other, copied)
                groups = tuple([group if each is previous else each for each in copied.metadata.groups])
                copied.metadata = copied.metadata._replace(groups=groups)
        group.join(layer, member)
        together[layer] = member
        if memo is not None:
            memo[name] = group, together
        return group

    # --- decisions --------------------------------------------------------------------------------------------------

    def forget(self) -> None:
        """Drops the last decision, after a trim, a reset or a change of rows."""
        self._decision = None

    def decision_at(self, row: Row) -> Decision | None:
        """The decision of layers that stand at `row`, if there is one already."""
        return self._decision if self._decision is not None and _in_step(self._decision.row, row) else None

    def decide(self, row: Row, layers: Sequence[LayerStep], scope: Scope) -> Decision:
        """Decides what every layer evicts.

        Args:
            row: where the layer stands that is due.
            layers: all layers of the sequence that hold tokens.
            scope: which tokens are kept together.

        Raises:
            ValueError: layers that stand elsewhere or were not copied with this one, or scores that cannot be used;
                nothing has changed then.
        """
        if scope == "layers":
            self._check_complete()
        check_in_step(row, layers)
        shared: RowPlan | None = None
        plans: dict[int, RowPlan] = {}
        self._gather_heads(scope, layers)
        if scope == "layers":
            shared = layers[0].step.plan_of_scores(layers[0].row_index, self._sum_of_layers(layers))
        else:
            plans = {each.layer: each.step.plan_alone(each.row_index) for each in layers}
        self._decision = Decision(row, shared, plans)
        return self._decision

    def _gather_heads(self, scope: Scope, layers: Sequence[LayerStep]) -> None:
        """Replaces the scores of the heads here by those of all heads, where other processes have some."""
        if not self.communicator.needs_all_heads(scope):
            return
        head_scores = [(each, each.step.scoring.of_heads(each.row_index)) for each in layers]
        missing = [(each, scores) for each, scores in head_scores if scores is not None]
        local_scores = list(
            evaluate_together((x for _, x in missing), layers[0].step.nbytes, TOGETHER_BYTES, at_once=True)
        )
        gathered = self.communicator.gather_heads(local_scores) if local_scores else []
        for (each, _), scores in zip(missing, gathered, strict=True):
            each.step.scoring.set_heads(each.row_index, scores)

    def _sum_of_layers(self, layers: Sequence[LayerStep]) -> mx.array:
        """The scores of all layers, (1, m), each scaled so that layers are comparable; added in the order of layers."""
        each_layer = (each.step.scoring.standardised(each.row_index) for each in layers)
        here = evaluate_together(each_layer, layers[0].step.nbytes, TOGETHER_BYTES, at_once=True)
        total = mx.zeros(1)
        for scores in self.communicator.gather_layers(list(here)) if self.communicator.splits_layers else here:
            total = total + scores
        return total

    def _check_complete(self) -> None:
        """Raises ValueError if layers of the sequence that this is a copy of were not copied into it."""
        if missing := self._required - self._members.keys():
            here, lacking = (", ".join(map(str, sorted(layers))) for layers in (self._members, missing))
            raise SettingError(
                "layer {} of a sequence was copied without layer {}, and they must evict the same tokens: copy all "
                "layers in their order, one copy after the other, or use {share:='layer'}",
                *(here, lacking),
            )


def check_in_step(row: Row, layers: Sequence[LayerStep]) -> None:
    """Raises ValueError unless every layer stands where `row` does."""
    if all(_in_step(each.row, row) for each in layers):
        return
    layers_by_tokens: dict[str, list[str]] = {}
    for each in layers:
        layers_by_tokens.setdefault(f"{each.row.end} of {each.row.offset}", []).append(str(each.layer))
    tokens = "; ".join(f"{kept} tokens in layer {', '.join(numbers)}" for kept, numbers in layers_by_tokens.items())
    raise ValueError(
        f"the layers of one sequence have diverged, and cannot decide together what to evict: they hold {tokens}. "
        "Trim all layers alike and copy them together"
    )


def _in_step(row: Row, other: Row) -> bool:
    """Whether two layers have read and evicted as many tokens; their heads may each hold other ones."""
    return (row.evicted, row.offset) == (other.evicted, other.offset)


class SequenceCopies:
    """The copies of one sequence that are being made. Found by name, which is all that states and files record.

    Attributes:
        layers: of the sequence.
    """

    _by_name: ClassVar[weakref.WeakValueDictionary[str, SequenceCopies]] = weakref.WeakValueDictionary()

    def __init__(self, name: str, layers: Iterable[int] = ()) -> None:
        self.layers = set(layers)
        # The last copy, by how many copies come before it in one batch, as where a prompt is merged with itself.
        self._groups: dict[int, weakref.ref[LayerGroup]] = {}
        self._by_name[name] = self

    @classmethod
    def named(cls, name: str) -> SequenceCopies:
        """The copies of a sequence, which may have been in another process."""
        return cls._by_name.get(name) or cls(name)

    def group_for(self, layer: int, member: Evictor, communicator: CacheCommunicator) -> LayerGroup:
        """The copy that a layer completes, or a new one.

        Args:
            member: the evictor that gets the copy, with the copies that it has.
        """
        number = sum(group._source is self for group in member.metadata.groups)
        group = self._groups.get(number, lambda: None)()
        if group is not None and layer > max(group._members):
            return group
        return self.begin(communicator, number)

    def begin(self, communicator: CacheCommunicator, number: int = 0) -> LayerGroup:
        """A new copy, which the layers that follow join."""
        group = LayerGroup(communicator, self)
        self._groups = {before: other for before, other in self._groups.items() if before < number}
        self._groups[number] = weakref.ref(group)
        return group
