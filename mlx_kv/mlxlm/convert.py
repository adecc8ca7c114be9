"""Our caches instead of a model's own: which of mlx-lm's become ours, and what a policy depends on in a model.

Types of mlx-lm's caches are handled in this room only.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import cache as stock

from mlx_kv.cache.checks import cache_list
from mlx_kv.cache.eviction.evictor import LayerGroup
from mlx_kv.cache.kv_cache import KVCache
from mlx_kv.communicator import LOCAL, CacheCommunicator
from mlx_kv.files.serialization import model_fingerprint
from mlx_kv.mlxlm.attention import attach_attention_hooks, reads_packed
from mlx_kv.mlxlm.probe import (
    ATTENTION,
    architecture,
    cache_usage,
    cached_per_model,
    check_model,
    counts_slots,
    indexers,
    window_of,
)
from mlx_kv.mlxlm.recurrent import RecurrentState, count_by_attention, mark_last
from mlx_kv.mlxlm.traverse import leaves, mapped
from mlx_kv.policy import BOUNDS, CachePolicy, given_policy, names
from mlx_kv.settings import SettingError

_fingerprint = cached_per_model(model_fingerprint)
FULL = {stock.KVCache, stock.QuantizedKVCache}
WINDOWED = {stock.RotatingKVCache, stock.ChunkedKVCache}
KINDS = {
    stock.KVCache: "full",
    stock.QuantizedKVCache: "full",
    stock.RotatingKVCache: "sliding",
    stock.ChunkedKVCache: "chunked",
    stock.ArraysCache: "recurrent",
}


class OneRow:
    """What a batch needs of a cache of an unknown kind: it is a batch of one row, never of more."""

    __slots__ = ()

    @classmethod
    def merge(cls, caches: Sequence[Any]) -> Any:
        (cache,) = caches
        return cache

    def filter(self, batch_indices: Sequence[int]) -> None:
        """Keeps the row: a batch without rows is dropped instead."""

    def extract(self, idx: int) -> Any:
        return copy.deepcopy(self)


@functools.cache
def one_row(kind: type) -> type:
    """A class of caches as a batch of one row. A subclass, since the model sets attributes that only it knows."""
    return type(kind.__name__, (kind, OneRow), {"__slots__": ()})


def make_prompt_cache(
    model: nn.Module, policy: CachePolicy | None = None, *, strict: bool = True, peers: CacheCommunicator = LOCAL
) -> list[Any]:
    """Creates one cache for each layer that uses one, in the order of the model's own list.

    Caches of attention follow the policy, also inside a `CacheList`: those with a window become rings of that window,
    and chunked ones stay chunked. Recurrent state stays mlx-lm's, and can be rolled back with a max_rollback. Classes
    that a model defines itself stay as they are, in batches of one row if they have no `merge`.

    Args:
        model: any model of mlx-lm.
        policy: None is `CachePolicy()`.
        strict: whether to refuse a policy with a setting that no layer supports.
        peers: the other parts of the model, if it is split: all parts decide together what a budget keeps.

    Raises:
        ValueError: strict, and the policy has a setting that no layer of this model supports; or a head dim that the
            codec cannot store; or peers that lack what a budget needs.
    """
    check_model("model", model)
    policy = given_policy(policy)
    fitting, packed_decode = _fit_policy(model, policy, strict)
    if strict:
        check_readable(model)
        whole = peers is LOCAL  # a part of a model has no fingerprint of the whole
        if whole and policy.calibration is not None and policy.calibration.fingerprint != _fingerprint(model):
            raise ValueError("this calibration is of another model: run mlx-kv calibrate MODEL for this one")
    stock_caches = stock.make_prompt_cache(model)
    attention = iter(_attention_caches(model, fitting, stock_caches, packed_decode, peers))

    def convert(cache: Any) -> Any:
        kind: type = type(cache)
        if kind in ATTENTION:
            return next(attention)
        if kind is stock.ArraysCache and policy.max_rollback:
            return RecurrentState.of(cache, policy.max_rollback)
        if not hasattr(kind, "merge"):
            cache.__class__ = one_row(kind)
        return cache

    caches = mapped(stock_caches, convert)
    count_by_attention(caches)
    mark_last(model, caches)
    attach_attention_hooks(model, caches)
    return caches


def _attention_caches(
    model: nn.Module, policy: CachePolicy, stock_caches: Sequence[Any], packed_decode: bool, peers: CacheCommunicator
) -> list[KVCache]:
    """A cache of ours for each of mlx-lm's attention caches of a model.

    Args:
        packed_decode: whether attention in every layer reads packed planes.

    Raises:
        ValueError: head dims that the codec cannot store, or budgets for other layers or that peers do not support.
    """
    usage = cache_usage(model)
    numbered = [(number, cache) for number, cache in enumerate(leaves(stock_caches)) if type(cache) in ATTENTION]
    if policy.budget is not None:
        _check_budgets(policy, sum(type(cache) in FULL for _, cache in numbered), peers)
    shapes, layer_group, layer, caches = dict(usage.shapes), LayerGroup(peers), peers.first_layer, []
    for number, cache in numbered:
        layer_policy = policy.plain() if number in usage.indexers else policy.of_cache(number)
        for name, codec, shape in zip(("keys", "values"), layer_policy.codecs, shapes.get(number, ()), strict=False):
            codec.check(name, mx.zeros(*shape))
        kind, window = kind_and_window(cache)
        if kind == "sliding":
            layout = layer_policy.layout(window_of(model, cache.max_size), cache.keep)
        else:
            layout = layer_policy.layout(chunk_size=window)
        caches.append(layer_policy.make_cache(layout, packed_decode, layer_group, layer))
        layer += kind == "full"
    return caches


def _check_budgets(policy: CachePolicy, full: int, peers: CacheCommunicator) -> None:
    """Raises ValueError where peers do not support a budget, or its tables are not for this number of full layers."""
    settings = {"share": policy.share, "layers": policy.layers, "score": policy.score_name}
    for (name, value), why in peers.unsupported.items():
        if settings[name] == value:
            raise SettingError(why)
    measured, total = None if policy.calibration is None else policy.calibration.heads, peers.total_layers(full)
    for what, table in (("table of budgets", policy.table), ("calibration", measured)):
        if table is not None and len(table) != total:
            raise ValueError(
                f"the {what} has {len(table)} rows, and this model has {total} layers of full attention: give a row "
                "for each of them, or run mlx-kv calibrate MODEL for this one"
            )


def _fit_policy(model: nn.Module, policy: CachePolicy, strict: bool) -> tuple[CachePolicy, bool]:
    """The policy without what a model does not support, and whether attention in every layer reads its packed planes.

    Raises:
        SettingError: strict, and no layer supports a setting.
    """
    kinds = cache_kinds(model)
    full, windowed = bool(kinds & FULL), bool(kinds & WINDOWED)
    packed_decode, computable = reads_packed(model, policy.codecs, bool(policy.residual_length))
    bounds = policy.max_kv_size is not None or policy.budget is not None
    why = why_unbounded(model) if bounds and full else None
    if not strict:
        fitting = policy if why is None else policy.unbounded()
        return fitting if computable else replace(fitting, residual_length=0), packed_decode
    bounded = full and why is None
    rings = windowed or (bounded and policy.max_kv_size is not None)
    supported = dict.fromkeys(BOUNDS, bounded)
    supported["max_write"] = rings or (bounded and policy.budget is not None)
    supported["max_rollback"] = rings or stock.ArraysCache in kinds
    ignored = [name for name in policy.changed() if not supported.get(name, full or windowed)]
    if not ignored and policy.residual_length and not computable:
        raise SettingError(
            "{residual_length:is}, but attention of {} cannot be answered here: leave it out",
            architecture(model),
            residual_length=policy.residual_length,
        )
    if not ignored:
        return policy, packed_decode
    reason = f"its caches are {', '.join(sorted(kind.__name__ for kind in kinds)) or 'none'}"
    if full and why is not None:
        reason = why
    elif not full and windowed and set(ignored) <= set(BOUNDS):
        reason = "every one has a window of its own"
    elif full and not rings and set(ignored) <= {"max_write", "max_rollback"}:
        reason = "none has a window, so all can take back any number of tokens, and read as many"
    raise SettingError(f"no layer of this model can honour {names(ignored)}: {{}}; leave it out", reason)


def check_caches(name: str, model: nn.Module, caches: Any) -> list[Any]:
    """Returns the caches of an argument, one for each layer of a model.

    Raises:
        ValueError: caches of another number of layers.
        TypeError: something else than caches.
    """
    checked, layers = cache_list(name, caches), len(stock.make_prompt_cache(model))
    if len(checked) != layers:
        raise ValueError(f"{name} has {len(checked)} layers, the model {layers}: use make_prompt_cache")
    return checked


def check_policy(model: nn.Module, policy: CachePolicy) -> None:
    """Raises ValueError where no layer of a model supports a setting of the policy, or mlx-lm cannot run it."""
    _fit_policy(model, policy, strict=True)
    check_readable(model)


@cached_per_model
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
    """Raises ValueError where caches keep a window as mlx-lm makes it, and the model's mask has a wider one."""
    for stock_cache, cache in zip(leaves(stock.make_prompt_cache(model)), leaves(caches), strict=False):
        if type(stock_cache) is not stock.RotatingKVCache or not isinstance(cache, KVCache):
            continue
        window = window_of(model, stock_cache.max_size)
        if cache.layout.window == stock_cache.max_size < window:
            raise ValueError(
                f"a cache keeps {stock_cache.max_size} tokens, as mlx-lm makes it, but layers of this model see "
                f"{window}: read the tokens anew, into caches of mlx_kv.make_prompt_cache"
            )


def kind_and_window(cache: Any) -> tuple[str | None, int | None]:
    """The kind of one of mlx-lm's own caches, and its window or chunk size; None where there is none."""
    kind = KINDS.get(type(cache))
    window = {"sliding": "max_size", "chunked": "chunk_size"}.get(kind or "")
    return kind, None if window is None else getattr(cache, window)
