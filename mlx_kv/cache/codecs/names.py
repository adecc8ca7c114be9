"""The names under which codecs are found: ours, those of other packages, and those that somebody registers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from mlx_kv.cache.codecs.affine import Affine
from mlx_kv.cache.codecs.base import Codec
from mlx_kv.cache.codecs.centre import Centre
from mlx_kv.cache.codecs.centred import Centred
from mlx_kv.cache.codecs.microscaled import MICROSCALED
from mlx_kv.cache.codecs.plain import Plain
from mlx_kv.open_set import OpenSet

Factory = Callable[
    ..., Codec
]  # takes the codec's `parameters` by their names; each has a default, though not one that will do for all


def _centred(heads: int = 0, numbers: str = "", codec: Sequence[Any] = ("affine", {})) -> Centred:
    if not numbers:
        raise ValueError("keys are centred by numbers of their model: give what evaluation.centres.centred() measures")
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
    """Makes a codec known by a name, so that it can be asked for by it and found again by a loaded cache.

    Args:
        name: the `name` that the codec says of itself; replaces whatever had it before.
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
        ValueError: no codec has this name, or it is none; and what a codec says of its parameters.
    """
    if not isinstance(codec, str):
        if not callable(getattr(codec, "encode", None)):
            raise ValueError(f"codec is {codec!r}: give a codec such as Affine(8, 64), or a name")
        return codec
    return CODECS.find(codec)(**(parameters or {}))
