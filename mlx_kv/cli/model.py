"""Options of a model: which one, how it is loaded (named as mlx-lm's), and where its config.json is."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import click

from mlx_kv.bundled import model_path
from mlx_kv.cli.options import read_wired_limit
from mlx_kv.settings import setting

if TYPE_CHECKING:
    import mlx.nn as nn

HUB_TIMEOUT = 10  # seconds
FOR_WHOLE_MODELS = ("adapter_path", "trust_remote_code", "quantize_activations", "chat_template", "lazy_load")


@dataclass(frozen=True)
class ModelOptions:
    """A model and how it is loaded."""

    SECTION: ClassVar = "Model"

    name: str = setting(
        "reference",
        option="--model",
        summary="Bundled model, directory or hub id.",
        metavar="PATH_OR_HUB_ID",
        help="Bundled model, directory or hub id.",
    )
    adapter_path: Path | None = setting(
        None,
        option="--adapter-path",
        summary="Adapter weights from mlx_lm.lora.",
        kind=click.Path(exists=True, file_okay=False, path_type=Path),
        metavar="DIR",
        help="Adapter weights, as mlx_lm.lora writes them.",
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
        from mlx_kv.generation.wired_memory import wired_memory

        wired_memory.choose(self.wired_limit)

    def load(self) -> tuple[nn.Module, Any]:
        """The model and its tokenizer."""
        from mlx_kv.mlxlm.loading import load

        lazy: dict[str, Any] = {"lazy": True} if self.lazy_load else {}
        network, tokenizer = load(model_path(self.name), **self._settings, **lazy)
        return network, self.with_eos_tokens(tokenizer)

    def release(self, network: nn.Module) -> None:
        """Frees the weights of the loaded model; they are loaded again when they are next used."""
        from mlx_kv.mlxlm.loading import load, release_weights

        release_weights(network, lambda: load(model_path(self.name), **self._settings, lazy=True)[0])

    @property
    def _settings(self) -> dict[str, Any]:
        names = ("adapter_path", "trust_remote_code", "quantize_activations", "chat_template")
        return {name: value for name in names if (value := getattr(self, name))}

    def check_parts(self) -> None:
        """Raises click.UsageError for what a rank with a part of a model does not support."""
        for name in FOR_WHOLE_MODELS:
            if getattr(self, name):
                raise click.UsageError(
                    f"--{name.replace('_', '-')} is for whole models, and each rank has a part of one: leave it out"
                )

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
        config = parse_config(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise click.UsageError(f"cannot read {path}: {error.strerror}") from error
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
