"""Readings of a text, the regressions on them, and the measurements of a calibration in progress.

A text is read twice, which gives its keys and values and the attention that each token receives when the text is read
again (KVzip). Ridge regressions of the logarithms of these shares on keys and values give a score; one ranking of all
tokens gives how many tokens each head needs.

n tokens, F features, H KV heads, Dk and Dv head dims of keys and values, L layers of full attention. Sums are of
float64.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlx_kv.cache.eviction.calibration import TINY_SHARE, FittedLayer, features
from mlx_kv.cache.kv_cache import KVCache
from mlx_kv.files import tensor_files
from mlx_kv.files.atomic_write import check_replaceable
from mlx_kv.generation.prefill import Instructions, TwoPassPrefill, prefill_step
from mlx_kv.mlxlm.convert import make_prompt_cache
from mlx_kv.mlxlm.probe import architecture, cache_ropes
from mlx_kv.mlxlm.traverse import is_ours, leaves
from mlx_kv.policy import CachePolicy
from mlx_kv.settings import MOST_TOKENS

# --- readings ---------------------------------------------------------------------------------------------------------

POLICY = CachePolicy(budget=MOST_TOKENS, score="kvzip", share="head")  # a budget that evicts nothing


class LayerReading(NamedTuple):
    """One text in one layer.

    Attributes:
        keys: (1, H, n, Dk), as the cache holds them.
        values: (1, H, n, Dv).
        shares: (H, n) of float32, the largest share of attention that each token received.
    """

    keys: mx.array
    values: mx.array
    shares: mx.array


def read_twice(model: nn.Module, tokens: Sequence[int], instructions: Instructions) -> list[LayerReading]:
    """A text in each layer of full attention, in order.

    Raises:
        ValueError: the model has no such layer, or one that hides its attention.
    """
    caches = _empty_caches(model)
    TwoPassPrefill(model, caches, [tokens], prefill_step(model, caches, None), instructions).finish()
    readings = []
    for _, cache in budgeted(caches):
        evictor, buffers, row = cache.evictor, cache.view.buffers, cache.view.rows[0]
        assert evictor is not None
        assert buffers is not None
        reread = evictor.metadata.reread[0]
        assert reread is not None
        assert reread.received.shape[1] == len(tokens), "all of the text was read again"
        slots = ((row.start, row.start + row.offset),)  # nothing was evicted: all tokens, in their order
        keys, values = (buffer.decode(buffer.read(slots)) for buffer in buffers)
        mx.eval(keys, values)
        readings.append(LayerReading(keys, values, reread.received))
    return readings


def _empty_caches(model: nn.Module) -> list[Any]:
    """Raises ValueError where a model hides its attention, or has nothing that a budget applies to."""
    try:
        return make_prompt_cache(model, POLICY)
    except ValueError as error:
        reason = str(error).partition(":")[0]
        raise ValueError(
            f"cannot calibrate a model of {architecture(model)}: {reason}. Its budgets work without a calibration"
        ) from error


def budgeted(caches: Sequence[Any]) -> list[tuple[int, KVCache]]:
    """The caches that a budget applies to, with their indices in the order of `leaves`, in the order of layers."""
    budgeted_caches = [
        (i, cache) for i, cache in enumerate(leaves(caches)) if is_ours(cache) and cache.evictor is not None
    ]
    return sorted(budgeted_caches, key=lambda pair: pair[1].evictor.layer)  # type: ignore[union-attr]


# --- fit --------------------------------------------------------------------------------------------------------------

LAMBDA = 1e-2  # of the penalty, per token; 1e-3 to 5e-2 give the same
KEPT = 0.25  # share of tokens kept by the ranking from which budgets of heads are counted
SINKS, RECENT = 4, 64  # first and last tokens that every head keeps; they are not ranked
MIN_SPREAD = 1e-6  # of a feature relative to its mean; a feature below it is constant


def inputs(layer: FittedLayer, keys: mx.array, values: mx.array) -> np.ndarray:
    """(n, F) of float64: the features of a text that begins at position 0."""
    positions = mx.arange(keys.shape[2])[None, None]
    return np.array(features(layer, keys, values, positions)[0], dtype=np.float64)


def targets(shares: np.ndarray) -> np.ndarray:
    """(n, H) of float64, of shares (H, n)."""
    return np.log(shares.astype(np.float64) + TINY_SHARE).T


class Moments:
    """Sums over tokens for a ridge regression, so that features need not be stored.

    Attributes:
        count: tokens.
        arrays: by name: `shift` (F,), near the mean; `first` (F + H,) and `second` (F, F + H), sums of features minus
            shift and of targets, and of their products.
    """

    def __init__(self, count: int = 0, arrays: dict[str, np.ndarray] | None = None) -> None:
        self.count, self.arrays = count, arrays or {}

    def add(self, f: np.ndarray, y: np.ndarray) -> None:
        """Adds tokens: features (n, F) and targets (n, H)."""
        if not self.arrays:
            sizes = f.shape[1], f.shape[1] + y.shape[1]
            self.arrays = {"shift": f.mean(axis=0), "first": np.zeros(sizes[1]), "second": np.zeros(sizes)}
        z = f - self.arrays["shift"]
        both = np.concatenate([z, y], axis=1)
        self.count += len(f)
        self.arrays["first"] += both.sum(axis=0)
        self.arrays["second"] += z.T @ both

    def ridge(self) -> tuple[np.ndarray, np.ndarray]:
        """Weights (F, H) and bias (H,): y ~ f @ weights + bias, of standardised features.

        w = (Z'Z + LAMBDA n I)^-1 Z'y.
        """
        shift, first, second, n = self.arrays["shift"], self.arrays["first"], self.arrays["second"], self.count
        size, means = len(shift), first / n
        centred = second - np.outer(first[:size], means)  # (F, F + H)
        mean = shift + means[:size]
        std = np.sqrt(np.maximum(np.diag(centred[:, :size]), 0) / n)
        varies = std > MIN_SPREAD * np.maximum(np.abs(mean), MIN_SPREAD)
        std = np.where(varies, std, 1.0)
        gram = np.where(np.outer(varies, varies), centred[:, :size] / np.outer(std, std), 0.0)
        product = np.where(varies[:, None], centred[:, size:] / std[:, None], 0.0)
        weights = np.linalg.solve(gram + LAMBDA * n * np.eye(size), product) / std[:, None]
        return weights, means[size:] - mean @ weights


class Quality(NamedTuple):
    """How well held-out texts are predicted, the mean over heads.

    Attributes:
        r2: explained variance of the log shares.
        spearman: correlation of ranks within a text.
        top_quarter: share of the quarter of a text with the largest shares that is found.
    """

    r2: float
    spearman: float
    top_quarter: float


def quality(predicted: Sequence[np.ndarray], actual: Sequence[np.ndarray]) -> Quality:
    """Of held-out texts, (n, H) each."""
    all_predicted, true = np.concatenate(predicted), np.concatenate(actual)
    spread = np.maximum(((true - true.mean(axis=0)) ** 2).sum(axis=0), 1e-12)
    r2 = 1 - ((all_predicted - true) ** 2).sum(axis=0) / spread
    ranks, overlaps = [], []
    for text, shares in zip(predicted, actual, strict=True):
        quarter = max(1, len(text) // 4)
        for p, t in zip(text.T, shares.T, strict=True):
            ranks.append(np.corrcoef(_ranks(p), _ranks(t))[0, 1] if len(p) > 1 else 0.0)
            overlaps.append(len({*np.argsort(-p)[:quarter]} & {*np.argsort(-t)[:quarter]}) / quarter)
    return Quality(float(r2.mean()), float(np.mean(ranks)), float(np.mean(overlaps)))


def _ranks(x: np.ndarray) -> np.ndarray:
    return np.argsort(np.argsort(x, kind="stable"), kind="stable")


def head_parts(shares: Sequence[np.ndarray], kept: float = KEPT) -> list[np.ndarray]:
    """The share of each head in the tokens that one ranking of all heads and layers keeps: (H,) by layer, of sum 1.

    Args:
        shares: (H, n) of each layer, of one text.
        kept: share of all tokens. `SINKS` and `RECENT` tokens are kept by every head and not counted.
    """
    n = shares[0].shape[1]
    sinks, recent = (SINKS, RECENT) if kept * n >= 2 * (SINKS + RECENT) else (0, 0)  # a short text is ranked whole
    ranked = [layer[:, sinks : n - recent] for layer in shares]
    heads = sum(len(layer) for layer in ranked)
    count = max(1, round(kept * n) - sinks - recent) * heads
    best = np.argsort(-np.concatenate(ranked).reshape(-1), kind="stable")[:count]
    counts = np.bincount(best // ranked[0].shape[1], minlength=heads) / len(best)
    ends = np.cumsum([len(layer) for layer in ranked])
    return np.split(counts, ends[:-1])


def head_table(parts: Sequence[list[np.ndarray]]) -> list[list[float]]:
    """(L, H), the mean over texts of `head_parts`; (L, 1) where layers differ in their heads."""
    layers = [np.mean(texts, axis=0) for texts in zip(*parts, strict=True)]
    if len({len(layer) for layer in layers}) > 1:
        return [[float(layer.mean())] for layer in layers]
    return [[float(part) for part in layer] for layer in layers]


# --- work -------------------------------------------------------------------------------------------------------------

FORMAT = "mlx-kv calibration in progress 1"
STATE, HELD_OUT = "state.safetensors", "held-out-{:03}.safetensors"

Arrays = dict[str, mx.array]


class Work:
    """The measurements of one model on given texts, in memory and, to continue later, in a directory.

    The directory has `state.safetensors` (the texts read, the parts of heads, the sums of the regressions) and a file
    for each held-out text. Other files in it are left alone.

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
            for layer, layer_shares, reading, moments in zip(layers, shares, readings, self._moments, strict=True):
                moments.add(inputs(layer, reading.keys, reading.values), targets(layer_shares))
        self._parts[index] = head_parts(shares)
        self._save()

    def _with_ropes(self) -> list[FittedLayer]:
        """Layers with the RoPE of their cached keys, without weights.

        Raises:
            ValueError: there is no layer of full attention, or its RoPE cannot be found.
        """
        if not self._plain_layers:
            which = tuple(index for index, _ in budgeted(_empty_caches(self._model)))
            if not which:
                raise ValueError(f"{architecture(self._model)} has no layer of full attention, so nothing to calibrate")
            nothing = mx.zeros((0,))
            self._plain_layers = [FittedLayer(nothing, nothing, *ropes) for ropes in cache_ropes(self._model, which)]
        return self._plain_layers

    def head_table(self) -> list[list[float]]:
        """(L, H): the share of each head in the tokens that one ranking keeps, the mean over texts."""
        return head_table([self._parts[index] for index in sorted(self._parts)])

    def fitted(self) -> tuple[list[FittedLayer], list[Quality]]:
        """The weights of each layer, and how well they predict held-out texts."""
        layers, qualities = [], []
        for i, (plain, moments) in enumerate(zip(self._with_ropes(), self._moments, strict=True)):
            weights, bias = (mx.array(x.astype(np.float32)) for x in moments.ridge())
            layers.append(plain._replace(weights=weights, bias=bias))
            predicted, actual = [], []
            for index in sorted(self._held_out):
                reading = self._held_out[index][i]
                positions = mx.arange(reading.keys.shape[2])[None, None]
                predicted.append(np.array(layers[-1].predicted(reading.keys, reading.values, positions)[0]).T)
                actual.append(targets(np.array(reading.shares)))
            qualities.append(quality(predicted, actual))
        return layers, qualities

    def remove(self) -> None:
        """Removes the stored measurements, and the directory unless it has other files."""
        if self._folder is None or not self._folder.is_dir():
            return
        for path in [self._folder / STATE, *self._folder.glob(HELD_OUT.format(0).replace("000", "*"))]:
            if path.is_file() and is_work_file(path):
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
            check_replaceable(folder / STATE, is_work_file, "file of a calibration in progress", fix="")

    def _save(self) -> None:
        arrays: Arrays = {}
        for index, layers in self._parts.items():
            arrays |= {f"part.{index}.{i}": words_of(shares) for i, shares in enumerate(layers)}
        for i, moments in enumerate(self._moments):
            arrays |= {f"moments.{i}.{name}": words_of(sums) for name, sums in moments.arrays.items()}
        counts = [moments.count for moments in self._moments]
        shapes = {f"moments.{i}.second": moments.arrays["second"].shape for i, moments in enumerate(self._moments)}
        self._write(STATE, arrays, {"counts": json.dumps(counts), "shapes": json.dumps(shapes)})

    def _write(self, name: str, arrays: Arrays, words: dict[str, str]) -> None:
        if self._folder is None:
            return
        self._folder.mkdir(exist_ok=True)
        check_replaceable(self._folder / name, is_work_file, "file of a calibration in progress", fix="")
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
                sums = {n: numbers_of(file.arrays[f"moments.{i}.{n}"]) for n in ("shift", "first", "second")}
                sums["second"] = sums["second"].reshape(json.loads(file.words["shapes"])[f"moments.{i}.second"])
                moments.append(Moments(count, sums))
        except (KeyError, ValueError, IndexError, TypeError):
            return
        for index in list(parts):
            if not (folder / HELD_OUT.format(index)).exists():
                continue
            file = self._read(folder / HELD_OUT.format(index))
            if file is not None:
                self._held_out[index] = readings_of(file.arrays)
        self._parts, self._moments = parts, moments


def reading_arrays(readings: Sequence[LayerReading]) -> Arrays:
    """The arrays of a text, by name."""
    return {f"{name}.{i}": x for i, reading in enumerate(readings) for name, x in reading._asdict().items()}


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


def is_work_file(path: Path) -> bool:
    """Whether a file is of a calibration in progress."""
    return tensor_files.has_format(path, FORMAT)
