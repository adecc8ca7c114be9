"""What a budget sends to other ranks: scores, by MLX's collectives.

B rows, H KV heads of one rank, n tokens, L layers of one rank, R ranks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import mlx.core as mx
import mlx.nn as nn

from mlx_kv.communicator import LOCAL, CacheCommunicator
from mlx_kv.ranks.splitting import all_gather, part_of


def cache_communicator_of(model: nn.Module) -> CacheCommunicator:
    """The communicator for the caches of a model: local where this process has the whole of it."""
    part = part_of(model)
    if part is None:
        return LOCAL
    return SplitHeads(part.raw, part.copies) if part.split == "heads" else SplitLayers(part.raw, part.full_layers)


class SplitHeads(CacheCommunicator):
    """Ranks that each have some heads of every layer.

    Scores are gathered and then added up as one process would: of sums made by each rank, the last bit would depend on
    the order of additions.

    Args:
        group: the ranks.
        copies: whether each of them has all heads of which keys and values are kept. All then use those of the first
            rank: the others' need not be equal to the last bit.
    """

    def __init__(self, group: mx.distributed.Group, copies: bool) -> None:
        self._group, self._copies = group, copies
        fitted = "{score:='fitted'} reads the keys and values of all of them: use another score, such as 'key_diff'"
        adaptive = "{share:='adaptive'} compares the tokens of all of them: use {share:='head'}"
        refused = {("score", "fitted"): fitted + ", or {split:='layers'}", ("share", "adaptive"): adaptive}
        if not copies:  # other heads' tokens lie in other slots
            self.unsupported = {key: f"heads are split over ranks, and {why}" for key, why in refused.items()}

    def first_head(self, heads: int) -> int:
        return 0 if self._copies else self._group.rank() * heads

    def total_heads(self, heads: int) -> int:
        return heads if self._copies else self._group.size() * heads

    def needs_all_heads(self, scope: str) -> bool:
        return self._copies or scope != "head"

    def gather_heads(self, scores: Sequence[mx.array]) -> list[mx.array]:
        flat = mx.concatenate([each.reshape(-1) for each in scores])
        every = all_gather(flat, self._group).reshape(self._group.size(), -1)  # (R, sum of B * H * n)
        sizes = [math.prod(each.shape) for each in scores]
        ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
        by_rank = [
            every[:, end - size : end].reshape(-1, *each.shape)  # (R, B, H, n)
            for each, size, end in zip(scores, sizes, ends, strict=True)
        ]
        return [ranks[0] if self._copies else mx.concatenate(list(ranks), axis=1) for ranks in by_rank]


class SplitLayers(CacheCommunicator):
    """Ranks that each have some layers, the last rank the first of them.

    Args:
        group: the ranks.
        full_layers: layers of full attention of each rank.
    """

    splits_layers = True

    def __init__(self, group: mx.distributed.Group, full_layers: Sequence[int]) -> None:
        self._group, self._max_layers = group, max(full_layers)
        self.first_layer, self._total = sum(full_layers[group.rank() + 1 :]), sum(full_layers)
        if min(full_layers) == 0:  # such a rank cannot take part when the others decide
            why = "a rank has no layer of full attention, and cannot decide with the others what a budget keeps"
            self.unsupported = {("share", "layers"): why + ": use {share:='layer'}, or give each rank such a layer"}

    def total_layers(self, layers: int) -> int:
        return self._total

    def gather_layers(self, scores: Sequence[mx.array]) -> list[mx.array]:
        padding = mx.zeros((self._max_layers - len(scores), scores[0].shape[1]))
        padded = mx.concatenate([*scores, padding])  # (L, n); to add zeros changes nothing
        every = all_gather(padded, self._group).reshape(self._group.size(), self._max_layers, 1, -1)
        return [each for rank in reversed(range(self._group.size())) for each in every[rank]]
