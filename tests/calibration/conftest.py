"""Short texts of token ids, and a tiny model."""

from __future__ import annotations

import sys
from pathlib import Path

import mlx.nn as nn
import numpy as np
import pytest
from tiny_models import VOCAB, make_model

sys.path.append(str(Path(__file__).parent.parent / "mlxlm"))  # families


@pytest.fixture(scope="session")
def tiny() -> nn.Module:
    return make_model("llama")


@pytest.fixture(scope="session")
def texts() -> list[list[int]]:
    """Twelve of 64 to 100 tokens; two are held out."""
    random = np.random.default_rng(0)
    return [random.integers(VOCAB, size=int(random.integers(64, 101))).tolist() for _ in range(12)]
