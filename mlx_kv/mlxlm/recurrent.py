"""Recurrent state with checkpoints: its values before the last passes, so that tokens can be trimmed.

A recurrent layer replaces its arrays and never writes into them, so a checkpoint is a reference. Rows can go back to
checkpoints only; tokens between two checkpoints must be read again. The number of tokens of a pass comes from loops of
this package (`announce`), from most models of mlx-lm after each layer (`advance`), or from a cache of attention
(`Clock`). The arrays may hold anything; they begin as zeros, as in mlx-lm.
B rows; arrays are (B, ...).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Protocol, Self

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import cache as stock

from mlx_kv.cache.checks import whole_numbers
from mlx_kv.cache.kv_cache import KVCache
from mlx_kv.mlxlm.traverse import is_ours, leaves, mapped

Arrays = tuple[mx.array | None, ...]


class Checkpoint(NamedTuple):
    """An earlier state of a row.

    Attributes:
        arrays: of the batch that it was in.
        row: its index there.
        at: tokens that it had read, since counting began.
    """

    arrays: Arrays
    row: int
    at: int


class Record(Protocol):
    """What a layer got in a pass, from which its state within that pass follows."""

    def after(self, counts: Sequence[int], like: Sequence[mx.array | None]) -> list[mx.array]:
        """The arrays of the state after the first counts[i] tokens of row i, at least one of each.

        Args:
            like: arrays of a state.
        """


class Clock(NamedTuple):
    """A cache of attention in another layer of the same sequence, which counts the tokens.

    Attributes:
        first: whether that layer comes before: then its cache holds the tokens of a pass when the recurrent layer runs.
        ahead: its offset when counting began.
    """

    cache: KVCache
    first: bool
    ahead: int

    @property
    def tokens(self) -> int:
        """Since the counting began."""
        return int(self.cache.offset) - self.ahead


class RecurrentState(stock.ArraysCache):
    """mlx-lm's recurrent state of one layer, with checkpoints to which tokens can be trimmed.

    Args:
        size: arrays of a row.
        max_rollback: maximum number of tokens to trim, from 0 up. Tokens read one by one have a checkpoint each.
        max_checkpoints: maximum number of checkpoints, if that is less.
    """

    cache: list[mx.array | None]  # type: ignore[assignment]
    record: Record | None = None  # of the last pass, if its tokens can be trimmed one by one
    sends_to_next = False  # whether a pass writes the first array twice: the second waits for the next rank

    def __init__(self, size: int, max_rollback: int, max_checkpoints: int | None = None) -> None:
        super().__init__(size)
        self.max_rollback, self.max_checkpoints = max_rollback, max_checkpoints
        self._begin(1)

    @classmethod
    def of(cls, cache: stock.ArraysCache, max_rollback: int, max_checkpoints: int | None = None) -> RecurrentState:
        """The same state with these limits, and no checkpoints yet."""
        state = cls(len(cache.cache), max_rollback, max_checkpoints)
        state.cache, state.left_padding, state.lengths = list(cache.cache), cache.left_padding, cache.lengths
        state._begin(cache.batch_size)
        return state

    def _begin(self, rows: int) -> None:
        """Begins to count tokens."""
        self._drop_record()
        self._read = [0] * rows  # by row, tokens since counting began
        self._checkpoints: list[tuple[Checkpoint, ...]] = [()] * rows  # by row, the newest last
        self._clock: Clock | None = None  # of one row, as long as it has its layer's place in a list
        self._reset_pass()

    def _reset_pass(self) -> None:
        """The next array begins a pass, unless one is announced before."""
        self._written: set[int] = set()  # the arrays of this pass that were written
        self._announced = self._sent = False
        self._before: Arrays | None = None  # the state before a pass of unknown length
        self._unread: list[int] | None = None  # by row, tokens to come before padding does

    # --- passes ---------------------------------------------------------------------------------------------------

    def announce(self, lengths: Sequence[int]) -> None:
        """Announces how many tokens of each row the next pass reads, without padding."""
        self._resize(len(lengths))
        self._drop_record()
        self._lengths = tuple(lengths)
        self._close_pass()
        self._add_checkpoints(tuple(self.cache), lengths)
        self._written, self._announced, self._sent = set(), True, False

    def __setitem__(self, index: int, value: mx.array) -> None:
        self._resize(value.shape[0])
        if self.sends_to_next and index == 0 and 0 in self._written and not self._sent:
            self._sent, self.cache[0] = True, value
            return
        if index in self._written or not (self._written or self._announced):  # each array is written once in a pass
            self._close_pass()
            self._drop_record()
            self._before, self._written = tuple(self.cache), set()
            self._announced = self._sent = False
            if self._clock is not None and self._clock.first:
                self._read_clock()
        self._written.add(index)
        self.cache[index] = value

    def advance(self, N: int) -> None:
        """The layer has read N tokens, including padding."""
        if self._before is not None and self.left_padding is None:
            before, self._before = self._before, None
            lengths = [N] * self.batch_size if self._unread is None else [min(n, N) for n in self._unread]
            self._add_checkpoints(before, lengths)
        if self._unread is not None:
            self._unread = [max(0, n - N) for n in self._unread]
        super().advance(N)  # type: ignore[no-untyped-call]

    def _resize(self, rows: int) -> None:
        """Begins to count anew with another number of rows."""
        if rows != len(self._read):
            self._begin(rows)

    def _close_pass(self) -> None:
        """Another pass begins: after one of unknown length, the checkpoints before it are useless."""
        self._read_clock()
        if self._before is not None:
            self.forget()

    def count_by(self, cache: KVCache, first: bool) -> None:
        """Counts passes of unknown length by the cache of another layer; see `Clock`."""
        self._clock = Clock(cache, first, int(cache.offset) - self._read[0])

    def _read_clock(self) -> None:
        """Finds the length of a pass of unknown length."""
        if self._before is not None and self._clock is not None:
            length = self._clock.tokens - self._read[0]
            if length > 0:  # else it is no longer the clock of this sequence
                before, self._before = self._before, None
                self._add_checkpoints(before, [length])

    def _add_checkpoints(self, before: Arrays, lengths: Sequence[int]) -> None:
        """Adds checkpoints of the state before a pass of so many tokens of each row."""
        for row, length in enumerate(lengths):
            if length:
                checkpoints = (*self._checkpoints[row], Checkpoint(before, row, self._read[row]))
                self._read[row] += length
                self._checkpoints[row] = self._within_limits(checkpoints, self._read[row])

    def _within_limits(self, checkpoints: Sequence[Checkpoint], now: int) -> tuple[Checkpoint, ...]:
        near = [checkpoint for checkpoint in checkpoints if now - checkpoint.at <= self.max_rollback]
        return tuple(near if self.max_checkpoints is None else near[max(0, len(near) - self.max_checkpoints) :])

    def limit(self, max_rollback: int, max_checkpoints: int | None) -> None:
        """Changes the limits."""
        self.max_rollback, self.max_checkpoints = max_rollback, max_checkpoints
        pairs = zip(self._checkpoints, self._read, strict=True)
        self._checkpoints = [self._within_limits(checkpoints, read) for checkpoints, read in pairs]

    def _drop_record(self) -> None:
        self.record, self._lengths = None, ()

    def forget(self) -> None:
        """Drops all checkpoints."""
        self._checkpoints, self._before = [()] * len(self._read), None

    # --- trims ----------------------------------------------------------------------------------------------------

    def can_trim(self, n: int | Sequence[int]) -> bool:
        """Whether every row has a checkpoint n tokens ago, or row i n[i] tokens ago."""
        try:
            counts = whole_numbers(n, len(self._read))
        except ValueError:
            return False
        return len(counts) == len(self._read) and self._refusal(counts) is None

    def trim(self, n: int) -> int:
        """Returns every row to its state n tokens ago; returns n.

        Raises:
            ValueError: a row that has no checkpoint there; nothing has changed then.
        """
        self.trim_per_sequence(whole_numbers(n, len(self._read)))
        return n

    def trim_per_sequence(self, n: Sequence[int] | mx.array) -> None:
        """Returns row i to its state n[i] tokens ago.

        Raises:
            ValueError: a wrong number of counts, or a row that has no checkpoint there; nothing has changed then.
        """
        counts = whole_numbers(n, len(self._read))
        if len(counts) != len(self._read):
            raise ValueError(f"got {len(counts)} counts to trim by, but there are {len(self._read)} rows")
        if (why := self._refusal(counts)) is not None:
            raise ValueError(why)
        if not any(counts):
            return
        if self._within_last_pass(counts):
            self._trim_last_pass(counts)
            return
        now = tuple(self.cache)
        sources = [
            self._checkpoint(row, count) or Checkpoint(now, row, self._read[row]) for row, count in enumerate(counts)
        ]
        self.cache = list(_rows_of(sources))
        for row, source in enumerate(sources):
            self._read[row] = source.at
            self._checkpoints[row] = tuple([c for c in self._checkpoints[row] if c.at < source.at])

    def _within_last_pass(self, counts: Sequence[int]) -> bool:
        """Whether the last pass was recorded, and keeps a token of each row that is trimmed."""
        return self.record is not None and all(
            count < length for count, length in zip(counts, self._lengths, strict=True) if count
        )

    def _trim_last_pass(self, counts: Sequence[int]) -> None:
        """Returns every row to its state within the last pass; its checkpoints stay, as they are before that pass."""
        kept = [length - count for length, count in zip(self._lengths, counts, strict=True)]
        assert self.record is not None
        changed, now = mx.array([count > 0 for count in counts]), list(self.cache)
        for index, array in enumerate(self.record.after(kept, now)):
            current = now[index]
            rows = changed.reshape(-1, *[1] * (array.ndim - 1))
            self.cache[index] = array if current is None else mx.where(rows, array, current)
        self._read = [read - count for read, count in zip(self._read, counts, strict=True)]
        self._drop_record()

    def _checkpoint(self, row: int, count: int) -> Checkpoint | None:
        at = self._read[row] - count
        return next((checkpoint for checkpoint in self._checkpoints[row] if checkpoint.at == at), None)

    def _refusal(self, counts: Sequence[int]) -> str | None:
        """Why rows cannot go back by so many tokens, and the fix; None where they can."""
        if not any(counts):
            return None
        if self._within_last_pass(counts):
            return None
        self._read_clock()
        if self._before is not None:
            return (
                f"cannot trim {max(counts)} tokens: this recurrent state does not have the length of its last write; "
                "copy the caches before (copy.deepcopy), or read them anew"
            )
        for row, count in enumerate(counts):
            if count and self._checkpoint(row, count) is None:
                where = "this recurrent state" if len(counts) == 1 else f"row {row} of this recurrent state"
                steps = sorted({0, *(self._read[row] - checkpoint.at for checkpoint in self._checkpoints[row])})
                more = f"plan for it with max_rollback={count}" if count > self.max_rollback else "read the rest again"
                return (
                    f"cannot trim {count} tokens: {where} was not kept there; "
                    f"trim by {' or '.join(map(str, steps))}, or {more}"
                )
        return None

    # --- rows -----------------------------------------------------------------------------------------------------

    @property
    def batch_size(self) -> int:
        return len(self._read)

    @classmethod
    def merge(cls, caches: Sequence[stock.ArraysCache]) -> RecurrentState:
        """A batch of the rows of several caches; rows of mlx-lm's have no checkpoints."""
        first = next((cache for cache in caches if isinstance(cache, cls)), None)
        limits = (0, None) if first is None else (first.max_rollback, first.max_checkpoints)
        parts = [cache if isinstance(cache, cls) else cls.of(cache, *limits) for cache in caches]
        new = cls(len(parts[0].cache), *limits)
        new.sends_to_next = any(part.sends_to_next for part in parts)
        new._join(parts)
        return new

    def extend(self, other: stock.ArraysCache) -> None:
        """Takes another's rows, after its own."""
        self._join([self, other if isinstance(other, RecurrentState) else self.of(other, self.max_rollback)])

    def _join(self, parts: Sequence[RecurrentState]) -> None:
        for part in parts:
            part._close_pass()
        rows = [Checkpoint(tuple(part.cache), row, 0) for part in parts for row in range(part.batch_size)]
        padded = any(part.left_padding is not None for part in parts)
        padding = [
            mx.zeros(part.batch_size, mx.int32) if part.left_padding is None else part.left_padding for part in parts
        ]
        self._read = [read for part in parts for read in part._read]
        self._checkpoints = [each for part in parts for each in part._checkpoints]
        self._clock = None
        self._drop_record()
        self._reset_pass()
        self.cache, self.left_padding = list(_rows_of(rows)), mx.concatenate(padding) if padded else None

    def filter(self, batch_indices: Sequence[int] | mx.array) -> None:
        """Keeps only these rows, in this order."""
        rows = whole_numbers(batch_indices, len(self._read))
        self._close_pass()
        self._drop_record()
        super().filter(mx.array(rows))  # type: ignore[no-untyped-call]
        self._clock = None
        self._read = [self._read[row] for row in rows]
        self._checkpoints = [self._checkpoints[row] for row in rows]
        self._unread = None if self._unread is None else [self._unread[row] for row in rows]

    def extract(self, idx: int) -> RecurrentState:
        """One row with its checkpoints, which reference the arrays of the batch until `forget`."""
        new = type(self)(len(self.cache), self.max_rollback, self.max_checkpoints)
        new.cache = [None if array is None else array[idx : idx + 1] for array in self.cache]
        new._read, new.sends_to_next = [self._read[idx]], self.sends_to_next
        if self._before is None:
            new._checkpoints = [self._checkpoints[idx]]
        return new

    def prepare(self, lengths: Sequence[int] | None = None, **_padding: Any) -> None:
        """Announces padding in the next tokens, as mlx-lm's does."""
        super().prepare(lengths)  # type: ignore[no-untyped-call]
        self._unread = list(whole_numbers(lengths, len(self._read)))

    def finalize(self) -> None:
        super().finalize()  # type: ignore[no-untyped-call]
        self._unread = None

    # --- the rest of mlx-lm's interface ---------------------------------------------------------------------------

    @property
    def state(self) -> Any:
        """As mlx-lm's: the current state, without checkpoints."""
        return self.cache, self.left_padding, self.lengths

    @state.setter
    def state(self, value: Any) -> None:
        self.cache, self.left_padding, self.lengths = value
        self._begin(next((array.shape[0] for array in self.cache if array is not None), 1))

    @classmethod
    def from_state(cls, state: Any) -> Self:
        """Of a saved state, with a max_rollback of 0."""
        new = cls(len(state[0]), 0)
        new.state = state
        return new

    @property
    def nbytes(self) -> int:
        """Bytes of the current state and of all checkpoints."""
        kept = [self.cache, *(checkpoint.arrays for row in self._checkpoints for checkpoint in row), self._before or ()]
        return sum({id(array): array.nbytes for arrays in kept for array in arrays if array is not None}.values())


