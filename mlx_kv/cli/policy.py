"""Options of a cache policy: how keys and values are stored, budgets, and the calibration of a model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, ClassVar, cast

import click

from mlx_kv.bundled import bundled_models, model_path
from mlx_kv.cli.options import Command, given_options, options
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
ANY_BITS = 8  # instead of those that a calibration decides, while all else is checked
COARSE_BITS, SMALL_MODEL = 4, 10**9  # bits of which a warning is given, for models of fewer weights
CHOSEN = ("codec", "rotate", "group_size")  # settings that --kv-bits auto chooses as well
CALIBRATED = {"score": "--kv-score fitted", "layers": "--kv-layers calibrated"}  # values that need a calibration

STORAGE = ("bits", "codec", "rotate", "residual_length")  # fields that describe how keys and values are stored
POLICY = (
    *STORAGE,
    *("group_size", "quantized_start", "growth", "max_kv_size", "max_write", "budget", "score", "keep_recent"),
    *("sinks", "share", "layers", "calibration_file", "margin", "max_loss"),
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
    """Options of a `CachePolicy`; a calibration has the numbers for bits "auto" and for keys "centred".

    Attributes:
        rotate: short for the codec "rotated".
        max_loss: that "auto" may add, in nats a token; None is `MAX_LOSS` of calibrations.
        calibration_file: a file, "none", or None: the one that is found for the model.
    """

    SECTION: ClassVar = "Cache"

    rotate: bool = setting(
        False,
        option="--kv-rotate",
        help="Rotate before quantising, for less loss: short for --kv-codec rotated.",
    )
    max_loss: float | None = setting(
        None,
        option="--max-loss",
        metavar="NATS",
        minimum=0,
        default_text="0.01",
        help=f"Largest loss per token that --kv-bits {AUTO} may add, its standard error included, as mlx-kv calibrate "
        "measured it; 0 quantises nothing.",
    )
    calibration_file: str | None = setting(
        None,
        option="--kv-calibration",
        metavar="FILE|none",
        default_text="found beside the model or in the cache folder",
        help="Calibration of the model, a file of mlx-kv calibrate.",
    )

    @property
    def measured(self) -> str | None:
        """The option whose value a calibration decides: --kv-bits auto, --kv-codec centred, or None."""
        if cast(Any, self.bits) == AUTO:
            return f"--kv-bits {AUTO}"
        keys = self.codec[0] if isinstance(self.codec, tuple) else self.codec
        return f"--kv-codec {CENTRED}" if keys == CENTRED else None

    def stored(self) -> dict[str, Any]:
        """The settings of a `CachePolicy` that describe how keys and values are stored, centred keys as rotated ones.

        Raises:
            click.UsageError: options that cannot be combined.
        """
        from mlx_kv.cache.codecs import TAKE_BITS, keys_and_values

        bits, codec = cast(Any, self.bits), self.codec
        if bits == AUTO:
            bits = ANY_BITS
        elif self.measured is not None:
            values = codec[1] if isinstance(codec, tuple) else CENTRED
            if (bits[0] if isinstance(bits, tuple) else bits) is None:
                raise click.UsageError(f"--kv-codec {CENTRED} needs --kv-bits: give a number, such as 4")
            plain = isinstance(bits, tuple) and bits[1] is None
            codec = ("rotated", ("plain" if plain else "rotated") if values == CENTRED else values)
        elif isinstance(codec, tuple) and codec[1] == CENTRED:
            raise click.UsageError(f"--kv-codec {codec[0]},{CENTRED}: keys are centred, values are not")
        if self.rotate:
            if codec is not None:
                raise click.UsageError("--kv-rotate is short for --kv-codec rotated: give one of them")
            if bits is None:
                raise click.UsageError("--kv-rotate needs --kv-bits: give a number, such as 8")
            names = ["plain" if count is None else "rotated" for count in keys_and_values("bits", bits)]
            codec = names[0] if names[0] == names[1] else (names[0], names[1])
        pairs = (keys_and_values(name, value) for name, value in (("bits", bits), ("codec", codec)))
        for count, name in zip(*pairs, strict=True):
            if name in TAKE_BITS and count is None:
                raise click.UsageError(f"--kv-codec {name} needs --kv-bits: give a number, such as 8")
        return {"bits": bits, "codec": codec, "residual_length": self.residual_length}

    def policy(self, calibration: Calibration | None = None) -> CachePolicy:
        """The policy.

        Args:
            calibration: of the model; it decides what `measured` names.

        Raises:
            click.UsageError, ValueError: settings that don't exist or cannot be combined, or a calibration that does
                not have what `measured` needs.
        """
        self._check_measured()
        policy = self._with_stand_ins(calibration)
        if self.measured is None:
            return policy
        if calibration is None:
            raise click.UsageError(f"{self.measured} needs a calibration: give --kv-calibration FILE")
        if self.bits != cast(Any, AUTO):
            keys, values = policy.codecs
            return replace(policy, bits=None, codec=(calibration.centred(keys), values))
        loss = calibration.smallest_bits(*([] if self.max_loss is None else [self.max_loss]))
        if loss is None:
            return policy.plain()
        codec = cast(Any, loss.codec)
        return replace(policy, bits=cast(Any, (loss.keys, loss.values)), group_size=loss.group_size, codec=codec)

    def checked(self) -> CachePolicy:
        """The policy without what only a calibration has, to check the options before a model is loaded.

        Raises:
            click.UsageError, ValueError: settings that don't exist or cannot be combined.
        """
        self._check_measured()
        if self.calibration_file is not None and self.budget is None and self.measured is None:
            raise click.UsageError("--kv-calibration is for a budget: give --kv-budget, too, or leave it out")
        needs = self._need_calibration()
        if self.calibration_file == NONE and needs:
            raise click.UsageError(f"{needs[0]} needs a calibration: leave out --kv-calibration none")
        if self.layers == "calibrated" and self.share == "layers":
            raise click.UsageError(
                "--kv-layers calibrated gives layers different budgets, and --kv-share layers keeps the same tokens in "
                "all of them: leave out one of them"
            )
        without: dict[str, Any] = {name: None for name, option in CALIBRATED.items() if option in needs}
        return replace(self, **without)._with_stand_ins()

    def for_model(self, model: nn.Module, name: str) -> CachePolicy:
        """The policy for a model; what a calibration decided, and what would be better, is reported on stderr.

        Args:
            name: of the model, as the user gave it.

        Raises:
            click.UsageError, ValueError: as `policy` and `calibration_for`.
        """
        needed = self.budget is not None or self.measured is not None
        policy = self.policy(self.calibration_for(model, name) if needed else None)
        if self.bits == cast(Any, AUTO):
            say(f"--kv-bits {AUTO} is {as_options(policy)}, as mlx-kv calibrate measured")
        elif self.measured is None and name not in bundled_models() and _too_coarse(policy, model):
            say(
                "keys of 4 bits or fewer often change the answers of models below a billion weights: give --kv-bits "
                f"{AUTO} instead, after mlx-kv calibrate {name}, or --kv-residual 64, too"
            )
        return policy

    def _check_measured(self) -> None:
        """Raises click.UsageError for options that do not go with bits or centres that a calibration decides."""
        auto = self.bits == cast(Any, AUTO)
        if self.max_loss is not None and not auto:
            raise click.UsageError(f"--max-loss is for --kv-bits {AUTO}: give that, too, or leave out --max-loss")
        if self.measured is not None and launched() is not None:
            raise click.UsageError(
                f"{self.measured} is measured on a whole model, and each rank has a part of one: leave it out"
            )
        for name, option in given_options(type(self)).items() if auto else ():
            if name in CHOSEN:
                raise click.UsageError(f"--kv-bits {AUTO} chooses the value of {option}, too: leave out {option}")

    def _with_stand_ins(self, calibration: Calibration | None = None) -> CachePolicy:
        """The policy, with other bits and codecs for those that a calibration decides."""
        from mlx_kv.policy import CachePolicy

        values = {each.name: getattr(self, each.name) for each in fields(PolicySettings)}
        unused = self.budget is None or self._leaves_out(calibration)
        return CachePolicy(**values | self.stored() | {"calibration": None if unused else calibration})

    def _leaves_out(self, calibration: Calibration | None) -> bool:
        """Whether a budget is better without a calibration, which nobody asked for: it was found."""
        asked = self.calibration_file is not None or self._calibrated_options()
        return calibration is not None and calibration.loses_answers and not asked

    def _calibrated_options(self) -> list[str]:
        """The options of a budget that need a calibration."""
        return [option for name, option in CALIBRATED.items() if getattr(self, name) == option.partition(" ")[2]]

    def _need_calibration(self) -> list[str]:
        """The options that need a calibration."""
        needs = self._calibrated_options()
        return needs if self.measured is None else [self.measured, *needs]

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
        calibration = self.calibration_of_file(model if whole else None)
        if self.calibration_file is None and whole:
            calibration = find_calibration(model_path(name), model)
        if calibration is not None:
            if self.budget is not None and self._leaves_out(calibration):
                say(
                    "note: --kv-budget does not use the calibration that was found, since fewer answers were right "
                    "with it: --kv-calibration FILE uses it"
                )
            return calibration
        for option in self._need_calibration():
            raise click.UsageError(
                f"{option} needs a calibration of this model, and none was found: run mlx-kv calibrate {name}, or give "
                "--kv-calibration FILE"
            )
        chosen = (self.score, self.share, self.layers, self.calibration_file)
        if recommend and whole and self.budget is not None and not any(chosen) and name not in bundled_models():
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


def _too_coarse(policy: CachePolicy, model: nn.Module) -> bool:
    """Whether keys, which lose more than values, have so few bits that a small model often answers differently."""
    from mlx_kv.mlxlm.loading import number_of_weights

    keys = policy.bits[0] if isinstance(policy.bits, tuple) else policy.bits
    few = keys is not None and keys <= COARSE_BITS
    return few and policy.residual_length == 0 and number_of_weights(model) < SMALL_MODEL


def as_options(policy: CachePolicy) -> str:
    """The options that describe how tensors are stored, as a user writes them."""
    if policy.stores_plain:
        return "nothing quantised"
    group = "" if policy.group_size == type(policy)().group_size else f" --kv-group-size {policy.group_size}"
    rotated = " --kv-rotate" if policy.codec == "rotated" else ""
    residual = f" --kv-residual {policy.residual_length}" if policy.residual_length else ""
    return f"--kv-bits {option_value(policy.bits)}{group}{rotated}{residual}"
