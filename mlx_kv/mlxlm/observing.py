"""Attention that caches want to see: which layers of a model show it, and the seam that caches carry for it.

Whether a layer shows its attention is found by asking the model. Some call a function of their own, some read the
tokens of another layer's cache, some attend to other keys than those that were cached, some make masks of their own. A
score of attention, newest tokens as they came and lengths of their own for heads, layers or rows need layers that show
it; caches of models that hide it are refused here.
B rows, N new tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import cache as stock

from mlx_kv.cache.checks import cache_list
from mlx_kv.cache.classes import DeferredMask
from mlx_kv.cache.codecs import Packing, packings_of
from mlx_kv.cache.kv_cache import KVCache
from mlx_kv.cache.protocol import Call
from mlx_kv.mlxlm.attention import HOOK, AttentionCall, AttentionSeam
from mlx_kv.mlxlm.loading import architecture, check_model
from mlx_kv.mlxlm.probe import (
    ATTENTION,
    FAR,
    ROWS,
    StandIn,
    asked_once,
    indexers,
    objection,
    refuses_ragged,
    stand_ins,
    takes_packed,
)
from mlx_kv.mlxlm.rope import ropes
from mlx_kv.mlxlm.traverse import leaves, mapped, parts_of

Sight = Literal["seen", "derived", "hidden"]
WORST = ("hidden", "derived", "seen")
# New tokens and those before them: models have a way for prompts and one for decoding, and some select tokens of long
# texts.
TRIALS = ((2, 0), (2, FAR), (1, FAR))


# --- caches that want to see it ---------------------------------------------------------------------------------------


def can_answer(model: nn.Module, packing: Packing) -> bool:
    """Whether every layer hands planes that are packed like these on to attention that can be answered.

    The model is tried with planes of mlx-lm's codec, of the same bits and group size.
    """
    sights = attention_seen(model)
    if not all(sight in ("seen", None) for sight in sights):
        return False
    affine = packing if packing.mode == "affine" else Packing(8, 32)
    return takes_packed(model, affine.group_size, affine.bits)


def _all_can_answer(model: nn.Module, parts: Sequence[KVCache]) -> bool:
    packings = [packings_of(part.view.codecs) for part in parts if not part.view.residual_length]
    return all(each is not None and can_answer(model, each[0]) for each in packings)


def show_attention(model: nn.Module, caches: Sequence[Any]) -> None:
    """Gives caches that want to see their attention a seam of the model, if they carry none.

    Args:
        caches: of this model, one for each layer.

    Raises:
        ValueError: layers that hide it.
    """
    check_model("model", model)
    everything = list(leaves(cache_list("caches", caches)))
    hooked = [i for i, cache in enumerate(everything) if any(part.own_hook is not None for part in parts_of(cache))]
    if not hooked:
        return
    parts = {i: parts_of(everything[i]) for i in hooked}
    wanting = [i for i in hooked if any(part.evictor and part.evictor.wants_attention for part in parts[i])]
    apart = [i for i in wanting if any(part.evictor and part.evictor.own_lengths for part in parts_of(everything[i]))]
    if apart and not attends_by_class(model):
        raise ValueError(
            f"layers or heads of different lengths each need a mask of their own, and {architecture(model)} does not "
            "attend with the mask that it is given: use layers='uniform', and not share='adaptive'"
        )
    sights = attention_seen(model)
    if hidden := [i for i in wanting if i < len(sights) and sights[i] not in ("seen", None)]:
        raise ValueError(
            f"a score of attention needs to see it, and {architecture(model)} shows none of layer "
            f"{', '.join(map(str, hidden))}: choose another score, such as key_diff"
        )
    residuals = [i for i in hooked if any(part.view.residual_length for part in parts[i])]
    if blind := [i for i in residuals if i < len(sights) and sights[i] not in ("seen", None)]:
        raise ValueError(
            f"newest tokens as they came need attention that can be answered, and {architecture(model)} shows none of "
            f"layer {', '.join(map(str, blind))}: leave out residual_length"
        )
    evictors = [(i, part.evictor) for i in wanting for part in parts_of(everything[i])]
    seen = [(i, evictor.observation) for i, evictor in evictors if evictor is not None]
    if turning := [(i, own) for i, own in seen if own is not None and own.wants_turning]:
        found = ropes(model)
        for i, own in turning:
            if (rope := found[i]) is None:
                raise ValueError(
                    f"this score turns queries back to before RoPE, and {architecture(model)} has none in layer {i} "
                    "that it could be asked for: choose another score, such as key_diff"
                )
            own.turning = rope
    # Those that only want to answer are read as arrays where they cannot.
    carrying = [i for i in hooked if i in wanting or _all_can_answer(model, parts[i])]
    unseen = [part for i in carrying for part in parts[i] if part.seam is None]
    seam = AttentionSeam(model) if unseen else None
    for part in unseen:
        part.carry(seam)


# --- layers that show it ----------------------------------------------------------------------------------------------


@dataclass
class _Listener:
    """Records which caches attention was called for, and how."""

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
                self.heard.append((index, "hidden"))  # a layer that reads another one's cache, and passes none
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


# --- layers that attend with the mask that they are given -------------------------------------------------------------


@asked_once
def attends_by_class(model: nn.Module) -> bool:
    """Whether a model calls all of its attention with what its caches returned, and with the mask that they gave it.

    So do most: others make a mask of their own or another of it, call another function, attend to what they make of
    the keys, or read the tokens of another layer. Rows that are kept by capacity class (`cache.classes`), and heads or
    layers of different lengths need it.
    """
    if refuses_ragged(model) is not None or indexers(model):
        return False
    return all(_hands_on(model, new, position) for new, position in TRIALS)


def _hands_on(model: nn.Module, new: int, position: int) -> bool:
    asked: list[_Asked] = []

    def stand_in(cache: Any, position: int) -> Any:
        if type(cache) not in ATTENTION:
            return cache
        asked.append(_Asked(position))
        return asked[-1]

    def caches_at(position: int) -> list[Any]:
        asked.clear()
        return mapped(stock.make_prompt_cache(model), lambda cache: stand_in(cache, position))

    with AttentionSeam(model):
        why = objection(model, (ROWS, new), caches_at, position)
    return why is None and bool(asked) and all(one.answered for one in asked)


class _Asked:
    """In a cache's place: returns what those of several classes would, and raises where a model does not pass it on."""

    def __init__(self, position: int) -> None:
        self._position = position
        self._fetched: tuple[mx.array, mx.array] | None = None
        self.attention_hook = self

    @property
    def answered(self) -> bool:
        """Whether attention came after every update."""
        return self._fetched is None

    @property
    def offset(self) -> mx.array:
        if self._fetched is not None:
            raise ValueError("positions were asked for between an update and its attention")
        return self._position - mx.arange(ROWS)

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> Any:
        return DeferredMask(N, return_array, window_size)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        if self._fetched is not None:
            raise ValueError("an update was not attended to")
        self._fetched = keys, values
        return keys, values

    def attend(self, call: Call) -> mx.array:
        fetched, self._fetched = self._fetched, None
        if fetched is None or not isinstance(call.mask, DeferredMask):
            raise ValueError("another mask, or no update before")
        keys, values = fetched
        if call.keys is not keys or call.values is not values or call.queries.shape[0] != ROWS:
            raise ValueError("other keys, values or rows than of the update")
        self._position += keys.shape[2]
        return mx.zeros((*call.queries.shape[:3], values.shape[3]), call.queries.dtype)
