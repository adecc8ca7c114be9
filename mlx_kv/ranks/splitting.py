"""Splits models over ranks by their own code in mlx-lm, and loads the part of each rank.

By heads (`shard`) each rank has some heads of every layer; by layers (`pipeline`) each rank has some of the layers, the
last rank the first of them. What cannot be split is refused before it runs: mlx-lm splits heads that do not divide
without an error, and such models fail later or give wrong results. All ranks refuse with the same line.
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
from mlx_lm.generate import generation_stream
from mlx_lm.models import cache as stock

from mlx_kv.cache.checks import check_type
from mlx_kv.mlxlm.attention import attends_by_class
from mlx_kv.mlxlm.convert import FULL, cache_kinds
from mlx_kv.mlxlm.loading import (
    fit_to_device,
    layer_weights,
    load_with_config,
    model_from_config,
    number_of_weights,
    quantize_as_stored,
    weights_of,
)
from mlx_kv.mlxlm.probe import architecture, copy_results, counts_slots, refuses_ragged
from mlx_kv.mlxlm.traverse import leaves
from mlx_kv.settings import SettingError

Split = Literal["heads", "layers"]


class Place(Protocol):
    """The rank and the number of ranks: what splitting a model needs of an `mx.distributed.Group`."""

    def rank(self) -> int: ...

    def size(self) -> int: ...


@runtime_checkable
class Group(Protocol):
    """What loading a part of a model needs of a `RankGroup`."""

    @property
    def raw(self) -> mx.distributed.Group: ...

    split: Split | None


@dataclass(frozen=True)
class PlannedRank:
    """A rank of a planned run. A model that is split for it has the right shapes, and cannot run."""

    number: int
    of: int

    def rank(self) -> int:
        return self.number

    def size(self) -> int:
        return self.of


@dataclass(frozen=True)
class Part:
    """How a model was split.

    Attributes:
        raw: the ranks that have the parts.
        split: "heads" or "layers".
        copies: whether every rank has the keys and values of all heads, as with latent attention.
        full_layers: layers of full attention of each rank; the last rank has the first of them, where layers are split.
    """

    raw: mx.distributed.Group
    split: Split
    copies: bool
    full_layers: tuple[int, ...]


_parts: dict[int, Part] = {}


def part_of(model: nn.Module) -> Part | None:
    """How a model was split; None if it is whole."""
    return _parts.get(id(model))


# --- what can be split ------------------------------------------------------------------------------------------------


def check_split(
    config: dict[str, Any], size: int, split: str | None = None, layers: Sequence[int] | None = None
) -> Split:
    """How the model of a config.json is split over so many ranks.

    Args:
        split: "heads" or "layers"; None chooses heads if they divide, else layers.
        layers: number of layers of each rank, the first of which has the last layers.

    Raises:
        ValueError: the model cannot be split so; the same line on every rank.
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
    quantize_as_stored(model, config)  # groups that share a scale cannot be split, either
    cut(model, PlannedRank(0, size), split, layers)


def _known(split: str) -> Split:
    if split not in get_args(Split):
        raise SettingError("{split:is}: choose one of {}", ", ".join(get_args(Split)), split=split)
    return split  # type: ignore[return-value]


# --- cutting ----------------------------------------------------------------------------------------------------------


def cut(model: nn.Module, place: Place, split: Split, layers: Sequence[int] | None = None) -> None:
    """Reduces a model to the part of one rank. Nothing is evaluated, and the weights of other parts are never read.

    Raises:
        ValueError: the model cannot be split so, and must not be used afterwards.
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
    """Raises ValueError if the ranks' shares of a number neither add up to it nor are copies of it."""
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
    """Integer attributes of a model's modules, such as numbers of heads, by their paths."""
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
        problem = f"layers are {','.join(map(str, layers))}"
        if len(layers) != size:
            raise ValueError(f"{problem}, but there are {size} ranks: give a number for each")
        if min(layers) < 1 or sum(layers) != count:
            raise ValueError(f"{problem}, but {name} has {count}: give each rank one at least, and {count} in all")
        if "split" not in inspect.signature(staged.pipeline).parameters:
            raise ValueError(f"mlx-lm splits the layers of {name} evenly only: leave out layers")
        options["split"] = list(layers)
    try:
        staged.pipeline(place, **options)
    except Exception as error:
        raise ValueError(f"the layers of {name} cannot be split over {size} ranks: {_words(error)}") from error


def _pipeline(model: nn.Module) -> Any | None:
    """The module of a model that can split its layers."""
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
    """The part of a planned rank, from a config.json. No weights are read, made or evaluated.

    It does not communicate, so that a token can be run through it to get shapes.

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
    """Loads this rank's part of a model, and the tokenizer. All ranks must call this, each with all files of the model.

    Memory holds the part and at most one other tensor. Embeddings, last norm and output layer are in every part.

    Args:
        group: from `join_ranks`. If its `split` is None, it is set to heads if they divide, else to layers.
        layers: number of layers of each rank, the first of which has the last layers; None splits evenly.

    Raises:
        ValueError: the model cannot be loaded, or cannot be split so; the same line on every rank.
    """
    check_type("group", group, Group, "give what mlx_kv.join_ranks() returns")
    model, tokenizer, config = load_with_config(path_or_hub_id, lazy=True)
    group.split = check_split(config, group.raw.size(), group.split, layers)
    split_model(model, group, layers, model_from_config(config, mx.float32))
    fit_to_device(model)
    for weight in weights_of(model):
        mx.eval(weight)  # one after the other, so that the tensor that each is cut from is freed
    mx.clear_cache()
    return model, tokenizer


def split_model(
    model: nn.Module, group: Group, layers: Sequence[int] | None = None, whole: nn.Module | None = None
) -> None:
    """Reduces a model that was loaded whole to the part of this rank, as `load_part` does. All ranks must call this.

    Args:
        whole: another model of the same configuration, for probes that must not read lazily loaded weights; None
            probes the model itself.

    Raises:
        ValueError: the model cannot be split so, and must not be used afterwards.
    """
    assert group.split is not None
    split, raw, whole = _known(group.split), group.raw, whole or model
    # Probed on the whole model: a part may lack kinds of layers, and its graph contains collectives.
    known = cache_kinds, counts_slots, number_of_weights, layer_weights, refuses_ragged, attends_by_class
    copy_results(model, whole, *known)
    heads = _heads(whole)
    cut(model, raw, split, layers)
    full = sum(type(cache) in FULL for cache in leaves(stock.make_prompt_cache(model)))
    full_layers: Any = all_gather(mx.array([full]), raw).tolist()
    copies = split == "heads" and bool(heads) and _heads(model) == heads
    _parts[id(model)] = Part(raw, split, copies, tuple(full_layers))
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


def _heads(model: nn.Module) -> list[int]:
    """The number of KV heads of each full-attention layer; nothing is evaluated."""
    caches = stock.make_prompt_cache(model)
    model(mx.array([[0]]), cache=caches)
    return [cache.keys.shape[1] for cache in leaves(caches) if type(cache) in FULL and cache.keys is not None]
