"""The measurements of a calibration in progress, in memory and, to continue later, in a directory.

The directory has `state.safetensors` (the texts read, the parts of heads, the sums of the regressions) and a file for
each held-out text. Other files in it are left alone.
L layers, H KV heads, F features.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlx_kv.cache.eviction.calibration import FittedLayer
from mlx_kv.calibration.fit import Moments, Quality, head_parts, head_table, inputs, quality, targets
from mlx_kv.calibration.measure import LayerReading, read_twice, ropes_of
from mlx_kv.files import tensor_files
from mlx_kv.files.atomic_write import check_replaceable
from mlx_kv.generation.prefill import Instructions

FORMAT = "mlx-kv calibration in progress 1"
STATE, HELD_OUT = "state.safetensors", "held-out-{:03}.safetensors"

Arrays = dict[str, mx.array]


class Work:
    """The measurements of one model on given texts.

    Args:
        model: to measure.
        subject: identifies the calibration; measurements of another one are discarded.
        folder: where to store measurements; None stores none.

    Raises:
        ValueError: the folder is no directory, or has another file under one of these names.
    """

    def __init__(self, model: nn.Module, subject: str, folder: Path | None) -> None:
        self._model, self._subject, self._folder = model, subject, folder
        self._parts: dict[int, list[np.ndarray]] = {}  # (H,) by layer, of each text
        self._moments: list[Moments] = []
        self._held_out: dict[int, list[LayerReading]] = {}
        self._plain_layers: list[FittedLayer] = []  # with the RoPE of each layer
        if folder is not None:
            self._check_folder(folder)
            self._load(folder)

    def has(self, index: int, held_out: bool) -> bool:
        """Whether a text has been read; for a held-out one, its file must exist too."""
        return index in self._parts and (not held_out or index in self._held_out)

    def read(self, index: int, text: Sequence[int], instructions: Instructions, fits: bool, held_out: bool) -> None:
        """Reads a text twice.

        Args:
            fits: whether a score is fitted.
            held_out: whether the text measures the fit and is no part of it.
        """
        layers = self._with_ropes() if fits and not held_out else []
        readings = read_twice(self._model, text, instructions)
        shares = [np.array(reading.shares) for reading in readings]
        if held_out:
            self._held_out[index] = readings
            self._write(HELD_OUT.format(index), reading_arrays(readings), {})
        elif fits:
            self._moments = self._moments or [Moments() for _ in readings]
            for layer, own, reading, moments in zip(layers, shares, readings, self._moments, strict=True):
                moments.add(inputs(layer, reading.keys, reading.values), targets(own))
        self._parts[index] = head_parts(shares)
        self._save()

    def _with_ropes(self) -> list[FittedLayer]:
        """Layers with the RoPE of their cached keys, without weights."""
        if not self._plain_layers:
            nothing = mx.zeros((0,))
            self._plain_layers = [FittedLayer(nothing, nothing, *ropes) for ropes in ropes_of(self._model)]
        return self._plain_layers

    def head_table(self) -> list[list[float]]:
        """(L, H): the share of each head in the tokens that one ranking keeps, the mean over texts."""
        return head_table([self._parts[index] for index in sorted(self._parts)])

    def fitted(self) -> tuple[list[FittedLayer], list[Quality]]:
        """The weights of each layer, and how well they predict held-out texts."""
        layers, found = [], []
        for i, (plain, moments) in enumerate(zip(self._with_ropes(), self._moments, strict=True)):
            weights, bias = (mx.array(x.astype(np.float32)) for x in moments.ridge())
            layers.append(plain._replace(weights=weights, bias=bias))
            predicted, actual = [], []
            for index in sorted(self._held_out):
                reading = self._held_out[index][i]
                positions = mx.arange(reading.keys.shape[2])[None, None]
                predicted.append(np.array(layers[-1].predicted(reading.keys, reading.values, positions)[0]).T)
                actual.append(targets(np.array(reading.shares)))
            found.append(quality(predicted, actual))
        return layers, found

    def remove(self) -> None:
        """Removes the stored measurements, and the directory unless it has other files."""
        if self._folder is None or not self._folder.is_dir():
            return
        for path in [self._folder / STATE, *self._folder.glob(HELD_OUT.format(0).replace("000", "*"))]:
            if path.is_file() and is_ours(path):
                path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            self._folder.rmdir()

    # --- files --------------------------------------------------------------------------------------------------------

    def _check_folder(self, folder: Path) -> None:
        if folder.exists() and not folder.is_dir():
            raise ValueError(f"{folder} exists and is not a directory: give the name of one for what is measured")
        if not folder.is_dir() and not folder.parent.is_dir():
            raise ValueError(f"there is no folder {folder.parent}: make it first")
        if folder.is_dir():
            check_replaceable(folder / STATE, is_ours, "file of a calibration in progress", fix="")

    def _save(self) -> None:
        arrays: Arrays = {}
        for index, layers in self._parts.items():
            arrays |= {f"part.{index}.{i}": words_of(own) for i, own in enumerate(layers)}
        for i, moments in enumerate(self._moments):
            arrays |= {f"moments.{i}.{name}": words_of(own) for name, own in moments.arrays.items()}
        counts = [moments.count for moments in self._moments]
        shapes = {f"moments.{i}.second": own.arrays["second"].shape for i, own in enumerate(self._moments)}
        self._write(STATE, arrays, {"counts": json.dumps(counts), "shapes": json.dumps(shapes)})

    def _write(self, name: str, arrays: Arrays, words: dict[str, str]) -> None:
        if self._folder is None:
            return
        self._folder.mkdir(exist_ok=True)
        check_replaceable(self._folder / name, is_ours, "file of a calibration in progress", fix="")
        tensor_files.write(self._folder / name, arrays, {"format": FORMAT, "subject": self._subject, **words})

    def _read(self, path: Path) -> tensor_files.TensorFile | None:
        """A file of this calibration; None if there is none, or it is damaged."""
        try:
            file = tensor_files.read(path)
        except (OSError, ValueError):
            return None
        same = file.words.get("format") == FORMAT and file.words.get("subject") == self._subject
        return file if same else None

    def _load(self, folder: Path) -> None:
        """Loads the measurements of this calibration; unusable ones are made again."""
        file = self._read(folder / STATE)
        if file is None:
            return
        try:
            parts: dict[int, list[np.ndarray]] = {}
            for name in sorted((n for n in file.arrays if n.startswith("part.")), key=_numbers):
                parts.setdefault(_numbers(name)[0], []).append(numbers_of(file.arrays[name]))
            moments = []
            for i, count in enumerate(json.loads(file.words["counts"])):
                own = {n: numbers_of(file.arrays[f"moments.{i}.{n}"]) for n in ("shift", "first", "second")}
                own["second"] = own["second"].reshape(json.loads(file.words["shapes"])[f"moments.{i}.second"])
                moments.append(Moments(count, own))
        except (KeyError, ValueError, IndexError, TypeError):
            return
        for index in list(parts):
            if not (folder / HELD_OUT.format(index)).exists():
                continue
            held = self._read(folder / HELD_OUT.format(index))
            if held is not None:
                self._held_out[index] = readings_of(held.arrays)
        self._parts, self._moments = parts, moments


def reading_arrays(readings: Sequence[LayerReading]) -> Arrays:
    """The arrays of a text, by name."""
    return {f"{name}.{i}": x for i, own in enumerate(readings) for name, x in own._asdict().items()}


def readings_of(arrays: Arrays) -> list[LayerReading]:
    """The inverse of `reading_arrays`."""
    return [
        LayerReading(*[arrays[f"{name}.{i}"] for name in LayerReading._fields])
        for i in range(len(arrays) // len(LayerReading._fields))
    ]


def words_of(numbers: np.ndarray) -> mx.array:
    """float64 as pairs of 32-bit words: files of MLX hold no float64."""
    return mx.array(np.ascontiguousarray(numbers, dtype=np.float64).reshape(-1).view(np.uint32))


def numbers_of(words: mx.array) -> np.ndarray:
    """The inverse of `words_of`, flat."""
    return np.array(words).view(np.float64).copy()


def _numbers(name: str) -> tuple[int, ...]:
    """The numbers in the name of an array."""
    return tuple(int(word) for word in name.split(".") if word.isdigit())


def is_ours(path: Path) -> bool:
    """Whether a file is of a calibration in progress."""
    try:
        with path.open("rb") as file:
            words = tensor_files.words_of(file, path.stat().st_size)
    except OSError:
        return False
    return words is not None and words.get("format") == FORMAT
