"""Refusals in the words of the command line: the library speaks of settings, a command of its options.

Decides which words of a message are names of settings, and what stands for them. Knows no message: settings are found
by their form (`bits is 7`, `group_size=48`, `max_write`), and where a name alone could be an ordinary word, the error
says which it means (`SettingError`).
"""

from __future__ import annotations

import re

import click

from mlx_kv.settings import SettingError

# Where an option is not called as what it sets.
SETTINGS = {
    "kv_bits": "bits",
    "kv_codec": "codec",
    "kv_group_size": "group_size",
    "quantized_kv_start": "quantized_start",
    "kv_residual": "residual_length",
    "kv_growth": "growth",
    "kv_budget": "budget",
    "kv_score": "score",
    "kv_keep_recent": "keep_recent",
    "kv_sinks": "sinks",
    "kv_share": "share",
    "kv_layers": "layers",
    "kv_calibration": "calibration",
    "kv_margin": "margin",
}
VALUE = r"'[^']*'|-?\d[\w.+-]*|-?nan|-?inf|None|\.\.\."


def options_of(command: click.Command) -> dict[str, str]:
    """What a user of this command writes for each setting, with the value that it has."""
    options = [param for param in command.params if isinstance(param, click.Option) and param.name]
    flags = [option for option in options if option.is_flag and not option.is_bool_flag]  # they say the value, too
    return {
        SETTINGS.get(str(option.name), str(option.name)): option.opts[0] for option in options if option not in flags
    }


def in_options(error: ValueError, command: click.Command) -> str:
    """The message of an error, its settings as the options of a command; other words stay as they are."""
    options = options_of(command)
    if isinstance(error, SettingError):
        return error.render(options)
    named: tuple[str, ...] = ()
    any_setting = "|".join(sorted(map(re.escape, options), key=len, reverse=True))
    told = {name for name in options if "_" in name or name in named}

    def stated(match: re.Match[str]) -> str:
        """`bits is 7` and `bits=7`: the option with its value, or that it is not there."""
        option, value = options[match["name"]], match["value"].strip("'")
        if value != "None":
            return f"{match['use'] or ''}{option} {value}"
        return f"leave out {option}" if match["use"] else f"{option} is not given"

    form = rf"(?<![-\w./])(?P<use>use )?(?P<name>{any_setting})(?: is |=)(?P<value>{VALUE})"
    text = re.sub(form, stated, str(error))
    # What is stated already begins with dashes: only names that stand alone are left.
    alone = rf"(?<![-\w./])({any_setting})(?![-\w(/]|\.\w)"  # and no part of a path
    return re.sub(alone, lambda match: options[match[0]] if match[0] in told else match[0], text)


class Commands(click.Group):
    """A group of commands that refuse in their own words."""

    def invoke(self, ctx: click.Context) -> object:
        try:
            return super().invoke(ctx)
        except ValueError as error:
            command = self.get_command(ctx, ctx.invoked_subcommand or "")
            if command is None:
                raise
            raise click.UsageError(in_options(error, command)) from error
