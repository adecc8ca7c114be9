"""How one tensor is stored: a protocol, one codec a file, and the names under which they are found."""

from __future__ import annotations

from mlx_kv.cache.codecs.affine import Affine
from mlx_kv.cache.codecs.base import Codec, Packing, Plane, Planes, in_rows
from mlx_kv.cache.codecs.centre import Centre
from mlx_kv.cache.codecs.centred import Centred, CentredByLayer
from mlx_kv.cache.codecs.microscaled import Microscaled
from mlx_kv.cache.codecs.pairs import (
    PLAIN,
    TAKE_BITS,
    Bits,
    Choice,
    Codecs,
    affine_of,
    alike,
    are_plain,
    briefly,
    codec_names,
    find_codec,
    find_codecs,
    find_packings,
    in_words,
    keys_and_values,
    of_cache,
    of_head,
    one_or_two,
    packing_of,
    packings_of,
    register_codec,
)
from mlx_kv.cache.codecs.plain import Plain

__all__ = [
    "PLAIN",
    "TAKE_BITS",
    "Affine",
    "Bits",
    "Centre",
    "Centred",
    "CentredByLayer",
    "Choice",
    "Codec",
    "Codecs",
    "Microscaled",
    "Packing",
    "Plain",
    "Plane",
    "Planes",
    "affine_of",
    "alike",
    "are_plain",
    "briefly",
    "codec_names",
    "find_codec",
    "find_codecs",
    "find_packings",
    "in_rows",
    "in_words",
    "keys_and_values",
    "of_cache",
    "of_head",
    "one_or_two",
    "packing_of",
    "packings_of",
    "register_codec",
]
