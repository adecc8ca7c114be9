"""What commands share: options of models and policies, sizes in words.

Decides how words on a command line become arguments of the library. Knows nothing about models or caches, and imports
neither MLX nor what needs it before a command runs.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import click

from mlx_kv.cli.codec_options import codec_options, codec_settings
from mlx_kv.cli.notices import say
from mlx_kv.cli.wording import SETTINGS

if TYPE_CHECKING:
    from mlx_kv.cache.eviction.calibration import Calibration
    from mlx_kv.policy import CachePolicy

Command = Callable[..., None]


class FiniteFloat(click.types.FloatParamType):
    """Any number but nan and infinity, which click's own type accepts."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number: float = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value} is no finite number.", param, ctx)
        return number


class FiniteRange(click.FloatRange):
    """A range of numbers with at least one bound; click's own accepts nan, and infinity where it has no bound."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return super().convert(FiniteFloat().convert(value, param, ctx), param, ctx)


class ByteCount(click.types.IntParamType):
    """A number of bytes from 0 up, or as mlx-lm writes it, of megabytes or gigabytes: 512MB, 1.5G."""

    name = "bytes"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([MG]?)B?", str(value).strip(), re.IGNORECASE | re.ASCII)
        if found is None or (not found[2] and "." in found[1]):
            self.fail(f"{value!r} is no number of bytes: write one, or as in 512MB or 1.5GB.", param, ctx)
        return int(Decimal(found[1]) * {"": 1, "M": 10**6, "G": 10**9}[found[2].upper()])


class LeadersFile(click.Path):
    """A path on the first of several machines: the others need not have it."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        from mlx_kv.ranks.environment import follows

        return self.coerce_path_result(value) if follows() else super().convert(value, param, ctx)


def applied(options: tuple[Callable[[Command], Command], ...], function: Command) -> Command:
    """The function with these options, listed in this order by --help."""
    for option in reversed(options):
        function = option(function)
    return function


def number_option(
    name: str, kind: click.ParamType[Any], default: float, text: str, metavar: str = "N", also: str | None = None
) -> Callable[[Command], Command]:
    """An option that is a number, with a default that --help shows; `also` is another name for it."""
    names = [name] if also is None else [name, also]
    return click.option(*names, type=kind, default=default, show_default=True, metavar=metavar, help=text)


def not_needed(option: str, why: str) -> Callable[[Command], Command]:
    """An option of mlx-lm's whose number changes nothing here: it is taken, and said so."""

    def note(ctx: click.Context, param: click.Parameter, value: int | None) -> None:
        if value is not None:
            say(f"note: {option} changes nothing: {why}")

    return click.option(option, type=int, expose_value=False, callback=note, hidden=True)


def model_option(**settings: Any) -> Callable[[Command], Command]:
    """--model, the same word in every command; a command for which it means something else says all of it."""
    usual = {
        "default": "reference",
        "show_default": True,
        "metavar": "PATH_OR_HUB_ID",
        "help": "A bundled model, a directory or a hub id.",
    }
    return click.option("--model", **(settings or usual))


_NUMBER: dict[str, Any] = {"type": int, "metavar": "N", "show_default": True}
BUDGET_OPTIONS = (
    click.option(
        "--kv-budget",
        "--compact-kv-budget",
        **_NUMBER,
        help="Full-attention layers evict all but the N tokens that matter most, whenever they hold a margin more. "
        "Memory peaks at the budget, the margin and one prefill chunk.",
    ),
    click.option(
        "--kv-score",
        metavar="NAME",
        help="What matters: fitted, key_diff, key_norm, recent, …  [default: fitted with a calibration, else key_diff]",
    ),
    click.option(
        "--kv-keep-recent", **_NUMBER, help="So many newest tokens are never evicted.  [default: 64; at most N/4]"
    ),
    click.option("--kv-sinks", **_NUMBER, default=4, help="So many first tokens are never evicted."),
    click.option(
        "--kv-share",
        type=click.Choice(["layers", "layer", "head", "adaptive"]),
        help="Keep the same tokens in all layers, in all heads of a layer, or each head its own; adaptive: heads of "
        "a layer compete.  [default: layers, or what --kv-layers needs]",
    ),
    click.option(
        "--kv-layers",
        type=click.Choice(["uniform", "pyramid", "calibrated", "global"]),
        help="How the budget is allocated: alike; lower layers more; each head as measured; or by one ranking of all "
        "heads (with --kv-share adaptive).  [default: calibrated with a calibration, else uniform]",
    ),
    click.option(
        "--kv-calibration",
        metavar="FILE|none",
        help="What mlx-kv calibrate measured of this model.  [default: found beside the model or in the cache folder]",
    ),
    click.option("--kv-margin", **_NUMBER, help="Tokens above the budget before it evicts.  [default: max(64, N/16)]"),
)


def policy_options(function: Command) -> Command:
    """The options that make a CachePolicy, for every command that makes caches or plans them."""
    number = _NUMBER
    options = (
        codec_options,
        click.option("--kv-group-size", **number, default=64, help="Elements that share a scale: 32, 64 or 128."),
        click.option("--quantized-kv-start", **number, default=0, help="Quantise once this many tokens are held."),
        click.option(
            "--kv-growth",
            type=click.Choice(["tapered", "geometric", "step"]),
            default="tapered",
            show_default=True,
            help="Grow by half of the slots and at most 8,192, to twice as many, or by 256 as mlx-lm does.",
        ),
        click.option(
            "--max-kv-size", **number, help="Full-attention layers keep the first 4 and the newest of N tokens."
        ),
        click.option(
            "--max-write", **number, default=512, help="The longest write that windows and budgets of layers plan for."
        ),
        *BUDGET_OPTIONS,
    )
    return applied(options, function)


def make_policy(calibration: Calibration | None = None, **options: Any) -> CachePolicy:
    """The policy that `policy_options` say.

    Args:
        calibration: of the model, in the place of what --kv-calibration says.

    Raises:
        ValueError: settings that don't exist or don't go together.
    """
    from mlx_kv.cache.growth import FixedStep, Geometric, Tapered
    from mlx_kv.policy import CachePolicy

    stored = codec_settings(**{name: options.pop(name) for name in ("kv_bits", "kv_codec", "kv_rotate", "kv_residual")})
    options["kv_growth"] = {"tapered": Tapered, "geometric": Geometric, "step": FixedStep}[options["kv_growth"]]()
    options.pop("kv_calibration", None)
    settings = {SETTINGS.get(name, name): value for name, value in options.items()}
    return CachePolicy(**stored, **settings, calibration=calibration)


def tokens_line(name: str, tokens: int, per_second: float | None) -> str:
    """A line of statistics; no rate where it was not measured."""
    rate = "" if per_second is None else f"  {per_second:10,.1f} tokens/s"
    return f"{name:<11} {tokens:7,} token{' ' if tokens == 1 and rate else '' if tokens == 1 else 's'}{rate}"


def human_bytes(count: int) -> str:
    return f"{count / 1e6:,.2f} MB"