def _rows_of(sources: Sequence[Checkpoint]) -> Arrays:
    """The arrays (B, ...) of rows of several batches; missing arrays are zeros."""
    first = sources[0].arrays
    if all(source.arrays is first and source.row == row for row, source in enumerate(sources)):
        rows = next((array.shape[0] for array in first if array is not None), len(sources))
        if rows == len(sources):
            return first
    return tuple([_concat([(source.arrays[index], source.row) for source in sources]) for index in range(len(first))])


def _concat(parts: Sequence[tuple[mx.array | None, int]]) -> mx.array | None:
    like = next((array for array, _ in parts if array is not None), None)
    if like is None:
        return None
    empty = mx.zeros((1, *like.shape[1:]), like.dtype)
    return mx.concatenate([empty if array is None else array[row : row + 1] for array, row in parts])


def is_recurrent(model: nn.Module) -> bool:
    """Whether any layer of a model of mlx-lm has recurrent state."""
    return any(isinstance(cache, stock.ArraysCache) for cache in leaves(stock.make_prompt_cache(model)))


def recurrent_states(caches: Iterable[Any]) -> list[RecurrentState]:
    """The recurrent states with checkpoints of all layers."""
    return [cache for cache in leaves(caches) if isinstance(cache, RecurrentState)]


