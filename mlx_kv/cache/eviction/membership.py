"""Which sequences the rows of one cache are, and what goes with a row into other batches.

Decides what rows that come, go or begin bring along: the layer group of their sequence, the work done for them, what is
known of their tokens. A membership never changes: each method gives another one. Those that take a `member` also join
it to its layer groups. Knows nothing about scores.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import mlx.core as mx

from mlx_kv.cache.eviction.allocation import Allocation, Granularity
from mlx_kv.cache.eviction.kept_tokens import KeptTokens
from mlx_kv.cache.eviction.layer_group import LayerGroup, Member
from mlx_kv.cache.eviction.peers import ALONE, Peers
from mlx_kv.cache.eviction.rereading import Reread
from mlx_kv.cache.layout import Budget, Row


class Work(NamedTuple):
    """What compactions did for one row, which takes it along into other batches.

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
        share: the granularity.
        layer: which of its sequences' layers it evicts from.
        groups: the names of the layer groups, by row.
        positions, scores: as in `KeptTokens`.
        work: by row, each as in `Work`; of all rows together, as version 0.1.0 counted, three numbers.
        dead: as in `KeptTokens`.
        layers: "uniform", "pyramid", "global", or a table of shares (L, H).
        observed: what was seen of attention, as in `ObservedState`; None where nothing was.
        reread: by row, each as in `Reread`, or None; None where no row has any.
    """

    score: str
    share: Granularity
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


class Membership(NamedTuple):
    """The rows of one evictor.

    Attributes:
        groups: of which sequence each row is.
        work: done for each row.
        kept: what is known of the tokens before the cut.
        reread: what tokens from the cut on received when their text was read once more, by row; empty where no row has
            been read again.
    """

    groups: tuple[LayerGroup, ...]
    work: tuple[Work, ...] = (Work(),)
    kept: KeptTokens = KeptTokens()
    reread: tuple[Reread | None, ...] = ()

    @classmethod
    def from_state(
        cls, state: EvictorState, member: Member, memo: dict[int, Any] | None = None, peers: Peers = ALONE
    ) -> Membership:
        """Rows that are copies of those of a state: their sequences are copies, too.

        Args:
            member: the evictor whose rows they become.
            memo: deepcopy's.
            peers: of the sequences.
        """
        return cls(
            tuple([LayerGroup.of_copy(name, state.layer, member, memo, peers) for name in state.groups]),
            state.work_by_row(),
            KeptTokens(state.positions, state.scores, state.dead),
            tuple([None if own is None else Reread(*own) for own in state.reread or ()]),
        )

    @property
    def nbytes(self) -> int:
        """Of all that is known of tokens."""
        return self.kept.nbytes + sum(own.received.nbytes for own in self.reread if own is not None)

    def first(self) -> Membership:
        """The sequence of the first row alone, begun anew."""
        return Membership(self.groups[:1])

    def new_batch(self, rows: int, layer: int, member: Member) -> Membership:
        """So many sequences that begin, the first of them that of the first row."""
        groups = tuple([self.groups[0].of_row(index) for index in range(rows)])
        for group in groups:
            group.join(layer, member)
        return Membership(groups, (Work(),) * rows)

    def of_rows(self, chosen: Sequence[int]) -> Membership:
        """Some of the rows, in this order."""
        groups, work = tuple([self.groups[row] for row in chosen]), tuple([self.work[row] for row in chosen])
        reread = tuple([self.reread[row] for row in chosen]) if self.reread else ()
        return Membership(groups, work, self.kept.of_rows(chosen), reread)

    def joined(self, other: Membership, layer: int, member: Member) -> Membership:
        """These rows, and after them copies of others."""
        peers = self.groups[0].peers
        more = tuple([LayerGroup.of_copy(group.name, layer, member, peers=peers) for group in other.groups])
        kept = self.kept.joined(len(self.groups), other.kept, len(more))
        reread: tuple[Reread | None, ...] = ()
        if self.reread or other.reread:
            reread = self._reread_by_row() + other._reread_by_row()
        return Membership(self.groups + more, self.work + other.work, kept, reread)

    def with_group(self, old: LayerGroup, new: LayerGroup) -> Membership:
        """The same rows, where the sequence of one group has become that of another."""
        return self._replace(groups=tuple([new if group is old else group for group in self.groups]))

    def compacted(self, due: Sequence[int], kept: KeptTokens, moved: int, seconds: float) -> Membership:
        """The same rows after a compaction of those that were due.

        Args:
            moved: slots of each of them.
            seconds: that it took for all of them.
        """
        work = [
            Work(row.moved + moved, row.compactions + 1, row.seconds + seconds / len(due)) if i in due else row
            for i, row in enumerate(self.work)
        ]
        return self._replace(work=tuple(work), kept=kept)

    def _reread_by_row(self) -> tuple[Reread | None, ...]:
        return self.reread or (None,) * len(self.groups)

    def with_reread(self, reread: Sequence[Reread]) -> Membership:
        """The same rows, where some tokens of each have been read again, after those that were before."""
        pairs = zip(self._reread_by_row(), reread, strict=True)
        return self._replace(reread=tuple([own if before is None else before.then(own) for before, own in pairs]))

    def where_they_stand(self, layout: Budget, rows: Sequence[Row]) -> Membership:
        """The same rows, once tokens were taken back or evicted: of those that are gone nothing is known any more.

        Scores of tokens before the cut of a row that has evicted are in `kept`.
        """
        if not self.reread:
            return self
        pairs = zip(self.reread, rows, strict=True)
        reread = tuple([own and own.between(layout.ordered_from(row), row.offset) for own, row in pairs])
        return self._replace(reread=reread if any(reread) else ())

    def without_evicted(self, rows: Sequence[Row]) -> Membership:
        """The same rows; where none has evicted anything, nothing is known of tokens."""
        return self._replace(kept=KeptTokens()) if all(row.evicted <= 0 for row in rows) else self
