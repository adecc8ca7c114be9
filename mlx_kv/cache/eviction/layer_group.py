"""The layers of one sequence, and the decision which of its tokens they evict.

A *layer group* stands for one sequence. Its members are the evictors of that sequence, one for each layer; the evictor
of a batch is a member of one group per row.

The group decides once per compaction: the first layer that is due passes the next compaction steps of all layers, and
the others use the plans that result. So no layer has changed when the scores of one cannot be used. (Layers of a
pyramid are due at different times: each decides alone.) Where other processes hold heads or layers of the sequence, the
scores of all are gathered first.

mlx-lm merges and extracts caches layer by layer, so copies find their group by a rule: layers are copied in ascending
order, one copy of the sequence after the other. Layer 4 joins the copy that ends with layer 3 or lower; layer 0 begins
the next copy. All that one deepcopy copies stays together, in any order. A copy that lacks layers of its sequence
raises where all layers must decide together.
"""

from __future__ import annotations

import uuid
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, Protocol, TypeVar

import mlx.core as mx

from mlx_kv.cache.eviction.allocation import Allocation, Scope
from mlx_kv.cache.eviction.compaction import RowPlan, lowest_ranks
from mlx_kv.cache.eviction.step import CompactionStep
from mlx_kv.cache.layout import Row
from mlx_kv.communicator import LOCAL, CacheCommunicator
from mlx_kv.settings import SettingError

TOGETHER_BYTES = 2**22  # of the layers whose scores are evaluated at once
T = TypeVar("T")


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

    def __init__(self, communicator: CacheCommunicator = LOCAL, source: Copies | None = None) -> None:
        """
        Args:
            communicator: as the attribute.
            source: the copies of which this is one, if it is a copy.
        """
        self.name, self.communicator = uuid.uuid4().hex, communicator
        # Weak: evictors reference their groups, and the memory of a cache is to be freed without a garbage collection.
        self._members: dict[int, weakref.ref[Any]] = {}  # by layer, also of caches that were deleted
        self._required = frozenset() if source is None else frozenset(source.layers)
        self._copies = Copies(self.name, self._required)
        self._source = source  # kept alive: the next layer of this copy finds it by its name
        self._decision: Decision | None = None
        # The groups of a new batch's other rows, by row: every layer gets the same.
        self._of_rows: weakref.WeakValueDictionary[int, LayerGroup] = weakref.WeakValueDictionary()

    # --- members ----------------------------------------------------------------------------------------------------

    def join(self, layer: int, member: object) -> None:
        """Makes an evictor the member of one layer."""
        self._members[layer] = weakref.ref(member)
        self._copies.layers.add(layer)

    def members(self, kind: type[T]) -> list[tuple[int, T]]:
        """The layers that still exist, in ascending order, and their evictors."""
        found = [(layer, ref()) for layer, ref in sorted(self._members.items())]
        return [(layer, member) for layer, member in found if isinstance(member, kind)]

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
        member: Regrouped,
        memo: dict[Any, Any] | None = None,
        communicator: CacheCommunicator = LOCAL,
    ) -> LayerGroup:
        """The group for a copy of one layer of the sequence `name`, by the rule at the top of this module.

        Args:
            memo: deepcopy's, which is the same for all layers that one call copies: such layers stay together. If
                the copy already has one of them, all of them move to a new copy.
            communicator: of the sequence.
        """
        copies = Copies.named(name)
        together: dict[int, Regrouped] = {}  # the layers that this deepcopy has copied so far
        if memo is not None and name in memo:
            group: LayerGroup
            group, together = memo[name]
        else:
            group = copies.completed_by(layer, member, communicator)
        if layer in group._members:
            taken, group = group, copies.begin(communicator)
            for other, copied in together.items():
                del taken._members[other]
                group.join(other, copied)
                copied.regroup(taken, group)
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

    def decide(self, row: Row, layers: Sequence[LayerStep], scope: Scope, layer_allocation: Allocation) -> Decision:
        """Decides what every layer evicts.

        Args:
            row: where the layer stands that is due.
            layers: all layers of the sequence that hold tokens.
            scope, layer_allocation: which tokens are kept together, and how many in each layer (`allocation`).

        Raises:
            ValueError: layers that stand elsewhere or were not copied with this one, or scores that cannot be used;
                nothing has changed then.
        """
        if scope == "layers" or layer_allocation == "global":
            self._check_complete()
        check_in_step(row, layers)
        shared: RowPlan | None = None
        plans: dict[int, RowPlan] = {}
        if layer_allocation == "global":
            plans = _ranked_together(layers)
        else:
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
        asked = [(each, each.step.scoring.of_heads(each.row_index)) for each in layers]
        missing = [(each, scores) for each, scores in asked if scores is not None]
        own = list(_few_at_once((scores for _, scores in missing), layers[0].step.nbytes))
        for (each, _), scores in zip(missing, self.communicator.gather_heads(own) if own else [], strict=True):
            each.step.scoring.set_heads(each.row_index, scores)

    def _sum_of_layers(self, layers: Sequence[LayerStep]) -> mx.array:
        """The scores of all layers, (1, m), each scaled so that layers are comparable; added in the order of layers."""
        each_layer = (each.step.scoring.standardised(each.row_index) for each in layers)
        here = _few_at_once(each_layer, layers[0].step.nbytes)
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
    held: dict[str, list[str]] = {}
    for each in layers:
        held.setdefault(f"{each.row.end} of {each.row.offset}", []).append(str(each.layer))
    found = "; ".join(f"{kept} tokens in layer {', '.join(numbers)}" for kept, numbers in held.items())
    raise ValueError(
        f"the layers of one sequence have diverged, and cannot decide together what to evict: they hold {found}. "
        "Trim all layers alike and copy them together"
    )


