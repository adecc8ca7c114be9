"""Options of several commands: a model (named as mlx-lm's), a prompt and the chat around it, sampling and drafts."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import click

from mlx_kv.bundled import draft_path, model_path
from mlx_kv.cli.options import LEADERS_FILE, Command, given_options, option, options, read_wired_limit
from mlx_kv.cli.output import file_errors, say
from mlx_kv.cli.policy import policy_options
from mlx_kv.generation.settings import SamplingSettings
from mlx_kv.generation.speculation import DraftSettings
from mlx_kv.settings import MOST_TOKENS, setting

if TYPE_CHECKING:
    import mlx.nn as nn

    from mlx_kv.generation.encoding import ChatSettings
    from mlx_kv.generation.sampling import Sampler
    from mlx_kv.generation.statistics import SpeculationStatistics


# --- the model --------------------------------------------------------------------------------------------------------


HUB_TIMEOUT = 10  # seconds


@dataclass(frozen=True)
class ModelOptions:
    """A model and how it is loaded."""

    SECTION: ClassVar = "Model"

    name: str = setting(
        "reference",
        option="--model",
        summary="Bundled model, directory or hub id.",
        metavar="PATH_OR_HUB_ID",
    )
    adapter_path: Path | None = setting(
        None,
        option="--adapter-path",
        summary="Adapter weights from mlx_lm.lora.",
        kind=click.Path(exists=True, file_okay=False, path_type=Path),
        metavar="DIR",
    )
    trust_remote_code: bool = setting(
        False, option="--trust-remote-code", help="Run code that comes with the model or its tokenizer."
    )
    extra_eos_token: tuple[str, ...] = setting(
        (),
        option="--extra-eos-token",
        multiple=True,
        metavar="TOKEN",
        help="Another token that ends an answer; repeatable.",
    )
    quantize_activations: bool = setting(
        False, option=("--quantize-activations", "-qa"), help="Quantise activations as the weights are."
    )
    chat_template: str | None = setting(
        None, option="--chat-template", metavar="JINJA", help="Chat template, instead of the model's own."
    )
    lazy_load: bool = setting(False, option="--lazy-load", help="Load the weights with the first request.")
    wired_limit: Any = setting(
        "auto",
        option="--wired-limit",
        kind=read_wired_limit,
        metavar="BYTES|none|auto",
        help="Memory that macOS must not page out, such as 12GB; auto: the recommended limit for models that need more "
        "than half of it, else none.",
    )

    def set_wired_limit(self) -> None:
        """Sets the wired limit of engines.

        Raises:
            ValueError: this device does not support it.
        """
        from mlx_kv.generation.engine import wired_memory

        wired_memory.choose(self.wired_limit)

    def load(self) -> tuple[nn.Module, Any]:
        """The model and its tokenizer."""
        from mlx_kv.mlxlm.loading import load

        network, tokenizer = load(model_path(self.name), **self._settings, lazy=self.lazy_load)
        return network, self.with_eos_tokens(tokenizer)

    def release(self, network: nn.Module) -> None:
        """Frees the weights of the loaded model; they are loaded again when they are next used."""
        from mlx_kv.mlxlm.loading import load, release_weights

        release_weights(network, lambda: load(model_path(self.name), **self._settings, lazy=True)[0])

    @property
    def _settings(self) -> dict[str, Any]:
        names = ("adapter_path", "trust_remote_code", "quantize_activations", "chat_template")
        return {name: value for name in names if (value := getattr(self, name))}

    def with_eos_tokens(self, tokenizer: Any) -> Any:
        """The tokenizer with the tokens of --extra-eos-token added.

        Raises:
            click.UsageError: a token that it does not have.
        """
        for token in self.extra_eos_token:
            try:
                tokenizer.add_eos_token(token)
            except ValueError as error:
                raise click.UsageError(f"--extra-eos-token {token!r} is not a token of this model: {error}") from error
        return tokenizer


def find_config(name: str) -> Path:
    """The config.json of a directory, a bundled model or a hub id, of which nothing else is downloaded.

    Raises:
        click.UsageError: there is none, or the hub does not answer.
    """
    path = Path(model_path(name))
    if path.is_file():
        return path
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise click.UsageError(f"{name} has no config.json: give a directory with a model, or its config.json")
        return path / "config.json"
    if path.is_absolute() or len(path.parts) != 2:
        raise click.UsageError(f"{name} is neither a directory, a config.json, nor a hub id such as org/model")
    import huggingface_hub
    from huggingface_hub.utils import logging

    logging.set_verbosity_error()  # type: ignore[no-untyped-call]  # it prints a line for each retry
    try:
        if not isinstance(huggingface_hub.try_to_load_from_cache(name, "config.json"), str):
            # One request first: without a network the download retries for half a minute.
            where = huggingface_hub.hf_hub_url(name, "config.json")
            huggingface_hub.get_hf_file_metadata(where, timeout=HUB_TIMEOUT)
        return Path(huggingface_hub.hf_hub_download(name, "config.json"))
    except Exception as error:  # of three libraries: no such model, no access, no network
        raise click.UsageError(f"cannot fetch config.json of {name} from the hub: {error}") from error


def read_config(path: Path) -> dict[str, Any]:
    """The content of a config.json, as mlx-lm reads it.

    Raises:
        click.UsageError: it cannot be read, or is no JSON object.
    """
    from mlx_kv.mlxlm.loading import parse_config

    try:
        with file_errors(f"read {path}"):
            config = parse_config(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise click.UsageError(f"{path} is not JSON ({error}): give the config.json of a model") from error
    if not isinstance(config, dict):
        raise click.UsageError(f"{path} holds no JSON object: give the config.json of a model")
    return config


def short_name(model: str) -> str:
    """The name of a model in a title: a hub id or bundled name as given, else the name of its directory."""
    path = Path(model)
    if path.is_file():
        return path.resolve().parent.name if path.name == "config.json" else path.stem
    return path.resolve().name if path.is_dir() else model


EXAMPLE = "'{\"enable_thinking\": false}'"


def prefill_option(
    text: str = "Prompt tokens per pass of the model.  [default: 2048; on a CPU 512 to 64, by the size of the model; "
    "at most max-write in models with windows]",
) -> Callable[[Command], Command]:
    """--prefill-step-size, for the commands that read prompts."""
    return option("--prefill-step-size", section="Model", type=click.IntRange(1), metavar="N", help=text)


# --- the prompt -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PromptOptions:
    """The three places that a prompt comes from: a text, a file, or stdin for a lone -."""

    SECTION: ClassVar = "Prompt"

    source: str | None = setting(None, option="source", metavar="[-]", help="A lone - reads the prompt from stdin.")
    prompt: str | None = setting(
        None,
        option=("--prompt", "-p"),
        summary="Prompt.",
        metavar="TEXT",
    )
    prompt_file: Path | None = setting(
        None,
        option="--prompt-file",
        summary="File with the prompt.",
        kind=LEADERS_FILE,
        metavar="FILE",
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
        places = [place for place in (self.prompt, self.prompt_file, self.source) if place is not None]
        if len(places) != 1:
            raise click.UsageError(
                f"{'no prompt' if not places else 'more than one prompt'}: give --prompt, --prompt-file or -"
            )
        try:
            if self.prompt_file is not None:
                text = self.prompt_file.read_text(encoding="utf-8")
            else:
                if self.prompt is None and sys.stdin is None:
                    raise click.UsageError("stdin is closed: give --prompt or --prompt-file")
                text = self.prompt if self.prompt is not None else sys.stdin.buffer.read().decode("utf-8")
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
        template_settings = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"it is not JSON ({error}): write an object, such as {EXAMPLE}") from None
    if not isinstance(template_settings, dict):
        raise ValueError(f"it is not a JSON object: write one, such as {EXAMPLE}")
    from mlx_kv.generation.encoding import check_template_settings  # it imports MLX, which help does without

    check_template_settings(template_settings)
    return template_settings


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
    thinking_budget: int | None = setting(
        None,
        option="--thinking-budget",
        metavar="N",
        minimum=0,
        maximum=MOST_TOKENS,
        help="Maximum tokens that the model thinks before it answers; then its thinking is ended.",
    )
    thinking_closing: str = setting(
        "",
        option="--thinking-closing",
        kind=read_utf8,
        metavar="TEXT",
        help="Text that ends thinking at its limit, before the model's own mark.",
    )

    @property
    def settings(self) -> ChatSettings:
        """The settings of the library."""
        from mlx_kv.generation.encoding import ChatSettings

        template, limit = self.chat_template_config or {}, self.thinking_budget
        return ChatSettings(self.system_prompt, self.prefill_response, template, limit, self.thinking_closing)


# --- sampling ---------------------------------------------------------------------------------------------------------

# Narrower than in Python: 0 is what other programs call "off".
SAMPLING_BOUNDS: dict[str, Any] = {
    "top_p": {"above": 0, "minimum": None},
    "repetition_penalty": {"above": 0, "minimum": None},
    "seed": {"minimum": 0, "maximum": 2**64 - 1},
}


def unseeded_sampler(sampling: SamplingSettings, tokenizer: Any) -> Sampler | None:
    """The sampler of all sequences, each of which gets a seed of its own; None is greedy."""
    return replace(sampling, seed=None).sampler(0, tokenizer)


# --- drafts -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class DraftOptions(DraftSettings):
    """The settings of drafts, and the draft model."""

    SECTION: ClassVar = "Speculation"

    draft_model: str | None = setting(
        None,
        option="--draft-model",
        summary="Speculate with this model.",
        metavar="PATH_OR_HUB_ID",
        help="Speculate with this model; `reference` is the bundled draft model.",
    )
    draft_head: str | None = setting(
        None,
        option="--draft-head",
        metavar="PATH_OR_HUB_ID",
        help="Speculate with a head of the model: a file of mlx-kv train-drafter, or a directory or repository with "
        "one, such as the model's original; `reference` is the bundled one.  [default with --draft mtp: the one beside "
        "the model, or in its files]",
    )

    def __post_init__(self) -> None:
        if self.draft_model is not None and self.draft_head is not None:
            raise click.UsageError("got --draft-model and --draft-head: give one of them")
        if self.draft_head is not None and self.drafter not in (None, "auto", "mtp"):
            raise click.UsageError(f"--draft {self.drafter} drafts without a head: leave out --draft-head, or --draft")
        if self.drafter == "mtp" and self.draft_model is not None:
            raise click.UsageError("--draft mtp drafts with a head of the model: leave out --draft-model, or --draft")
        if self.drafter == "model" and self.draft_model is None:
            raise click.UsageError("--draft model drafts with a model: give --draft-model")
        if not self.enabled and self.num_draft_tokens is not None:
            raise click.UsageError("--num-draft-tokens needs --draft, --draft-head or --draft-model")
        chosen = given_options(DraftOptions)
        for name in ("prompt_lookup_min", "prompt_lookup_max"):
            if self.drafter in (None, "model", "mtp") and name in chosen:
                raise click.UsageError(f"{chosen[name]} needs --draft ngram, suffix or auto")
        if self.drafter in ("ngram", "suffix", "auto") and self.draft_model is not None:
            raise click.UsageError(
                f"--draft {self.drafter} drafts without a model: leave out --draft-model, or --draft"
            )
        super().__post_init__()

    @property
    def enabled(self) -> bool:
        """Whether anything is drafted."""
        return any(each is not None for each in (self.drafter, self.draft_model, self.draft_head))

    @property
    def settings(self) -> DraftSettings:
        """The settings of drafts alone."""
        return DraftSettings(**{each.name: getattr(self, each.name) for each in fields(DraftSettings)})

    def load(self, model: nn.Module, folder: str, lazy: bool = False, whole: bool = True) -> nn.Module | None:
        """The draft model, or a head of the model; None where drafts need neither.

        Args:
            model: that verifies drafts.
            folder: of its files.
            lazy: read each weight on first use.
            whole: False for a part of a model.

        Raises:
            click.UsageError: a head is wanted, and there is none.
        """
        if self.draft_model is not None:
            from mlx_kv.mlxlm.loading import load

            return load(draft_path(self.draft_model), lazy=lazy)[0]
        if self.draft_head is None and self.drafter not in ("auto", "mtp"):
            return None
        from mlx_kv.mlxlm.head_files import find_draft_head, load_draft_head

        if self.draft_head is not None:
            return load_draft_head(self.draft_head, model, whole=whole)
        try:
            head = find_draft_head(folder, model, whole=whole)
        except ValueError as error:
            if self.drafter == "mtp":
                raise
            say(f"note: drafts without a head: {error}")
            head = None
        if head is None and self.drafter == "mtp":
            raise click.UsageError(
                f"--draft mtp: {folder} has no head that drafts: give --draft-head with the repository that the model "
                "was made from, or train one with mlx-kv train-drafter"
            )
        return head

    def release(self, draft: nn.Module) -> None:
        """Frees the weights that drafts need; they are loaded again when they are next used."""
        from mlx_kv.mlxlm.heads import DraftHead
        from mlx_kv.mlxlm.loading import load, release_weights

        if isinstance(draft, DraftHead):
            draft.release()
            return
        assert self.draft_model is not None
        path = draft_path(self.draft_model)
        release_weights(draft, lambda: load(path, lazy=True)[0])


def draft_options(function: Command) -> Command:
    """The options of drafts, for a command that receives `drafts`, a `DraftOptions`."""
    order = (
        "drafter",
        "draft_model",
        "draft_head",
        "num_draft_tokens",
        "draft_length",
        "prompt_lookup_min",
        "prompt_lookup_max",
    )
    return options(DraftOptions, "drafts", *order)(function)


def generation_options(function: Command, max_tokens_summary: str = "Maximum tokens of an answer.") -> Command:
    """For a command that receives `max_tokens`, `sampling`, `prefill_step_size`, `drafts` and `policy`."""
    max_tokens = option(
        *("--max-tokens", "-m"),
        type=click.IntRange(1, MOST_TOKENS),
        default=256,
        show_default=True,
        metavar="N",
        section="Sampling",
        summary=max_tokens_summary,
    )
    sampling = options(SamplingSettings, "sampling", section="Sampling", **SAMPLING_BOUNDS)
    return max_tokens(sampling(prefill_option()(draft_options(policy_options()(function)))))


def draft_lines(speculation: SpeculationStatistics) -> str:
    """Two lines of statistics."""
    share = f"{speculation.accepted:,} of {speculation.drafted:,} ({speculation.acceptance_rate:.0%})"
    gain = "" if speculation.gain is None else f", {speculation.gain:.2f} times as fast as without drafts"
    return (
        f"draft       {share} accepted in {speculation.rounds:,} passes of the model, by {speculation.drafter}\n"
        f"            {speculation.tokens_per_pass:.2f} tokens a pass, {speculation.length} drafted at last{gain}"
    )
