"""The calibration that a budget uses: the file of --kv-calibration, or the one that is found for the model.

Imports neither MLX nor what needs it before a command runs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from mlx_kv.bundled import bundled_models, model_path
from mlx_kv.cli.notices import say
from mlx_kv.cli.options import make_policy
from mlx_kv.ranks.environment import launched

if TYPE_CHECKING:
    import mlx.nn as nn

    from mlx_kv.cache.eviction.calibration import Calibration
    from mlx_kv.policy import CachePolicy

NONE = "none"
CHOICES = {"kv_score": "fitted", "kv_layers": "calibrated"}  # the values that need a calibration


def checked_policy(**options: Any) -> CachePolicy:
    """The policy that options describe, checked before there is a model: without what only a calibration has.

    Raises:
        click.UsageError, ValueError: settings that don't exist or don't go together.
    """
    given = options["kv_calibration"]
    if given is not None and options["kv_budget"] is None:
        raise click.UsageError("--kv-calibration is for a budget: give --kv-budget, too, or leave it out")
    needs = {name for name, value in CHOICES.items() if options[name] == value}
    if given == NONE:
        for name in needs:
            option = f"--{name.replace('_', '-')} {CHOICES[name]}"
            raise click.UsageError(f"{option} needs a calibration: leave out --kv-calibration none")
    if "kv_layers" in needs and options["kv_share"] == "layers":
        raise click.UsageError(
            "--kv-layers calibrated gives layers different budgets, and --kv-share layers keeps the same tokens in all "
            "of them: leave out one of them"
        )
    return make_policy(**options | dict.fromkeys(needs))


def calibration_for(model: nn.Module, name: str, options: dict[str, Any], recommend: bool = True) -> Calibration | None:
    """The calibration to use for a model; None without one.

    Args:
        name: of the model, as the user gave it.
        options: of the policy.
        recommend: whether to note that a calibration would help, where there is none.

    Raises:
        click.UsageError: a file that cannot be read, or options that need a calibration where there is none.
        ValueError: a file that is no calibration, or one of another model.
    """
    from mlx_kv.files.calibration_file import find_calibration

    whole = launched() is None  # a part of a model does not tell which model it is of
    found = calibration_of_file(options, model if whole else None)
    if options["kv_calibration"] is None and whole:
        found = find_calibration(model_path(name), model)
    if found is None:
        _check_without(name, options)
        chosen = [options.get(each) for each in ("kv_score", "kv_share", "kv_layers", "kv_calibration")]
        if recommend and whole and not any(chosen) and name not in bundled_models():
            say(f"note: --kv-budget keeps what matters far better after mlx-kv calibrate {name}, once for this model")
    return found


def calibration_of_file(options: dict[str, Any], model: nn.Module | None = None) -> Calibration | None:
    """The calibration in the file of --kv-calibration; None where none is given.

    Args:
        model: that it must be of; None takes it for any.

    Raises:
        click.UsageError: a file that cannot be read.
        ValueError: a file that is no calibration, or one of another model.
    """
    from mlx_kv.files.calibration_file import load_calibration

    given = options["kv_calibration"]
    if given in (None, NONE):
        return None
    try:
        return load_calibration(given, model)
    except OSError as error:
        raise click.UsageError(
            f"cannot read --kv-calibration {given}: {error.strerror}; make one with mlx-kv calibrate MODEL"
        ) from error


def _check_without(name: str, options: dict[str, Any]) -> None:
    """Raises click.UsageError for options that need a calibration."""
    for option, value in CHOICES.items():
        if options.get(option) == value:
            raise click.UsageError(
                f"--{option.replace('_', '-')} {value} needs a calibration of this model, and none was found: run "
                f"mlx-kv calibrate {name}, or give --kv-calibration FILE"
            )
