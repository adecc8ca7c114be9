"""What the layers of one sequence agree on: which of its tokens go.

A *layer group* stands for one sequence. Its members are the caches of that sequence, one a layer; a batched cache is a
member of one group for each of its rows.

mlx-lm merges and extracts caches layer by layer, so copies find their group by a rule: layers are copied in ascending
order, one copy of the sequence after the other. Layer 4 joins the copy whose last layer was 3 or lower; layer 0 begins
the next copy. What deepcopy copies in one go stays together, in any order. A copy that lacks layers of its sequence
cannot decide with them, and raises instead of deciding alone.

Decides once per compaction: the first member that is to be compacted asks all others, as they stand before the step,
and the others find the decision made. So nothing has changed anywhere when one of them cannot decide. Where other
processes have heads or layers of the same sequence, their scores are heard first, those of all layers at once. Knows
nothing about how scores come about, how others are heard, or what moves.
"""

from __future__ import annotations

import uuid
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, ClassVar, NamedTuple, Protocol

import mlx.core as mx

from mlx_kv.cache.eviction.allocation import Granularity
from mlx_kv.cache.eviction.compaction import Moves
from mlx_kv.cache.eviction.peers import ALONE, Peers
from mlx_kv.cache.eviction.uneven import Evictable, lowest_ranks
from mlx_kv.cache.layout import Row

TOGETHER_BYTES = 2**22  # of layers whose scores are waited for at once


class Member(Protocol):
    """The cache of one layer of a sequence, or rather its evictor; with rows of several sequences, of each of them."""

    def row(self, group: LayerGroup) -> Row:
        """Where the sequence stands in this layer."""
        ...

    def own_scores(self, group: LayerGroup) -> mx.array | None:
        """(B, H, n) of the heads here, all that a decision needs of them; None where all heads were heard already."""
        ...

    def hear(self, group: LayerGroup, scores: mx.array) -> None:
        """Has what `own_scores` gave replaced by the scores of all heads, (B, all heads, n)."""
        ...

    def evictable_scores(self, group: LayerGroup) -> mx.array:
        """(1, n) of the evictable slots, higher is kept, comparable between layers."""
        ...

    def decide(self, group: LayerGroup) -> None:
        """Finds out which tokens this layer alone would evict, or raises ValueError."""
        ...

    def ranked(self, group: LayerGroup, place: int, layers: int) -> tuple[Evictable, int]:
        """The evictable tokens, ranked with those of other layers, and how many go if heads have equal budgets.

        Args:
            place, layers: which of so many layers this is.
        """
        ...

    def evict(self, group: LayerGroup, tokens: Evictable, gone: mx.array) -> None:
        """Has the next compaction evict these of the ranked tokens, (H, m') of bool."""
        ...

    def change(self, old: LayerGroup, new: LayerGroup) -> None:
        """From now on the sequence of the old group is that of the new one."""
        ...


class Decision(NamedTuple):
    """What the layers of a sequence have agreed on.

    Attributes:
        row: where all of them stand.
        moves: the same in all layers; None where each has decided for itself.
    """

    row: Row
    moves: Moves | None


class Copies:
    """The copy of a sequence that is being made, layer by layer.

    Attributes:
        groups: one for each time that the sequence is in the same cache, as when a prompt is merged with itself.
        member: the cache of the last layer that was copied.
        number: of its copies of this layer so far, less 1.
    """

    def __init__(self) -> None:
        self.groups: list[weakref.ref[LayerGroup]] = []
        self.member: Callable[[], Member | None] = lambda: None
        self.number = 0


class CopiedTogether(NamedTuple):
    """The layers of one sequence that a deepcopy has copied so far, and the group that they are in."""

    group: LayerGroup
    members: tuple[tuple[int, Member], ...]


