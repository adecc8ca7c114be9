"""Affine quantisation, as `mx.quantize` does it: groups of elements share a scale and a bias.

Of the tensor as it is, or rotated: a channel that is far larger than others is then spread over all of them, before it
takes the precision of its group away from them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from mlx_kv.cache.codecs.base import Packing, Plane, Planes
from mlx_kv.cache.codecs.rotation import check_rotation, rotated
from mlx_kv.settings import SettingError

BITS = (2, 3, 4, 5, 6, 8)
GROUP_SIZES = (32, 64, 128)


@dataclass(frozen=True)
class Affine:
    """Three planes: uint32 (…, D·bits/32), scales and biases (…, D/group_size).

    Args:
        bits: per element, one of `BITS`.
        group_size: elements of a token and head that share a scale and a bias, one of `GROUP_SIZES`.
        rotate: whether it is the tensor times `rotation.rotated` that is stored; named "rotated" then.

    Raises:
        ValueError: bits or a group size that `mx.quantize` does not support.
    """

    bits: int = 8
    group_size: int = 64
    rotate: bool = False

    def __post_init__(self) -> None:
        if type(self.bits) is not int or self.bits not in BITS:
            raise SettingError("{bits:is}: a quantised cache has {} bits", ", ".join(map(str, BITS)), bits=self.bits)
        if type(self.group_size) is not int or self.group_size not in GROUP_SIZES:
            sizes = ", ".join(map(str, GROUP_SIZES))
            raise SettingError("{group_size:is}: choose one of {}", sizes, group_size=self.group_size)

    @property
    def name(self) -> str:
        return "rotated" if self.rotate else "affine"

    @property
    def parameters(self) -> dict[str, Any]:
        return {"bits": self.bits, "group_size": self.group_size}

    @property
    def packed(self) -> Packing:
        return Packing(self.bits, self.group_size, rotated=self.rotate)

    def check(self, name: str, x: mx.array) -> None:
        dim = x.shape[-1]
        if dim % self.group_size:
            sizes = " or ".join(str(size) for size in GROUP_SIZES if dim % size == 0)
            raise SettingError(
                "{0} have head dim {1}, not a multiple of {group_size:=}; "
                + ("use {group_size:={2}}" if sizes else "{bits:omit}: no group size divides it"),
                *(name, dim, sizes),
                group_size=self.group_size,
            )
        if self.rotate:
            check_rotation(name, dim)

    def planes(self, head_dim: int, dtype: mx.Dtype) -> tuple[Plane, ...]:
        groups = Plane(head_dim // self.group_size, dtype)
        return Plane(head_dim * self.bits // 32, mx.uint32), groups, groups

    def encode(self, x: mx.array) -> Planes:
        x = rotated(x) if self.rotate else x
        packed, scales, biases = mx.quantize(x, group_size=self.group_size, bits=self.bits)
        return packed, scales, biases

    def decode(self, planes: Planes, dtype: mx.Dtype) -> mx.array:
        packed, scales, biases = planes
        decoded = mx.dequantize(packed, scales, biases, group_size=self.group_size, bits=self.bits)
        return rotated(decoded) if self.rotate else decoded
