"""Operations on rows: join caches into a batch, select and copy rows, announce padding.

A row's slots begin at 0 in every cache, whatever was evicted or overwritten, so rows are stacked without
realigning them. Only the slots of rings of different room are rearranged first.
"""

from __future__ import annotations

from collections.abc import Sequence

from mlx_kv.cache.buffers import Buffers, SlotBuffer
from mlx_kv.cache.codecs import affine_of, are_plain, in_words
from mlx_kv.cache.growth import TAIL_MULTIPLE, round_up
from mlx_kv.cache.layout import Layout, Row, enough_slots, moves_between, planned, reshaped, stay
from mlx_kv.cache.residual import Residual
from mlx_kv.cache.state import CacheData


def check_joinable(index: int, first: CacheData, other: CacheData) -> None:
    """Raises ValueError unless `other`, number `index` of those to join, stores its tokens as `first` does."""
    kept, wanted = _how(other), _how(first)
    if first.buffers is None or other.buffers is None:  # a cache without tokens takes any shape
        kept, wanted = kept[:-2], wanted[:-2]
    for (what, own), (_, theirs) in zip(wanted, kept, strict=True):
        if own != theirs:
            raise ValueError(
                f"cache {index} has {what} {theirs}, the first one {own}: only caches of one kind can be one batch"
            )


def _how(data: CacheData) -> list[tuple[str, object]]:
    """Names and values of all that must be equal in the rows of a batch."""
    evictor = data.evictor
    affine = affine_of(data.codecs)
    keys, values = (None, None) if data.buffers is None else (buffer.signature[1:] for buffer in data.buffers)
    other = None if affine is not None or are_plain(data.codecs) else in_words(data.codecs)
    return [
        ("layout", planned(data.layout).parameters),
        ("bits and group size", None if affine is None else (affine.bits, affine.group_size)),
        ("a residual of", data.residual_length),
        ("codecs", (other, None if other is None else tuple(map(type, data.codecs)))),
        ("score and share", None if evictor is None else (evictor.score.name, evictor.scope)),
        ("budgets of layers", None if evictor is None else evictor.layer_allocation),
        # Names are not enough: all lambdas have the same, and functions can be registered again under one name.
        (
            "the score function",
            None if evictor is None else (evictor.score.function, evictor.score.per_token, evictor.score.wants),
        ),
        ("KV heads, head dim and dtype of keys", keys),
        ("KV heads, head dim and dtype of values", values),
    ]


def check_rows(chosen: Sequence[int], rows: int) -> None:
    """Raises ValueError unless these rows exist, each given once."""
    if not chosen or len(set(chosen)) < len(chosen) or not all(0 <= index < rows for index in chosen):
        raise ValueError(
            f"cannot take rows {list(chosen)}: this cache has rows 0 to {rows - 1}; give at least one, and none twice"
        )


def join(data: CacheData, others: Sequence[CacheData]) -> None:
    """Appends copies of the rows of others, which `check_joinable` has checked."""
    everyone = [data, *others]
    filled = [each for each in everyone if not each.empty()]
    if filled:  # new rows take the layout of those that are there, which are usually more
        layout = filled[0].layout
        data.layout, everyone = layout, [_in_shape(each, layout) for each in everyone]
        filled = [each for each in everyone if not each.empty()]
    encoded = any(each.encoded for each in filled)  # if one cache is quantised, all become so
    # Where no row has a token, buffers left over from trimmed rows have rows for this cache only.
    data.buffers = joined_buffers(everyone, _joint_capacity(filled), encoded) if filled else None
    data.encoded = encoded
    if data.residual is not None:
        parts = [(each.residual, len(each.rows)) for each in everyone if each.residual is not None]
        data.residual = Residual.joined(parts)
    data.rows = tuple([row for each in everyone for row in each.rows])
    data.reserved = max(each.reserved for each in everyone)
    data.announced = tuple([announced for each in everyone for announced in each.announced])
    lengths = [each.lengths for each in everyone if each.lengths is not None]  # rows of one batch that move: of all
    data.lengths = tuple([count for own in lengths for count in own]) if len(lengths) == len(everyone) else None
    data.transient, data.ranges, data.packed, data.trimmed_at, data.chain = None, (), False, (), ()
    if data.evictor is not None:
        for other in others:
            if other.evictor is not None:
                data.evictor.extend(other.evictor)


def _in_shape(data: CacheData, layout: Layout) -> CacheData:
    """The same data, or a copy of it in a layout of another room."""
    if data.layout == layout:
        return data
    copied = data.without_evictor()
    copied.layout, copied.rows = layout, reshaped(data.layout, layout, data.rows)
    if stay(data.layout, layout, data.rows):
        return copied
    moves = [moves_between(data.layout, layout, row) for row in data.rows]
    for buffer in copied.buffers or ():
        buffer.rearrange(moves, copied.round_up(copied.used))
    return copied


def _joint_capacity(filled: Sequence[CacheData]) -> int:
    """Slots for all rows: at most what they hold now, or can ever need."""
    used = max(each.used for each in filled)
    enough = max(enough_slots(filled[0].layout, each.rows) for each in filled)
    return min(max(each.capacity for each in filled), max(each.round_up(max(used, enough)) for each in filled))


