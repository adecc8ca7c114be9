"""How keys and values are stored: --kv-bits, --kv-codec, --kv-rotate and --kv-residual.

Decides what pairs of words mean, keys first, and that of two words for one thing one is enough. Which codecs there are,
and what they can store, the library says.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

AUTO = "auto"  # in the place of bits: as few as a model bears
CENTRED = "centred"  # a codec of keys: what is taken away from them is measured
PAIR = "one, or two with a comma, of keys and of values"


class _OneOrTwo(click.ParamType[Any]):
    """One word, or two with a comma between them, as a tuple."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not isinstance(value, str):
            return value
        words = [word.strip() for word in value.split(",")]
        if len(words) > 2 or not all(words):
            self.fail(f"{value!r}: give {PAIR}.", param, ctx)
        read = [self.read(word, len(words) > 1, param, ctx) for word in words]
        return read[0] if len(read) == 1 or read[0] == read[1] else tuple(read)

    def read(self, word: str, of_two: bool, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return word


class BitCounts(_OneOrTwo):
    """8, or 8,4; of two one may be none, which stays as it is; or auto."""

    name = "bits"

    def read(self, word: str, of_two: bool, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if of_two and word == "none":
            return None
        if not of_two and word == AUTO:
            return AUTO
        if not (word.isascii() and word.isdecimal() and len(word) <= 9):
            self.fail(f"{word!r} is no number of bits: give 8, say, or 8,4 for keys of 8 and values of 4.", param, ctx)
        return int(word)


class CodecNames(_OneOrTwo):
    """mxfp8, or rotated,plain."""

    name = "codecs"


_OPTIONS = (
    click.option(
        "--kv-bits",
        type=BitCounts(),
        metavar="N[,N]",
        help="Quantise keys and values to 2, 3, 4, 5, 6 or 8 bits; 8,4 is keys to 8, values to 4; auto is as few as "
        "the model bears.",
    ),
    click.option(
        "--kv-codec",
        type=CodecNames(),
        metavar="NAME[,NAME]",
        help="How they are stored: mxfp8, mxfp4, nvfp4, …, or beside --kv-bits rotated, or centred; two are of "
        "keys and of values.",
    ),
    click.option("--kv-rotate", is_flag=True, help="Quantise them rotated: short for --kv-codec rotated."),
    click.option(
        "--kv-residual",
        type=int,
        default=0,
        metavar="N",
        help="So many of the newest tokens are seen as they came, however others are stored: 64, say.",
    ),
)


def codec_options(function: Callable[..., None]) -> Callable[..., None]:
    """These options, for every command that makes caches or plans them."""
    for option in reversed(_OPTIONS):
        function = option(function)
    return function


def codec_settings(kv_bits: Any, kv_codec: Any, kv_rotate: bool, kv_residual: int) -> dict[str, Any]:
    """The settings of a `CachePolicy` that these options say.

    Raises:
        click.UsageError: options that do not go together.
    """
    from mlx_kv.cache.codecs import TAKE_BITS, keys_and_values

    if kv_bits == AUTO:
        raise click.UsageError(f"--kv-bits {AUTO} is measured by commands that generate: say how many here, such as 8")
    if CENTRED in keys_and_values("codec", kv_codec):
        raise click.UsageError(
            f"--kv-codec {CENTRED} is measured by commands that generate: say rotated here, which takes as many bytes"
        )
    if kv_rotate:
        if kv_codec is not None:
            raise click.UsageError("--kv-rotate is short for --kv-codec rotated: give one of them")
        if kv_bits is None:
            raise click.UsageError("--kv-rotate needs --kv-bits: say how many, such as 8")
        names = ["plain" if count is None else "rotated" for count in keys_and_values("bits", kv_bits)]
        kv_codec = names[0] if names[0] == names[1] else tuple(names)
    pairs = (keys_and_values(name, given) for name, given in (("bits", kv_bits), ("codec", kv_codec)))
    for count, name in zip(*pairs, strict=True):
        if name in TAKE_BITS and count is None:
            raise click.UsageError(f"--kv-codec {name} needs --kv-bits: say how many, such as 8")
    return {"bits": kv_bits, "codec": kv_codec, "residual_length": kv_residual}


def in_words(given: Any) -> str:
    """One thing or two, as these options take them."""
    return ",".join("none" if one is None else str(one) for one in (given if isinstance(given, tuple) else (given,)))
