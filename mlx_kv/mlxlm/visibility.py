"""Which layers of a model show their attention where it can be seen (`attention`), found by asking the model itself.

Some call a function of their own, some read the tokens of another layer's cache, some attend to other keys than those
that were cached. Knows nothing about who wants to see it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import cache as stock

from mlx_kv.mlxlm.asking import asked_once
from mlx_kv.mlxlm.attention import HOOK, AttentionCall, AttentionSeam
from mlx_kv.mlxlm.quirks import indexers
from mlx_kv.mlxlm.stand_ins import FAR, StandIn, stand_ins
from mlx_kv.mlxlm.traverse import leaves
from mlx_kv.mlxlm.trials import objection

Sight = Literal["seen", "derived", "hidden"]
WORST = ("hidden", "derived", "seen")
# New tokens and those before them: models have a way for prompts and one for decoding, and some select tokens of long
# texts.
TRIALS = ((2, 0), (2, FAR), (1, FAR))


@dataclass
class _Listener:
    """Writes down which caches attention was called for."""

    caches: list[Any] = field(default_factory=list)
    heard: list[tuple[int, Sight]] = field(default_factory=list)

    def attend(self, call: AttentionCall) -> mx.array:
        for index, cache in enumerate(self.caches):
            kept = getattr(cache, "keys", None)
            if cache is call.cache:
                slots = kept.shape[2] if isinstance(cache, StandIn) and kept is not None else call.keys.shape[2]
                same: Sight = "seen" if call.keys is kept or not isinstance(cache, StandIn) else "derived"
                self.heard.append((index, same if call.keys.shape[2] == slots else "hidden"))
            elif kept is not None and call.keys is kept:
                self.heard.append((index, "hidden"))  # somebody else reads them, and does not say whose they are
        return call.hand_on()


@asked_once
def attention_seen(model: nn.Module) -> tuple[Sight | None, ...]:
    """How attention over each cache of the model, in the order of `leaves`, passes where it can be seen.

    "seen": with the cache, and the keys that the cache returned. "derived": with the cache, and as many keys, in the
    order of its slots, that the layer makes of them (latent attention; part of the products may be in the mask).
    "hidden": not at all, or not always, or not over all slots. None: nothing is attended to, as in recurrent layers and
    indexers.
    """
    own = list(leaves(stock.make_prompt_cache(model)))
    found: list[set[Sight | None]] = [set() for _ in own]
    for new, position in TRIALS:
        for index, sight in enumerate(_tried(model, new, position)):
            found[index].add(sight)
    return tuple(next((sight for sight in WORST if sight in sights), None) for sights in found)


def _tried(model: nn.Module, new: int, position: int) -> list[Sight | None]:
    listener = _Listener()

    def listening(caches: list[Any]) -> list[Any]:
        listener.caches, listener.heard = list(leaves(caches)), []
        for cache in listener.caches:
            setattr(cache, HOOK, listener)
        return caches

    with AttentionSeam(model, otherwise=listener):
        why = objection(model, (1, new), lambda at: listening(stand_ins(model, at)), position)
        if why is not None:  # it needs what only mlx-lm's own caches have
            model(mx.zeros((1, new), mx.int32), cache=listening(stock.make_prompt_cache(model)))
    aside = indexers(model)
    return [
        _sight(cache, [sight for i, sight in listener.heard if i == index], index in aside)
        for index, cache in enumerate(listener.caches)
    ]


def _sight(cache: Any, heard: list[Sight], indexer: bool) -> Sight | None:
    if heard:
        return next(sight for sight in WORST if sight in heard)
    written = cache.written if isinstance(cache, StandIn) else not isinstance(cache, stock.ArraysCache)
    return "hidden" if written and not indexer else None
