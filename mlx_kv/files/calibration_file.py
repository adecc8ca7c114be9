"""Calibration files, `NAME.kvcal.safetensors`, and the places where they are searched.

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
from mlx_kv.cache.codecs import Centre
from mlx_kv.cache.eviction.calibration import Answers, BitsLoss, Calibration, FittedLayer, Rotation
from mlx_kv.files import tensor_files
from mlx_kv.files.atomic_write import check_replaceable
from mlx_kv.files.serialization import model_fingerprint
from mlx_kv.files.tensor_files import Part, check_shape, decode, read_json

FORMATS = ("mlx-kv calibration 1", "mlx-kv calibration 2")  # the second has losses of bits and centres of keys
SUFFIX = ".kvcal.safetensors"
MAX_CACHES = 10_000  # of a model
FOLDER = "calibrations"  # in the user's cache folder
FIX = "make it again with mlx-kv calibrate MODEL"


class Metadata(Part):
    format: str
    fingerprint: str
    name: str  # a digest of all numbers
    heads: str  # JSON
    details: str  # JSON
    losses: str = "[]"  # JSON
    centres: str = "0"  # their number


def save_calibration(path: str | Path, calibration: Calibration, *, force: bool = False) -> None:
    """Writes a calibration to a file, atomically.

    Args:
        path: usually `MODEL_NAME.kvcal.safetensors` beside the directory of the model, where `find_calibration` finds
            it.
        calibration: as `calibrate` returns it.
        force: also replace a file that is no calibration.

    Raises:
        ValueError: the folder does not exist, or the file is no calibration.
        OSError: it cannot be written.
    """
    check_type("path", path, str | os.PathLike, "give the name of a file")
    check_type("calibration", calibration, Calibration, "give what calibrate returns")
    check_replaceable(path, is_calibration, "calibration", force)
    try:
        details = json.dumps(dict(calibration.details), allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"details of a calibration are not JSON ({error}): leave out what no JSON can hold") from error
    words = {
        "format": FORMATS[bool(calibration.losses or calibration.centres)],
        "fingerprint": calibration.fingerprint,
        "name": calibration.name,
        "heads": json.dumps(calibration.heads, allow_nan=False),
        "details": details,
    }
    if calibration.losses or calibration.centres:
        words |= {"losses": json.dumps(calibration.losses, allow_nan=False), "centres": str(len(calibration.centres))}
    arrays = {f"layers.{i}.{name}": x for i, layer in enumerate(calibration.layers) for name, x in layer.arrays.items()}
    for i, centre in enumerate(calibration.centres):
        if centre is not None:
            arrays[f"centres.{i}"] = centre.array(mx.float16)[:, 0]
    tensor_files.write(path, arrays, words)


def load_calibration(path: str | Path, model: nn.Module | None = None) -> Calibration:
    """The calibration in a file.

    Args:
        path: of a file that `save_calibration` or `mlx-kv calibrate` wrote.
        model: the model that the calibration must be of; None does not check it.

    Raises:
        FileNotFoundError: it does not exist.
        ValueError: it is no calibration, was cut off or damaged, or is of another model.

    Example:
        >>> calibration = load_calibration("smollm2.kvcal.safetensors", model)  # doctest: +SKIP
        >>> caches = make_prompt_cache(model, CachePolicy(budget=512, score=calibration.score))  # doctest: +SKIP
    """
    check_type("path", path, str | os.PathLike, "give the name of a file")
    check_type("model", model, nn.Module | None, "give a model, as mlx_kv.load returns it")
    file = tensor_files.read(path)
    if file.words.get("format") not in FORMATS:
        raise ValueError(f"{path} is not a calibration that this version reads: {FIX}")
    try:
        metadata = decode(file.words, Metadata)
        heads = decode(read_json(metadata.heads), list[list[float]])
        details = decode(read_json(metadata.details), dict[str, Any])
        decode(details.get("answers"), Answers | None)  # type: ignore[arg-type]
        losses = tuple(decode(read_json(metadata.losses), list[BitsLoss]))
        arrays = dict(file.arrays)
        centres = tuple(
            _centre(arrays.pop(f"centres.{i}", None)) for i in range(min(int(metadata.centres), MAX_CACHES))
        )
        layers = _layers(arrays, [len(row) for row in heads])
        calibration = Calibration(metadata.fingerprint, heads, layers, details, losses, centres)  # type: ignore[arg-type]
        if calibration.name != metadata.name:
            raise ValueError("its numbers are not those that were written")
    except ValueError as error:
        raise ValueError(f"{path} was damaged ({error}): {FIX}") from error
    if model is not None and calibration.fingerprint != model_fingerprint(model):
        raise ValueError(f"{path} is a calibration of another model: run mlx-kv calibrate MODEL")
    return calibration


def _centre(array: mx.array | None) -> Centre | None:
    """Raises ValueError for an array that is no centre (H, D)."""
    if array is None:
        return None
    check_shape(array, "H D", {}, mx.float16)
    return Centre.of(array[None, :, None])


def _layers(arrays: dict[str, mx.array], heads: list[int]) -> tuple[FittedLayer, ...]:
    """The weights of all layers; none where there are no arrays.

    Args:
        heads: budgets of each layer: one for each head, or one.

    Raises:
        ValueError: an array is missing, too many, of another shape or dtype, or not finite.
    """
    if not arrays:
        return ()
    layers = []
    for i, count in enumerate(heads):
        prefix = f"layers.{i}."
        layer_arrays = {name.removeprefix(prefix): array for name, array in arrays.items() if name.startswith(prefix)}
        try:
            layer = FittedLayer.of_arrays(layer_arrays)
            _check_layer(layer, count)
        except KeyError as error:
            raise ValueError(f"{error.args[0]} of layer {i} is missing") from error
        except ValueError as error:
            raise ValueError(f"layer {i} has {error}") from error
        if layer.arrays.keys() != layer_arrays.keys():
            raise ValueError(f"layer {i} has arrays that are not known")
        layers.append(layer)
    if sum(len(layer.arrays) for layer in layers) != len(arrays):
        raise ValueError("it has arrays of other layers")
    return tuple(layers)


def _check_layer(layer: FittedLayer, heads: int) -> None:
    """Raises ValueError for shapes, dtypes and numbers that no fit has."""
    sizes: dict[str, int] = {}
    check_shape(layer.weights, "F H", sizes, mx.float32)
    check_shape(layer.bias, "H", sizes, mx.float32)
    features, count = sizes["F"], sizes["H"]
    channels = (features - 1) // count - 2 if count else 0  # Dk + Dv
    if heads not in (1, count) or channels <= 0 or features != count * (channels + 2) + 1:
        raise ValueError(f"weights of shape {layer.weights.shape} for {heads} heads")
    for rope in (layer.key_rope, layer.value_rope):
        if rope is not None:
            _check_rope(rope, channels)
    if not all(mx.isfinite(array).all().item() for array in layer.arrays.values()):
        raise ValueError("numbers that are not finite")


def _check_rope(rope: Rotation, channels: int) -> None:
    sizes = {"two": 2}
    check_shape(rope.pairs, "P two", sizes, mx.int32)
    check_shape(rope.frequencies, "P", sizes, mx.float32)
    check_shape(rope.factor, "", sizes, mx.float32)
    rotated: Any = rope.pairs.reshape(-1).tolist()
    if not rotated or len({*rotated}) < len(rotated) or min(rotated) < 0 or max(rotated) >= channels:
        raise ValueError("a RoPE of channels that there are not, or of one twice")
    if rope.factor.item() == 0:
        raise ValueError("a RoPE with a factor of 0")


# --- places -----------------------------------------------------------------------------------------------------------


def cache_folder() -> Path | None:
    """The folder of this user for data that can be made again; it may not exist yet. None without a home directory.

    $XDG_CACHE_HOME/mlx-kv if that is an absolute path, as its specification demands, else ~/.cache/mlx-kv.
    """
    xdg = os.environ.get("XDG_CACHE_HOME", "")
    folder = xdg if os.path.isabs(xdg) else os.path.expanduser("~/.cache")
    return Path(folder) / "mlx-kv" if os.path.isabs(folder) else None


def is_calibration(path: Path) -> bool:
    """Whether a file is a calibration, of any version, complete or cut off."""
    words = _words(path)
    return words is not None and words.get("format", "").startswith(FORMATS[0].rstrip("0123456789"))


def _words(path: Path) -> dict[str, str] | None:
    try:
        return tensor_files.read_metadata(path)
    except OSError:
        return None


def find_calibration(model_path: str | Path, model: nn.Module) -> Calibration | None:
    """The calibration of a model: beside its directory, in it, or in the user's cache folder.

    Files of other models in these places are ignored.

    Args:
        model_path: a directory, or a hub id, for which only the cache folder is searched.
        model: the model that the calibration must be of.

    Raises:
        ValueError: the file of this model was damaged.
    """
    fingerprint: str | None = None
    for path in _places(model_path):
        words = _words(path)
        if words is None or words.get("format") not in FORMATS:
            continue
        fingerprint = fingerprint or model_fingerprint(model)
        if words.get("fingerprint") == fingerprint:
            return load_calibration(path)
    return None


def _places(model_path: str | Path) -> Iterator[Path]:
    """Paths that may be the calibration of a model, in the order of the search."""
    folder = Path(model_path)
    if folder.is_dir():
        yield beside(folder)
        yield from sorted(folder.glob(f"*{SUFFIX}"))
    if (cache := cache_folder()) is not None:
        yield from sorted((cache / FOLDER).glob(f"*{SUFFIX}"))


def beside(folder: Path) -> Path:
    """The file beside the directory of a model: in it, loaders take every safetensors file for weights."""
    real = Path(os.path.abspath(folder))
    return real.with_name(real.name + SUFFIX)


def default_path(model_path: str | Path, fingerprint: str, *, beside_model: bool = True) -> Path:
    """Where a calibration is written: beside the directory of the model, or in the cache folder, which is made.

    Directories of bundled models and of a hub's cache belong to other programs: for those it is the cache folder.

    Args:
        model_path: a directory, or a hub id.
        fingerprint: of the model.
        beside_model: False for a model with an adapter, which is not what the directory has.

    Raises:
        ValueError: there is no cache folder.
    """
    from huggingface_hub.constants import HF_HUB_CACHE

    folder = Path(model_path)
    in_hub_cache = Path(os.path.abspath(folder)).is_relative_to(os.path.abspath(HF_HUB_CACHE))
    users = beside_model and folder.is_dir() and not in_hub_cache and folder.parent != BUNDLED
    if users and os.access(beside(folder).parent, os.W_OK):
        existing = _words(beside(folder)) or {}
        if existing.get("fingerprint", fingerprint) == fingerprint:
            return beside(folder)  # one of other weights or of another dtype is not replaced
    cache = cache_folder()
    if cache is None:
        raise ValueError("no default file for a calibration of this model: give --output FILE")
    (cache / FOLDER).mkdir(mode=0o700, parents=True, exist_ok=True)
    name = Path(os.path.abspath(folder)).name if folder.is_dir() else str(model_path).replace("/", "--")
    return cache / FOLDER / f"{name}-{fingerprint[:8]}{SUFFIX}"
