"""Every quirk of mlx-lm (0.32), and nothing else.

Decides which of a model's own caches become ours, and what a model's attention can take. This is the only place that
asks for types of caches; loops and samplers are in `generation`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import cache as stock

from mlx_kv.batch import check_joinable
from mlx_kv.cache import KVCache
from mlx_kv.checks import SettingError
from mlx_kv.eviction.ledger import Ledger
from mlx_kv.policy import FOR_BUDGETS, CachePolicy

FULL = {stock.KVCache, stock.QuantizedKVCache}
KINDS = {
    stock.KVCache: "full",
    stock.QuantizedKVCache: "full",
    stock.RotatingKVCache: "sliding",
    stock.ChunkedKVCache: "chunked",
    stock.ArraysCache: "recurrent",
}
WINDOWED = {stock.RotatingKVCache, stock.ChunkedKVCache}
# Sparse-attention models keep the keys of their indexer in the second cache of a layer. It is small, and the models
# write its buffers themselves (deepseek_v32 zeroes the values, minimax_m3 has none), so it stays plain.
INDEXER_MODELS = ("deepseek_v32", "glm_moe_dsa", "minimax_m3_vl")
# gemma2 adds a mask of one row to scores that have an axis for query heads; llama4 counts chunks from one offset.
UNBATCHED_MODELS = ("gemma2", "llama4")
# From some length on, their masks have an axis for query heads, which packed attention cannot broadcast. One token does
# not show it.
NEVER_PACKED_MODELS = ("minimax_m3_vl",)


def make_prompt_cache(model: nn.Module, policy: CachePolicy | None = None, *, strict: bool = True) -> list[Any]:
    """One cache for each layer that wants one, in the order of the model's own list.

    Attention caches become ours as the policy says, also inside a `CacheList`: those with a window become rings of that
    window, chunked ones stay chunked. Recurrent state stays mlx-lm's.

    Args:
        model: any model of mlx-lm.
        policy: None is `CachePolicy()`.
        strict: whether to refuse a policy of which no layer can honour some setting.

    Raises:
        ValueError: strict, and the policy sets what no layer of this model can honour; or a head dim.
    """
    policy = policy or CachePolicy()
    own = stock.make_prompt_cache(model)
    kinds = {type(cache) for cache in leaves(own)}
    full, windowed = bool(kinds & FULL), bool(kinds & WINDOWED)
    boundable = full and architecture(model) not in INDEXER_MODELS
    rings = windowed or (boundable and policy.max_kv_size is not None)
    budgets = boundable and policy.budget is not None
    honoured = {"max_write": rings or budgets, "max_rollback": rings}
    honoured |= dict.fromkeys(("max_kv_size", "budget", "sinks", *FOR_BUDGETS), boundable)
    ignored = [name for name in policy.changed() if not honoured.get(name, full or windowed)]
    if strict and ignored:
        raise SettingError(
            f"no layer of this model can honour {', '.join(ignored)}: its caches are "
            f"{', '.join(sorted(kind.__name__ for kind in kinds)) or 'none'}; leave it out",
            ignored,
        )
    packed_decode = policy.bits is not None and _takes_packed_planes(model, policy)
    return _convert(model, own, policy, packed_decode)


def check_batches(model: nn.Module, rows: int) -> None:
    """Raises ValueError where a model of mlx-lm cannot read so many rows of different lengths."""
    name = architecture(model)
    if rows > 1 and name in UNBATCHED_MODELS:
        raise ValueError(f"mlx-lm's {name} cannot read rows of different lengths: use max_batch_size=1")


def architecture(model: nn.Module) -> str:
    """The name of the file of mlx-lm that a model comes from."""
    return type(model).__module__.rpartition(".")[2]


def _convert(model: nn.Module, own: Iterable[Any], policy: CachePolicy, packed_decode: bool) -> list[Any]:
    indexed = architecture(model) in INDEXER_MODELS
    if indexed:  # the indexer counts slots of the layer beside it: nothing may move there
        policy = policy.unbounded()
    plain = replace(policy, bits=None, quantized_start=0)
    ledger, layers = Ledger(), count()

    def converted(cache: Any, policy: CachePolicy) -> Any:
        if type(cache) is stock.CacheList:
            members = [converted(c, plain if indexed and i == 1 else policy) for i, c in enumerate(cache.caches)]
            return stock.CacheList(*members)  # type: ignore[no-untyped-call]
        if type(cache) is stock.RotatingKVCache:
            return policy.make_cache(policy.layout(cache.max_size, cache.keep), packed_decode)
        if type(cache) is stock.ChunkedKVCache:
            return policy.make_cache(policy.layout(chunk_size=cache.chunk_size), packed_decode)
        if type(cache) in FULL:
            return policy.make_cache(packed_decode=packed_decode, ledger=ledger, layer=next(layers))
        return cache

    return [converted(cache, policy) for cache in own]


def _takes_packed_planes(model: nn.Module, policy: CachePolicy) -> bool:
    """Whether attention in every layer of this model works on packed planes.

    mlx-lm's shared attention function does, unless the model has attention sinks; MLA models and those with a function
    of their own don't. No list of models stays true for long, so ask the model: put one token through it, and see
    whether Python objects. The graph is dropped without being evaluated (unless the model
    itself evaluates something on its way).
    """
    if architecture(model) in NEVER_PACKED_MODELS:
        return False
    always = replace(policy, quantized_start=0)
    token = mx.array([[0]])
    try:
        model(token, cache=_convert(model, stock.make_prompt_cache(model), always, packed_decode=True))
    except Exception:
        # Not on packed planes. On plain ones it works, or the error is for the user: a head dim that no group divides.
        model(token, cache=_convert(model, stock.make_prompt_cache(model), always, packed_decode=False))
        return False
    return True


def leaves(caches: Iterable[Any]) -> Iterator[Any]:
    """The caches of all layers, those inside a `CacheList` one by one."""
    for cache in caches:
        if isinstance(cache, stock.CacheList):
            yield from leaves(cache.caches)
        else:
            yield cache


def attention_caches(caches: Iterable[Any]) -> list[KVCache]:
    """Those of all the caches that are ours."""
    return [cache for cache in leaves(caches) if isinstance(cache, KVCache)]


def can_trim(caches: Iterable[Any], n: int | Sequence[int]) -> bool:
    """Whether every layer can take back n tokens, or n[i] of row i, and then any of them be written again."""
    uniform = isinstance(n, int)
    # Ours and those of others answer as `protocol.Cache` says; mlx-lm's own know only whether they trim at all.
    return all(c.can_trim(n) if hasattr(c, "can_trim") else uniform and c.is_trimmable() for c in leaves(caches))


def trim_prompt_cache(caches: Sequence[Any], n: int | Sequence[int]) -> int | Sequence[int]:
    """Drops the last n tokens in every layer, or in none, and returns n.

    Args:
        n: tokens of every row, or n[i] of row i.

    Raises:
        ValueError: a layer that cannot; nothing has changed then, in any layer.
    """
    if n == 0:
        return n  # recurrent state, too, can be left as it is
    for index, cache in enumerate(caches):
        if not can_trim([cache], n):
            raise ValueError(
                f"cannot trim {n} tokens: layer {index} ({type(cache).__name__}) has lost what would be seen again, or "
                "never held as many; plan for it with CachePolicy(max_rollback=...), or keep_recent=... with a budget"
            )
    for cache in caches if isinstance(n, int) else leaves(caches):
        cache.trim(n) if isinstance(n, int) else cache.trim_per_sequence(n)
    return n


def check_alike(first: Sequence[Any], others: Sequence[Any]) -> None:
    """Raises ValueError unless two lists of caches of a model can be one batch."""
    pairs = list(zip(leaves(first), leaves(others), strict=False))
    if len(first) != len(others):
        raise ValueError(f"got {len(others)} caches for a model that has {len(first)}: use make_prompt_cache")
    for own, other in pairs:
        if isinstance(own, KVCache):
            check_joinable(1, own, other)
        elif type(own) is not type(other):
            raise ValueError(f"got a {type(other).__name__} where the model has a {type(own).__name__}")


def compact(caches: Iterable[Any]) -> None:
    """Evicts down to the budget in every layer, now; by itself a cache does that when its margin is overshot, too.

    Raises:
        ValueError: a score that cannot be used, or layers that have diverged; nothing has changed then, in any layer.
    """
    for cache in attention_caches(caches):
        cache.compact()


def load(path_or_hub_id: str | Path) -> tuple[nn.Module, Any]:
    """A model and its tokenizer, by mlx-lm. On a CPU, 16-bit weights become float32: half precision is emulated there.

    Raises:
        ValueError: a directory that holds no model, or a name that mlx-lm cannot load.
    """
    from mlx_lm import load as stock_load

    path = Path(path_or_hub_id)
    if path.is_dir() and not (path / "config.json").exists():
        raise ValueError(f"{path} has no config.json: give a directory with a model that mlx-lm can load")
    if path.is_file():
        raise ValueError(f"{path} is a file: give the directory of a model, with its config.json")
    if not path.exists() and (path.is_absolute() or len(path.parts) != 2):
        raise ValueError(f"{path} is neither a directory nor a hub id such as mlx-community/Qwen3-0.6B-4bit")
    try:
        model, tokenizer = stock_load(str(path_or_hub_id))[:2]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise ValueError(f"mlx-lm cannot load {path_or_hub_id}: {reason[0]}") from error
    if mx.default_device().type == mx.DeviceType.cpu:
        model.set_dtype(mx.float32)
    return model, tokenizer


def model_from_config(config: dict[str, Any], dtype: mx.Dtype) -> nn.Module:
    """The model of mlx-lm that a config.json describes, its weights lazy: never read, never made.

    Args:
        config: the content of a config.json. Its entries about quantised weights don't matter to keys and values.
        dtype: of the weights, and so of keys and values.

    Raises:
        ValueError: mlx-lm has no such model, or the configuration lacks what the model needs.
    """
    from mlx_lm.utils import _get_classes

    if config.get("model_file") is not None:
        raise ValueError(
            f"this config.json needs code of its own ({config['model_file']}), which is not run: give one of mlx-lm's"
        )
    if not isinstance(config.get("model_type"), str):
        raise ValueError('this config.json has no "model_type": give that of a model that mlx-lm can load')
    try:
        model_class, arguments = _get_classes(config)
        model: nn.Module = model_class(arguments.from_dict(config))
        model.set_dtype(dtype)
    except Exception as error:  # the constructors of a hundred models, with a configuration that may be anything
        reason = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
        raise ValueError(f"mlx-lm cannot build a model from this config.json: {reason}") from error
    return model


def kind_and_window(cache: Any) -> tuple[str | None, int | None]:
    """What one of mlx-lm's own caches is for, and the window or chunk of its layer; None for one that is unknown."""
    kind = KINDS.get(type(cache))
    window = {"sliding": "max_size", "chunked": "chunk_size"}.get(kind or "")
    return kind, None if window is None else getattr(cache, window)


def context_length(model: nn.Module) -> int | None:
    """The positions that a model was made for, where its configuration says so."""
    args = getattr(model, "args", None)
    length = getattr(args, "max_position_embeddings", None)
    return length if isinstance(length, int) else None
