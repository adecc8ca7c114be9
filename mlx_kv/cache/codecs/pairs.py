"""Codecs by name, and pairs of them: one for keys and one for values, from the settings `bits` and `codec`."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from mlx_kv.cache.codecs.affine import Affine
from mlx_kv.cache.codecs.base import Codec, Packing
from mlx_kv.cache.codecs.centre import Centre
from mlx_kv.cache.codecs.centred import Centred
from mlx_kv.cache.codecs.microscaled import MICROSCALED
from mlx_kv.cache.codecs.plain import Plain
from mlx_kv.settings import OpenSet, SettingError

Codecs = tuple[Codec, Codec]  # of keys, of values
Choice = str | Codec | tuple[str | Codec, str | Codec]
Bits = int | tuple[int | None, int | None]  # of both tensors, or (of keys, of values)
PLAIN: Codecs = (Plain(), Plain())
MAX_CHARACTERS = 200  # of parameters in messages
TAKE_BITS = ("affine", "rotated")  # the codecs that are made with bits and a group size


def find_codecs(bits: Bits | None, group_size: int, codec: Choice | None = None) -> Codecs:
    """The codecs for the settings of a cache.

    Args:
        bits: of both tensors, or (of keys, of values); None is plain. With a codec, only one of `TAKE_BITS`, by name.
        group_size: elements that share a scale; without bits it is not looked at.
        codec: of both tensors, or (of keys, of values); each a codec or its name.

    Raises:
        ValueError: bits and a codec that takes none, or what does not exist.
    """
    kinds, counts = keys_and_values("codec", codec), keys_and_values("bits", bits)
    keys, values = (_codec(*each, group_size) for each in zip(kinds, counts, strict=True))
    return keys, values


def _codec(kind: str | Codec | None, bits: int | None, group_size: int) -> Codec:
    if bits is None:
        return Plain() if kind is None else find_codec(kind)
    if kind is not None and kind not in TAKE_BITS:
        raise SettingError(
            "got {bits:=} and {codec:=}, which both describe how tensors are stored: give one of them, or "
            "{codec:='rotated'} beside {bits}",
            bits=bits,
            codec=kind if isinstance(kind, str) else kind.name,
        )
    return find_codec(kind or "affine", {"bits": bits, "group_size": group_size})


def keys_and_values(name: str, given: Any) -> tuple[Any, Any]:
    """A setting as a pair, of keys and of values, from a pair or from one for both."""
    if not isinstance(given, (tuple, list)):
        return given, given
    if len(given) != 2:
        raise SettingError(f"{{{name}:is}}: give one, or two, of keys and of values", **{name: given})
    return given[0], given[1]


def one_or_two(given: Any) -> Any:
    """A setting of both tensors in a form to be compared: one where keys and values have the same, else a tuple."""
    if not isinstance(given, (tuple, list)):
        return given
    one, *others = given or [None]
    same = len(others) == 1 and type(one) is type(others[0]) and one == others[0]
    return one if same else tuple(given)


def of_cache(codecs: Codecs, number: int) -> Codecs:
    """The codecs of one of a model's caches, by its index; a codec that differs between caches has an `of_layer`.

    Raises:
        ValueError: such a codec has none for this cache.
    """
    keys, values = (getattr(codec, "of_layer", lambda _, codec=codec: codec)(number) for codec in codecs)
    return keys, values


def of_head(codec: Codec, head: int) -> Codec:
    """What decodes one head's planes alone; a codec that stores heads differently has an `of_head`."""
    own: Codec = getattr(codec, "of_head", lambda _: codec)(head)
    return own


def alike(one: Codec, other: Codec) -> bool:
    """Whether two codecs store the same planes: third parties' need no `==` for that."""
    return one is other or (type(one) is type(other) and one.name == other.name and one.parameters == other.parameters)


def are_plain(codecs: Codecs) -> bool:
    """Whether both tensors are stored as they are."""
    return all(codec.name == Plain.name for codec in codecs)


def packing_of(codecs: Codecs) -> Packing | None:
    """How mlx-lm can read both tensors packed: it supports one number of bits and one group size for both."""
    keys, values = (codec.packed for codec in codecs)
    return keys if keys == values and (keys is None or keys.stock) else None