def with_checkpoints(caches: Sequence[Any], max_rollback: int, max_checkpoints: int | None = None) -> list[Any]:
    """The caches of all layers, with checkpoints for recurrent state."""

    def one(cache: Any) -> Any:
        if isinstance(cache, RecurrentState):
            cache.limit(max_rollback, max_checkpoints)
            return cache
        return RecurrentState.of(cache, max_rollback, max_checkpoints) if type(cache) is stock.ArraysCache else cache

    return mapped(caches, one)


def count_by_attention(caches: Sequence[Any]) -> None:
    """Connects the recurrent states of a new sequence to a cache of another layer that counts tokens."""
    for index, layer in enumerate(caches):
        for state in recurrent_states([layer]):
            others = [(other, each) for other, each in enumerate(caches) if other != index]
            clocks = [(other, cache) for other, each in others for cache in leaves([each]) if is_ours(cache)]
            if clocks:
                other, clock = clocks[0]
                state.count_by(clock, other < index)


def mark_last(model: nn.Module, caches: Sequence[Any]) -> None:
    """Marks the last cache of a rank that sends its result to the next rank: see `sends_to_next`."""
    modules: Any = model.modules() if caches and isinstance(caches[-1], RecurrentState) else []  # type: ignore[no-untyped-call]
    if any(getattr(module, "pipeline_rank", 0) for module in modules):
        caches[-1].sends_to_next = True


def lacks_state(caches: Iterable[Any]) -> bool:
    """Whether any recurrent layer has no state yet."""
    layers = [cache for cache in leaves(caches) if isinstance(cache, stock.ArraysCache)]
    return any(array is None for layer in layers for array in layer.cache)
