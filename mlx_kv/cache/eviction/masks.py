"""The masks of a layer whose length is its own, or whose heads hold different numbers of tokens.

mlx-lm asks one layer for the mask of all. Where layers or heads differ in length, each makes its own, and it is put in
the place of the one that came. Decides what each query head may read.
B rows, H KV heads, Hq query heads, S queries, K slots that attention reads.
"""

from __future__ import annotations

import mlx.core as mx

from mlx_kv.cache.eviction.kept_tokens import KeptTokens
from mlx_kv.cache.growth import round_up
from mlx_kv.cache.layout import Budget, Row, count_slots, plan_of
from mlx_kv.cache.mask import Mask, make_mask
from mlx_kv.cache.protocol import Call


class OwnMasks:
    """Makes them for one cache.

    Args:
        layout: of the cache.
    """

    def __init__(self, layout: Budget) -> None:
        self._layout = layout
        self._alive: mx.array | None = None  # (B, heads, 1, slots), good for:
        self._alive_of: tuple[object, ...] = ()
        self._unasked = 0  # updates since a mask was last asked for here, of those that took the whole way

    def of(self, call: Call, rows: tuple[Row, ...], counts: tuple[int, ...] | None, kept: KeptTokens) -> Mask:
        """The mask of a call of attention after an update: None, "causal", (S, K), (B, 1, S, K) or (B, Hq, S, K).

        Of packed planes (B, H, S, K) in the last case: mlx-lm has query heads in groups there.

        Args:
            rows, counts: as of `Evictor.attend`.
        """
        self._unasked = 0
        new = call.queries.shape[2]
        stored = (new,) * len(rows) if counts is None else counts
        before = tuple([row._replace(offset=row.offset - n) for row, n in zip(rows, stored, strict=True)])
        plan = plan_of(self._layout, before, new, counts)
        uneven = kept.dead is not None
        mask = make_mask(plan, return_array=uneven)
        if not uneven:
            return mask
        read = count_slots(plan.ranges)
        alive = self._alive_slots(call, rows, kept, read)[..., :read]
        assert mask != "causal", "it was asked for as an array"
        return alive if mask is None else alive & mask

    def _alive_slots(self, call: Call, rows: tuple[Row, ...], kept: KeptTokens, read: int) -> mx.array:
        """Which slots hold a token of which head, (B, Hq or H, 1, at least `read`), good until the next compaction."""
        packed, query_heads = not isinstance(call.keys, mx.array), call.queries.shape[1]
        good_for = kept.dead, packed, query_heads, tuple([row.longer for row in rows])
        known = self._alive
        same = len(self._alive_of) == len(good_for) and self._alive_of[0] is kept.dead
        if known is None or known.shape[3] < read or not same or self._alive_of[1:] != good_for[1:]:
            slots = round_up(read + 1)
            lines = [kept.alive(self._layout, row, i, slots) for i, row in enumerate(rows)]
            heads = max(line.shape[0] for line in lines)
            known = mx.stack([mx.broadcast_to(line, (heads, slots)) for line in lines])[:, :, None]
            if not packed and heads > 1:
                known = mx.repeat(known, query_heads // heads, axis=1)
            mx.async_eval(known)  # type: ignore[no-untyped-call]
            self._alive, self._alive_of = known, good_for
        return known

    def check_asked(self, due: bool) -> None:
        """Called before each update; raises ValueError before a first compaction if no mask is asked for here.

        Args:
            due: whether the update evicts.
        """
        self._unasked += 1
        if due and self._unasked > 1:
            raise ValueError(
                "layers or heads of different lengths each need a mask of their own, and nobody asked for it: use the "
                "caches of mlx_kv.make_prompt_cache(model, policy), or open an AttentionSeam(model) around the model"
            )
