"""Metadata of the rows of one evictor, which a row keeps in other batches and copies.

Immutable: each method returns another `RowMetadata`. Methods with a `member` also make it a member of layer groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import mlx.core as mx

from mlx_kv.cache.eviction.allocation import Allocation, Scope
from mlx_kv.cache.eviction.kept_tokens import KeptTokens
from mlx_kv.cache.eviction.layer_group import LayerGroup, Regrouped
from mlx_kv.cache.eviction.two_pass import SecondPassShares
from mlx_kv.cache.layout import Budget, Row


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
    """What a loaded evictor needs besides its layout. Files hold it as a list of the same order.

    Attributes:
        score: its name.
        share: which heads and layers keep the same tokens.
        layer: which of its sequences' layers it evicts from.
        groups: the names of the layer groups, by row.
        positions, scores: as in `KeptTokens`.
        work: by row, each as in `Work`; of all rows together, as version 0.1.0 counted, three numbers.
        dead: as in `KeptTokens`.
        layers: "uniform", "pyramid", "global", or a table of shares (L, H).
        observed: what was observed of attention, as in `ObservedState`; None where nothing was.
        reread: by row, each as in `SecondPassShares`, or None; None where no row has any.
    """

    score: str
    share: Scope
    layer: int
    groups: list[str]
    positions: mx.array | None
    scores: mx.array | None
    work: list[Any]
    dead: mx.array | None = None
    layers: Allocation = "uniform"
    observed: Sequence[Any] | None = None
    reread: list[Any] | None = None

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
    kept: KeptTokens = KeptTokens()
    reread: tuple[SecondPassShares | None, ...] = ()

    @classmethod
    def from_state(cls, state: EvictorState, member: Regrouped) -> RowMetadata:
        """Rows that are copies of those of a state, in copies of their sequences.

        Args:
            member: the evictor that gets them.
        """
        return cls(
            tuple([LayerGroup.of_copy(name, state.layer, member) for name in state.groups]),
            state.work_by_row(),
            KeptTokens(state.positions, state.scores, state.dead),
            tuple([None if own is None else SecondPassShares(*own) for own in state.reread or ()]),
        )

    def copied(self, layer: int, member: Regrouped, memo: dict[int, Any] | None = None) -> RowMetadata:
        """The same in copies of the sequences.

        Args:
            layer, member: the evictor that gets them, and its layer.
            memo: deepcopy's.
        """
        copies = [LayerGroup.of_copy(group.name, layer, member, memo, group.communicator) for group in self.groups]
        return self._replace(groups=tuple(copies))

    def state(
        self,
        score: str,
        scope: Scope,
        layer: int,
        layer_allocation: Allocation,
        observed: Sequence[Any] | None,
    ) -> EvictorState:
        """The state of an evictor of these rows.

        Args:
            score, scope, layer, layer_allocation: its settings.
            observed: as in the state.
        """
        layers: Any = layer_allocation if isinstance(layer_allocation, str) else [list(row) for row in layer_allocation]
        reread = [None if own is None else list(own) for own in self.reread] if self.reread else None
        names, work, (positions, scores, dead) = [group.name for group in self.groups], list(self.work), self.kept
        return EvictorState(score, scope, layer, names, positions, scores, work, dead, layers, observed, reread)

    @property
    def nbytes(self) -> int:
        """Of all arrays."""
        return self.kept.nbytes + sum(own.received.nbytes for own in self.reread if own is not None)

    @property
    def _reread_by_row(self) -> tuple[SecondPassShares | None, ...]:
        return self.reread or (None,) * len(self.groups)

    # --- rows that come and go --------------------------------------------------------------------------------------

    def new_session(self) -> RowMetadata:
        """The sequence of the first row, which begins again."""
        return RowMetadata(self.groups[:1])

    def new_batch(self, rows: int, layer: int, member: Regrouped) -> RowMetadata:
        """As many sequences as rows, all of which begin; the first is that of the first row."""
        groups = tuple([self.groups[0].of_row(index) for index in range(rows)])
        for group in groups:
            group.join(layer, member)
        return RowMetadata(groups, (Work(),) * rows)

    def of_rows(self, chosen: Sequence[int]) -> RowMetadata:
        """Some of the rows, in this order."""
        groups, work = tuple([self.groups[row] for row in chosen]), tuple([self.work[row] for row in chosen])
        reread = tuple([self.reread[row] for row in chosen]) if self.reread else ()
        return RowMetadata(groups, work, self.kept.of_rows(chosen), reread)

    def joined(self, other: RowMetadata, layer: int, member: Regrouped) -> RowMetadata:
        """These rows, and after them copies of others."""
        communicator, rows, more = self.groups[0].communicator, len(self.groups), len(other.groups)
        copies = [LayerGroup.of_copy(group.name, layer, member, communicator=communicator) for group in other.groups]
        reread = self._reread_by_row + other._reread_by_row if self.reread or other.reread else ()
        kept = self.kept.joined(rows, other.kept, more)
        return RowMetadata((*self.groups, *copies), self.work + other.work, kept, reread)

    def with_group(self, old: LayerGroup, new: LayerGroup) -> RowMetadata:
        """The same rows, of which one belongs to another group."""
        return self._replace(groups=tuple([new if group is old else group for group in self.groups]))

    # --- tokens that come and go ------------------------------------------------------------------------------------

    def compacted(self, due: Sequence[int], kept: KeptTokens, moved: int, seconds: float) -> RowMetadata:
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
        return self._replace(reread=tuple([own if before is None else before.then(own) for before, own in pairs]))

    def standing_at(self, layout: Budget, rows: Sequence[Row]) -> RowMetadata:
        """The same rows after tokens were trimmed or evicted, without the second pass of tokens that are gone.

        Scores of tokens before the cut of a row that has evicted are in `kept`.
        """
        if not self.reread:
            return self
        pairs = zip(self.reread, rows, strict=True)
        reread = tuple([own and own.between(layout.ordered_from(row), row.offset) for own, row in pairs])
        return self._replace(reread=reread if any(reread) else ())

    def without_evicted(self, rows: Sequence[Row]) -> RowMetadata:
        """The same rows, without `kept` where none of them has evicted anything."""
        return self._replace(kept=KeptTokens()) if all(row.evicted <= 0 for row in rows) else self
