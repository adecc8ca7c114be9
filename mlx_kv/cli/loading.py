"""How a model is loaded: options that commands share, named as mlx-lm's.

Decides what they mean to a model and its tokenizer, and what a part of a model cannot have. Imports neither MLX nor
what needs it before a command runs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mlx_kv.bundled import model_path
from mlx_kv.cli.options import Command, applied

if TYPE_CHECKING:
    import mlx.nn as nn


@dataclass(frozen=True)
class Loading:
    """What `loading_options` say; each attribute is an option."""

    adapter_path: Path | None = None
    trust_remote_code: bool = False
    extra_eos_token: tuple[str, ...] = ()
    quantize_activations: bool = False
    chat_template: str | None = None
    lazy_load: bool = False

    def load(self, model: str) -> tuple[nn.Module, Any]:
        """A model, as the option --model names it, and its tokenizer."""
        from mlx_kv.mlxlm.loading import load

        network, tokenizer = load(model_path(model), **self._of_the_model, **self._lazily)
        return network, self.told(tokenizer)

    def let_go(self, network: nn.Module, model: str) -> None:
        """The weights of a model that was loaded so leave memory, until they are next used."""
        from mlx_kv.mlxlm.loading import load, release_weights

        release_weights(network, lambda: load(model_path(model), **self._of_the_model, lazy=True)[0])

    @property
    def _of_the_model(self) -> dict[str, Any]:
        names = ("adapter_path", "trust_remote_code", "quantize_activations", "chat_template")
        return {name: value for name in names if (value := getattr(self, name))}

    @property
    def _lazily(self) -> dict[str, Any]:
        return {"lazy": True} if self.lazy_load else {}

    def check_parts(self) -> None:
        """Refuses what a rank that has a part of a model cannot do."""
        for name in ("adapter_path", "trust_remote_code", "quantize_activations", "chat_template", "lazy_load"):
            if getattr(self, name):
                raise click.UsageError(
                    f"--{name.replace('_', '-')} is for whole models, and each rank has a part of one: leave it out"
                )

    def told(self, tokenizer: Any) -> Any:
        """The tokenizer, which knows now what else ends an answer, and how chats are written.

        Raises:
            click.UsageError: a token that it does not have.
        """
        for token in self.extra_eos_token:
            try:
                tokenizer.add_eos_token(token)
            except ValueError as error:
                raise click.UsageError(f"--extra-eos-token {token!r} is no token of this model: {error}") from error
        return tokenizer


def loading_options(*names: str) -> Callable[[Command], Command]:
    """Some of the options of a `Loading`, for a command that gets one."""
    options = {
        "adapter_path": click.option(
            "--adapter-path",
            type=click.Path(exists=True, file_okay=False, path_type=Path),
            metavar="DIR",
            help="Weights that were trained beside the model's, as mlx_lm.lora writes them.",
        ),
        "trust_remote_code": click.option(
            "--trust-remote-code", is_flag=True, help="Run code that comes with the model or its tokenizer."
        ),
        "extra_eos_token": click.option(
            "--extra-eos-token", multiple=True, metavar="TOKEN", help="It ends an answer, too; may be repeated."
        ),
        "quantize_activations": click.option(
            "--quantize-activations", "-qa", is_flag=True, help="Quantise activations as the weights are."
        ),
        "chat_template": click.option(
            "--chat-template", metavar="JINJA", help="Instead of the one that came with the model."
        ),
        "lazy_load": click.option(
            "--lazy-load", is_flag=True, help="Keep no weights in memory before the first request."
        ),
    }
    assert set(options) == {each.name for each in fields(Loading)}

    def add(function: Command) -> Command:
        @functools.wraps(function)
        def command(**given: Any) -> None:
            function(loading=Loading(**{name: given.pop(name) for name in names}), **given)

        return applied(tuple(options[name] for name in names), command)

    return add