def packings_of(codecs: Codecs) -> tuple[Packing, Packing] | None:
    """How our own attention reads both tensors packed; None where one of them must be decoded, or mlx-lm's can."""
    keys, values = (codec.packed for codec in codecs)
    return None if keys is None or values is None or packing_of(codecs) is not None else (keys, values)


def find_packings(codecs: Codecs, residual: bool) -> tuple[Packing | None, tuple[Packing, Packing] | None]:
    """How mlx-lm's attention reads the planes, and how our own does, of keys and of values; None where it cannot.

    Args:
        residual: whether there is one, which mlx-lm's cannot read: then our own reads all planes.
    """
    keys, values = (codec.packed for codec in codecs)
    if residual:
        return None, None if keys is None or values is None else (keys, values)
    return packing_of(codecs), packings_of(codecs)


def affine_of(codecs: Codecs) -> Packing | None:
    """The bits and the group size of both, where both are affine with the same ones; else None."""
    return packing_of(codecs) if all(codec.name == "affine" for codec in codecs) else None


def in_words(codecs: Codecs) -> str:
    """How tensors are stored, nothing where they are plain. Two say the same only if they store the same."""
    if (affine := affine_of(codecs)) is not None:
        return f"{affine.bits} bits in groups of {affine.group_size}"
    keys, values = (f"{codec.name} {_described(codec.parameters)}" for codec in codecs)
    return "" if are_plain(codecs) else f"keys as {keys} and values as {values}"


def briefly(codecs: Codecs) -> str:
    """As `in_words`, but only the bits where both are affine."""
    affine = affine_of(codecs)
    return in_words(codecs) if affine is None else f"bits={affine.bits}"


def _described(parameters: dict[str, Any]) -> str:
    """Parameters as JSON, or a digest where that is too long to read."""
    text = json.dumps(parameters, sort_keys=True)
    return text if len(text) <= MAX_CHARACTERS else hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


Factory = Callable[..., Codec]  # takes the codec's `parameters` by their names, each with a default


def _centred(heads: int = 0, numbers: str = "", codec: Sequence[Any] = ("affine", {})) -> Centred:
    if not numbers:
        raise ValueError("keys are centred by numbers of their model: give what calibration.storage.centred() measures")
    name, parameters = codec
    return Centred(Centre(heads, numbers), find_codec(name, parameters))


CODECS: OpenSet[Factory] = OpenSet(
    "codec",
    "a codec",
    {
        "plain": Plain,
        "affine": Affine,
        "rotated": partial(Affine, rotate=True),
        Centred.name: _centred,
        **MICROSCALED,
    },
)


def codec_names() -> list[str]:
    """All that `codec=` takes by name; "centred" needs numbers of a model, so a codec is given in its place."""
    return CODECS.names()


def register_codec(name: str, factory: Factory) -> None:
    """Registers a codec under a name, for `codec=` and for loaded caches.

    Args:
        name: the `name` of the codec; replaces a codec of the same name.
        factory: makes one, usually its class. A loaded cache gives it the `parameters` of the saved one.

    Raises:
        ValueError: a factory that cannot be called, or a name that is no text.
    """
    if not isinstance(name, str):
        raise ValueError(f"the name of a codec is {name!r}: give a text")
    if not callable(factory):
        raise ValueError(f"the codec {name} is {factory!r}: give what makes one, such as its class")
    CODECS.registered[name] = factory


def find_codec(codec: str | Codec, parameters: Mapping[str, Any] | None = None) -> Codec:
    """The codec of a name, or the one that is given.

    Args:
        parameters: of the codec, instead of its defaults; only with a name.

    Raises:
        ValueError: no codec has this name, it is no codec, or its parameters are wrong.
    """
    if not isinstance(codec, str):
        if not callable(getattr(codec, "encode", None)):
            raise SettingError("{codec:is}: give a codec such as Affine(8, 64), or a name", codec=codec)
        return codec
    return CODECS.find(codec)(**(parameters or {}))
