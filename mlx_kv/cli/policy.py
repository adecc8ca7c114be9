"""Options of a cache policy: how keys and values are stored, budgets, and the calibration of a model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, ClassVar, cast

import click

from mlx_kv.bundled import bundled_models, model_path
from mlx_kv.cli.options import Command, options
from mlx_kv.cli.output import say
from mlx_kv.policy_settings import PolicySettings
from mlx_kv.ranks.environment import launched
from mlx_kv.settings import option_value, setting

if TYPE_CHECKING:
    import mlx.nn as nn

    from mlx_kv.cache.eviction.calibration import Calibration
    from mlx_kv.policy import CachePolicy

AUTO = "auto"  # instead of bits: as few as a model bears
CENTRED = "centred"  # a codec of keys with a centre that is measured
NONE = "none"  # instead of a calibration file
CALIBRATED = {"score": "--kv-score fitted", "layers": "--kv-layers calibrated"}  # values that need a calibration

STORAGE = ("bits", "codec", "rotate", "residual_length")  # fields that describe how keys and values are stored
POLICY = (
    *STORAGE,
    *("group_size", "quantized_start", "growth", "max_kv_size", "max_write", "budget", "score", "keep_recent"),
    *("sinks", "share", "layers", "calibration_file", "margin"),
)


# --- values -----------------------------------------------------------------------------------------------------------


def one_or_two(text: str) -> list[str]:
    words = [word.strip() for word in text.split(",")]
    if len(words) > 2 or not all(words):
        raise ValueError(f"{text!r}: give one, or two with a comma, for keys and for values.")
    return words


def read_bits(text: str) -> Any:
    """Bits from 8, or from 8,4, where one of two may be none; or auto.

    Raises:
        ValueError: another text.
    """
    words = one_or_two(text)
    if words == [AUTO]:
        return AUTO
    for word in words:
        if not (word.isascii() and word.isdecimal() and len(word) <= 9) and (word != NONE or len(words) == 1):
            raise ValueError(f"{word!r} is not a number of bits: give 8, or 8,4 for keys of 8 and values of 4.")
    bits = [None if word == NONE else int(word) for word in words]
    return bits[0] if bits[0] == bits[-1] else tuple(bits)


def read_codecs(text: str) -> Any:
    """Names of codecs from mxfp8, or from rotated,plain.

    Raises:
        ValueError: more than two, or an empty one.
    """
    words = one_or_two(text)
    return words[0] if words[0] == words[-1] else tuple(words)


# --- the options ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PolicyOptions(PolicySettings):
    """Options of a `CachePolicy`; `bits` may be "auto", and a codec of keys "centred", for commands that measure them.

    Attributes:
        rotate: short for the codec "rotated".
        calibration_file: a file, "none", or None: the one that is found for the model.
    """

    SECTION: ClassVar = "Cache"

    rotate: bool = setting(
        False,
        option="--kv-rotate",
        help="Rotate before quantising, for less loss: short for --kv-codec rotated.",
    )
    calibration_file: str | None = setting(
        None,
        option="--kv-calibration",
        metavar="FILE|none",
        default_text="found beside the model or in the cache folder",
        help="Calibration of the model, a file of mlx-kv calibrate.",
    )

    def stored(self) -> dict[str, Any]:
        """The settings of a `CachePolicy` that describe how keys and values are stored.

        Raises:
            click.UsageError: options that cannot be combined.
        """
        from mlx_kv.cache.codecs import TAKE_BITS, keys_and_values

        bits, codec = cast(Any, self.bits), self.codec
        if bits == AUTO:
            raise click.UsageError(f"--kv-bits {AUTO} is measured by commands that generate: give a number, such as 8")
        if CENTRED in keys_and_values("codec", codec):
            raise click.UsageError(
                f"--kv-codec {CENTRED} is measured by commands that generate: give rotated, which takes as many bytes"
            )
        if self.rotate:
            if codec is not None:
                raise click.UsageError("--kv-rotate is short for --kv-codec rotated: give one of them")
            if bits is None:
                raise click.UsageError("--kv-rotate needs --kv-bits: give a number, such as 8")
            names = ["plain" if count is None else "rotated" for count in keys_and_values("bits", bits)]
            codec = names[0] if names[0] == names[1] else (names[0], names[1])
        pairs = (keys_and_values(name, given) for name, given in (("bits", bits), ("codec", codec)))
        for count, name in zip(*pairs, strict=True):
            if name in TAKE_BITS and count is None:
                raise click.UsageError(f"--kv-codec {name} needs --kv-bits: give a number, such as 8")
        return {"bits": bits, "codec": codec, "residual_length": self.residual_length}

    def policy(self, calibration: Calibration | None = None) -> CachePolicy:
        """The policy.

        Raises:
            click.UsageError, ValueError: settings that don't exist or cannot be combined.
        """
        from mlx_kv.policy import CachePolicy

        given = {each.name: getattr(self, each.name) for each in fields(PolicySettings)}
        return CachePolicy(**given | self.stored() | {"calibration": calibration})

    def checked(self) -> CachePolicy:
        """The policy without what only a calibration has, to check the options before a model is loaded.

        Raises:
            click.UsageError, ValueError: settings that don't exist or cannot be combined.
        """
        if self.calibration_file is not None and self.budget is None:
            raise click.UsageError("--kv-calibration is for a budget: give --kv-budget, too, or leave it out")
        needs = self._need_calibration()
        if self.calibration_file == NONE and needs:
            raise click.UsageError(f"{CALIBRATED[needs[0]]} needs a calibration: leave out --kv-calibration none")
        if "layers" in needs and self.share == "layers":
            raise click.UsageError(
                "--kv-layers calibrated gives layers different budgets, and --kv-share layers keeps the same tokens in "
                "all of them: leave out one of them"
            )
        without: dict[str, Any] = dict.fromkeys(needs)
        return replace(self, **without).policy()

    def _need_calibration(self) -> list[str]:
        return [name for name, option in CALIBRATED.items() if getattr(self, name) == option.partition(" ")[2]]

    # --- the calibration ----------------------------------------------------------------------------------------------

    def calibration_for(self, model: nn.Module, name: str, recommend: bool = True) -> Calibration | None:
        """The calibration to use for a model; None without one.

        Args:
            name: of the model, as the user gave it.
            recommend: whether to note that a calibration would help, where there is none.

        Raises:
            click.UsageError: a file that cannot be read, or options that need a calibration where there is none.
            ValueError: a file that is no calibration, or one of another model.
        """
        from mlx_kv.files.calibration_file import find_calibration

        whole = launched() is None  # a part of a model does not identify the model
        found = self.calibration_of_file(model if whole else None)
        if self.calibration_file is None and whole:
            found = find_calibration(model_path(name), model)
        if found is not None:
            return found
        for setting_name in self._need_calibration():
            raise click.UsageError(
                f"{CALIBRATED[setting_name]} needs a calibration of this model, and none was found: run mlx-kv "
                f"calibrate {name}, or give --kv-calibration FILE"
            )
        chosen = (self.score, self.share, self.layers, self.calibration_file)
        if recommend and whole and not any(chosen) and name not in bundled_models():
            say(f"note: --kv-budget chooses tokens far better after mlx-kv calibrate {name}, once for this model")
        return None

    def calibration_of_file(self, model: nn.Module | None = None) -> Calibration | None:
        """The calibration in the file of --kv-calibration; None without one.

        Args:
            model: that it must be of; None accepts that of any model.

        Raises:
            click.UsageError: a file that cannot be read.
            ValueError: a file that is no calibration, or one of another model.
        """
        from mlx_kv.files.calibration_file import load_calibration

        if self.calibration_file in (None, NONE):
            return None
        try:
            return load_calibration(self.calibration_file, model)
        except OSError as error:
            raise click.UsageError(
                f"cannot read --kv-calibration {self.calibration_file}: {error.strerror}; make one with mlx-kv "
                "calibrate MODEL"
            ) from error


def policy_options(group: type = PolicyOptions, parameter: str = "policy", *names: str) -> Callable[[Command], Command]:
    """The options of a policy, for a command that receives a `PolicyOptions`, or another group with its fields.

    Args:
        names: fields; none: all of a policy.
    """
    read: dict[str, Any] = {"bits": {"kind": read_bits}, "codec": {"kind": read_codecs}}
    return options(group, parameter, *(names or POLICY), **read)


def as_options(policy: CachePolicy) -> str:
    """The options that describe how tensors are stored, as a user writes them."""
    group = "" if policy.group_size == type(policy)().group_size else f" --kv-group-size {policy.group_size}"
    rotated = " --kv-rotate" if policy.codec == "rotated" else ""
    residual = f" --kv-residual {policy.residual_length}" if policy.residual_length else ""
    return f"--kv-bits {option_value(policy.bits)}{group}{rotated}{residual}"
