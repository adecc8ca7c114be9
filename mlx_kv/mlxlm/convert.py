"""Every quirk of mlx-lm (0.32), and nothing else.

Decides which of a model's own caches become ours, what of a policy a model can honour, and what is taken back together.
What a model does with its caches it asks `probe`; these two are the only places that ask for types of caches. Loops and
samplers are in `generation`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.models import cache as stock

from mlx_kv.cache.checks import SettingError
from mlx_kv.cache.eviction.layer_group import LayerGroup
from mlx_kv.cache.kv_cache import KVCache
from mlx_kv.cache.rows import check_joinable
from mlx_kv.mlxlm import quirks as probe
from mlx_kv.mlxlm.quirks import leaves as leaves
from mlx_kv.policy import FOR_BUDGETS, CachePolicy

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
# Two rows of a batch, when it is tried what padding does to recurrent layers: as many tokens as it takes for a state
# that fades with every token.
TOKENS, PADDING = 3, 13
# Padding that is read changes a state by as much as tokens in its place would (0.96 to 1.3 of it, in nine families);
# sums in another order, by 1e-6 of it in float32, and in 16 bits still by little.
MOST_ROUNDING = 0.1


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
    if strict:
        check_policy(model, policy)
    if policy.max_kv_size is not None or policy.budget is not None:
        policy = policy if why_unbounded(model) is None else policy.unbounded()
    packed_decode = not policy.stores_plain and _takes_packed_planes(model, policy)
    return _convert(model, stock.make_prompt_cache(model), policy, packed_decode)


def check_policy(model: nn.Module, policy: CachePolicy) -> None:
    """Raises ValueError where no layer of a model can honour a setting of the policy, or mlx-lm cannot run it."""
    caches = list(leaves(stock.make_prompt_cache(model)))
    kinds = {type(cache) for cache in caches}
    full, windowed = bool(kinds & FULL), bool(kinds & WINDOWED)
    bounded = full and (policy.max_kv_size is not None or policy.budget is not None)
    why = why_unbounded(model) if bounded else None
    rings = windowed or (policy.max_kv_size is not None and full and why is None)
    honoured = {"max_write": rings or (policy.budget is not None and full and why is None), "max_rollback": rings}
    honoured |= dict.fromkeys(BOUNDS, full and why is None)
    ignored = [name for name in policy.changed() if not honoured.get(name, full or windowed)]
    if not ignored:
        check_readable(model)
        return
    reason = f"its caches are {', '.join(sorted(kind.__name__ for kind in kinds)) or 'none'}"
    if why is not None:
        reason = why
    elif not full and windowed and set(ignored) <= set(BOUNDS):
        reason = "every one has a window of its own"
    elif full and not rings and set(ignored) <= {"max_write", "max_rollback"}:
        reason = "none has a window, so all can take back any number of tokens, and read as many"
    raise SettingError(f"no layer of this model can honour {', '.join(ignored)}: {reason}; leave it out", ignored)


def check_readable(model: nn.Module) -> None:
    """Raises ValueError where mlx-lm cannot run a model, with whatever caches."""
    if (fault := probe.asked(model).fault) is not None:
        raise ValueError(
            f"mlx-lm's {architecture(model)} cannot read a prompt: with mlx-lm's own caches, too, it ends in {fault}; "
            "try another version of mlx-lm"
        )


def why_unbounded(model: nn.Module) -> str | None:
    """Why full attention of this model must keep all of its tokens; None where some can be dropped."""
    if probe.indexers(model):
        return "the indexer of its sparse attention counts slots, so none may be moved or dropped"
    if probe.counts_slots(model):
        return "its attention tells positions by the number of slots, so no token may be dropped"
    return None


def check_batches(model: nn.Module) -> None:
    """Raises ValueError where the caches of a model of mlx-lm cannot become rows of a batch, not even one alone."""
    kinds = {type(cache) for cache in leaves(stock.make_prompt_cache(model)) if not hasattr(cache, "merge")}
    if kinds - probe.ATTENTION:
        raise ValueError(
            f"mlx-lm's {architecture(model)} has caches of its own ({', '.join(sorted(k.__name__ for k in kinds))}), "
            "which cannot be rows of a batch: generate from one prompt at a time"
        )


def rows_must_be_equal(model: nn.Module) -> bool:
    """Whether rows of a batch must always be of one length: prompts that are read together, and all that comes."""
    return probe.refuses_ragged(model) is not None


@probe.asked_once
def prompts_must_be_equal(model: nn.Module) -> bool:
    """Whether prompts of different lengths cannot be read together, since recurrent layers would read the padding.

    Some look at the lengths that are announced to them, some in part, some not at all: so it is tried, with a few
    tokens, which are evaluated. Rows that decode are of one token each, and need no padding.
    """
    rows = mx.arange(2 * (TOKENS + PADDING)).reshape(2, -1)  # as many ids as any model has

    def state(tokens: mx.array, lengths: list[int] | None = None) -> list[mx.array]:
        """Of the second row."""
        own = make_prompt_cache(model)
        caches = [cache.merge([cache, copy]) for cache, copy in zip(own, make_prompt_cache(model), strict=True)]
        if lengths is not None:
            for cache in caches:
                cache.prepare(lengths=lengths, right_padding=[tokens.shape[1] - length for length in lengths])
        model(tokens, cache=caches)
        recurrent = [cache.state for cache in leaves(caches) if not isinstance(cache, KVCache)]
        flat: Any = tree_flatten(recurrent)
        return [array[1].astype(mx.float32) for _, array in flat if isinstance(array, mx.array) and array.ndim > 1]

    if all(type(cache) in probe.ATTENTION for cache in leaves(stock.make_prompt_cache(model))):
        return False
    longer, shorter = state(rows), state(rows[:, :TOKENS])
    padded = state(rows, [TOKENS + PADDING, TOKENS])
    changes = zip(longer, shorter, padded, strict=True)
    return not all(
        bool(mx.abs(pad - own).max() <= MOST_ROUNDING * mx.abs(full - own).max()) for full, own, pad in changes
    )


def architecture(model: nn.Module) -> str:
    """The name of the file of mlx-lm that a model comes from."""
    return type(model).__module__.rpartition(".")[2]


def _convert(model: nn.Module, own: Iterable[Any], policy: CachePolicy, packed_decode: bool) -> list[Any]:
    # The keys of an indexer stay plain: they are few, and the models write such a cache's buffers themselves.
    indexers, plain = probe.indexers(model), policy.plain()
    layer_group, numbers, layers = LayerGroup(), count(), count()

    def converted(cache: Any) -> Any:
        if type(cache) is stock.CacheList:
            return stock.CacheList(*[converted(member) for member in cache.caches])  # type: ignore[no-untyped-call]
        kept = plain if next(numbers) in indexers else policy
        if type(cache) is stock.RotatingKVCache:
            window = probe.window_of(model, cache.max_size)
            return kept.make_cache(kept.layout(window, cache.keep), packed_decode)
        if type(cache) is stock.ChunkedKVCache:
            return kept.make_cache(kept.layout(chunk_size=cache.chunk_size), packed_decode)
        if type(cache) in FULL:
            return kept.make_cache(packed_decode=packed_decode, layer_group=layer_group, layer=next(layers))
        return cache

    return [converted(cache) for cache in own]


def _takes_packed_planes(model: nn.Module, policy: CachePolicy) -> bool:
    """Whether attention in every layer of this model works on packed planes.

    Raises:
        ValueError: a head dim that the codec cannot store.
    """
    packing = policy.packing
    if packing is not None and probe.takes_packed(model, packing.group_size, packing.bits):
        return True
    # On plain ones it works, or the error is for the user. The graph is dropped without being evaluated.
    always = replace(policy, quantized_start=0)
    model(mx.array([[0]]), cache=_convert(model, stock.make_prompt_cache(model), always, packed_decode=False))
    return False


def attention_caches(caches: Iterable[Any]) -> list[KVCache]:
    """Those of all the caches that are ours."""
    return [cache for cache in leaves(caches) if isinstance(cache, KVCache)]


def _in_use(caches: Iterable[Any]) -> list[Any]:
    """The caches of all layers that hold anything, as far as any does.

    Some models have caches for layers that have no attention: nothing is ever written to them, nor taken back. As long
    as nothing was written to any, nobody knows which they are.
    """
    everything = list(leaves(caches))
    unwritten = [isinstance(cache, KVCache) and cache.keys is None for cache in everything]
    in_use = [cache for cache, spared in zip(everything, unwritten, strict=True) if not spared]
    return in_use if any(isinstance(cache, KVCache) for cache in in_use) else everything


def can_trim(caches: Iterable[Any], n: int | Sequence[int]) -> bool:
    """Whether every layer can take back n tokens, or n[i] of row i, and then any of them be written again."""
    return all(_can_trim(cache, n) for cache in _in_use(caches))


def _can_trim(cache: Any, n: int | Sequence[int]) -> bool:
    # Ours and those of others answer as `protocol.Cache` says; mlx-lm's own know only whether they trim at all.
    return bool(cache.can_trim(n) if hasattr(cache, "can_trim") else isinstance(n, int) and cache.is_trimmable())


def trim_prompt_cache(caches: Sequence[Any], n: int | Sequence[int]) -> int | Sequence[int]:
    """Drops the last n tokens in every layer, or in none, and returns n.

    Args:
        n: tokens of every row, or n[i] of row i.

    Raises:
        ValueError: a layer that cannot, with its reason; nothing has changed then, in any layer.
    """
    if n == 0:
        return n  # recurrent state, too, can be left as it is
    in_use = _in_use(caches)
    for cache in in_use:
        if not _can_trim(cache, n):
            index = next(i for i, layer in enumerate(caches) if any(leaf is cache for leaf in leaves([layer])))
            raise ValueError(f"cannot trim {n} tokens: layer {index} {_why_no_trim(cache, n)}")
    for cache in in_use:
        cache.trim(n) if isinstance(n, int) else cache.trim_per_sequence(n)
    return n


def _why_no_trim(cache: Any, n: int | Sequence[int]) -> str:
    """Why a cache cannot take back so many tokens, and what to do about it."""
    if type(cache) is stock.ArraysCache:
        return "is recurrent, and such state cannot go back: copy the caches before (copy.deepcopy), or read them anew"
    if not hasattr(cache, "can_trim"):
        return f"is a {type(cache).__name__} of mlx-lm's, which takes no tokens back: read them anew"
    try:  # it refuses before it changes anything
        cache.trim(n) if isinstance(n, int) else cache.trim_per_sequence(n)
    except ValueError as error:
        return f"says: {error}"
    return f"({type(cache).__name__}) says that it cannot"


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


def check_windows(model: nn.Module, caches: Sequence[Any]) -> None:
    """Raises ValueError where caches keep a window as mlx-lm makes it, and the model asks for a wider one."""
    for own, cache in zip(leaves(stock.make_prompt_cache(model)), leaves(caches), strict=False):
        if type(own) is not stock.RotatingKVCache or not isinstance(cache, KVCache):
            continue
        wanted = probe.window_of(model, own.max_size)
        if cache.layout.window == own.max_size < wanted:
            raise ValueError(
                f"a cache keeps {own.max_size} tokens, as mlx-lm makes it, but layers of this model see {wanted}: "
                "read the tokens anew, into caches of mlx_kv.make_prompt_cache"
            )


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
    """What one of mlx-lm's own caches is for, and the window or chunk that it was made for; None for one unknown."""
    kind = KINDS.get(type(cache))
    window = {"sliding": "max_size", "chunked": "chunk_size"}.get(kind or "")
    return kind, None if window is None else getattr(cache, window)


def context_length(model: nn.Module) -> int | None:
    """The positions that a model was made for, where its configuration says so."""
    args = getattr(model, "args", None)
    length = getattr(args, "max_position_embeddings", None)
    return length if isinstance(length, int) else None
