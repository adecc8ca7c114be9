"""A prompt on the command line: where it comes from, how it is read, and how long it may be.

Knows nothing about what is done with it. Imports neither MLX nor what needs it before a command runs.
"""

from __future__ import annotations

import contextlib
import functools
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mlx_kv.cli.notices import say
from mlx_kv.cli.options import Command, LeadersFile, applied

if TYPE_CHECKING:
    import mlx.nn as nn

    from mlx_kv.generation.encoding import ChatSettings

SOON_READ = 128  # tokens for which nobody waits


def prefill_option(
    text: str = "Prompt tokens read at once.  [default: 2048; on a CPU 512 to 64, by the size of the model; at most "
    "max-write in models with windows]",
) -> Callable[[Command], Command]:
    """--prefill-step-size, for the commands that read prompts."""
    return click.option("--prefill-step-size", type=click.IntRange(1), metavar="N", help=text)


def prompt_options(function: Command) -> Command:
    """The three places that a prompt comes from, for `read_prompt`."""
    options = (
        click.argument("source", required=False, metavar="[-]"),
        click.option("--prompt", "-p", metavar="TEXT"),
        click.option("--prompt-file", type=LeadersFile(exists=True, dir_okay=False, path_type=Path), metavar="FILE"),
    )
    return applied(options, function)


@dataclass(frozen=True)
class Chat:
    """What options say of a chat around a prompt; each attribute is an option."""

    system_prompt: str | None = None
    chat_template_config: dict[str, Any] | None = None
    prefill_response: str | None = None

    @property
    def settings(self) -> ChatSettings:
        """The same, in terms of the library."""
        from mlx_kv.generation.encoding import ChatSettings

        return ChatSettings(self.system_prompt, self.prefill_response, self.chat_template_config or {})


def read_utf8(ctx: click.Context, param: click.Parameter, value: str | None) -> str | None:
    """A text without lone surrogates, which Python makes of bytes on the command line that are not UTF-8."""
    try:
        (value or "").encode("utf-8")
    except UnicodeEncodeError:
        raise click.BadParameter("it is not UTF-8 text: write it in UTF-8") from None
    return value


def read_template_settings(ctx: click.Context, param: click.Parameter, value: str | None) -> dict[str, Any] | None:
    """A JSON object of what a chat template may be told."""
    read_utf8(ctx, param, value)
    if value is None:
        return None
    try:
        found = json.loads(value)
    except (ValueError, RecursionError) as error:
        raise click.BadParameter(
            f"it is no JSON ({error}): write an object, such as '{{\"enable_thinking\": false}}'"
        ) from None
    if not isinstance(found, dict):
        raise click.BadParameter("it is no JSON object: write one, such as '{\"enable_thinking\": false}'")
    from mlx_kv.generation.encoding import check_template_settings  # it imports MLX, which help does without

    try:
        check_template_settings(found)
    except ValueError as error:
        raise click.BadParameter(str(error)) from None
    return found


def chat_options(*names: str) -> Callable[[Command], Command]:
    """Some of the options of a `Chat`, for a command that gets one."""
    options = {
        "system_prompt": click.option(
            "--system-prompt", callback=read_utf8, metavar="TEXT", help="Comes before all else in a chat."
        ),
        "chat_template_config": click.option(
            "--chat-template-config",
            callback=read_template_settings,
            metavar="JSON",
            help="An object of settings for the chat template, such as '{\"enable_thinking\": false}'.",
        ),
        "prefill_response": click.option(
            "--prefill-response",
            callback=read_utf8,
            metavar="TEXT",
            help="The answer goes on from this beginning, which is not repeated.",
        ),
    }

    def add(function: Command) -> Command:
        @functools.wraps(function)
        def command(**given: Any) -> None:
            function(chat=Chat(**{name: given.pop(name) for name in names}), **given)

        return applied(tuple(options[name] for name in names), command)

    return add


def read_stdin() -> str:
    if sys.stdin is None:
        raise click.UsageError("stdin is closed: give --prompt or --prompt-file")
    return sys.stdin.buffer.read().decode("utf-8")


def read_prompt(prompt: str | None, prompt_file: Path | None, source: str | None) -> str:
    """The one prompt of three possible places.

    Raises:
        click.UsageError: none or more than one was given, or it is empty or no text.
    """
    if source not in (None, "-"):
        raise click.UsageError(
            f"unexpected argument {source!r}: a prompt comes from --prompt, --prompt-file or - for stdin"
        )
    given = [place for place in (prompt, prompt_file, source) if place is not None]
    if len(given) != 1:
        raise click.UsageError(
            f"{'no prompt' if not given else 'more than one prompt'}: give --prompt, --prompt-file or -"
        )
    try:
        if prompt_file is not None:
            text = prompt_file.read_text(encoding="utf-8")
        else:
            text = prompt if prompt is not None else read_stdin()
        text.encode("utf-8")
    except UnicodeError as error:
        raise click.UsageError(
            f"the prompt is not UTF-8 text ({getattr(error, 'reason', error)}): give a text file"
        ) from error
    except OSError as error:
        raise click.UsageError(f"cannot read {prompt_file}: {error.strerror}") from error
    if not text.strip():
        raise click.UsageError("the prompt is empty: give at least one word")
    return text


def note_context(model: nn.Module, prompt_tokens: int, max_tokens: int = 0) -> None:
    """Says on stderr where a prompt and its answer go past the positions that a model was made for."""
    from mlx_kv.mlxlm.loading import context_length

    length = context_length(model)
    if length is not None and prompt_tokens + max_tokens > length:
        asked = f"{prompt_tokens} + {max_tokens} tokens" if max_tokens else f"{prompt_tokens} tokens"
        say(f"note: {asked}, but this model was made for {length}")


@contextlib.contextmanager
def prefill_bar(prompt_tokens: int, step: int, name: str = "prompt") -> Iterator[Callable[[int, int], None] | None]:
    """A progress bar for a prompt of several chunks or of a long one, on a terminal only; mlx-lm's callback."""
    if not sys.stderr.isatty() or prompt_tokens <= min(step, SOON_READ):
        yield None
        return
    from tqdm import tqdm

    with tqdm(total=prompt_tokens, desc=name, unit="tok", leave=False, file=sys.stderr) as bar:

        def advance(done: int, total: int) -> None:
            bar.update(done - bar.n)
            if done == total:
                bar.close()

        yield advance
