"""The bundled model that recalls, loaded once."""

from __future__ import annotations

from typing import Any

import mlx.nn as nn
import pytest

from mlx_kv.bundled import model_path
from mlx_kv.mlxlm.convert import load


@pytest.fixture(scope="session")
def recall_model() -> tuple[nn.Module, Any]:
    return load(model_path("recall"))
