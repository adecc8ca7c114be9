"""A run of `mlx-kv batch` in this process. Other commands have a `call` of their own."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from batch_runs import Called, Files

from mlx_kv import model_path


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(tmp_path)


@pytest.fixture
def call(
    files: Files, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, reference: Any, draft: Any
) -> Any:
    """`mlx-kv batch` in this process, with models that are loaded once for all tests."""
    monkeypatch.setattr(
        "mlx_kv.mlxlm.loading.load", lambda path, **options: (draft, None) if "draft" in path else reference
    )
    return lambda *arguments: Called(capsys, monkeypatch, *files.options(), *map(str, arguments))


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The draft model in a directory of its own, and a cache folder that is empty."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return Path(shutil.copytree(model_path("draft"), tmp_path / "draft"))
