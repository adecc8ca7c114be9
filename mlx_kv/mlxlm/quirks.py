"""What a model of mlx-lm does with its caches, found by asking the model itself.

Decides no policy: it answers questions, each once for a model. Most of them by a few tokens that go through the model
while stand-ins for its caches write down what it asks of them: graphs are built and dropped, and nothing is evaluated
(unless the model itself evaluates something on its way). No list of models stays true for long.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import cache as stock

from mlx_kv.mlxlm.asking import asked_once
from mlx_kv.mlxlm.slots import counts_slots
from mlx_kv.mlxlm.stand_ins import ATTENTION, ROWS, StandIn, stand_ins
from mlx_kv.mlxlm.traverse import leaves
from mlx_kv.mlxlm.trials import in_words, objection


@dataclass(frozen=True)
class CacheUsage:
    """What a model asked of its caches in one step of two tokens.

    Attributes:
        fault: why it could not be asked: what mlx-lm's own caches end in, too.
        windows: the widest window of which a mask was asked, by the one that its cache was made for.
        indexers: the numbers of the caches, in the order of `leaves`, whose values say nothing: sparse attention keeps
            the keys of its indexer in such.
        masked_by_unwritten: whether a mask was asked of a cache that no layer writes to.
    """

    fault: str | None = None
    windows: tuple[tuple[int, int], ...] = ()
    indexers: frozenset[int] = frozenset()
    masked_by_unwritten: bool = False


@asked_once
def cache_usage(model: nn.Module) -> CacheUsage:
    """What the model asks of its caches when it reads its first two tokens."""
    own = list(leaves(stock.make_prompt_cache(model)))
    if not any(type(cache) in ATTENTION for cache in own):
        return CacheUsage()  # there is nothing to ask
    caches, tokens = stand_ins(model, 0), mx.zeros((1, 2), mx.int32)
    try:
        model(tokens, cache=caches)
    except Exception:
        try:
            model(tokens, cache=stock.make_prompt_cache(model))
        except Exception as error:
            return CacheUsage(fault=in_words(error))
        return CacheUsage()  # it needs what only mlx-lm's own caches have
    windows: dict[int, int] = {}
    seen = [(index, cache) for index, cache in enumerate(leaves(caches)) if isinstance(cache, StandIn)]
    for index, cache in seen:
        if type(own[index]) is stock.RotatingKVCache:
            made_for = own[index].max_size
            windows[made_for] = max(windows.get(made_for, 0), *(window or 0 for window in cache.windows), 0)
    return CacheUsage(
        None,
        tuple((made_for, widest) for made_for, widest in windows.items() if widest > made_for),
        frozenset(index for index, cache in seen if cache.written and not cache.says_values),
        any(cache.windows and not cache.written for _, cache in seen),
    )


def window_of(model: nn.Module, made_for: int) -> int:
    """The tokens that layers see whose caches were made for so many: of the mask that the model asks for, if more."""
    return max(made_for, dict(cache_usage(model).windows).get(made_for, 0))


def indexers(model: nn.Module) -> frozenset[int]:
    """The caches that belong to the indexer of sparse attention, by their numbers in the order of `leaves`."""
    return cache_usage(model).indexers


@asked_once
def takes_packed(model: nn.Module, group_size: int, bits: int) -> bool:
    """Whether attention in every layer works on packed planes, at any length.

    mlx-lm's shared attention function does, unless the model has attention sinks; those with a function of their own
    mostly don't, nor masks with an axis for query heads.
    """
    return not any(_objects(model, new, packed=(group_size, bits)) for new in (1, 2))


@asked_once
def refuses_ragged(model: nn.Module) -> str | None:
    """Why the rows of a batch cannot have lengths of their own; None where they can."""
    for new in (1, 2):
        if (why := _objects(model, new, rows=ROWS)) is not None:
            return f"its attention is not made for them ({why})"
    if cache_usage(model).masked_by_unwritten:
        return "it asks a layer without attention for the mask"
    if counts_slots(model):
        return "its attention counts the slots of the longest one"
    return None


def _objects(model: nn.Module, new: int, rows: int = 1, **how: Any) -> str | None:
    """What Python says to `new` tokens after many others; None where the graph can be built."""
    if "packed" in how:
        how["plain"] = indexers(model)
    return objection(model, (rows, new), lambda position: stand_ins(model, position, rows=rows, **how))
