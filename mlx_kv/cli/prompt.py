"""Options of a prompt and of the chat around it."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import click

from mlx_kv.cli.help import option
from mlx_kv.cli.options import LEADERS_FILE, Command
from mlx_kv.cli.output import say
from mlx_kv.settings import setting

if TYPE_CHECKING:
    import mlx.nn as nn

    from mlx_kv.generation.encoding import ChatSettings

EXAMPLE = "'{\"enable_thinking\": false}'"


def prefill_option(
    text: str = "Prompt tokens per pass of the model.  [default: 2048; on a CPU 512 to 64, by the size of the model; "
    "at most max-write in models with windows]",
) -> Callable[[Command], Command]:
    """--prefill-step-size, for the commands that read prompts."""
    return option("--prefill-step-size", section="Model", type=click.IntRange(1), metavar="N", help=text)


max_tokens_option = option(
    "--max-tokens",
    "-m",
    type=click.IntRange(1),
    default=256,
    show_default=True,
    metavar="N",
    section="Sampling",
    summary="Maximum tokens of an answer.",
    help="Maximum tokens of an answer.",
)


# --- the prompt -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PromptOptions:
    """The three places that a prompt comes from: a text, a file, or stdin for a lone -."""

    SECTION: ClassVar = "Prompt"

    source: str | None = setting(None, option="source", metavar="[-]", help="A lone - reads the prompt from stdin.")
    prompt: str | None = setting(None, option=("--prompt", "-p"), summary="Prompt.", metavar="TEXT", help="Prompt.")
    prompt_file: Path | None = setting(
        None,
        option="--prompt-file",
        summary="File with the prompt.",
        kind=LEADERS_FILE,
        metavar="FILE",
        help="File with the prompt.",
    )

    def read(self) -> str:
        """The one prompt of the three places.

        Raises:
            click.UsageError: none or more than one was given, or it is empty or no text.
        """
        if self.source not in (None, "-"):
            raise click.UsageError(
                f"unexpected argument {self.source!r}: a prompt comes from --prompt, --prompt-file or - for stdin"
            )
        given = [place for place in (self.prompt, self.prompt_file, self.source) if place is not None]
        if len(given) != 1:
            raise click.UsageError(
                f"{'no prompt' if not given else 'more than one prompt'}: give --prompt, --prompt-file or -"
            )
        try:
            if self.prompt_file is not None:
                text = self.prompt_file.read_text(encoding="utf-8")
            else:
                text = self.prompt if self.prompt is not None else _read_stdin()
            text.encode("utf-8")
        except UnicodeError as error:
            raise click.UsageError(
                f"the prompt is not UTF-8 text ({getattr(error, 'reason', error)}): give a text file"
            ) from error
        except OSError as error:
            raise click.UsageError(f"cannot read {self.prompt_file}: {error.strerror}") from error
        if not text.strip():
            raise click.UsageError("the prompt is empty: give at least one word")
        return text


def _read_stdin() -> str:
    if sys.stdin is None:
        raise click.UsageError("stdin is closed: give --prompt or --prompt-file")
    return sys.stdin.buffer.read().decode("utf-8")


def note_context(model: nn.Module, prompt_tokens: int, max_tokens: int = 0) -> None:
    """Notes on stderr that a prompt and its answer exceed the context of a model."""
    from mlx_kv.mlxlm.loading import context_length

    length = context_length(model)
    if length is not None and prompt_tokens + max_tokens > length:
        count = f"{prompt_tokens} + {max_tokens} tokens" if max_tokens else f"{prompt_tokens} tokens"
        say(f"note: {count}, but this model was made for {length}")


# --- the chat ---------------------------------------------------------------------------------------------------------


def read_utf8(text: str) -> str:
    """The text; ValueError for lone surrogates, which Python makes of bytes that are not UTF-8."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise ValueError("it is not UTF-8 text: write it in UTF-8") from None
    return text


def read_template_settings(text: str) -> dict[str, Any]:
    """The settings of a chat template from a JSON object.

    Raises:
        ValueError: no JSON object, or settings that a template cannot take.
    """
    read_utf8(text)
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"it is not JSON ({error}): write an object, such as {EXAMPLE}") from None
    if not isinstance(found, dict):
        raise ValueError(f"it is not a JSON object: write one, such as {EXAMPLE}")
    from mlx_kv.generation.encoding import check_template_settings  # it imports MLX, which help does without

    check_template_settings(found)
    return found


@dataclass(frozen=True)
class ChatOptions:
    """The chat around a prompt."""

    SECTION: ClassVar = "Prompt"

    system_prompt: str | None = setting(
        None,
        option="--system-prompt",
        summary="System prompt of a chat.",
        kind=read_utf8,
        metavar="TEXT",
        help="System prompt of a chat.",
    )
    chat_template_config: dict[str, Any] | None = setting(
        None,
        option="--chat-template-config",
        kind=read_template_settings,
        metavar="JSON",
        help=f"Settings for the chat template, an object such as {EXAMPLE}.",
    )
    prefill_response: str | None = setting(
        None,
        option="--prefill-response",
        kind=read_utf8,
        metavar="TEXT",
        help="Beginning of the answer; it is not printed again.",
    )

    @property
    def settings(self) -> ChatSettings:
        """The settings of the library."""
        from mlx_kv.generation.encoding import ChatSettings

        return ChatSettings(self.system_prompt, self.prefill_response, self.chat_template_config or {})
