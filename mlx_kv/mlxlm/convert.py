"""A model's own caches, and ours in their place: which become ours, and what of a policy a model can honour.

Types of mlx-lm's caches are handled in this room only. What a model does with its caches is found by asking it
(`probe`). Loops and samplers are in `generation`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import count
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import cache as stock

from mlx_kv.cache.checks import SettingError
from mlx_kv.cache.codecs import Packing, packings_of
from mlx_kv.cache.eviction.calibration import is_fitted
from mlx_kv.cache.eviction.layer_group import LayerGroup
from mlx_kv.cache.eviction.peers import ALONE, Peers
from mlx_kv.cache.kv_cache import KVCache
from mlx_kv.files.fingerprint import model_fingerprint
from mlx_kv.mlxlm.loading import architecture, check_model
from mlx_kv.mlxlm.observing import can_answer, show_attention
from mlx_kv.mlxlm.probe import asked_once, cache_usage, counts_slots, indexers, takes_packed, window_of
from mlx_kv.mlxlm.recurrent import RecurrentState, count_by_attention, mark_last
from mlx_kv.mlxlm.traverse import leaves, mapped
from mlx_kv.policy import FOR_BUDGETS, CachePolicy, given_policy

FULL = {stock.KVCache, stock.QuantizedKVCache}
WINDOWED = {stock.RotatingKVCache, stock.ChunkedKVCache}
KINDS = {
    stock.KVCache: "full",
    stock.QuantizedKVCache: "full",
    stock.RotatingKVCache: "sliding",
    stock.ChunkedKVCache: "chunked",
    stock.ArraysCache: "recurrent",
}
BOUNDS = ("max_kv_size", "budget", "sinks", *FOR_BUDGETS)


def make_prompt_cache(
    model: nn.Module, policy: CachePolicy | None = None, *, strict: bool = True, peers: Peers = ALONE
) -> list[Any]:
    """One cache for each layer that wants one, in the order of the model's own list.

    Attention caches become ours as the policy says, also inside a `CacheList`: those with a window become rings of that
    window, chunked ones stay chunked. Recurrent state stays mlx-lm's, and with a max_rollback it can go back.

    Args:
        model: any model of mlx-lm.
        policy: None is `CachePolicy()`.
        strict: whether to refuse a policy of which no layer can honour some setting.
        peers: who has the other parts of the model, if it is but a part: what a budget keeps is decided by all.

    Raises:
        ValueError: strict, and the policy sets what no layer of this model can honour; or a head dim; or peers that
            cannot say what a budget needs.
    """
    check_model("model", model)
    policy = given_policy(policy)
    if strict:
        check_policy(model, policy)
        if peers is ALONE:  # a part of a model has no fingerprint of the whole
            check_calibration(model, policy)
    if policy.max_kv_size is not None or policy.budget is not None:
        policy = policy if why_unbounded(model) is None else policy.unbounded()
    if policy.budget is not None:
        peers.check(policy.share, policy.allocated, is_fitted(policy.score))
    if policy.residual_length and not shows_residual(model, policy):
        policy = replace(policy, residual_length=0)
    packed_decode = not policy.stores_plain and _takes_packed_planes(model, policy)
    caches = _convert(model, stock.make_prompt_cache(model), policy, packed_decode, peers)
    show_attention(model, caches)
    return caches


def check_policy(model: nn.Module, policy: CachePolicy) -> None:
    """Raises ValueError where no layer of a model can honour a setting of the policy, or mlx-lm cannot run it."""
    kinds = cache_kinds(model)
    full, windowed = bool(kinds & FULL), bool(kinds & WINDOWED)
    bounded = full and (policy.max_kv_size is not None or policy.budget is not None)
    why = why_unbounded(model) if bounded else None
    rings = windowed or (policy.max_kv_size is not None and full and why is None)
    honoured = {"max_write": rings or (policy.budget is not None and full and why is None)}
    honoured["max_rollback"] = rings or stock.ArraysCache in kinds
    honoured |= dict.fromkeys(BOUNDS, full and why is None)
    ignored = [name for name in policy.changed() if not honoured.get(name, full or windowed)]
    if not ignored:
        check_readable(model)
        if policy.residual_length and not shows_residual(model, policy):
            raise SettingError(
                f"residual_length is {policy.residual_length}, but attention of {architecture(model)} cannot be "
                "answered here: leave it out",
                ["residual_length"],
            )
        return
    reason = f"its caches are {', '.join(sorted(kind.__name__ for kind in kinds)) or 'none'}"
    if why is not None:
        reason = why
    elif not full and windowed and set(ignored) <= set(BOUNDS):
        reason = "every one has a window of its own"
    elif full and not rings and set(ignored) <= {"max_write", "max_rollback"}:
        reason = "none has a window, so all can take back any number of tokens, and read as many"
    raise SettingError(f"no layer of this model can honour {', '.join(ignored)}: {reason}; leave it out", ignored)


@asked_once
def cache_kinds(model: nn.Module) -> frozenset[type]:
    """The classes of the caches that mlx-lm makes for a model."""
    return frozenset(type(cache) for cache in leaves(stock.make_prompt_cache(model)))


def check_readable(model: nn.Module) -> None:
    """Raises ValueError where mlx-lm cannot run a model, with whatever caches."""
    if (fault := cache_usage(model).fault) is not None:
        raise ValueError(
            f"mlx-lm's {architecture(model)} cannot read a prompt: with mlx-lm's own caches, too, it ends in {fault}; "
            "try another version of mlx-lm"
        )


def why_unbounded(model: nn.Module) -> str | None:
    """Why full attention of this model must keep all of its tokens; None where some can be dropped."""
    if indexers(model):
        return "the indexer of its sparse attention counts slots, so none may be moved or dropped"
    if counts_slots(model):
        return "its attention tells positions by the number of slots, so no token may be dropped"
    return None


def check_windows(model: nn.Module, caches: Sequence[Any]) -> None:
    """Raises ValueError where caches keep a window as mlx-lm makes it, and the model asks for a wider one."""
    for own, cache in zip(leaves(stock.make_prompt_cache(model)), leaves(caches), strict=False):
        if type(own) is not stock.RotatingKVCache or not isinstance(cache, KVCache):
            continue
        wanted = window_of(model, own.max_size)
        if cache.layout.window == own.max_size < wanted:
            raise ValueError(
                f"a cache keeps {own.max_size} tokens, as mlx-lm makes it, but layers of this model see {wanted}: "
                "read the tokens anew, into caches of mlx_kv.make_prompt_cache"
            )


def kind_and_window(cache: Any) -> tuple[str | None, int | None]:
    """What one of mlx-lm's own caches is for, and the window or chunk that it was made for; None for one unknown."""
    kind = KINDS.get(type(cache))
    window = {"sliding": "max_size", "chunked": "chunk_size"}.get(kind or "")
    return kind, None if window is None else getattr(cache, window)


