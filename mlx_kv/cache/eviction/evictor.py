"""The part of a cache that evicts: scores its tokens, and has its buffers compacted.

One evictor belongs to one cache, of one layer. It keeps what must be known of tokens that no longer lie in order: their
positions, and their scores where those are asked for once. Both cover the slots before the cut; from there on position
is slot - start, and scores are not needed yet. Knows nothing about updates, masks or growth.
B rows, H KV heads; H' is H where every head keeps its own tokens (share="head"), else 1.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, Protocol, get_args

import mlx.core as mx

from mlx_kv.cache.buffers import SlotBuffer
from mlx_kv.cache.codecs import Planes
from mlx_kv.cache.eviction.compaction import hole_moves, lowest, moved, padded, slide
from mlx_kv.cache.eviction.layer_group import LayerGroup, Moves
from mlx_kv.cache.eviction.scores import Function, Score, find_score
from mlx_kv.cache.layout import Budget, Plan, Row, count_slots
from mlx_kv.cache.view import CacheView

Granularity = Literal["layers", "layer", "head"]
Buffers = tuple[SlotBuffer, SlotBuffer]


class Owner(Protocol):
    """The cache that an evictor belongs to."""

    @property
    def view(self) -> CacheView: ...


class Work(NamedTuple):
    """What compactions did for one row, which takes it along into other batches.

    Attributes:
        moved: slots.
        compactions: that it took part in.
        seconds: of them, shared among the rows that took part.
    """

    moved: int = 0
    compactions: int = 0
    seconds: float = 0.0


class Evictor:
    """Compacts the rows of one cache.

    Args:
        layout: the budget.
        score: what to keep, a name or a function; see `mlx_kv.cache.eviction.scores`.
        share: which tokens are kept together: the same in all "layers", each "layer" its own, each "head" its own.
        layer_group, layer: the sequence, and which of its layers this is.

    Raises:
        ValueError: an unknown score or share.
    """

    def __init__(
        self,
        layout: Budget,
        score: str | Function | Score = "key_diff",
        share: Granularity = "layers",
        layer_group: LayerGroup | None = None,
        layer: int = 0,
    ) -> None:
        if share not in get_args(Granularity):
            raise ValueError(f"share is {share!r}: choose one of {', '.join(get_args(Granularity))}")
        self.layout, self.score, self.share, self.layer = layout, find_score(score), share, layer
        self.layer_groups: tuple[LayerGroup, ...] = (layer_group or LayerGroup(),)
        self.layer_groups[0].join(layer, self)
        self.positions: mx.array | None = None  # (B, H', cut)
        self.scores: mx.array | None = None  # (B, H', cut), of a score that is asked for once per token
        self.work: tuple[Work, ...] = (Work(),)  # by row
        self._owner: Any = lambda: None
        # What was scored for the step that comes, by row; rows that all stand alike have one entry.
        self._scored: dict[tuple[Row, int], mx.array] = {}
        self._decided: dict[tuple[Row, int], Moves] = {}

    # --- belonging ------------------------------------------------------------------------------------------------

    def belong_to(self, owner: Owner) -> None:
        self._owner = weakref.ref(owner)

    def copied(self, memo: dict[int, Any]) -> Evictor:
        """An evictor for a deep copy of the cache; copies of all layers share layer_groups of their own.

        Args:
            memo: deepcopy's.
        """
        return Evictor.from_state(self.layout, self.state, self.score, memo)

    def change(self, old: LayerGroup, new: LayerGroup) -> None:
        self.layer_groups = tuple([new if layer_group is old else layer_group for layer_group in self.layer_groups])

    @property
    def state(self) -> list[Any]:
        """What a loaded cache needs besides its layout."""
        names = [layer_group.name for layer_group in self.layer_groups]
        work = [list(row) for row in self.work]
        return [self.score.name, self.share, self.layer, names, self.positions, self.scores, work]

    @classmethod
    def from_state(
        cls, layout: Budget, state: list[Any], score: Score | None = None, memo: dict[int, Any] | None = None
    ) -> Evictor:
        """Raises ValueError if the score is one that nobody registered here."""
        name, share, layer, names, positions, scores, work = state
        made = cls(layout, score or name, share, LayerGroup(), layer)
        made.layer_groups = tuple([LayerGroup.joined(name, layer, made, memo) for name in names])
        made.positions, made.scores = positions, scores
        if not isinstance(work[0], Sequence):  # of all rows together, as version 0.1.0 counted
            moved, compactions, seconds = work
            work = [(moved, compactions, seconds), *[(0, compactions, 0.0)] * (len(names) - 1)]
        made.work = tuple([Work(*row) for row in work])
        return made

    def reset(self) -> None:
        """A new session begins, of one sequence until more are seen."""
        self.forget()
        self.layer_groups, self.work = self.layer_groups[:1], (Work(),)
        self.positions = self.scores = None

    def _begin_batch(self, rows: int) -> None:
        """A new batch of so many sequences begins."""
        self.layer_groups = tuple([self.layer_groups[0].for_row(index) for index in range(rows)])
        for layer_group in self.layer_groups:
            layer_group.join(self.layer, self)
        self.work = (Work(),) * rows
        self.positions = self.scores = None

    def selected(self, rows: Sequence[int]) -> Evictor:
        """An evictor for copies of some rows."""
        name, share, layer, names, positions, scores, work = self.state
        index = mx.array(list(rows))
        positions, scores = (None if x is None else x[index] for x in (positions, scores))
        state = [name, share, layer, [names[row] for row in rows], positions, scores, [work[row] for row in rows]]
        return Evictor.from_state(self.layout, state, self.score)

    def keep(self, chosen: Sequence[int], rows: Sequence[Row]) -> None:
        """Lets all rows go but the chosen, which then stand as `rows` say."""
        self.forget()
        index = mx.array(list(chosen))
        self.layer_groups = tuple([self.layer_groups[row] for row in chosen])
        self.work = tuple([self.work[row] for row in chosen])
        if all(row.start >= 0 for row in rows):
            self.positions = self.scores = None
        self.positions, self.scores = (None if x is None else x[index] for x in (self.positions, self.scores))
        self._compute()

    def _compute(self) -> None:
        """Rows may come and go for long before the next compaction: what is known of them must not become a chain."""
        mx.async_eval(self.positions, self.scores)  # type: ignore[no-untyped-call]

    def extend(self, other: Evictor) -> None:
        """Takes copies of another's rows, after its own."""
        self.forget()
        counts = len(self.layer_groups), len(other.layer_groups)
        self.layer_groups += tuple(
            [LayerGroup.joined(layer_group.name, self.layer, self) for layer_group in other.layer_groups]
        )

        def both(own: mx.array | None, more: mx.array | None) -> mx.array | None:
            like = own if own is not None else more
            if like is None:
                return None
            parts = [
                mx.zeros((count, *like.shape[1:]), like.dtype) if x is None else x
                for x, count in zip((own, more), counts, strict=True)
            ]
            return mx.concatenate(parts)

        self.positions, self.scores = both(self.positions, other.positions), both(self.scores, other.scores)
        self._compute()
        self.work += other.work

    def forget(self) -> None:
        """Tokens were taken back: nothing that was worked out for the next compaction holds."""
        self._scored.clear()
        self._decided.clear()
        for layer_group in self.layer_groups:
            layer_group.forget()

    @property
    def nbytes(self) -> int:
        return sum(x.nbytes for x in (self.positions, self.scores) if x is not None)

    # --- what is known of tokens ------------------------------------------------------------------------------------

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

    def row(self, layer_group: LayerGroup) -> Row:
        owner = self._owner()
        if owner is None or owner.view.buffers is None or layer_group not in self.layer_groups:
            return Row()
        rows: tuple[Row, ...] = owner.view.rows
        return rows[self.layer_groups.index(layer_group)]

    def live_positions(self, row: Row, index: int) -> mx.array:
        """The position of each live slot of one row, (H', n)."""
        n, cut = max(0, row.end), self.layout.cut
        if row.start >= 0 or self.positions is None:
            return mx.arange(n, dtype=mx.int32)[None]
        kept = self.positions[index]  # (H', cut)
        rest = mx.broadcast_to(mx.arange(cut, n, dtype=mx.int32) - row.start, (kept.shape[0], n - cut))
        return mx.concatenate([kept, rest], axis=1)

    def key_positions(self, plan: Plan) -> mx.array | None:
        """The position of each key that attention reads with the next write: (B, 1, 1, K); None if nothing was evicted.

        Raises:
            ValueError: heads or layers keep different tokens, and one mask for all of them cannot say so.
        """
        if all(row.start >= 0 for row in plan.rows):
            return None
        if self.share != "layers":
            raise ValueError(
                f"this model asks for a window in a layer with a budget and share={self.share!r}, and shares the mask "
                "among layers and heads: use share='layers'"
            )
        read = count_slots(plan.ranges)
        lines = []
        for i, (row, new) in enumerate(zip(plan.rows, plan.counts, strict=True)):
            line = mx.concatenate([self.live_positions(row, i)[0], mx.arange(row.offset, row.offset + new)])
            lines.append(mx.pad(line, (0, read - line.size), constant_values=mx.array(-1)))
        return mx.stack(lines)[:, None, None]

    def evictable_scores(self, layer_group: LayerGroup) -> mx.array:
        """The scores of the evictable slots of one sequence, (1, n), of mean 0 and deviation 1.

        Layers with large norms would decide alone otherwise.
        """
        row = self.row(layer_group)
        scores = self._evictable(row, self.layer_groups.index(layer_group))
        centred = scores - scores.mean(axis=-1, keepdims=True)
        return centred / mx.maximum(scores.std(axis=-1, keepdims=True), 1e-12)

    def live_scores(self, index: int) -> mx.array:
        """The scores of all live slots of one row, (H', n), as they are now."""
        row, buffers = self._owner().view.rows[index], self._owner().view.buffers
        return self._combined(self._asked(buffers, row, index, 0, row.end))[0]

    def _evictable(self, row: Row, index: int) -> mx.array:
        """The scores (H', n - keep_recent - sinks) of the evictable slots of one row."""
        return self._from_slot_0(row, index)[:, self.layout.sinks : row.end - self.layout.keep_recent]

    def _from_slot_0(self, row: Row, index: int) -> mx.array:
        """The scores (H', n) of one row, at least up to its recent block; worked out for all rows that stand alike."""
        alike = all(other == row for other in self._owner().view.rows)
        key = row, -1 if alike else index
        if key not in self._scored:
            self._scored[key] = self._score(row, None if alike else index)
        return self._scored[key][index if alike else 0]

    def _score(self, row: Row, index: int | None) -> mx.array:
        """Scores from slot 0 on, (B, H', n), or (1, H', n) of one row."""
        buffers: Buffers = self._owner().view.buffers
        if not self.score.per_token:
            return self._combined(self._asked(buffers, row, index, 0, row.end))
        last = row.end - self.layout.keep_recent
        if row.start >= 0 or self.scores is None:
            return self._combined(self._asked(buffers, row, index, 0, last))
        known = self.scores if index is None else self.scores[index : index + 1]
        fresh = self._combined(self._asked(buffers, row, index, self.layout.cut, last))
        return mx.concatenate([known, fresh], axis=2)

    def _asked(self, buffers: Buffers, row: Row, index: int | None, first: int, last: int) -> mx.array:
        """What the score says of slots [first, last), (B or 1, H, n), after a check of what it is."""

        def read(buffer: SlotBuffer) -> mx.array:
            planes: Planes = buffer.read(((first, last),))
            return buffer.codec.decode(planes if index is None else tuple(p[index : index + 1] for p in planes))

        keys, values = read(buffers[0]), read(buffers[1])
        which = range(keys.shape[0]) if index is None else [index]
        positions = mx.stack([self.live_positions(row, i)[:, first:last] for i in which])  # (B or 1, H', n)
        scores = self.score.function(keys, values, positions)
        wanted = keys.shape[:3]
        if not isinstance(scores, mx.array) or scores.shape != wanted or scores.dtype != mx.float32:
            got = f"{scores.shape} of {scores.dtype}" if isinstance(scores, mx.array) else type(scores).__name__
            raise ValueError(
                f"the score {self.score.name} gave {got}, expected an mx.array {wanted} of float32: one number "
                "for each row, head and token"
            )
        return scores

    def _combined(self, scores: mx.array) -> mx.array:
        """Of all heads together, unless each keeps its own tokens."""
        return scores if self.share == "head" else scores.mean(axis=1, keepdims=True)

    # --- compaction -------------------------------------------------------------------------------------------------

    def compact_if_due(self, rows: tuple[Row, ...], on_demand: bool = False) -> tuple[Row, ...]:
        """Compacts every row that is due, or on demand all of more tokens than the budget; returns where rows stand.

        Args:
            rows: where they stand now.

        Raises:
            ValueError: a score that cannot be used, or layers that have diverged; nothing has changed then.
        """
        layout = self.layout
        if len(rows) != len(self.layer_groups):
            self._begin_batch(len(rows))
        due = [i for i, row in enumerate(rows) if (row.end > layout.budget if on_demand else layout.due(row))]
        if not due:
            return rows
        buffers: Buffers = self._owner().view.buffers
        mx.eval([buffer.planes for buffer in buffers])  # what is still to be computed is no part of a compaction
        started = time.perf_counter()
        source, target = self._fill_holes(rows, {i: self._moves(rows[i], i) for i in due})
        self._note(rows, due, source, target)
        slides = [slide(layout, row if i in due else Row(offset=layout.budget)) for i, row in enumerate(rows)]
        shape = (*source.shape[:2], layout.keep_recent)
        source, target = (
            mx.concatenate([x, mx.broadcast_to(mx.stack([pair[which] for pair in slides])[:, None], shape)], axis=2)
            for which, x in enumerate((source, target))
        )
        for buffer in buffers:
            buffer.move(source, target)
        self._scored.clear()
        self._decided.clear()
        moved, seconds = source.shape[2], (time.perf_counter() - started) / len(due)
        self.work = tuple(
            [
                Work(row.moved + moved, row.compactions + 1, row.seconds + seconds) if i in due else row
                for i, row in enumerate(self.work)
            ]
        )
        return tuple([layout.compacted(row) if i in due else row for i, row in enumerate(rows)])

    def _moves(self, row: Row, index: int) -> Moves:
        """Which survivors of one row fill which holes."""
        if self.share == "layers":
            return self.layer_groups[index].moves(row, lambda scores: self._moves_for(scores, row, index))
        self.layer_groups[index].all_decide(row)
        return self._own_moves(row, index)

    def decide(self, layer_group: LayerGroup) -> None:
        self._own_moves(self.row(layer_group), self.layer_groups.index(layer_group))

    def _own_moves(self, row: Row, index: int) -> Moves:
        if (row, index) not in self._decided:
            self._decided[row, index] = self._moves_for(self._evictable(row, index), row, index)
        return self._decided[row, index]

    def _moves_for(self, scores: mx.array, row: Row, index: int) -> Moves:
        """What moves if the tokens of the lowest scores (H', n) go."""
        if not mx.isfinite(scores).all().item():
            raise ValueError(f"the score {self.score.name} gave what is not a finite number: check it for NaN")
        sinks = self.layout.sinks
        positions = self.live_positions(row, index)[:, sinks : sinks + scores.shape[1]]
        victims = lowest(scores, positions, row.end - self.layout.budget) + sinks
        decided = hole_moves(self.layout, row, victims)
        mx.eval(decided)
        return decided

    def _fill_holes(self, rows: Sequence[Row], decided: dict[int, Moves]) -> Moves:
        """Every row's survivors that move, (B, H', m), from and to; rows that are not due move slot 0 onto itself."""
        nothing = mx.zeros((next(iter(decided.values()))[0].shape[0], 0), mx.int32)
        each = [decided.get(i, (nothing, nothing)) for i in range(len(rows))]
        most = max(source.shape[1] for source, _ in each)
        source, target = (mx.stack([padded(pair[which], most) for pair in each]) for which in (0, 1))
        return source, target

    def _note(self, rows: Sequence[Row], due: Sequence[int], source: mx.array, target: mx.array) -> None:
        """Keeps positions and scores of what will lie before the cut. Small arrays: they are made anew."""
        heads, cut, recent = source.shape[1], self.layout.cut, self.layout.keep_recent
        positions = {i: self.live_positions(rows[i], i) for i in due}
        scores = {i: self._from_slot_0(rows[i], i) for i in due} if self.score.per_token else {}

        def noted(known: dict[int, mx.array], old: mx.array | None, dtype: mx.Dtype) -> mx.array:
            lines = []
            for i, row in enumerate(rows):
                if i in due:
                    last = row.end - recent
                    line = mx.broadcast_to(known[i][:, :last], (heads, last))[None]
                    lines.append(moved(line, source[i : i + 1], target[i : i + 1])[0, :, :cut].astype(dtype))
                else:
                    lines.append(mx.zeros((heads, cut), dtype) if old is None else old[i])
            return mx.stack(lines)

        new_positions = noted(positions, self.positions, mx.int32)
        self.scores = noted(scores, self.scores, mx.float32) if scores else None
        self.positions = new_positions
        mx.async_eval(self.positions, self.scores)  # type: ignore[no-untyped-call]
