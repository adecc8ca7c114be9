"""What the parts of one model tell each other before they evict: scores, all of one compaction at once.

Scores are gathered and then added up as one process would: of sums that ranks made beforehand, the last bit would
depend on who added what. Decides nothing about which tokens go.
B rows, H KV heads of one rank, n tokens, L layers of one rank, R ranks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import mlx.core as mx
import mlx.nn as nn

from mlx_kv.cache.eviction.allocation import Scope
from mlx_kv.cache.eviction.peers import ALONE, Peers
from mlx_kv.ranks.collectives import gathered
from mlx_kv.ranks.splitting import part_of


def peers_of(model: nn.Module) -> Peers:
    """Who has the other parts of a model; nobody where it is whole."""
    part = part_of(model)
    if part is None:
        return ALONE
    return Heads(part.raw, part.copies) if part.split == "heads" else Layers(part.raw, part.full_layers)


class Heads(Peers):
    """Ranks that each have some heads of every layer.

    Args:
        group: the ranks.
        copies: whether each of them has all heads of which keys and values are kept. All then hear the first: theirs
            need not be the same to the last bit.
    """

    def __init__(self, group: mx.distributed.Group, copies: bool) -> None:
        self._group, self._copies = group, copies
        split = "heads are split over ranks, and"
        self.unsupported = {
            ("layers", "global"): f"{split} layers='global' ranks the tokens of all of them: use layers='uniform' or "
            "'calibrated'"
        }
        if not copies:  # other heads' tokens lie in other slots
            self.unsupported |= {
                ("score", "fitted"): f"{split} score='fitted' reads the keys and values of all of them: use another "
                "score, such as 'key_diff', or split='layers'",
                ("share", "adaptive"): f"{split} share='adaptive' compares the tokens of all of them: use share='head'",
            }

    def first_head(self, heads: int) -> int:
        return 0 if self._copies else self._group.rank() * heads

    def all_heads(self, heads: int) -> int:
        return heads if self._copies else self._group.size() * heads

    def have_heads(self, scope: Scope) -> bool:
        return self._copies or scope != "head"

    def with_heads(self, scores: Sequence[mx.array]) -> list[mx.array]:
        flat = mx.concatenate([each.reshape(-1) for each in scores])
        every = gathered(flat, self._group).reshape(self._group.size(), -1)  # (R, sum of B * H * n)
        sizes = [math.prod(each.shape) for each in scores]
        ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
        return [
            self._whole(every[:, end - size : end].reshape(-1, *each.shape))
            for each, size, end in zip(scores, sizes, ends, strict=True)
        ]

    def _whole(self, of_ranks: mx.array) -> mx.array:
        """(B, R * H, n) of (R, B, H, n); (B, H, n) of copies."""
        return of_ranks[0] if self._copies else mx.concatenate(list(of_ranks), axis=1)


class Layers(Peers):
    """Ranks that each have some layers, the last rank the first of them.

    Args:
        group: the ranks.
        full_layers: layers of full attention of each rank.
    """

    have_layers = True

    def __init__(self, group: mx.distributed.Group, full_layers: Sequence[int]) -> None:
        self._group, self._most = group, max(full_layers)
        self.first_layer, self._every = sum(full_layers[group.rank() + 1 :]), sum(full_layers)
        self.unsupported = {
            ("layers", name): f"layers are split over ranks, and layers={name!r} needs all of them in one process: use "
            "layers='uniform' or 'calibrated'"
            for name in ("pyramid", "global")
        }
        if min(full_layers) == 0:  # nothing on such a rank would know when the others decide
            self.unsupported["share", "layers"] = (
                "a rank has no layer of full attention, and cannot decide with the others what a budget keeps: use "
                "share='layer', or give each rank such a layer"
            )

    def all_layers(self, layers: int) -> int:
        return self._every

    def with_layers(self, scores: Sequence[mx.array]) -> list[mx.array]:
        nothing = mx.zeros((self._most - len(scores), scores[0].shape[1]))
        own = mx.concatenate([*scores, nothing])  # (L, n); to add zeros changes nothing
        every = gathered(own, self._group).reshape(self._group.size(), self._most, 1, -1)
        return [each for rank in reversed(range(self._group.size())) for each in every[rank]]
