"""The command `mlx-kv`: answers go to stdout, everything else to stderr.

Each command has a file in `mlx_kv.cli`; MLX is imported when one of them runs.
"""

from __future__ import annotations

import errno
import os
import sys

import click

from mlx_kv import __version__
from mlx_kv.cli.batch import batch
from mlx_kv.cli.cache import cache
from mlx_kv.cli.calibrate import calibrate_command
from mlx_kv.cli.chat import chat
from mlx_kv.cli.generate import generate
from mlx_kv.cli.info import completion, info
from mlx_kv.cli.inspect import inspect_command
from mlx_kv.cli.options import Commands
from mlx_kv.cli.output import say
from mlx_kv.cli.plan import plan
from mlx_kv.cli.serve import serve
from mlx_kv.cli.train_drafter import train_drafter_command


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="mlx-kv")
def command() -> None:
    """Composable KV caches for language models on MLX: generate, serve, and measure caches.

    \b
    Examples:
      mlx-kv generate --prompt "import os"
      mlx-kv plan --model mlx-community/Qwen3-0.6B-4bit
      mlx-kv info
    """


COMMANDS = (generate, chat, batch, cache, serve, plan, calibrate_command, train_drafter_command, inspect_command, info)
for each in (*COMMANDS, completion):
    command.add_command(each)


def _open_standard_files() -> None:
    """Opens what the caller has closed (`<&-`): the next file would get its number, and MLX reads none of number 0."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest number that is free
    if sys.stdin is None:
        sys.stdin = open(0, closefd=False)  # noqa: SIM115, as long as the process


def main() -> None:
    """Runs the command: bad input is one line on stderr and exit code 2, never a traceback.

    `mlx_kv_command` calls it, and handles interrupts before all of this is imported.
    """
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    _open_standard_files()
    try:
        command.main(standalone_mode=False)
    except ImportError as error:
        if error.name not in ("mlx", "mlx.core") and "libmlx" not in str(error):
            raise
        click.echo('mlx-kv: error: MLX is not installed here: install mlx-kv with its extra "cpu" or "cuda"', err=True)
        sys.exit(2)
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message(), err=True)
        sys.exit(2)
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        say(f"error: cannot write: {error.strerror}")
        sys.exit(2)
    except (click.ClickException, ValueError) as error:
        message = error.format_message() if isinstance(error, click.ClickException) else str(error)
        say(f"error: {' '.join(message.split())}")
        sys.exit(2)
    except (click.Abort, KeyboardInterrupt):
        say("interrupted")  # click has ended the line that was being written
        sys.exit(130)
