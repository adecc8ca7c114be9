"""Probes of attention, and caches that need to see theirs: which layers show it, and the patch that shows it.

Some models call an attention function of their own, read the tokens of another layer's cache, attend to other keys than
the cached ones, or make their own masks. Scores of attention, residuals and different lengths of heads, layers or rows
need layers that show their attention; for other models their caches are refused.
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
from mlx_kv.cache.codecs import Codecs, Packing, packings_of
from mlx_kv.cache.kv_cache import KVCache
from mlx_kv.cache.protocol import AttentionCall, Call
from mlx_kv.cache.segmented import DeferredMask
from mlx_kv.mlxlm.attention import HOOK, AttentionPatch
from mlx_kv.mlxlm.loading import architecture, check_model
from mlx_kv.mlxlm.probe import (
    ATTENTION,
    FAR,
    ROWS,
    ProbeCache,
    cached_per_model,
    graph_error,
    indexers,
    probe_caches,
    refuses_ragged,
    takes_packed,
)
from mlx_kv.mlxlm.traverse import leaves, mapped, parts_of
from mlx_kv.settings import SettingError

Sight = Literal["seen", "derived", "hidden"]
WORST = ("hidden", "derived", "seen")
# New tokens and those before: models read prompts and decode in different ways, and some select tokens of long texts.
TRIALS = ((2, 0), (2, FAR), (1, FAR))


# --- caches that need to see it ---------------------------------------------------------------------------------------


def can_answer(model: nn.Module, packing: Packing) -> bool:
    """Whether every layer passes planes packed like these to attention that can be computed here.

    The model is probed with planes of mlx-lm's codec, of the same bits and group size.
    """
    sights = attention_seen(model)
    if not all(sight in ("seen", None) for sight in sights):
        return False
    affine = packing if packing.mode == "affine" else Packing(8, 32)
    return takes_packed(model, affine.group_size, affine.bits)


def reads_packed(model: nn.Module, codecs: Codecs, residual: bool) -> tuple[bool, bool]:
    """Whether attention in every layer of a model reads what codecs store packed, and whether it can be computed here.

    Args:
        residual: whether it must be computed here, beside newest tokens that are not quantised.
    """
    packed = [codec.packed for codec in codecs if codec.packed is not None]
    ours = packings_of(codecs) is not None  # planes that mlx-lm's attention cannot read
    answered = can_answer(model, packed[0] if packed else Packing(8, 32)) if residual or ours else True
    if len(packed) < len(codecs) or ours:
        return len(packed) == len(codecs) and answered, answered
    return takes_packed(model, packed[0].group_size, packed[0].bits), answered


def _all_can_answer(model: nn.Module, parts: Sequence[KVCache]) -> bool:
    packings = [packings_of(part.view.codecs) for part in parts if not part.view.residual_length]
    return all(each is not None and can_answer(model, each[0]) for each in packings)


def show_attention(model: nn.Module, caches: Sequence[Any]) -> None:
    """Connects caches that need to see their attention to a patch of the model's, if they are not yet.

    Args:
        caches: of this model, one for each layer.

    Raises:
        ValueError: layers that hide it.
    """
    check_model("model", model)
    parts = [parts_of(cache) for cache in leaves(cache_list("caches", caches))]
    hooked = {i: own for i, own in enumerate(parts) if any(part.own_hook is not None for part in own)}
    if not hooked:
        return
    evictors = {i: [part.evictor for part in own if part.evictor is not None] for i, own in hooked.items()}
    wanting = {i: own for i, own in evictors.items() if any(evictor.wants_attention for evictor in own)}
    if any(evictor.own_lengths for own in wanting.values() for evictor in own) and not attends_by_class(model):
        raise SettingError(
            "layers or heads of different lengths each need a mask of their own, and {} does not attend with the mask "
            "that it is given: use {layers:='uniform'}, and not {share:='adaptive'}",
            architecture(model),
        )
    sights = dict(enumerate(attention_seen(model)))
    hidden = [i for i in hooked if sights.get(i) not in ("seen", None)]
    if blind := [str(i) for i in hidden if i in wanting]:
        raise ValueError(
            f"a score of attention needs to see it, and {architecture(model)} shows none of layer {', '.join(blind)}: "
            "choose another score, such as key_diff"
        )
    if blind := [str(i) for i in hidden if any(part.view.residual_length for part in hooked[i])]:
        raise SettingError(
            "unquantised newest tokens need attention that can be computed here, and {} shows none of layer {}: leave "
            "out {residual_length}",
            *(architecture(model), ", ".join(blind)),
        )
    # Where packed planes cannot be attended to here, attention gets arrays: such caches need no patch.
    carrying = [own for i, own in hooked.items() if i in wanting or _all_can_answer(model, own)]
    if unseen := [part for own in carrying for part in own if part.seam is None]:
        patch = AttentionPatch(model)
        for part in unseen:
            part.carry(patch)


# --- layers that show it ----------------------------------------------------------------------------------------------


@dataclass
class _Listener:
    """Records the caches of attention calls, and how the calls use them."""

    caches: list[Any] = field(default_factory=list)
    calls: list[tuple[int, Sight]] = field(default_factory=list)

    def attend(self, call: AttentionCall) -> mx.array:
        for index, cache in enumerate(self.caches):
            kept = getattr(cache, "keys", None)
            if cache is call.cache:
                slots = kept.shape[2] if isinstance(cache, ProbeCache) and kept is not None else call.keys.shape[2]
                same: Sight = "seen" if call.keys is kept or not isinstance(cache, ProbeCache) else "derived"
                self.calls.append((index, same if call.keys.shape[2] == slots else "hidden"))
            elif kept is not None and call.keys is kept:
                self.calls.append((index, "hidden"))  # a layer that reads another one's cache, and passes none
        return call.forward()


@cached_per_model
def attention_seen(model: nn.Module) -> tuple[Sight | None, ...]:
    """How the model calls attention over each of its caches, in the order of `leaves`.

    "seen": with the cache, and the keys that the cache returned. "derived": with the cache, and as many keys, in the
    order of its slots, that the layer computes from them (latent attention; part of the products may be in the mask).
    "hidden": never, or not always, or not over all slots. None: without attention, as recurrent layers and indexers.
    """
    own = list(leaves(stock.make_prompt_cache(model)))
    found: list[set[Sight | None]] = [set() for _ in own]
    for new, position in TRIALS:
        for index, sight in enumerate(_probe_attention(model, new, position)):
            found[index].add(sight)
    return tuple(next((sight for sight in WORST if sight in sights), None) for sights in found)


def _probe_attention(model: nn.Module, new: int, position: int) -> list[Sight | None]:
    listener = _Listener()

    def listening(caches: list[Any]) -> list[Any]:
        listener.caches, listener.calls = list(leaves(caches)), []
        for cache in listener.caches:
            setattr(cache, HOOK, listener)
        return caches

    with AttentionPatch(model, otherwise=listener):
        why = graph_error(model, (1, new), lambda at: listening(probe_caches(model, at)), position)
        if why is not None:  # it needs attributes of mlx-lm's own caches
            model(mx.zeros((1, new), mx.int32), cache=listening(stock.make_prompt_cache(model)))
    aside = indexers(model)
    return [
        _sight(cache, [sight for i, sight in listener.calls if i == index], index in aside)
        for index, cache in enumerate(listener.caches)
    ]


def _sight(cache: Any, calls: list[Sight], indexer: bool) -> Sight | None:
    if calls:
        return next(sight for sight in WORST if sight in calls)
    written = cache.written if isinstance(cache, ProbeCache) else not isinstance(cache, stock.ArraysCache)
    return "hidden" if written and not indexer else None


# --- layers that use the mask of their cache --------------------------------------------------------------------------


@cached_per_model
def attends_by_class(model: nn.Module) -> bool:
    """Whether a model calls all of its attention with exactly the keys, values and mask that its caches returned.

    Most do. Others make their own mask, call another function, compute keys from the cached ones, or read the tokens of
    another layer. Rows in capacity classes (`cache.segments`), and heads or layers of different lengths need it.
    """
    if refuses_ragged(model) is not None or indexers(model):
        return False
    return all(_passes_through(model, new, position) for new, position in TRIALS)


def _passes_through(model: nn.Module, new: int, position: int) -> bool:
    strict: list[_StrictCache] = []

    def caches_at(position: int) -> list[Any]:
        def replaced(cache: Any) -> Any:
            if type(cache) not in ATTENTION:
                return cache
            strict.append(_StrictCache(position))
            return strict[-1]

        strict.clear()
        return mapped(stock.make_prompt_cache(model), replaced)

    with AttentionPatch(model):
        why = graph_error(model, (ROWS, new), caches_at, position)
    return why is None and bool(strict) and all(cache.attended for cache in strict)


class _StrictCache:
    """Returns what caches of several classes would, and raises an error where a model does not pass it to attention."""

    def __init__(self, position: int) -> None:
        self._position = position
        self._fetched: tuple[mx.array, mx.array] | None = None
        self.attention_hook = self

    @property
    def attended(self) -> bool:
        """Whether attention followed every update."""
        return self._fetched is None

    @property
    def offset(self) -> mx.array:
        if self._fetched is not None:
            raise ValueError("positions were read between an update and its attention")
        return self._position - mx.arange(ROWS)

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> Any:
        return DeferredMask(N, return_array, window_size)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        if self._fetched is not None:
            raise ValueError("an update without attention")
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
