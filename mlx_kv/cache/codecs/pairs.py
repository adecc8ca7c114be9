"""Two codecs: of keys, and of values. What one or the other of them means for a cache.

Decides what `bits` and `codec` ask for, and when mlx-lm can read both tensors packed.
"""

from __future__ import annotations

import json

from mlx_kv.cache.codecs.affine import Affine
from mlx_kv.cache.codecs.base import Codec, Packing
from mlx_kv.cache.codecs.names import find_codec
from mlx_kv.cache.codecs.plain import Plain

Codecs = tuple[Codec, Codec]  # of keys, of values
Choice = str | Codec | tuple[str | Codec, str | Codec]
PLAIN: Codecs = (Plain(), Plain())


def find_codecs(bits: int | None, group_size: int, codec: Choice | None = None) -> Codecs:
    """The codecs that the settings of a cache ask for.

    Args:
        bits, group_size: the short way to `Affine`; bits=None is plain, and the group size is then not looked at.
        codec: of both tensors, or (of keys, of values); each a codec or its name.

    Raises:
        ValueError: bits and a codec, or what does not exist.
    """
    if codec is None:
        same = Plain() if bits is None else Affine(bits, group_size)
        return same, same
    if bits is not None:
        raise ValueError(f"got bits={bits} and a codec, which both say how tensors are stored: give one of them")
    if not isinstance(codec, (tuple, list)):
        found = find_codec(codec)
        return found, found
    if len(codec) != 2:
        raise ValueError(f"codec is {codec!r}: give one, or two, of keys and of values")
    return find_codec(codec[0]), find_codec(codec[1])


def alike(one: Codec, other: Codec) -> bool:
    """Whether two codecs store the same planes: third parties' need no `==` for that."""
    return one is other or (type(one) is type(other) and one.name == other.name and one.parameters == other.parameters)


def are_plain(codecs: Codecs) -> bool:
    """Whether both tensors are stored as they are."""
    return all(codec.name == Plain.name for codec in codecs)


def packing_of(codecs: Codecs) -> Packing | None:
    """How mlx-lm can read both tensors packed: it knows one number of bits and one group size for both."""
    keys, values = (codec.packed for codec in codecs)
    return keys if keys == values else None


def affine_of(codecs: Codecs) -> Packing | None:
    """The bits and the group size that ask for these two; None where that takes a `codec`."""
    return packing_of(codecs) if all(codec.name == Affine.name for codec in codecs) else None


def in_words(codecs: Codecs) -> str:
    """How tensors are stored, nothing where they are plain. Two say the same only if they store the same."""
    if (affine := affine_of(codecs)) is not None:
        return f"{affine.bits} bits in groups of {affine.group_size}"
    keys, values = (f"{codec.name} {json.dumps(codec.parameters, sort_keys=True)}" for codec in codecs)
    return "" if are_plain(codecs) else f"keys as {keys} and values as {values}"
