"""Whether arrays that somebody says are keys and values can be that. Knows nothing about files, rows or layouts.

B rows, H KV heads, n slots.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from mlx_kv.cache.codecs import Codecs
from mlx_kv.cache.state import DTYPES, Tensors, tensor_told_by

Planes = Sequence[mx.array]


def check_planes(keys: Planes, values: Planes, codecs: Codecs, tensors: Tensors | None = None) -> None:
    """Whether these planes (B, H, n, width) are what the codecs make of keys and of values.

    Args:
        tensors: head dim and dtype of both; None where the planes tell them.

    Raises:
        ValueError, LookupError: they are not.
    """
    for which, (name, planes, codec) in enumerate(zip(("keys", "values"), (keys, values), codecs, strict=True)):
        if not planes or not all(type(plane) is mx.array and plane.ndim == 4 for plane in planes):
            raise ValueError("keys or values that are no arrays of four axes")
        head_dim, dtype = tensor_told_by(codec, tuple(planes)) if tensors is None else tensors[which]
        if dtype not in DTYPES:
            raise ValueError(f"keys or values of {dtype}")
        codec.check(name, mx.zeros((1, planes[0].shape[1], 1, head_dim), DTYPES[dtype]))
        made = [(width, of) for width, of in codec.planes(head_dim, DTYPES[dtype])]
        if [(plane.shape[3], plane.dtype) for plane in planes] != made:
            raise ValueError(f"planes that the codec {codec.name} does not make")
        if name == "keys" and head_dim == 0:
            raise ValueError("keys of no head dim")
    if len({plane.shape[:3] for plane in (*keys, *values)}) != 1 or 0 in keys[0].shape[:2]:
        raise ValueError("keys and values of a cache do not fit each other")