def _in_step(row: Row, other: Row) -> bool:
    """Whether two layers have read and evicted as many tokens; their heads may each hold other ones."""
    return (row.evicted, row.offset) == (other.evicted, other.offset)


def _ranked_together(layers: Sequence[LayerStep]) -> dict[int, RowPlan]:
    """The plans of all layers by one ranking of the tokens of all heads of all layers."""
    ranked = [each.step.evictable(each.row_index, place, len(layers)) for place, each in enumerate(layers)]
    counts = [
        tokens.ranks.shape[0] * each.step.surplus(each.row_index) for each, tokens in zip(layers, ranked, strict=True)
    ]
    lowest = lowest_ranks(mx.concatenate([tokens.ranks.reshape(-1) for tokens in ranked]), sum(counts))
    ends = [0]
    for tokens in ranked:
        ends.append(ends[-1] + tokens.ranks.size)
    return {
        each.layer: each.step.plan_without(each.row_index, tokens, lowest[first:last].reshape(tokens.ranks.shape))
        for each, tokens, first, last in zip(layers, ranked, ends[:-1], ends[1:], strict=True)
    }


def _few_at_once(made: Iterator[mx.array], nbytes: int) -> Iterator[mx.array]:
    """The same arrays, evaluated in groups that are made of `TOGETHER_BYTES`, which bounds the memory at the peak.

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


# --- copies that are made layer by layer ------------------------------------------------------------------------------


class Regrouped(Protocol):
    """An evictor, while it is being copied."""

    def regroup(self, old: LayerGroup, new: LayerGroup) -> None:
        """Makes the sequence of the old group that of the new one."""
        ...


class Copies:
    """The copies of one sequence that are being made. Found by name, which is all that states and files record.

    Attributes:
        layers: of the sequence.
    """

    _by_name: ClassVar[weakref.WeakValueDictionary[str, Copies]] = weakref.WeakValueDictionary()

    def __init__(self, name: str, layers: Iterable[int] = ()) -> None:
        self.layers = set(layers)
        # The last copy; several where one cache has the sequence several times, as a prompt merged with itself.
        self._groups: list[weakref.ref[LayerGroup]] = []
        self._last: Callable[[], Regrouped | None] = lambda: None  # the evictor of the layer that was copied last
        self._number = 0  # of the copies of that layer in that evictor, less 1
        self._by_name[name] = self

    @classmethod
    def named(cls, name: str) -> Copies:
        """The copies of a sequence, which may have been in another process."""
        return cls._by_name.get(name) or cls(name)

    def completed_by(self, layer: int, member: Regrouped, communicator: CacheCommunicator) -> LayerGroup:
        """The copy that a layer completes, or a new one."""
        self._number = self._number + 1 if self._last() is member else 0
        self._last = weakref.ref(member)
        group = self._groups[self._number]() if self._number < len(self._groups) else None
        return group if group is not None and layer > max(group._members) else self.begin(communicator)

    def begin(self, communicator: CacheCommunicator) -> LayerGroup:
        """A new copy, which the layers that follow join."""
        group = LayerGroup(communicator, self)
        self._groups[self._number :] = [weakref.ref(group)]
        return group
