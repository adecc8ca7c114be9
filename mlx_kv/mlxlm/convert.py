"""Our caches instead of a model's own: which of mlx-lm's become ours, and what a policy depends on in a model.

Types of mlx-lm's caches are handled in this room only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.nn as nn
from mlx_lm.models import cache as stock

from mlx_kv.cache.kv_cache import KVCache
from mlx_kv.communicator import LOCAL, CacheCommunicator
from mlx_kv.files.serialization import model_fingerprint
from mlx_kv.mlxlm.loading import architecture, check_model
from mlx_kv.mlxlm.observing import reads_packed, show_attention
from mlx_kv.mlxlm.probe import ATTENTION, cache_usage, cached_per_model, counts_slots, indexers, window_of
from mlx_kv.mlxlm.recurrent import RecurrentState, count_by_attention, mark_last
from mlx_kv.mlxlm.traverse import leaves, mapped
from mlx_kv.policy import CachePolicy, CacheSpec, ModelTraits, fit_policy, given_policy, make_layer_caches

FULL = {stock.KVCache, stock.QuantizedKVCache}
WINDOWED = {stock.RotatingKVCache, stock.ChunkedKVCache}
KINDS = {
    stock.KVCache: "full",
    stock.QuantizedKVCache: "full",
    stock.RotatingKVCache: "sliding",
    stock.ChunkedKVCache: "chunked",
    stock.ArraysCache: "recurrent",
}


def make_prompt_cache(
    model: nn.Module, policy: CachePolicy | None = None, *, strict: bool = True, peers: CacheCommunicator = LOCAL
) -> list[Any]:
    """Creates one cache for each layer that uses one, in the order of the model's own list.

    Caches of attention follow the policy, also inside a `CacheList`: those with a window become rings of that window,
    and chunked ones stay chunked. Recurrent state stays mlx-lm's, and can be rolled back with a max_rollback.

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
    return converted_caches(model, given_policy(policy), strict, peers)


def converted_caches(model: nn.Module, policy: CachePolicy, strict: bool, peers: CacheCommunicator) -> list[Any]:
    """As `make_prompt_cache`, of arguments that were checked."""
    traits, packed_decode = _traits(model, policy)
    fitting = fit_policy(policy, traits, strict)
    if strict:
        check_readable(model)
        whole = peers is LOCAL  # a part of a model has no fingerprint of the whole
        if whole and policy.calibration is not None and policy.calibration.fingerprint != _fingerprint(model):
            raise ValueError("this calibration is of another model: run mlx-kv calibrate MODEL for this one")
    own = stock.make_prompt_cache(model)
    attention = iter(make_layer_caches(fitting, _specs(model, own), packed_decode, peers))

    def converted(cache: Any) -> Any:
        if type(cache) is stock.ArraysCache and policy.max_rollback:
            return RecurrentState.of(cache, policy.max_rollback)
        return next(attention) if type(cache) in ATTENTION else cache

    caches = mapped(own, converted)
    count_by_attention(caches)
    mark_last(model, caches)
    show_attention(model, caches)
    return caches


def _specs(model: nn.Module, own: Sequence[Any]) -> list[CacheSpec]:
    """What each of mlx-lm's own attention caches of a model is for."""
    usage, specs = cache_usage(model), []
    shapes = dict(usage.shapes)
    for number, cache in enumerate(leaves(own)):
        kind, window = kind_and_window(cache)
        if type(cache) in ATTENTION:
            specs.append(
                CacheSpec(
                    number,
                    window=window_of(model, cache.max_size) if kind == "sliding" else None,
                    sinks=cache.keep if kind == "sliding" else 0,
                    chunk_size=window if kind == "chunked" else None,
                    indexer=number in usage.indexers,
                    shapes=shapes.get(number, ()),
                )
            )
    return specs


def _traits(model: nn.Module, policy: CachePolicy) -> tuple[ModelTraits, bool]:
    """What a policy depends on in a model, and whether attention in every layer reads its packed planes."""
    kinds, bounded = cache_kinds(model), policy.max_kv_size is not None or policy.budget is not None
    packed_decode, answered = reads_packed(model, policy.codecs, bool(policy.residual_length))
    traits = ModelTraits(
        architecture(model),
        [kind.__name__ for kind in kinds],
        full=bool(kinds & FULL),
        windowed=bool(kinds & WINDOWED),
        recurrent=stock.ArraysCache in kinds,
        unbounded=why_unbounded(model) if bounded and kinds & FULL else None,
        answered=answered,
    )
    return traits, packed_decode


def check_policy(model: nn.Module, policy: CachePolicy) -> None:
    """Raises ValueError where no layer of a model supports a setting of the policy, or mlx-lm cannot run it."""
    fit_policy(policy, _traits(model, policy)[0], strict=True)
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
    """The kind of one of mlx-lm's own caches, and its window or chunk size; None where there is none."""
    kind = KINDS.get(type(cache))
    window = {"sliding": "max_size", "chunked": "chunk_size"}.get(kind or "")
    return kind, None if window is None else getattr(cache, window)


@cached_per_model
def _fingerprint(model: nn.Module) -> str:
    return model_fingerprint(model)
