"""Codecs as another package would bring them, and what each of them leaves of a tensor, in NumPy.

Importing this registers them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_kv import register_codec
from mlx_kv.cache.codecs import Affine, Centre, Centred, Codec, Microscaled, Plane, Planes


class Half:
    """Half precision: one plane."""

    name, packed = "half", None
    parameters: dict[str, Any] = {}  # noqa: RUF012

    def check(self, name: str, x: mx.array) -> None:
        pass

    def planes(self, head_dim: int, dtype: mx.Dtype) -> tuple[Plane, ...]:
        return (Plane(head_dim, mx.float16),)

    def encode(self, x: mx.array) -> Planes:
        return (x.astype(mx.float16),)

    def decode(self, planes: Planes, dtype: mx.Dtype) -> mx.array:
        return planes[0].astype(dtype)


class Scaled:
    """Each token's vector in `levels` steps of either sign, and its scale: two planes."""

    name, packed = "scaled", None

    def __init__(self, levels: int = 127, note: str = "") -> None:
        if not 1 <= levels <= 127:
            raise ValueError(f"levels is {levels}: give 1 to 127")
        self.levels, self.note = levels, note

    def __repr__(self) -> str:
        return f"Scaled({self.levels}, {self.note!r})"

    @property
    def parameters(self) -> dict[str, Any]:
        return {"levels": self.levels, "note": self.note}

    def check(self, name: str, x: mx.array) -> None:
        if x.shape[3] % 4:
            raise ValueError(f"{name} have head dim {x.shape[3]}: give a multiple of 4")

    def planes(self, head_dim: int, dtype: mx.Dtype) -> tuple[Plane, ...]:
        return Plane(head_dim, mx.int8), Plane(1, mx.float32)

    def encode(self, x: mx.array) -> Planes:
        wide = x.astype(mx.float32)
        scale = mx.maximum(mx.abs(wide).max(axis=-1, keepdims=True) / self.levels, 1e-6)
        return mx.round(wide / scale).astype(mx.int8), scale

    def decode(self, planes: Planes, dtype: mx.Dtype) -> mx.array:
        words, scale = planes
        return (words.astype(mx.float32) * scale).astype(dtype)


def scaled(x: np.ndarray, levels: int) -> np.ndarray:
    wide = x.astype(np.float32)
    scale = np.maximum(np.abs(wide).max(axis=-1, keepdims=True, initial=0) / np.float32(levels), np.float32(1e-6))
    return np.round(wide / scale) * scale


def round_trip(x: mx.array, bits: int | None, group_size: int) -> mx.array:
    """What is left of a tensor that was quantised."""
    if bits is None or x.shape[-1] == 0:
        return x
    return mx.dequantize(*mx.quantize(x, group_size, bits), group_size, bits)


def decoded(codec: Codec) -> Callable[[np.ndarray], np.ndarray]:
    """What a codec of ours leaves: bit for bit what it makes of its planes, whatever was stored with it."""
    return lambda x: np.array(codec.decode(codec.encode(mx.array(x)), mx.float32))


FEW = Scaled(levels=7)
ROTATED = Affine(4, 32, rotate=True)
# From zero, by head. Not further: scores of hundreds would leave float32 no digits to compare.
FAR = np.linspace(-2, 2, 128).astype(np.float16).astype(np.float32).reshape(2, 1, 64)
CENTRED = Centred(Centre.of(mx.array(FAR)[None]), ROTATED)
LEFT: dict[Any, Callable[[np.ndarray], np.ndarray]] = {
    "plain": lambda x: x,
    "half": lambda x: x.astype(np.float16).astype(x.dtype),
    "scaled": lambda x: scaled(x, 127),
    FEW: lambda x: scaled(x, 7),
    Affine(4, 32): lambda x: np.array(round_trip(mx.array(x), 4, 32)),
    Affine(8, 32): lambda x: np.array(round_trip(mx.array(x), 8, 32)),
    ROTATED: decoded(ROTATED),
    CENTRED: lambda x: decoded(ROTATED)(x - FAR) + FAR,
    "mxfp8": decoded(Microscaled("mxfp8")),
}
# Packed in ways that only our own attention reads.
PACKED: tuple[Any, ...] = (
    (Affine(8, 32), Affine(4, 32)),
    ROTATED,
    (ROTATED, Affine(4, 32)),
    "mxfp8",
    ("mxfp8", ROTATED),
    (CENTRED, ROTATED),
)
CODECS: tuple[Any, ...] = (
    "half",
    "scaled",
    FEW,
    ("plain", "half"),
    ("half", "scaled"),
    ("scaled", "plain"),
    (Affine(4, 32), FEW),
    ("plain", Affine(4, 32)),
    *PACKED,
)
# What a `Spec` says of how tensors are stored.
STORED: tuple[dict[str, Any], ...] = (
    *({"bits": bits} for bits in (None, None, None, 8, 8, 4, 4)),
    *({"codec": codec, "carries": True} for codec in PACKED[:-1]),
    {"codec": PACKED[-1], "carries": True, "key_dim": CENTRED.centre.dim},
)


def left_of(codec: Any, x: np.ndarray) -> np.ndarray:
    """What is left of x once it was stored."""
    return LEFT[codec](x) if x.size else x


register_codec("half", Half)
register_codec("scaled", Scaled)
