"""Paths of the models that ship with this package."""

from __future__ import annotations

from pathlib import Path

FOLDER = Path(__file__).parent / "models"


def bundled_models() -> list[str]:
    """Names of the bundled models."""
    return sorted(path.parent.name for path in FOLDER.glob("*/config.json"))


def draft_path(name_or_path: str) -> str:
    """The folder of the draft model that goes with a bundled model, anything else as it came."""
    return model_path("draft" if name_or_path == "reference" else name_or_path)


def head_path(name_or_path: str | Path) -> Path:
    """The file of the head that goes with a bundled model, anything else as it came."""
    return FOLDER / "draft" / "reference.kvdraft.safetensors" if name_or_path == "reference" else Path(name_or_path)


def model_path(name_or_path: str) -> str:
    """The directory of a bundled model (`reference`, `draft`); any other name is returned unchanged."""
    return (
        str(FOLDER / name_or_path)
        if isinstance(name_or_path, str) and name_or_path in bundled_models()
        else name_or_path
    )
