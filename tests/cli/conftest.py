"""A run of `mlx-kv batch` in this process. Other commands have a `call` of their own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from batch_runs import Called, Files


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(tmp_path)


@pytest.fixture
def call(
    files: Files, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, reference: Any, draft: Any
) -> Any:
    """`mlx-kv batch` in this process, with models that are loaded once for all tests."""
    monkeypatch.setattr("mlx_kv.mlxlm.loading.load", lambda path: (draft, None) if "draft" in path else reference)
    return lambda *arguments: Called(capsys, monkeypatch, *files.options(), *map(str, arguments))
