"""Shared set-up: a tuned BLAS before MLX, deterministic hypothesis runs, and the reference model."""

from __future__ import annotations

import os

if "PYTEST_XDIST_WORKER" in os.environ:  # tests run side by side: each takes one core, and no BLAS all of them
    os.environ.setdefault("MKL_NUM_THREADS", "1")
    os.environ.setdefault("OMP_NUM_THREADS", "1")

import mlx_kv  # noqa: F401  before anything below imports MLX: it loads a tuned BLAS

# isort: split
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.nn as nn
import pytest
from effort import PROFILE, covering
from hypothesis import HealthCheck, settings

sys.path.append(str(Path(__file__).parent.parent))  # the checkout, for benchmarks.eval

settings.register_profile(
    "default", deadline=None, max_examples=60, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("usual", parent=settings.get_profile("default"), max_examples=15)
settings.register_profile("quick", parent=settings.get_profile("default"), max_examples=10)
settings.register_profile("thorough", deadline=None, max_examples=1000, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile(PROFILE)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--quick", action="store_true", help="one case of each test, and none of those marked slow")
    parser.addoption(
        "--cover",
        action="store_true",
        help="of each test as many cases as bring a new value of a parameter, and none of those marked slow",
    )


def parameters(item: pytest.Item) -> dict[str, Any]:
    return item.callspec.params if hasattr(item, "callspec") else {}


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not (config.getoption("quick") or config.getoption("cover")):
        return
    functions: dict[tuple[Any, ...], list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("slow") is None:
            functions.setdefault((item.path, item.parent, getattr(item, "originalname", item.name)), []).append(item)
    kept: set[pytest.Item] = set()
    for brisk in functions.values():
        if config.getoption("quick"):
            kept.update(brisk[:1])
        else:
            kept.update(brisk[index] for index in covering([parameters(item) for item in brisk]))
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = [item for item in items if item in kept]


@pytest.fixture(scope="session")
def reference() -> tuple[nn.Module, Any]:
    """The reference model and its tokenizer, float32."""
    from mlx_kv.bundled import model_path
    from mlx_kv.mlxlm.loading import load

    return load(model_path("reference"))


@pytest.fixture(autouse=True)
def _all_that_may_be_is_drafted(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """How many tokens are drafted would follow from how busy the machine is; `chosen_length` marks tests of that."""
    if request.node.get_closest_marker("chosen_length") is None:
        from mlx_kv.generation import decoder
        from mlx_kv.generation.speculation import pacing

        monkeypatch.setattr(decoder, "Pace", lambda most, free, fixed, replays: pacing.Pace(most, free, True))


@pytest.fixture(scope="session")
def draft() -> nn.Module:
    """The draft model that goes with the reference model."""
    from mlx_kv.bundled import model_path
    from mlx_kv.mlxlm.loading import load

    return load(model_path("draft"))[0]


class Called:
    """What one call of the command left: exit code, stdout and stderr."""

    def __init__(self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
        from mlx_kv.cli import main as cli

        monkeypatch.setattr(sys, "argv", ["mlx-kv", *arguments])
        self.code: Any = 0
        try:
            cli.main()
        except SystemExit as end:
            self.code = end.code
        self.out, self.err = capsys.readouterr()


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Called]:
    """Calls `mlx-kv` with arguments, in this process."""
    return lambda *arguments: Called(capsys, monkeypatch, *map(str, arguments))
