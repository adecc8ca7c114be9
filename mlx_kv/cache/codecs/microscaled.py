"""The formats of floats that share an 8-bit scale in small groups, as `mx.quantize` makes them.

mxfp4 and mxfp8 are the OCP's microscaling formats (groups of 32, scales are powers of two), nvfp4 is NVIDIA's (groups
of 16, scales are floats of 8 bits).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import mlx.core as mx

from mlx_kv.cache.codecs.base import Packing, Plane, Planes

FORMATS = {"mxfp4": Packing(4, 32, "mxfp4"), "mxfp8": Packing(8, 32, "mxfp8"), "nvfp4": Packing(4, 16, "nvfp4")}


@dataclass(frozen=True)
class Microscaled:
    """Two planes: uint32 (…, D·bits/32), and scales as uint8 (…, D/group_size).

    Args:
        name: "mxfp4", "mxfp8" or "nvfp4".

    Raises:
        ValueError: another name.
    """

    name: str

    def __post_init__(self) -> None:
        if self.name not in FORMATS:
            raise ValueError(f"there is no format {self.name!r}: choose one of {', '.join(FORMATS)}")

    @property
    def parameters(self) -> dict[str, Any]:
        return {}

    @property
    def packed(self) -> Packing:
        return FORMATS[self.name]

    def check(self, name: str, x: mx.array) -> None:
        if x.shape[-1] % 32:  # words of 32 bits, and groups
            raise ValueError(f"{name} have head dim {x.shape[-1]}, which {self.name} cannot store: 32 must divide it")

    def planes(self, head_dim: int, dtype: mx.Dtype) -> tuple[Plane, ...]:
        bits, group_size, *_ = self.packed
        return Plane(head_dim * bits // 32, mx.uint32), Plane(head_dim // group_size, mx.uint8)

    def encode(self, x: mx.array) -> Planes:
        bits, group_size, mode, *_ = self.packed
        return tuple(mx.quantize(x, group_size=group_size, bits=bits, mode=mode))

    def decode(self, planes: Planes, dtype: mx.Dtype) -> mx.array:
        bits, group_size, mode, *_ = self.packed
        packed, scales = planes
        return mx.dequantize(packed, scales, group_size=group_size, bits=bits, mode=mode, dtype=dtype)


MICROSCALED = {name: partial(Microscaled, name) for name in FORMATS}
