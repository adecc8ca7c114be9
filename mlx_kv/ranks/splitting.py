"""Models in parts: which can be split over ranks, how, and the part of each rank, loaded alone.

A model is split by its own code in mlx-lm, by heads (`shard`: every rank has some heads of every layer) or by layers
(`pipeline`: every rank has some of the layers, the last rank the first of them). Decides what is refused before it
runs: mlx-lm itself splits heads that don't divide without a word, and such models fail later or, worse, say something
else. What is refused follows from numbers alone, so every rank says the same line. Knows nothing about links, or what
the ranks agree on.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, get_args, runtime_checkable

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.generate import generation_stream
from mlx_lm.models import cache as stock

from mlx_kv.cache.checks import check_type
from mlx_kv.mlxlm.convert import FULL, cache_kinds
from mlx_kv.mlxlm.loading import (
    architecture,
    fit_to_device,
    load_lazily,
    model_from_config,
    number_of_weights,
    quantize_as_stored,
)
from mlx_kv.mlxlm.observing import attends_by_class
from mlx_kv.mlxlm.probe import copy_results, counts_slots, refuses_ragged
from mlx_kv.mlxlm.traverse import leaves
from mlx_kv.settings import SettingError

Split = Literal["heads", "layers"]


class Place(Protocol):
    """Which rank of how many: all that a model asks of an `mx.distributed.Group` when it is split."""

    def rank(self) -> int: ...

    def size(self) -> int: ...


@runtime_checkable
class Group(Protocol):
    """The ranks of one run, as far as a part of a model needs them."""

    @property
    def raw(self) -> mx.distributed.Group: ...

    split: Split | None


@dataclass(frozen=True)
class PlannedRank:
    """A rank that is not there: a model that is split for it tells shapes, and cannot run."""

    number: int
    of: int

    def rank(self) -> int:
        return self.number

    def size(self) -> int:
        return self.of


@dataclass(frozen=True)
class Part:
    """What a model is a part of.

    Attributes:
        raw: the ranks that have the others.
        split: how the model was split.
        copies: whether split heads share keys and values that every rank has whole, as latent attention does.
        full_layers: layers of full attention of each rank; the last rank has the first of them, where layers are split.
    """

    raw: mx.distributed.Group
    split: Split
    copies: bool
    full_layers: tuple[int, ...]


_parts: dict[int, Part] = {}


def part_of(model: nn.Module) -> Part | None:
    """What a model is a part of; None where it is whole."""
    return _parts.get(id(model))


# --- what can be split ------------------------------------------------------------------------------------------------


def check_split(
    config: dict[str, Any], size: int, split: str | None = None, layers: Sequence[int] | None = None
) -> Split:
    """How the model of a config.json is split over so many ranks.

    Args:
        split: "heads" or "layers"; None is what the model offers: heads where they divide, else layers.
        layers: of each rank, the first of which has the last layers.

    Raises:
        ValueError: it cannot be split so, in one line that is the same on every rank.
    """
    if layers is not None and split is None:
        split = "layers"
    if split is not None:
        _try(config, size, _known(split), layers)
        return _known(split)
    try:
        _try(config, size, "heads", layers)
    except ValueError as unfit:
        try:
            _try(config, size, "layers", layers)
        except ValueError as other:
            neither = all("mlx-lm cannot split" in str(each) for each in (unfit, other))
            name = config.get("model_type")
            raise (ValueError(f"mlx-lm cannot split {name}: run it on one machine") if neither else unfit) from None
        return "layers"
    return "heads"


def _try(config: dict[str, Any], size: int, split: Split, layers: Sequence[int] | None) -> None:
    model = model_from_config(config, mx.bfloat16)
    quantize_as_stored(model, config)  # groups that share a scale must not be parted either
    cut(model, PlannedRank(0, size), split, layers)


def _known(split: str) -> Split:
    if split not in get_args(Split):
        raise SettingError("{split:is}: choose one of {}", ", ".join(get_args(Split)), split=split)
    return split  # type: ignore[return-value]


# --- cutting ----------------------------------------------------------------------------------------------------------


def cut(model: nn.Module, place: Place, split: Split, layers: Sequence[int] | None = None) -> None:
    """Leaves the part of one rank of a model; nothing is evaluated, and what goes is never read.

    Raises:
        ValueError: it cannot be split so; it is of no use then.
    """
    if split == "heads":
        _cut_heads(model, place, layers)
    else:
        _cut_layers(model, place, layers)


def _cut_heads(model: nn.Module, place: Place, layers: Sequence[int] | None) -> None:
    size, name = place.size(), architecture(model)
    if layers is not None:
        raise SettingError(
            "layers are those of each rank, but heads are split: use {split:='layers'}, or leave them out"
        )
    if not hasattr(model, "shard"):
        fix = "use {split:='layers'}" if _pipeline(model) is not None else "run it on one machine"
        raise SettingError(f"mlx-lm cannot split the heads of {{}}: {fix}", name)
    before = _numbers(model)
    try:
        model.shard(place)
    except Exception as error:  # the code of two dozen models, with any configuration
        _check_shares(before, {path: n // size for path, n in before.items() if path.endswith("heads")}, size, name)
        raise ValueError(f"{name} cannot be split over {size} ranks: {_words(error)}") from error
    _check_shares(before, _numbers(model), size, name)


def _check_shares(before: dict[str, int], after: dict[str, int], size: int, name: str) -> None:
    """Raises ValueError where a number that was split is not the sum of its shares, or as many copies."""
    for path, whole in before.items():
        share = after.get(path, whole)
        if share in (whole, whole / size) or (share == 1 and size % whole == 0):
            continue
        what = path.rpartition(".")[2]
        kind = "key/value heads" if "kv" in what or "key_value" in what else "heads"
        raise SettingError(
            "{} {} of {} cannot be shared by {} ranks: use a number of ranks that divides them, or {split:='layers'} "
            "where the model offers it",
            *(whole, kind if "head" in what else what, name, size),
        )


def _numbers(model: nn.Module) -> dict[str, int]:
    """The numbers that the layers of a model go by, such as those of heads, by their paths."""
    return {
        f"{path}.{name}": value
        for path, module in sorted(model.named_modules())  # type: ignore[no-untyped-call]
        for name, value in vars(module).items()
        if type(value) is int and not name.startswith("_") and "pipeline" not in name
    }


def _cut_layers(model: nn.Module, place: Place, layers: Sequence[int] | None) -> None:
    name, size, staged = architecture(model), place.size(), _pipeline(model)
    if staged is None:
        fix = "use {split:='heads'}" if hasattr(model, "shard") else "run it on one machine"
        raise SettingError(f"mlx-lm cannot split the layers of {{}}: {fix}", name)
    count = len(staged.layers)
    if count < size:
        raise ValueError(f"{count} layers of {name} cannot be shared by {size} ranks: use {count} ranks at the most")
    options: dict[str, Any] = {}
    if layers is not None:
        told = f"layers are {','.join(map(str, layers))}"
        if len(layers) != size:
            raise ValueError(f"{told}, but there are {size} ranks: give a number for each")
        if min(layers) < 1 or sum(layers) != count:
            raise ValueError(f"{told}, but {name} has {count}: give each rank one at least, and {count} in all")
        if "split" not in inspect.signature(staged.pipeline).parameters:
            raise ValueError(f"mlx-lm splits the layers of {name} evenly only: leave out layers")
        options["split"] = list(layers)
    try:
        staged.pipeline(place, **options)
    except Exception as error:
        raise ValueError(f"the layers of {name} cannot be split over {size} ranks: {_words(error)}") from error


def _pipeline(model: nn.Module) -> Any | None:
    """The module of a model that knows how to split its layers."""
    inner = getattr(model, "model", None)
    for module in (inner, getattr(inner, "language_model", None)):
        if hasattr(module, "pipeline") and hasattr(module, "layers"):
            return module
    text = getattr(getattr(model, "language_model", None), "model", None)
    return text if hasattr(text, "pipeline") else None


def _words(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def planned_part(
    config: dict[str, Any], dtype: mx.Dtype, place: PlannedRank, split: Split, layers: Sequence[int] | None = None
) -> nn.Module:
    """The part of a rank that is not there, of a config.json: nothing is read, made or evaluated.

    Where the rank would wait for others it does not, so that a token goes through it: its shapes are right.

    Raises:
        ValueError: mlx-lm cannot build the model, or it cannot be split so.
    """
    model = model_from_config(config, dtype)
    quantize_as_stored(model, config)
    whole = model_from_config(config, dtype)
    copy_results(model, whole, cache_kinds, counts_slots, refuses_ragged)
    cut(model, place, split, layers)
    alone = mx.distributed.init()
    for module in model.modules():  # type: ignore[no-untyped-call]
        for name, value in vars(module).items():
            if value is place:
                setattr(module, name, alone)
    if (staged := _pipeline(model)) is not None:
        staged.pipeline_rank, staged.pipeline_size = 0, 1
    return model


# --- loading ----------------------------------------------------------------------------------------------------------


def load_part(path_or_hub_id: str | Path, group: Group, layers: Sequence[int] | None = None) -> tuple[nn.Module, Any]:
    """The part of a model that one rank has, and the tokenizer. All ranks call it at once, each with the whole model.

    No more is ever in memory than the part and one tensor of the whole. Embeddings, the last norm and what makes logits
    are in every part.

    Args:
        group: where it says no split yet, it is told what was found: heads where they divide, else layers.
        layers: of each rank where layers are split, the first rank having the last; None is as many for each.

    Raises:
        ValueError: the model cannot be loaded, or not be split so: the same line on every rank.
    """
    check_type("group", group, Group, "give what mlx_kv.join_ranks() returns")
    model, tokenizer, config = load_lazily(path_or_hub_id)
    group.split = check_split(config, group.raw.size(), group.split, layers)
    split_model(model, group, layers, model_from_config(config, mx.float32))
    fit_to_device(model)
    for weight in weights_of(model):
        mx.eval(weight)  # one after the other: what each is cut from is let go
    mx.clear_cache()
    return model, tokenizer


def split_model(
    model: nn.Module, group: Group, layers: Sequence[int] | None = None, whole: nn.Module | None = None
) -> None:
    """Leaves the part of this rank of a model that was loaded whole, as `load_part` does. All ranks call it at once.

    Args:
        whole: another model of the same configuration, which can be asked what lazily loaded weights cannot; None asks
            the model itself.

    Raises:
        ValueError: it cannot be split so; it is of no use then.
    """
    assert group.split is not None, "whoever splits a model knows how"
    split, raw, whole = _known(group.split), group.raw, whole or model
    # A part cannot say what the whole does: it may have other kinds of layers, and its graph has what no graph shows.
    copy_results(model, whole, cache_kinds, counts_slots, number_of_weights, refuses_ragged, attends_by_class)
    heads = _heads(whole)
    cut(model, raw, split, layers)
    full = sum(type(cache) in FULL for cache in leaves(stock.make_prompt_cache(model)))
    told: Any = all_gather(mx.array([full]), raw).tolist()
    copies = split == "heads" and bool(heads) and _heads(model) == heads
    _parts[id(model)] = Part(raw, split, copies, tuple(told))
    weakref.finalize(model, _parts.pop, id(model), None)


def all_gather(x: mx.array, group: mx.distributed.Group) -> mx.array:
    """The arrays of all ranks, one after the other on axis 0, evaluated.

    All collectives run on the stream of mlx-lm's loop: on different streams, two could be matched wrongly.
    """
    mx.eval(x)
    with mx.stream(generation_stream):
        arrays = mx.distributed.all_gather(x, group=group)
        mx.eval(arrays)
    return arrays


def weights_of(model: nn.Module) -> list[mx.array]:
    """All weights of a model, evaluated or not."""
    flat: Any = tree_flatten(model.parameters())  # type: ignore[no-untyped-call]
    return [weight for _, weight in flat]


def _heads(model: nn.Module) -> list[int]:
    """The heads of which each layer of full attention keeps keys and values; nothing is evaluated."""
    caches = stock.make_prompt_cache(model)
    model(mx.array([[0]]), cache=caches)
    return [cache.keys.shape[1] for cache in leaves(caches) if type(cache) in FULL and cache.keys is not None]
