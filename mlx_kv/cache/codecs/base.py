"""What every codec is: a way to store one tensor as planes.

A tensor of shape (B, H, S, D) becomes a tuple of *planes* that share every axis but the last: plain has one, affine
quantisation three (packed words, scales, biases). Independent of slots, lengths and attention: every slot operation
maps over planes, so rings, budgets and ragged rows need no code of their own for any codec.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import mlx.core as mx

from mlx_kv.cache.codecs.centre import Centre

Planes = tuple[mx.array, ...]


def in_rows(planes: Planes) -> Planes:
    """Planes as `mx.quantized_matmul` takes them: without gaps on CUDA, which has no kernel for others (mlx 0.32.4)."""
    return tuple([mx.contiguous(plane) for plane in planes]) if mx.cuda.is_available() else planes


class Plane(NamedTuple):
    """What one plane is, for tensors of some head dim and dtype.

    Attributes:
        width: of its last axis.
        dtype: of its elements.
    """

    width: int
    dtype: mx.Dtype


class Packing(NamedTuple):
    """Planes as `mx.quantized_matmul` reads them: packed words, scales, and biases where the mode has them.

    Attributes:
        bits: per element.
        group_size: elements that share a scale.
        mode: of `mx.quantize`. mlx-lm's attention supports only "affine".
        rotated: whether the planes are those of the tensor times `rotation.rotated`: queries are to be rotated, too,
            and the weighted sum of values is to be rotated back.
        centre: what was subtracted from the tensor first; None is nothing.
    """

    bits: int
    group_size: int
    mode: str = "affine"
    rotated: bool = False
    centre: Centre | None = None

    @property
    def stock(self) -> bool:
        """Whether mlx-lm's attention reads such planes."""
        return self.mode == "affine" and not self.rotated and self.centre is None


class Codec(Protocol):
    """Turns (B, H, S, D) into planes and back. A codec is immutable, and encodes each token independently.

    One that stores heads differently also has `of_head(head)`, the codec of planes of that head alone; one that differs
    from cache to cache of a model `of_layer(number)`, by the place in the list of caches.
    """

    @property
    def name(self) -> str:
        """The name that it is registered under; saved caches refer to it."""
        ...

    @property
    def parameters(self) -> dict[str, Any]:
        """The arguments of its factory, as JSON values."""
        ...

    @property
    def packed(self) -> Packing | None:
        """How attention can read the planes as they are; None where they must be decoded first."""
        ...

    def check(self, name: str, x: mx.array) -> None:
        """Raises ValueError where this codec cannot store x (B, H, S, D), before anything has changed.

        Args:
            name: "keys" or "values", for the message.
        """
        ...

    def planes(self, head_dim: int, dtype: mx.Dtype) -> tuple[Plane, ...]:
        """The planes (B, H, S, width) of a tensor (B, H, S, head_dim): one or more."""
        ...

    def encode(self, x: mx.array) -> Planes:
        """The planes of a tensor (B, H, S, D), as `planes` describes them."""
        ...

    def decode(self, planes: Planes, dtype: mx.Dtype) -> mx.array:
        """The tensor (B, H, S, D), in the dtype that it had."""
        ...
