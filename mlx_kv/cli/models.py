"""`mlx-kv models`: models on this machine, with their sizes, and how many tokens of each fit in its memory."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import click

from mlx_kv.bundled import bundled_models, model_path
from mlx_kv.cli.help import command, option
from mlx_kv.cli.model import read_config
from mlx_kv.cli.output import aligned

EXAMPLES = """
\b
Examples:
  mlx-kv models
  mlx-kv models --json
  hf download mlx-community/Qwen3-0.6B-4bit
"""
MAX_TOKENS = 2**20  # that are reported of a model whose configuration has no context


class ModelFiles(NamedTuple):
    """The files of a model: its directory, and the bytes of its weights."""

    name: str
    folder: Path
    bytes: int


@dataclass(frozen=True)
class ModelMemory:
    """A model and the memory that it needs on this machine.

    Attributes:
        bytes: of its weights on disk.
        weights: bytes of them in memory.
        context: tokens; None if its configuration has none.
        bytes_per_token: of keys and values, beyond windows, in the dtype of this device.
        fits_tokens: longest prompt and answer of one sequence beside the weights, at most the context; 0: not even the
            weights fit, None: the memory of this device is unknown.
        error: why nothing is known of it.
    """

    model: str
    path: str
    bytes: int
    model_type: str = ""
    context: int | None = None
    weights: int = 0
    bytes_per_token: int = 0
    fits_tokens: int | None = None
    error: str | None = None


def cached_models(cache_folder: Path | None) -> Iterator[ModelFiles]:
    """The models in the Hugging Face cache, each at its newest revision with weights and a config.json.

    Raises:
        click.UsageError: a given directory is no such cache.
    """
    from huggingface_hub import CacheNotFound, scan_cache_dir

    try:
        found = scan_cache_dir(cache_folder)
    except (CacheNotFound, ValueError) as error:
        if cache_folder is not None:
            raise click.UsageError(f"{cache_folder} is not a Hugging Face cache: give its directory `hub`") from error
        return
    for repo in sorted(found.repos, key=lambda repo: repo.repo_id.lower()):
        for revision in sorted(repo.revisions, key=lambda revision: -revision.last_modified):
            weights = [file.size_on_disk for file in revision.files if file.file_name.endswith(".safetensors")]
            if repo.repo_type == "model" and weights and (revision.snapshot_path / "config.json").is_file():
                yield ModelFiles(repo.repo_id, revision.snapshot_path, sum(weights))
                break


def own_models() -> Iterator[ModelFiles]:
    """The bundled models."""
    for name in bundled_models():
        folder = Path(model_path(name))
        yield ModelFiles(name, folder, sum(file.stat().st_size for file in folder.glob("*.safetensors")))


def memory_of(files: ModelFiles, limit: int | None) -> ModelMemory:
    """The memory that a model needs here, from its config.json alone.

    Args:
        limit: bytes for weights and caches; None is unknown.
    """
    from mlx_kv.mlxlm.loading import context_length, model_from_config
    from mlx_kv.planning import DTYPES, Planner, Strategy, config_dtype
    from mlx_kv.planning.device import device_dtype
    from mlx_kv.policy import CachePolicy

    known = ModelMemory(files.name, str(files.folder), files.bytes)
    try:
        config = read_config(files.folder / "config.json")
        dtype = DTYPES[device_dtype(config)]
        planner, policy = Planner(model_from_config(config, dtype)), CachePolicy()
        layers, context = planner.layers(policy), context_length(planner.model)
    except (click.UsageError, ValueError) as error:
        message = error.message if isinstance(error, click.UsageError) else str(error)
        return ModelMemory(files.name, str(files.folder), files.bytes, error=" ".join(message.split()))
    # Weights that are not quantised become those of the device's dtype when they are loaded.
    widened = 1 if "quantization" in config else dtype.size / DTYPES[config_dtype(config)].size
    weights = int(files.bytes * max(widened, 1))
    strategy, fits = Strategy("", policy), None
    if limit is not None:
        fits = most_tokens(lambda tokens: planner.bytes_held(strategy, tokens), limit - weights, context or MAX_TOKENS)
    return ModelMemory(
        **{name: getattr(known, name) for name in ("model", "path", "bytes")},
        model_type=config["model_type"],
        context=context,
        weights=weights,
        bytes_per_token=sum(layer.bytes_per_slot for layer in layers if layer.window is None),
        fits_tokens=fits,
    )


def most_tokens(bytes_held: Any, room: int, maximum: int) -> int:
    """The largest number of tokens up to a maximum that takes no more bytes than there is room for.

    Args:
        bytes_held: bytes of a number of tokens, which never falls.
    """
    low, high = 0, maximum
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if bytes_held(middle) <= room else (low, middle - 1)
    return low


def fits_in_words(model: ModelMemory) -> str:
    if model.error is not None:
        return f"cannot be planned: {model.error}"[:100]
    if model.fits_tokens is None:
        return "unknown memory"
    if model.fits_tokens == 0:
        return f"no: weights take {in_words(model.weights)}"
    if model.context is None:
        return f"{model.fits_tokens:,} tokens" + (" or more" if model.fits_tokens == MAX_TOKENS else "")
    return "all tokens" if model.fits_tokens == model.context else f"{model.fits_tokens:,} tokens"


def in_words(count: int) -> str:
    """A size on disk."""
    return f"{count / 1e9:,.2f} GB" if count >= 1e9 else f"{count / 1e6:,.1f} MB"


def table(models: list[ModelMemory]) -> list[str]:
    """A line for each model."""
    rows = [["model", "size", "context", "bytes a token", "fits"]]
    for each in models:
        context = "-" if each.context is None else f"{each.context:,}"
        size, token = in_words(each.bytes), f"{each.bytes_per_token:,}" if each.error is None else "-"
        rows.append([each.model, size, context, token, fits_in_words(each)])
    return [line.rstrip() for line in aligned(rows, left=(0, 4))]


@command("models", epilog=EXAMPLES, short_help="List models on this machine and the size of their caches.")
@option(
    "--cache-dir",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    metavar="DIR",
    summary="Hugging Face cache to look in.",
    help="Hugging Face cache to look in.  [default: that of hf, as HF_HOME and HF_HUB_CACHE set it]",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object, sizes in bytes.")
def models_command(cache_dir: Path | None, as_json: bool) -> None:
    """List models on this machine: size, context, cache bytes a token, and how many tokens fit.

    These are the bundled models and those in the Hugging Face cache; hf downloads more. Nothing is loaded. Sizes of
    caches are in the dtype that this device computes in, for one sequence and plain caches: mlx-kv plan compares
    others.
    """
    files = [*own_models(), *cached_models(cache_dir)]

    from mlx_kv.planning.device import default_limit

    limit = default_limit()
    found = [memory_of(each, limit) for each in files]
    if as_json:
        click.echo(json.dumps({"memory_bytes": limit, "models": [asdict(each) for each in found]}))
        return
    click.echo("\n".join(table(found)))
    if len(found) == len(bundled_models()):
        click.echo("\nThe Hugging Face cache has no models: hf download mlx-community/Qwen3-0.6B-4bit", err=True)
    memory = "unknown" if limit is None else in_words(limit)
    click.echo(f"\nMemory for weights and caches: {memory}. One sequence, plain caches; see mlx-kv plan.", err=True)
