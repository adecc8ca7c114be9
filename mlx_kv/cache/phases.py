"""What a sequence is doing, and how much room its writes want.

Reading a prompt and decoding want different shapes: a ring of window + room - 1 slots and a budget of budget + margin +
room need room for the longest write of the phase, and none that is left of the phase before. Decides when a cache is
given another room: at once when a longer write comes, and when PERIOD writes in a row would do with far less. Trims are
looked at, too: whoever takes tokens back, as a draft model's loop does, keeps room for as many as it may take back.
Integers only: what moves then is in `update`.

A mask is asked for before the update, of one layer for all: so what the next write gets is decided before, from what
all layers have seen alike.
"""

from __future__ import annotations

from mlx_kv.cache.contents import Contents
from mlx_kv.cache.growth import round_up
from mlx_kv.cache.layout import NO_LIMIT, Layout, Row, enough_slots, planned

# Changing the room copies what is live once, about as much as attention reads in two or three steps of decoding. After
# so many, this is little even where writes change all the time.
PERIOD = 32
MUCH_LESS = 4  # times: less than that is not worth a copy, unless it makes the mask unnecessary


def layout_for(held: Contents, new: int) -> Layout:
    """The layout that a write of `new` tokens finds."""
    layout, following = held.layout, held.following
    if new > layout.room:
        return layout if layout.room == layout.max_write else layout.with_room(_room_for(new, layout))
    return layout if following is None or new > following.room else following


def begin(held: Contents) -> None:
    """A new session: there is all the room that is planned for, and nothing was seen."""
    held.layout, held.following, held.last = planned(held.layout), None, None
    held.steps, held.most_steps, held.short_writes, held.longest, held.trimmed_at = 0, 0, 0, 0, ()


def note_write(held: Contents, new: int) -> None:
    """Looks at a write that was made, in the layout that `layout_for` says."""
    if held.layout.room == NO_LIMIT:
        return
    held.following = None  # this write has found it
    _note(held, new, writes=1)


def note_trim(held: Contents, rows: tuple[Row, ...]) -> None:
    """Looks at a trim, of whatever number of tokens: it might have been all that were written since the last one.

    Args:
        rows: as they stood before it.
    """
    if held.layout.room == NO_LIMIT:
        return
    before = held.trimmed_at if len(held.trimmed_at) == len(rows) else (0,) * len(rows)
    _note(held, max(row.offset - offset for row, offset in zip(rows, before, strict=True)), writes=0)
    held.last = None
    held.trimmed_at = tuple([row.offset for row in held.rows])


def _note(held: Contents, tokens: int, writes: int) -> None:
    """So many tokens were written at once, or might have been taken back."""
    layout = held.layout
    if held.following is not None and tokens > held.following.room:
        held.following = None
    if tokens * MUCH_LESS > layout.room and tokens > 1:
        held.steps, held.short_writes, held.longest, held.most_steps = 0, 0, 0, NO_LIMIT
        return
    if held.short_writes:  # the steps since the last look were short, too
        held.short_writes += held.steps
    held.short_writes += writes
    held.longest = max(held.longest, tokens)
    if held.short_writes >= PERIOD:
        narrower = layout.with_room(min(layout.room, _room_for(held.longest, layout)))
        held.short_writes, held.longest = 0, 0
        if narrower is not layout or held.capacity > round_up(enough_slots(layout, held.rows)):
            held.following, held.last = narrower, None
    held.steps, held.most_steps = 0, PERIOD - 1 - held.short_writes


def _room_for(tokens: int, layout: Layout) -> int:
    """Room for writes of at least so many: powers of two, so that drafts of changing lengths change nothing."""
    wanted = max(1, tokens, layout.max_rollback)
    return min(1 << (wanted - 1).bit_length(), layout.max_write)
