"""The centre of a tensor's channels: one number for each head and channel, the same for all tokens."""

from __future__ import annotations

import base64
import binascii
from dataclasses import dataclass, field
from functools import cached_property

import mlx.core as mx
import numpy as np


@dataclass(frozen=True)
class Centre:
    """Where the channels of one layer's keys, or values, lie: (H, D) numbers.

    Args:
        heads: H.
        numbers: base64 of the numbers, head by head, as little-endian float16: a text, to be saved as
            JSON, hashed and compared.

    Raises:
        ValueError: no head, a text that holds no such numbers, or numbers that are not finite.
    """

    heads: int
    numbers: str = field(repr=False)

    def __post_init__(self) -> None:
        if type(self.heads) is not int or self.heads < 1 or not isinstance(self.numbers, str):
            raise ValueError("a centre has 1 head or more, and base64 of float16: make one with Centre.of(keys)")
        try:
            array = self._array
        except (binascii.Error, ValueError) as error:
            raise ValueError(f"a centre is base64 of float16 for {self.heads} heads: {error}") from error
        if not array.size or not np.isfinite(array).all():
            raise ValueError("a centre is finite in float16, and these keys are not: store them without one")

    @classmethod
    def of(cls, x: mx.array) -> Centre:
        """The mean of all tokens of x (B, H, S, D), S of 1 or more.

        Raises:
            ValueError: a mean that is not finite in float16.
        """
        return cls._of(np.array(x.astype(mx.float32).mean(axis=(0, 2))))

    @classmethod
    def _of(cls, numbers: np.ndarray) -> Centre:
        return cls(len(numbers), base64.b64encode(numbers.astype("<f2").tobytes()).decode())

    def of_head(self, head: int) -> Centre:
        """That of one head: (1, D)."""
        return self._of(self._array[head : head + 1])

    @property
    def dim(self) -> int:
        """D."""
        return int(self._array.shape[1])

    def array(self, dtype: mx.Dtype) -> mx.array:
        """(H, 1, D)."""
        return self._on_device.astype(dtype)

    @cached_property
    def _array(self) -> np.ndarray:
        flat = np.frombuffer(base64.b64decode(self.numbers, validate=True), dtype="<f2")
        return flat.reshape(self.heads, -1)

    @cached_property
    def _on_device(self) -> mx.array:
        return mx.array(self._array.astype(np.float32))[:, None]
