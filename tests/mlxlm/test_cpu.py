"""Activation and output head on a CPU: what float64 says they are, gradients; and who is left alone."""

from __future__ import annotations

import gc
import importlib
from types import ModuleType
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from family_model import distance, read, tokens
from hypothesis import given
from hypothesis import strategies as st
from mlx_lm.models import activations
from tiny_models import make_model

from mlx_kv import make_prompt_cache
from mlx_kv.mlxlm import cpu
from mlx_kv.mlxlm.cpu import TallEmbedding, TallLinear, swiglu, use_cpu_activation, use_cpu_head

FAMILIES = ("olmo3", "qwen3", "deepseek_v3")  # of modules that no bundled model has
pytestmark = pytest.mark.skipif(mx.default_device().type != mx.DeviceType.cpu, reason="on a GPU nothing is changed")


@pytest.fixture(autouse=True)
def all_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also small ones, which MLX computes faster."""
    monkeypatch.setattr(cpu, "MIN_GATES", 0)


def numbers(*shape: int, seed: int = 0, scale: float = 10.0) -> tuple[mx.array, mx.array]:
    gate, x = mx.random.normal((2, *shape), key=mx.random.key(seed))
    return gate * scale, x


def module_of(family: str) -> ModuleType:
    return importlib.import_module(f"mlx_lm.models.{family}")


@given(st.lists(st.floats(-80, 80, width=32), min_size=1, max_size=20), st.floats(-1e6, 1e6, width=32))
def test_it_is_what_float64_says(gates: list[float], factor: float) -> None:
    gate = np.array(gates, np.float64)
    wanted = gate / (1 + np.exp(-gate)) * factor
    got = np.array(swiglu(mx.array(gates, mx.float32), mx.full(len(gates), factor, mx.float32)), np.float64)
    np.testing.assert_allclose(got, wanted, rtol=1e-6, atol=1e-37)


def test_far_out_it_is_the_gate_or_nothing() -> None:
    got = swiglu(mx.array([200.0, float("inf"), -200.0, -1e30, 0.0, float("nan")]), mx.ones(6)).tolist()
    assert got[:2] == [200.0, float("inf")]
    assert all(abs(small) < 1e-7 for small in got[2:5])
    assert got[5] != got[5]


@pytest.mark.parametrize("shape", [(1, 7, 96), (2, 40, 96), (3, 5, 2, 1, 96), (1, 3, 1100), (0, 4, 96)])
def test_blocks_are_the_whole(shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    gate, x = numbers(*shape)
    whole = swiglu(gate, x)
    monkeypatch.setattr(cpu, "BLOCK_ELEMENTS", 1000)
    assert mx.array_equal(swiglu(gate, x), whole)
    assert swiglu(gate, x).shape == shape
    assert mx.array_equal(swiglu(gate.swapaxes(1, 2), x.swapaxes(1, 2)), whole.swapaxes(1, 2))


def test_its_gradients_are_those_of_mlx_lm() -> None:
    gate, x = numbers(3, 50)

    def gradients(function: Any) -> Any:
        return mx.grad(lambda gate, x: mx.square(function(gate, x)).sum(), argnums=(0, 1))(gate, x)

    for got, wanted in zip(gradients(swiglu), gradients(activations.swiglu), strict=True):
        assert float(mx.abs(got - wanted).max()) <= 1e-4 * float(mx.abs(wanted).max())
        assert float(mx.abs(wanted).max()) > 1


def test_what_is_small_is_mlx_lms(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    calls: list[Any] = []
    monkeypatch.setattr(cpu, "quick_swiglu", lambda *given: calls.append(given) or activations.swiglu(*given))
    for count in (cpu.MIN_GATES - 1, cpu.MIN_GATES):
        swiglu(*numbers(count))
    assert [gate.size for gate, _ in calls] == [cpu.MIN_GATES]


def test_what_is_not_float32_or_not_alike_is_mlx_lms() -> None:
    gate, x = numbers(4, 30)
    half = gate.astype(mx.float16), x.astype(mx.float16)
    assert mx.array_equal(swiglu(*half), activations.swiglu(*half))
    assert swiglu(*half).dtype == mx.float16
    assert mx.array_equal(swiglu(gate[:1], x), activations.swiglu(gate[:1], x))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_says_what_it_says_without(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, chunks, calls = make_model(family), (20, 11, 1, 1), []
    wanted = read(model, make_prompt_cache(model), tokens(), chunks)
    genuine = cpu._block
    monkeypatch.setattr(cpu, "_block", lambda *given: calls.append(given) or genuine(*given))
    use_cpu_activation(model)
    assert distance(read(model, make_prompt_cache(model), tokens(), chunks), wanted) < 1e-5
    assert len(calls) >= len(chunks) * len(make_prompt_cache(model))
    monkeypatch.setattr(cpu, "_block", lambda gate, x: genuine(gate, x) + gate)
    assert distance(read(model, make_prompt_cache(model), tokens(), chunks), wanted) > 1e-4  # it is what is computed


def test_it_stands_there_while_a_model_that_wants_it_lives() -> None:
    gc.collect()
    one, other = make_model("qwen3"), make_model("qwen3")
    assert module_of("qwen3").swiglu is activations.swiglu
    use_cpu_activation(one)
    use_cpu_activation(other)
    assert module_of("qwen3").swiglu is swiglu
    assert module_of("olmo3").swiglu is activations.swiglu
    del one
    gc.collect()
    assert module_of("qwen3").swiglu is swiglu
    del other
    gc.collect()
    assert module_of("qwen3").swiglu is activations.swiglu


def test_somebody_elses_activation_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    def theirs(gate: mx.array, x: mx.array) -> mx.array:
        return gate * x

    monkeypatch.setattr(module_of("qwen3"), "swiglu", theirs)
    model = make_model("qwen3")
    use_cpu_activation(model)
    assert module_of("qwen3").swiglu is theirs
    del model
    gc.collect()
    assert module_of("qwen3").swiglu is theirs


def test_a_variable_leaves_it_to_mlx(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model("qwen3")
    monkeypatch.setenv("MLX_KV_ACTIVATION", "mlx")
    use_cpu_activation(model)
    assert module_of("qwen3").swiglu is activations.swiglu
    monkeypatch.delenv("MLX_KV_ACTIVATION")
    use_cpu_activation(model)
    assert module_of("qwen3").swiglu is swiglu


@pytest.mark.parametrize("rows", [(1, 1), (2, 1), (3, 5), (8, 4), (33, 1)])
@pytest.mark.parametrize("bias", [False, True])
def test_logits_are_the_product_whatever_the_number_of_rows(
    rows: tuple[int, int], bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu, "MIN_TOKENS", 200)
    model = nn.Sequential(nn.Embedding(300, 64), nn.Linear(64, 200, bias=bias), nn.Linear(64, 199))
    table, head, other = model.layers
    x = mx.random.normal((*rows, 64), key=mx.random.key(3))
    use_cpu_head(model)
    assert [type(layer) for layer in model.layers] == [TallEmbedding, TallLinear, nn.Linear]
    exact = np.array(x, dtype=np.float64)
    for told, layer in ((table.as_linear(x), table), (head(x), head), (other(x), other)):
        wanted = exact @ np.array(layer.weight, dtype=np.float64).T + np.array(layer.get("bias", 0.0))
        assert told.shape == wanted.shape
        assert np.abs(np.array(told) - wanted).max() < 1e-4
    assert mx.array_equal(table(mx.array([3])), table.weight[3:4])
    nn.quantize(model)
    assert not {TallEmbedding, TallLinear} & set(map(type, model.layers))
