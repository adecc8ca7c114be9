"""The wired limit: when it is set, to how much, and that it is restored. MLX's functions are replaced."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from click.testing import CliRunner
from engines import make_engine
from mlx.utils import tree_flatten

import mlx_kv.generation.engine as wired
from mlx_kv.bundled import model_path
from mlx_kv.cli.main import command
from mlx_kv.generation.sequence import TokenSequence
from mlx_kv.mlxlm.loading import load


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return load(model_path("reference"))[0]


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """All limits that are set, on a device that wires 1 TB at most."""
    calls, info = [0], mx.device_info()

    def set_wired_limit(limit: int) -> int:
        calls.append(limit)
        return calls[-2]

    monkeypatch.setattr(mx, "set_wired_limit", set_wired_limit)
    monkeypatch.setattr(mx, "device_info", lambda: info | {"max_recommended_working_set_size": 10**12})
    memory = wired.WiredMemory()  # other tests may have engines that are still open
    monkeypatch.setattr(wired, "wired_memory", memory)
    yield calls
    assert not memory._engines


def run(model: nn.Module, engine: Any = None) -> Any:
    """An engine that has made a step."""
    engine = engine or make_engine(model, set())
    engine.submit(TokenSequence(0, [5, 6, 7], 2))
    engine.step()
    return engine


def test_auto_sets_none_for_a_model_that_is_small_for_its_machine(model: nn.Module, limits: list[int]) -> None:
    run(model).close()
    assert limits == [0]


def test_auto_sets_the_recommended_limit_for_a_model_of_more_than_half(
    model: nn.Module, limits: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    flat: Any = tree_flatten(model.parameters())  # type: ignore[no-untyped-call]
    weights = sum(weight.nbytes for _, weight in flat)
    for most, expected in ((2 * weights, [0]), (2 * weights - 1, [0, 2 * weights - 1, 0])):
        monkeypatch.setattr(mx, "device_info", lambda most=most: {"max_recommended_working_set_size": most})
        run(model).close()
        assert limits == expected


def test_none_sets_nothing_even_for_a_large_model(
    model: nn.Module, limits: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mx, "device_info", lambda: {"max_recommended_working_set_size": 1000})
    wired.wired_memory.choose("none")
    run(model).close()
    assert limits == [0]


def test_a_device_that_wires_nothing_is_left_alone(
    model: nn.Module, limits: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mx, "device_info", lambda: {"architecture": "x86_64"})
    run(model).close()
    assert limits == [0]


def test_it_is_set_once_for_all_engines_and_restored_after_the_last(model: nn.Module, limits: list[int]) -> None:
    wired.wired_memory.choose(5000)
    first, second = run(model), run(model)
    assert limits == [0, 5000]
    first.step()
    first.close()
    assert limits == [0, 5000]  # the other one still generates
    second.close()
    second.close()
    assert limits == [0, 5000, 0]
    run(model, first).close()
    assert limits == [0, 5000, 0, 5000, 0]


def test_an_engine_that_was_dropped_unclosed_does_not_keep_it(model: nn.Module, limits: list[int]) -> None:
    wired.wired_memory.choose(5000)
    run(model)
    gc.collect()
    run(model).close()
    assert limits == [0, 5000, 0]


@pytest.mark.parametrize(
    ("option", "problem"),
    [
        ("2000GB", "--wired-limit 2,000,000,000,000: this device wires 1,000,000,000,000 bytes at most; give less"),
        ("lots", "'lots' is not a number of bytes: write one, or as in 512MB or 1.5GB, or auto or none"),
    ],
)
def test_what_cannot_be_wired_is_refused(limits: list[int], option: str, problem: str) -> None:
    for name in ("generate", "serve"):
        arguments = [name, "--wired-limit", option, *(["--prompt", "a"] if name == "generate" else [])]
        result = CliRunner().invoke(command, arguments)
        assert result.exit_code == 2
        assert problem in result.output.replace("\n", " ")
    assert limits == [0]


def test_bytes_are_refused_where_nothing_can_be_wired(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mx, "device_info", lambda: {"architecture": "x86_64"})
    with pytest.raises(ValueError, match="--wired-limit is for GPUs of Macs: leave it out here"):
        wired.wired_memory.choose(5000)
    assert wired.wired_memory.limit == "auto"


def test_generate_uses_it(limits: list[int]) -> None:
    result = CliRunner().invoke(command, ["generate", "--prompt", "import", "-m", "2", "--wired-limit", "3GB"])
    assert result.exit_code == 0, result.output
    assert limits == [0, 3 * 10**9, 0]
