"""Shared by the tests of benchmarks/eval: the model that recalls."""

from __future__ import annotations

from typing import Any

import mlx.nn as nn
import pytest


@pytest.fixture(scope="session")
def recall_model() -> tuple[nn.Module, Any]:
    """The recall model and its tokenizer, float32."""
    from mlx_kv.bundled import model_path
    from mlx_kv.mlxlm.loading import load

    return load(model_path("recall"))
