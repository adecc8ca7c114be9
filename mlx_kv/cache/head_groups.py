"""Keys and values of one row whose heads keep different numbers of tokens, in at most two buffers instead of one.

In one buffer every head has as many slots as the longest. Here heads of alike lengths share a buffer, so a layer of one
long head and several short ones takes few bytes more than its tokens. The recent block, and what comes after it, begins
in each buffer at the cut of its own longest head:

    one buffer   older tokens | dead | recent, new     of a short head: slots up to the cut of the longest are dead
    a group      older tokens | recent, new            `shift` slots less; dead ones only in shorter heads of the group

It is a form for decoding: one row, one query at a time, tensors as they are. For all else `KVCache.buffers` puts the
heads back into one buffer. H KV heads, h of them in a group; r query heads of each; n slots; D head dim.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from mlx_kv.cache.buffers import Buffers, SlotBuffer, index_of
from mlx_kv.cache.layout import Budget, Row
from mlx_kv.cache.protocol import Call

MIN_SAVED_SLOTS = 256  # of one head, by a second call of attention, or it costs more than it saves
MAX_BYTES = 0.95  # of the bytes of one buffer: groups that take more are not made


class HeadGroup:
    """Some heads of a layer.

    Args:
        heads: their numbers, ascending.
        lengths: tokens of each before the recent block.
        tensors: keys and values of all heads, (1, H, C, D) each.
        layer_cut, after: the slot of the recent block in these, and how many slots there are from it on.
        repeats: query heads of each head.

    Attributes:
        cut: the slot of the recent block here.
        shift: how many slots it comes earlier.
    """

    def __init__(
        self,
        heads: Sequence[int],
        lengths: Sequence[int],
        tensors: Sequence[mx.array],
        layer_cut: int,
        after: int,
        repeats: int,
    ) -> None:
        cut = self.cut = max(lengths)
        self.shift, self.heads = layer_cut - cut, index_of(heads)
        self._queries = index_of([head * repeats + i for head in heads for i in range(repeats)])
        self.keys, self.values = (self._copy_slots(tensor, layer_cut, after) for tensor in tensors)
        self.mask: mx.array | None = None  # (1, h r, 1, n)
        if min(lengths) < cut:
            slots = mx.arange(cut + after)
            self.mask = (slots < mx.array(list(lengths))[:, None]) | (slots >= cut)
            self.mask = mx.repeat(self.mask, repeats, axis=0)[None, :, None]

    def _copy_slots(self, tensor: mx.array, layer_cut: int, after: int) -> mx.array:
        """(1, h, cut + after, D): what these heads hold before their cut and after that of the layer."""
        heads = tensor[:, self.heads]
        parts = [heads[:, :, : self.cut], heads[:, :, layer_cut : layer_cut + after]]
        missing = self.cut + after - sum(part.shape[2] for part in parts)
        if missing:
            parts.append(mx.zeros((1, heads.shape[1], missing, heads.shape[3]), heads.dtype))
        return mx.concatenate(parts, axis=2)

    def write(self, keys: mx.array, values: mx.array, slot: int) -> None:
        """Stores keys and values (1, H, 1, D) of one token, whose slot in one buffer would be `slot`."""
        at = slice(slot - self.shift, slot - self.shift + 1)
        self.keys[:, :, at] = keys[:, self.heads]
        self.values[:, :, at] = values[:, self.heads]

    def attend(self, queries: mx.array, scale: float, slots: int) -> mx.array:
        """(1, h r, 1, Dv): attention of queries (1, H r, 1, D) over the first `slots` slots of one buffer."""
        last = slots - self.shift
        mask = None if self.mask is None else self.mask[..., :last]
        keys, values = self.keys[:, :, :last], self.values[:, :, :last]
        return mx.fast.scaled_dot_product_attention(queries[:, self._queries], keys, values, scale=scale, mask=mask)


class HeadGroups:
    """All heads of a layer, in one group or two.

    Args:
        buffers: with all heads, of one row.
        lengths: tokens of each head before the cut.
        cut, after: where the recent block begins, and how many slots there are from it on.
        slots: how many hold tokens.
        query_heads: Hq = H r.

    Attributes:
        max_slots: slots that a row can use before its next compaction.
        attended: whether the last token was attended to here; False where the attention is no longer patched.
    """

    def __init__(
        self, buffers: Buffers, lengths: Sequence[int], cut: int, after: int, slots: int, query_heads: int
    ) -> None:
        self._buffers = tuple([SlotBuffer(each.codec, (), each.head_dim, each.dtype) for each in buffers])
        self.heads, self.capacity, self.max_slots = len(lengths), max(buffers[0].capacity, cut + after), cut + after
        self.slots, self.bytes_per_slot = slots, sum(each.bytes_per_slot for each in buffers)
        tensors = [each.planes[0] for each in buffers]
        chosen, repeats = choose_groups(lengths), query_heads // self.heads
        self.groups = [
            HeadGroup(each, [lengths[head] for head in each], tensors, cut, after, repeats) for each in chosen
        ]
        order = [head * repeats + i for each in chosen for head in each for i in range(repeats)]
        self._order: mx.array | None = None  # where each query head is in the groups, one after the other
        if order != sorted(order):
            self._order = mx.array([order.index(head) for head in range(query_heads)])
        self._cut = cut
        self.attended = True

    @classmethod
    def if_smaller(
        cls, buffers: Buffers, layout: Budget, row: Row, dead: mx.array, query_heads: int
    ) -> HeadGroups | None:
        """Groups of the heads of a single row, if they take clearly fewer bytes than one buffer.

        Args:
            dead: slots before the cut that hold no token, (1, H).
        """
        cut, after = layout.cut_of(row), layout.keep_recent + layout.slack + 1
        lengths: list[int] = (cut - dead[0]).tolist()  # type: ignore[assignment]
        groups = cls(buffers, lengths, cut, after, row.end, query_heads)
        smaller = groups.nbytes < MAX_BYTES * sum(each.nbytes for each in buffers)
        return groups if smaller and row.end <= groups.max_slots else None

    @property
    def arrays(self) -> list[mx.array]:
        """All keys and values."""
        return [each for group in self.groups for each in (group.keys, group.values)]

    @property
    def nbytes(self) -> int:
        """Bytes allocated, from shapes alone."""
        return sum(array.nbytes for array in self.arrays)

    def write(self, keys: mx.array, values: mx.array) -> None:
        """Stores keys and values (1, H, 1, D) of the next token."""
        for group in self.groups:
            group.write(keys, values, self.slots)
        self.slots, self.attended = self.slots + 1, False

    def attend(self, call: Call) -> mx.array:
        """(1, Hq, 1, Dv): attention of the last token's queries."""
        self.attended = True
        outputs = [group.attend(call.queries, call.scale, self.slots) for group in self.groups]
        output = outputs[0] if len(outputs) == 1 else mx.concatenate(outputs, axis=1)
        return output if self._order is None else mx.take(output, self._order, axis=1)

    def buffers(self) -> Buffers:
        """All heads in one buffer again; dead slots are 0."""
        keys, values = self._buffers
        for which, buffer in enumerate((keys, values)):
            first = self.arrays[which]
            whole = mx.zeros((1, self.heads, self.capacity, first.shape[3]), first.dtype)
            for group in self.groups:
                tensor = group.values if which else group.keys
                whole[:, group.heads, : group.cut] = tensor[:, :, : group.cut]
                whole[:, group.heads, self._cut : self.max_slots] = tensor[:, :, group.cut :]
            buffer.planes = (whole,)
            mx.eval(whole)
        return keys, values


def choose_groups(lengths: Sequence[int]) -> list[list[int]]:
    """Which heads share a buffer: one group, or the two of the fewest slots where these save enough.

    Args:
        lengths: tokens of each head before the cut.
    """
    ranked = sorted(range(len(lengths)), key=lambda head: lengths[head])
    longest = lengths[ranked[-1]]
    # What a split after the first k heads saves: each of them has as many slots as number k.
    saved, k = max(((longest - lengths[ranked[k - 1]]) * k, k) for k in range(1, len(ranked))) if ranked[1:] else (0, 0)
    if saved <= MIN_SAVED_SLOTS:
        return [sorted(ranked)]
    return sorted([sorted(ranked[:k]), sorted(ranked[k:])])