def joined_buffers(everyone: Sequence[CacheData], capacity: int, encoded: bool) -> Buffers:
    """Buffers of all rows, encoded or still plain."""
    stored = [None if each.empty() else each.buffers for each in everyone]

    def joined(which: int) -> SlotBuffer:
        parts: list[tuple[SlotBuffer | None, int, int]] = []
        for each, buffers in zip(everyone, stored, strict=True):
            if buffers is None:
                parts.append((None, len(each.rows), 0))
                continue
            buffer = buffers[which]
            if encoded:
                buffer = buffer.copied()
                buffer.recode(everyone[0].codecs[which])
            parts.append((buffer, len(each.rows), each.used))
        return SlotBuffer.stacked(parts, capacity)

    return joined(0), joined(1)


def extracted(data: CacheData, index: int) -> CacheData:
    """A copy of one row without reserved slots."""
    single = copied_rows(data, [index], shrink=True)
    single.announced = (0,)
    return single


def copied_rows(data: CacheData, chosen: Sequence[int], shrink: bool = False) -> CacheData:
    """A copy of some rows, in this order, and of no other sequence.

    Args:
        shrink: without slack.
    """
    copied = data.without_evictor()
    select(copied, chosen, shrink)
    if data.evictor is not None:
        copied.evictor = data.evictor.selected(chosen)
        copied.evictor.belong_to(copied)
    return copied


def drop_first(data: CacheData, tokens: int) -> None:
    """Drops the slots of first tokens of a single row, which are read from shared segments from now on."""
    row, buffers = _single(data)
    capacity = round_up(row.end - tokens + 1, TAIL_MULTIPLE)
    keys, values = (SlotBuffer.in_order([(buffer, tokens, row.end)], capacity) for buffer in buffers)
    _set_shared(data, (keys, values), tokens)


def add_first(data: CacheData, parts: Sequence[tuple[Buffers, int, int]]) -> None:
    """Gives a single row slots for first tokens that were read from shared segments.

    Args:
        parts: buffers, and their slots [first, last) with these tokens.
    """
    row, own = _single(data)
    tokens = sum(last - first for _, first, last in parts)
    keys, values = (
        SlotBuffer.in_order(
            [*((buffers[which], first, last) for buffers, first, last in parts), (own[which], 0, row.end)],
            round_up(tokens + row.end + 1),
        )
        for which in range(2)
    )
    _set_shared(data, (keys, values), -tokens)


def _single(data: CacheData) -> tuple[Row, Buffers]:
    assert data.buffers is not None
    (row,) = data.rows
    return row, data.buffers


def _set_shared(data: CacheData, buffers: Buffers, tokens: int) -> None:
    """Sets the buffers after so many more tokens of the single row are read from segments."""
    (row,) = data.rows
    data.buffers = buffers
    data.rows = (row._replace(start=row.start - tokens, shared=row.shared + tokens),)
    data.announced = tuple([count and max(0, count - tokens) for count in data.announced])
    data.transient, data.ranges, data.packed, data.last = None, (), False, None


def select(data: CacheData, chosen: Sequence[int], shrink: bool = False) -> None:
    """Keeps only these rows, in this order.

    Args:
        shrink: without slack.
    """
    data.rows = tuple([data.rows[index] for index in chosen])
    data.announced = tuple([data.announced[index] for index in chosen])
    if data.buffers is not None:
        used = data.used
        capacity = min(data.capacity, data.round_up(max(data.reserved, *data.announced, 2 * used, 1)))
        capacity = data.round_up(used + 1) if shrink else capacity
        keys, values = (buffer.selected(chosen, capacity) for buffer in data.buffers)
        data.buffers = keys, values
    if data.residual is not None:
        data.residual = data.residual.selected(chosen)
    data.transient, data.ranges, data.packed, data.trimmed_at = None, (), False, ()
    data.chain = data.chain if len(chosen) == 1 else ()
    if data.lengths is not None:
        data.lengths = tuple([data.lengths[index] for index in chosen])
    if data.evictor is not None:
        data.evictor.keep(chosen, data.rows)


def check_padding(rows: int, empty: bool, lengths: Sequence[int] | None, left_padding: Sequence[int] | None) -> None:
    """Raises ValueError unless this padding can be announced for so many rows."""
    for name, counts in (("lengths", lengths), ("left_padding", left_padding)):
        if counts is not None and (len(counts) != rows or min(counts) < 0):
            raise ValueError(f"{name} is {list(counts)}: give {rows} numbers from 0 up, one for each row")
    if left_padding is not None and not empty:
        raise ValueError("left padding can only come first, but this cache holds tokens: give lengths instead")


def announce_padding(data: CacheData, lengths: Sequence[int] | None, left_padding: Sequence[int] | None) -> None:
    """As `KVCache.prepare`."""
    check_padding(len(data.rows), data.empty(), lengths, left_padding)
    if left_padding is not None:
        data.rows = tuple([row._replace(offset=row.offset - n) for row, n in zip(data.rows, left_padding, strict=True)])
    if lengths is not None:
        data.lengths, data.last = tuple(lengths), None