def _convert(
    model: nn.Module, own: Sequence[Any], policy: CachePolicy, packed_decode: bool, peers: Peers = ALONE
) -> list[Any]:
    # The keys of an indexer stay plain: they are few, and the models write such a cache's buffers themselves.
    of_indexers, plain = indexers(model), policy.plain()
    layer_group, numbers, layers = LayerGroup(peers), count(), count(peers.first_layer)
    full = sum(type(cache) in FULL for cache in leaves(own))
    _check_table(policy, full, peers)

    def converted(cache: Any) -> Any:
        number = next(numbers)
        kept = plain if number in of_indexers else policy
        if type(cache) in FULL | WINDOWED:
            kept = kept.of_cache(number)
        if type(cache) is stock.RotatingKVCache:
            window = window_of(model, cache.max_size)
            return kept.make_cache(kept.layout(window, cache.keep), packed_decode)
        if type(cache) is stock.ChunkedKVCache:
            return kept.make_cache(kept.layout(chunk_size=cache.chunk_size), packed_decode)
        if type(cache) in FULL:
            layer = next(layers)
            return kept.of_layer(layer, full).make_cache(
                packed_decode=packed_decode, layer_group=layer_group, layer=layer
            )
        if type(cache) is stock.ArraysCache and policy.max_rollback:
            return RecurrentState.of(cache, policy.max_rollback)
        return cache

    caches = mapped(own, converted)
    count_by_attention(caches)
    mark_last(model, caches)
    return caches


def _check_table(policy: CachePolicy, full: int, peers: Peers) -> None:
    """Raises ValueError for a table of budgets, or measurements, of another number of layers."""
    table, every = policy.table, peers.all_layers(full)
    if table is not None and len(table) != every:
        raise ValueError(
            f"the table of budgets has {len(table)} rows, and this model has {every} layers of full attention: give a "
            "row for each of them"
        )
    if policy.calibration is not None and len(policy.calibration.heads) != every:
        raise ValueError(
            f"this calibration is of a model of {len(policy.calibration.heads)} layers of full attention, and this one "
            f"has {every}: run mlx-kv calibrate MODEL for this one"
        )


@asked_once
def _fingerprint(model: nn.Module) -> str:
    return model_fingerprint(model)


def check_calibration(model: nn.Module, policy: CachePolicy) -> None:
    """Raises ValueError if a policy has measurements of another model."""
    if policy.calibration is not None and policy.calibration.fingerprint != _fingerprint(model):
        raise ValueError("this calibration is of another model: run mlx-kv calibrate MODEL for this one")


def shows_residual(model: nn.Module, policy: CachePolicy) -> bool:
    """Whether attention in every layer can be given newest tokens as they came beside what is stored."""
    packed = [codec.packed for codec in policy.codecs if codec.packed is not None]
    return can_answer(model, packed[0] if packed else Packing(8, 32))


def _takes_packed_planes(model: nn.Module, policy: CachePolicy) -> bool:
    """Whether attention in every layer of this model works on packed planes.

    Raises:
        ValueError: a head dim that the codec cannot store.
    """
    packing = policy.packing
    if policy.residual_length and None not in [codec.packed for codec in policy.codecs]:
        return True  # it can be answered
    if packing is not None and takes_packed(model, packing.group_size, packing.bits):
        return True
    if (packings := packings_of(policy.codecs)) is not None and can_answer(model, packings[0]):
        return True
    # On plain ones it works, or the error is for the user. The graph is dropped without being evaluated.
    always = replace(policy, quantized_start=0)
    model(mx.array([[0]]), cache=_convert(model, stock.make_prompt_cache(model), always, packed_decode=False))
    return False
