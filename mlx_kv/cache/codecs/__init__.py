"""How one tensor is stored: as it is, or quantised.

A tensor of shape (B, H, S, D) becomes a tuple of *planes* that share every axis but the last: plain has one, affine
quantisation three (packed words, scales, biases). Knows nothing about slots, lengths or attention. Because every slot
operation maps over planes, rings, budgets and ragged rows need no code of their own for quantised tensors.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import mlx.core as mx

Planes = tuple[mx.array, ...]

BITS = (2, 3, 4, 5, 6, 8)
GROUP_SIZES = (32, 64, 128)


class Codec(Protocol):
    """Turns (B, H, S, D) into planes and back."""

    @property
    def bits(self) -> int | None:
        """Bits per element where planes are packed, None where the one plane is the tensor."""
        ...

    @property
    def group_size(self) -> int | None: ...

    def check(self, name: str, x: mx.array) -> None:
        """Raises ValueError where this codec cannot store `x`, before anything has changed."""
        ...

    def encode(self, x: mx.array) -> Planes: ...

    def decode(self, planes: Planes) -> mx.array: ...


@dataclass(frozen=True)
class Plain:
    """One plane: the tensor itself."""

    bits: None = None
    group_size: None = None

    def check(self, name: str, x: mx.array) -> None:
        pass

    def encode(self, x: mx.array) -> Planes:
        return (x,)

    def decode(self, planes: Planes) -> mx.array:
        return planes[0]


@dataclass(frozen=True)
class Affine:
    """Three planes, as `mx.quantize` makes them: uint32 (…, D·bits/32), scales and biases (…, D/group_size).

    Raises:
        ValueError: bits or a group size that `mx.quantize` does not know.
    """

    bits: int
    group_size: int

    def __post_init__(self) -> None:
        if type(self.bits) is not int or self.bits not in BITS:
            raise ValueError(f"bits is {self.bits!r}: a quantised cache has {', '.join(map(str, BITS))} bits")
        if type(self.group_size) is not int or self.group_size not in GROUP_SIZES:
            raise ValueError(f"group_size is {self.group_size}: choose one of {', '.join(map(str, GROUP_SIZES))}")

    def check(self, name: str, x: mx.array) -> None:
        dim = x.shape[-1]
        if dim % self.group_size:
            fitting = [str(g) for g in GROUP_SIZES if dim % g == 0]
            mend = f"use group_size={' or '.join(fitting)}" if fitting else "use bits=None: no group size divides it"
            raise ValueError(f"{name} have head dim {dim}, not a multiple of group_size={self.group_size}; {mend}")

    def encode(self, x: mx.array) -> Planes:
        packed, scales, biases = mx.quantize(x, group_size=self.group_size, bits=self.bits)
        return packed, scales, biases

    def decode(self, planes: Planes) -> mx.array:
        packed, scales, biases = planes
        return mx.dequantize(packed, scales, biases, group_size=self.group_size, bits=self.bits)


def make_codec(bits: int | None, group_size: int) -> Codec:
    """The codec for `bits` (None is plain; the group size is then not looked at)."""
    return Plain() if bits is None else Affine(bits, group_size)
