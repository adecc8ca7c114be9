"""Where a config.json comes from: a directory, a bundled model, the hub.

Only the config.json is fetched.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from mlx_kv.bundled import model_path

SECONDS_TO_ANSWER = 10  # that the hub has


def find_config(name: str) -> Path:
    """The config.json of a directory, a bundled model or a hub id, from where nothing else is fetched.

    Raises:
        click.UsageError: there is none, or the hub cannot be asked.
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

    logging.set_verbosity_error()  # type: ignore[no-untyped-call]  # it says every retry, a line each
    try:
        if not isinstance(huggingface_hub.try_to_load_from_cache(name, "config.json"), str):
            # One question first, as without a network the download would ask for half a minute.
            where = huggingface_hub.hf_hub_url(name, "config.json")
            huggingface_hub.get_hf_file_metadata(where, timeout=SECONDS_TO_ANSWER)
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
        raise click.UsageError(f"{path} is no JSON ({error}): give the config.json of a model") from error
    if not isinstance(config, dict):
        raise click.UsageError(f"{path} holds no JSON object: give the config.json of a model")
    return config


def short_name(model: str) -> str:
    """What to call a model in a title: a hub id or bundled name as it came, else the name of its directory."""
    path = Path(model)
    if path.is_file():
        return path.resolve().parent.name if path.name == "config.json" else path.stem
    return path.resolve().name if path.is_dir() else model
