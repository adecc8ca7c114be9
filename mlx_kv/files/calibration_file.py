"""Files of calibrations, `NAME.kvcal.safetensors`, and where they are looked for.

L layers of full attention, H KV heads, F features, P pairs of channels.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_kv.bundled import FOLDER as BUNDLED
from mlx_kv.cache.checks import check_type
from mlx_kv.cache.eviction.calibration import Calibration, as_arrays
from mlx_kv.cache.eviction.scores.fitted import FittedLayer, Rotation
from mlx_kv.files import tensor_files
from mlx_kv.files.fingerprint import model_fingerprint
from mlx_kv.files.remembered import cache_folder
from mlx_kv.files.replacing import check_replaceable
from mlx_kv.files.strict_json import read_json

FORMAT = "mlx-kv calibration 1"
SUFFIX = ".kvcal.safetensors"
FOLDER = "calibrations"  # in the user's cache folder
ROPES = ("key_rope", "value_rope")
FIX = "make it again with mlx-kv calibrate MODEL"


def save_calibration(path: str | Path, calibration: Calibration, *, force: bool = False) -> None:
    """Writes a calibration to a file; an older one is replaced when the new one is complete.

    Args:
        path: usually `MODEL_NAME.kvcal.safetensors` beside the directory of the model, where it is found by itself.
        calibration: as `calibrate` returns it.
        force: replace a file that is no calibration, too.

    Raises:
        ValueError: there is no such folder, or a file that is no calibration.
        OSError: it cannot be written.
    """
    check_type("path", path, str | os.PathLike, "give the name of a file")
    check_type("calibration", calibration, Calibration, "give what calibrate returns")
    check_replaceable(path, is_calibration, "calibration", force)
    try:
        details = json.dumps(dict(calibration.details), allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"details of a calibration are no JSON ({error}): leave out what no JSON can hold") from error
    words = {
        "format": FORMAT,
        "fingerprint": calibration.fingerprint,
        "name": calibration.name,
        "heads": json.dumps(calibration.heads, allow_nan=False),
        "details": details,
    }
    tensor_files.write(path, as_arrays(calibration.layers), words)


def load_calibration(path: str | Path, model: nn.Module | None = None) -> Calibration:
    """The calibration in a file.

    Args:
        path: as `save_calibration` or `mlx-kv calibrate` wrote it.
        model: that it is for, if that is to be checked.

    Raises:
        FileNotFoundError: it is not there.
        ValueError: it is no calibration, was cut off or damaged, or is of another model.

    Example:
        >>> calibration = load_calibration("smollm2.kvcal.safetensors", model)  # doctest: +SKIP
        >>> caches = make_prompt_cache(model, CachePolicy(budget=512, score=calibration.score))  # doctest: +SKIP
    """
    check_type("path", path, str | os.PathLike, "give the name of a file")
    check_type("model", model, nn.Module | None, "give a model, as mlx_kv.load returns it")
    file = tensor_files.read(path)
    if file.words.get("format") != FORMAT:
        raise ValueError(f"{path} is no calibration that this version reads: {FIX}")
    try:
        heads, details = (read_json(file.words[name].encode()) for name in ("heads", "details"))
        if not isinstance(details, dict):
            raise ValueError("details are no object")
        layers = _layers(file.arrays, [len(row) for row in heads])
        calibration = Calibration(file.words["fingerprint"], heads, layers, details)
        if calibration.name != file.words["name"]:
            raise ValueError("its numbers are not those that were written")
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"{path} was damaged ({_reason(error)}): {FIX}") from error
    if model is not None and calibration.fingerprint != model_fingerprint(model):
        raise ValueError(f"{path} is a calibration of another model: run mlx-kv calibrate MODEL")
    return calibration


def _reason(error: Exception) -> str:
    return f"{error.args[0]} is missing" if isinstance(error, KeyError) else str(error)


def _layers(arrays: dict[str, mx.array], heads: list[int]) -> tuple[FittedLayer, ...]:
    """The weights of all layers; none where there are no arrays.

    Args:
        heads: budgets of each layer: one for each head, or one.

    Raises:
        KeyError, ValueError: an array is missing, too many, of another shape or dtype, or not finite.
    """
    if not arrays:
        return ()
    layers = []
    for i, count in enumerate(heads):
        prefix = f"layers.{i}."
        own = {name.removeprefix(prefix): array for name, array in arrays.items() if name.startswith(prefix)}
        layer = FittedLayer.of_arrays(own)
        if layer.arrays.keys() != own.keys():
            raise ValueError(f"layer {i} has arrays that are not known")
        _check_layer(layer, i, count)
        layers.append(layer)
    if sum(len(layer.arrays) for layer in layers) != len(arrays):
        raise ValueError("it has arrays of other layers")
    return tuple(layers)


def _check_layer(layer: FittedLayer, index: int, heads: int) -> None:
    """Raises ValueError for shapes, dtypes and numbers that no fit has."""
    features, count = layer.weights.shape if layer.weights.ndim == 2 else (0, 0)
    channels = (features - 1) // count - 2 if count else 0  # Dk + Dv
    fits = count and heads in (1, count) and channels > 0 and features == count * (channels + 2) + 1
    if not fits or layer.bias.shape != (count,):
        raise ValueError(f"the weights of layer {index} have shape {layer.weights.shape}")
    for name, rope in zip(ROPES, (layer.key_rope, layer.value_rope), strict=True):
        if rope is not None and not _is_rope(rope, channels):
            raise ValueError(f"the {name} of layer {index} is no rotation")
    for name, array in layer.arrays.items():
        dtype = mx.int32 if name.endswith(".pairs") else mx.float32
        if array.dtype != dtype or not bool(mx.isfinite(array).all().item()):
            raise ValueError(f"{name} of layer {index} is not finite or no {dtype}")


def _is_rope(rope: Rotation, channels: int) -> bool:
    pairs = rope.pairs.shape[0] if rope.pairs.ndim == 2 else 0
    if not pairs or rope.pairs.shape != (pairs, 2) or rope.frequencies.shape != (pairs,) or rope.factor.shape != ():
        return False
    named: Any = rope.pairs.reshape(-1).tolist()
    return len({*named}) == len(named) and 0 <= min(named) <= max(named) < channels and rope.factor.item() != 0


# --- where they are ---------------------------------------------------------------------------------------------------


def is_calibration(path: Path) -> bool:
    """Whether a file is one of calibrations, of any version, whole or not."""
    words = _words(path)
    return words is not None and words.get("format", "").startswith(FORMAT.rstrip("0123456789"))


def _words(path: Path) -> dict[str, str] | None:
    try:
        with path.open("rb") as file:
            return tensor_files.words_of(file, os.fstat(file.fileno()).st_size)
    except OSError:
        return None


def find_calibration(model_path: str | Path, model: nn.Module) -> Calibration | None:
    """The calibration of a model: beside its directory, in it, or in the user's cache folder.

    Files of other models in these places are ignored.

    Args:
        model_path: a directory, or a hub id, which has no place of its own.
        model: that it is for.

    Raises:
        ValueError: the file of this model was damaged.
    """
    fingerprint: str | None = None
    for path in _places(model_path):
        words = _words(path)
        if words is None or words.get("format") != FORMAT:
            continue
        fingerprint = fingerprint or model_fingerprint(model)
        if words.get("fingerprint") == fingerprint:
            return load_calibration(path)
    return None


def _places(model_path: str | Path) -> Iterator[Path]:
    """Files that may be the calibration of a model, in the order in which they are looked at."""
    folder = Path(model_path)
    if folder.is_dir():
        yield beside(folder)
        yield from sorted(folder.glob(f"*{SUFFIX}"))
    if (cache := cache_folder()) is not None:
        yield from sorted((cache / FOLDER).glob(f"*{SUFFIX}"))


def beside(folder: Path) -> Path:
    """The file of the model in a directory: not in it, where loaders take every safetensors file for weights."""
    real = Path(os.path.abspath(folder))
    return real.with_name(real.name + SUFFIX)


def default_path(model_path: str | Path, fingerprint: str, *, beside_model: bool = True) -> Path:
    """Where a calibration is written: beside a directory of the user's, else in the cache folder, which is made.

    Bundled models and those of a hub's cache are in directories of other programs.

    Args:
        model_path: a directory, or a hub id.
        fingerprint: of the model.
        beside_model: whether it is of the model as it lies there, without an adapter.

    Raises:
        ValueError: there is no cache folder.
    """
    folder = Path(model_path)
    own = beside_model and folder.is_dir() and not _in_hub_cache(folder) and folder.parent != BUNDLED
    if own and os.access(beside(folder).parent, os.W_OK):
        there = _words(beside(folder)) or {}
        if there.get("fingerprint", fingerprint) == fingerprint:
            return beside(folder)  # else it has one of other weights or of another dtype, which stays
    cache = cache_folder()
    if cache is None:
        raise ValueError("there is no place for a calibration of this model: say where with --output FILE")
    (cache / FOLDER).mkdir(mode=0o700, parents=True, exist_ok=True)
    name = Path(os.path.abspath(folder)).name if folder.is_dir() else str(model_path).replace("/", "--")
    return cache / FOLDER / f"{name}-{fingerprint[:8]}{SUFFIX}"


def _in_hub_cache(folder: Path) -> bool:
    from huggingface_hub.constants import HF_HUB_CACHE

    return Path(os.path.abspath(folder)).is_relative_to(os.path.abspath(HF_HUB_CACHE))