class LayerGroup:
    """The layers of one sequence.

    Attributes:
        name: of this one alone, by which copies and files know what they are copies of.
        peers: who is heard before anything is decided; copies have the same.
    """

    _alive: ClassVar[weakref.WeakValueDictionary[str, LayerGroup]] = weakref.WeakValueDictionary()  # by name
    _copies: ClassVar[dict[str, Copies]] = {}  # by the name of what they are copies of

    def __init__(self, peers: Peers = ALONE, layers: frozenset[int] = frozenset()) -> None:
        """
        Args:
            peers: as the attribute.
            layers: of the sequence that it is a copy of.
        """
        self.name, self.peers, self._layers = uuid.uuid4().hex, peers, layers
        self._alive[self.name] = self
        self._members: dict[int, weakref.ref[Member]] = {}  # by layer, also those that are gone
        self._decision: Decision | None = None
        # Those of a new batch's other rows, by row: layer after layer asks for them.
        self._of_rows: weakref.WeakValueDictionary[int, LayerGroup] = weakref.WeakValueDictionary()

    # --- who belongs to it ------------------------------------------------------------------------------------------

    @classmethod
    def of_copy(
        cls, name: str, layer: int, member: Member, memo: dict[Any, Any] | None = None, peers: Peers = ALONE
    ) -> LayerGroup:
        """The group for a copy of one layer of the sequence `name`, by the rule at the top of this module.

        Args:
            memo: deepcopy's, which all that it copies in one go has in common: such layers are never parted. One that
                finds its place taken was not meant to complete an older copy, and so were those that came before it.
            peers: of the sequence.
        """
        before: CopiedTogether | None = None if memo is None else memo.get(name)
        if before is None:
            group = cls._completed_by(name, layer, member, peers)
            together: tuple[tuple[int, Member], ...] = ()
        else:
            group, together = before
            if layer in group._members:
                taken, group = group, cls._new_copy(name, peers)
                cls._begin(name, group)
                for number, other in together:
                    del taken._members[number]
                    group.join(number, other)
                    other.change(taken, group)
        group.join(layer, member)
        if memo is not None:
            memo[name] = CopiedTogether(group, (*together, (layer, member)))
        return group

    @classmethod
    def _completed_by(cls, name: str, layer: int, member: Member, peers: Peers) -> LayerGroup:
        """The copy that a layer goes on with, or a new one."""
        copies = cls._copies.setdefault(name, Copies())
        copies.number = copies.number + 1 if copies.member() is member else 0
        copies.member = weakref.ref(member)
        ref = copies.groups[copies.number] if copies.number < len(copies.groups) else None
        group = None if ref is None else ref()
        if group is not None and layer > max(group._members):
            return group
        return cls._begin(name, cls._new_copy(name, peers))

    @classmethod
    def _begin(cls, name: str, group: LayerGroup) -> LayerGroup:
        """The same group, which layers of this copy join from now on."""
        copies = cls._copies.setdefault(name, Copies())
        copies.groups[copies.number :] = [weakref.ref(group, lambda _: cls._drop(name))]
        return group

    @classmethod
    def _new_copy(cls, name: str, peers: Peers) -> LayerGroup:
        source = cls._alive.get(name)
        return cls(peers, frozenset() if source is None else source._layers | source._members.keys())

    @classmethod
    def _drop(cls, name: str) -> None:
        if name in cls._copies and all(ref() is None for ref in cls._copies[name].groups):
            del cls._copies[name]

    def of_row(self, index: int) -> LayerGroup:
        """The group of another row of a new batch whose first row has this one; the same in every layer."""
        if index == 0:
            return self
        group = self._of_rows.get(index) or LayerGroup(self.peers)
        self._of_rows[index] = group
        return group

    def join(self, layer: int, member: Member) -> None:
        self._members[layer] = weakref.ref(member)

    def members(self) -> list[tuple[int, Member]]:
        """Those that still exist and hold tokens, in the order of layers."""
        alive = [(layer, ref()) for layer, ref in sorted(self._members.items())]
        return [(layer, member) for layer, member in alive if member is not None and member.row(self).offset]

    # --- what it decides --------------------------------------------------------------------------------------------

    def forget(self) -> None:
        """A member was trimmed or reset: what was decided about its tokens no longer holds."""
        self._decision = None

    def decide_together(self, row: Row, decide: Callable[[mx.array], Moves], nbytes: int) -> Moves:
        """What moves in every layer: decided once, from the sum of all layers' scores.

        Args:
            row: where the asking layer stands.
            decide: from summed scores (1, n) to moves.
            nbytes: that a layer is scored from: so much is waited for before the next is, where it is much.

        Raises:
            ValueError: layers that stand elsewhere or were not copied with this one, or scores that cannot be used;
                nothing has changed then.
        """
        decision = self._decision
        if decision is not None and _alike(decision.row, row) and decision.moves is not None:
            return decision.moves
        self._check_complete()
        self.check_in_step(row)
        self._hear_heads("layers", nbytes)
        total = mx.zeros(1)
        for scores in self._of_layers(nbytes):
            total = total + scores
        moves = decide(total)
        self._decision = Decision(row, moves)
        return moves

    def decide_each(self, row: Row, granularity: Granularity, nbytes: int) -> None:
        """Has every layer decide for itself, once.

        Args:
            granularity: of the caches; it says whose scores are to be heard.
            nbytes: as `decide_together`.

        Raises:
            ValueError: as `decide_together`.
        """
        if self._decision is not None and _alike(self._decision.row, row):
            return
        self.check_in_step(row)
        self._hear_heads(granularity, nbytes)
        for _, member in self.members():
            member.decide(self)
        self._decision = Decision(row, None)

    def decide_globally(self, row: Row, nbytes: int) -> None:
        """Ranks the tokens of all heads of all layers, and has each layer evict those of the lowest ranks, once.

        Args:
            row: where the asking layer stands.
            nbytes: as `decide_together`.

        Raises:
            ValueError: as `decide_together`.
        """
        if self._decision is not None and _alike(self._decision.row, row):
            return
        self._check_complete()
        self.check_in_step(row)
        members = self.members()
        ranked = [member.ranked(self, place, len(members)) for place, (_, member) in enumerate(members)]
        flat = [tokens.ranks.reshape(-1) for tokens, _ in ranked]
        gone = lowest_ranks(mx.concatenate(flat), sum(count for _, count in ranked))
        first = 0
        for (_, member), (tokens, _) in zip(members, ranked, strict=True):
            size = tokens.ranks.size
            member.evict(self, tokens, gone[first : first + size].reshape(tokens.ranks.shape))
            first += size
        self._decision = Decision(row, None)

    def _hear_heads(self, granularity: Granularity, nbytes: int) -> None:
        """Tells every layer what the heads of other processes say of its tokens."""
        if not self.peers.have_heads(granularity):
            return
        asked = ((member, member.own_scores(self)) for _, member in self.members())
        unheard = [(member, scores) for member, scores in asked if scores is not None]
        own = list(_few_at_once((scores for _, scores in unheard), nbytes))
        for (member, _), scores in zip(unheard, self.peers.with_heads(own) if own else [], strict=True):
            member.hear(self, scores)

    def _of_layers(self, nbytes: int) -> Iterable[mx.array]:
        """The scores of all layers, (1, n) each, in their order."""
        here = _few_at_once((member.evictable_scores(self) for _, member in self.members()), nbytes)
        return self.peers.with_layers(list(here)) if self.peers.have_layers else here

    def _check_complete(self) -> None:
        """Raises ValueError if layers of the sequence that this is a copy of were not copied into it."""
        if missing := self._layers - self._members.keys():
            here, lacking = (", ".join(map(str, sorted(layers))) for layers in (self._members, missing))
            raise ValueError(
                f"layer {here} of a sequence was copied without layer {lacking}, and they must evict the same tokens: "
                "copy all layers in their order, one copy after the other, or use share='layer'"
            )

    def check_in_step(self, row: Row) -> None:
        """Raises ValueError unless every layer stands where `row` does."""
        standing = [(layer, member.row(self)) for layer, member in self.members()]
        if all(_alike(other, row) for _, other in standing):
            return
        held: dict[str, list[str]] = {}
        for layer, other in standing:
            held.setdefault(f"{other.end} of {other.offset}", []).append(str(layer))
        told = "; ".join(f"{kept} tokens in layer {', '.join(layers)}" for kept, layers in held.items())
        raise ValueError(
            f"the layers of one sequence have diverged, and cannot evict the same tokens: they hold {told}. "
            "Trim all layers alike and copy them together, or use share='layer'"
        )


def _alike(row: Row, other: Row) -> bool:
    """Whether rows of two layers have read as many tokens, and evicted as many; their heads may each have others."""
    return (row.evicted, row.offset) == (other.evicted, other.offset)


def _few_at_once(made: Iterator[mx.array], nbytes: int) -> Iterator[mx.array]:
    """The same, evaluated as many at a time as are made of `TOGETHER_BYTES`: none of them needs memory for long.

    Args:
        nbytes: that each is made of.
    """
    together: list[mx.array] = []
    for each in made:
        together.append(each)
        if len(together) == max(1, TOGETHER_BYTES // nbytes):
            mx.eval(together)
            together.clear()
        yield each
