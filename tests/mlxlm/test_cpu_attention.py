"""Attention on a CPU: models say what they say without it, prompts and decoding, batches; and who is left alone."""

from __future__ import annotations

import gc
import importlib
from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from family_model import distance, read, tokens
from mlx_lm.models import cache as stock
from tiny_models import make_model

import mlx_kv
from mlx_kv import CachePolicy, make_prompt_cache
from mlx_kv.bundled import model_path
from mlx_kv.mlxlm import cpu, loading
from mlx_kv.mlxlm.attention import AttentionCall, AttentionPatch
from mlx_kv.mlxlm.cpu import CpuAttention, use_cpu_attention

# Of modules that no bundled model has, whose attention is answered while one of them lives.
FAMILIES = ("olmo3", "gemma3_text", "gpt_oss", "qwen3", "deepseek_v3")
CHUNKS = (20, 11, 1, 1, 3, 1)
SEVERAL = sum(chunk > 1 for chunk in CHUNKS)  # a single query over packed planes is left to MLX, but for 8 bits
pytestmark = pytest.mark.skipif(mx.default_device().type != mx.DeviceType.cpu, reason="on a GPU nothing is changed")


class Counted(CpuAttention):
    """How many calls were answered, and how many handed on."""

    def __init__(self) -> None:
        self.answered, self.handed_on = 0, 0

    def attend(self, call: AttentionCall) -> mx.array:
        handed = self.handed_on
        result = super().attend(call.before(self.Noting(self)))
        self.answered += handed == self.handed_on
        return result

    class Noting:
        def __init__(self, counted: Any) -> None:
            self._counted = counted

        def attend(self, call: AttentionCall) -> mx.array:
            self._counted.handed_on += 1
            return call.forward()


@pytest.fixture
def all_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also small ones."""
    monkeypatch.setattr(cpu, "MIN_SCORES", 0)


@pytest.fixture(autouse=True)
def untouched() -> Iterator[None]:
    gc.collect()
    before = {family: attention_of(family) for family in FAMILIES}
    yield
    gc.collect()
    assert {family: attention_of(family) for family in FAMILIES} == before


def attention_of(family: str) -> Any:
    return importlib.import_module(f"mlx_lm.models.{family}").scaled_dot_product_attention


def rows_read(model: nn.Module) -> list[mx.array]:
    """Logits of the tokens of each row of a ragged batch, then of two steps."""
    each = [make_prompt_cache(model) for _ in range(3)]
    caches = [same[0].merge(same) for same in zip(*each, strict=True)]
    lengths, prompt = (9, 20, 3), mx.concatenate([tokens(seed, 20) for seed in range(3)])
    for cache in caches:
        cache.prepare(lengths=list(lengths), right_padding=[20 - length for length in lengths])
    logits = read(model, caches, prompt, (12, 8))
    for cache in caches:
        cache.finalize()
    steps = read(model, caches, prompt, (1, 1))
    return [*(logits[row, :length] for row, length in enumerate(lengths)), steps]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.usefixtures("all_calls")
@pytest.mark.slow
def test_a_model_says_what_it_says_without(family: str) -> None:
    model, counted = make_model(family), Counted()
    for make in (stock.make_prompt_cache, make_prompt_cache):
        wanted = read(model, make(model), tokens(), CHUNKS)
        with AttentionPatch(model, backend=counted):
            assert distance(read(model, make(model), tokens(), CHUNKS), wanted) < 1e-5
    layers = len(make_prompt_cache(model))
    assert (counted.answered, counted.handed_on) == (2 * layers * len(CHUNKS), 0)
    wanted = rows_read(model)
    with AttentionPatch(model, backend=counted):
        got = rows_read(model)
    assert all(distance(*each) < 1e-5 for each in zip(got, wanted, strict=True))
    assert counted.handed_on == 0


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.usefixtures("all_calls")
@pytest.mark.slow
def test_an_answer_that_leaves_out_the_mask_and_sinks_is_caught(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    genuine = cpu.attend
    monkeypatch.setattr(cpu, "attend", lambda *given: genuine(*given[:4]))
    with pytest.raises(AssertionError):
        test_a_model_says_what_it_says_without(family)


@pytest.mark.parametrize("bits", [8, 4, 3])
@pytest.mark.usefixtures("all_calls")
def test_planes_that_mlx_lm_could_read_are_read_here(bits: int) -> None:
    """Of one layer: in several, a last bit of one would turn the rounding of a key in the next."""
    model, counted, policy = make_model("qwen3", num_hidden_layers=1), Counted(), CachePolicy(bits=bits, group_size=32)
    wanted = read(model, make_prompt_cache(model, policy), tokens(), CHUNKS)
    with AttentionPatch(model, backend=counted):
        got = read(model, make_prompt_cache(model, policy), tokens(), CHUNKS)
    assert distance(got, wanted) < 1e-5
    assert counted.answered == (len(CHUNKS) if bits == 8 else SEVERAL)


def test_small_calls_and_16_bits_are_handed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    for dtype, least in ((mx.float32, 2**13), (mx.bfloat16, 0), (mx.float16, 0)):
        monkeypatch.setattr(cpu, "MIN_SCORES", least)
        model, counted = make_model("qwen3"), Counted()
        model.set_dtype(dtype)
        for policy in (CachePolicy(), CachePolicy(bits=8, group_size=32)):
            if policy.bits is not None and dtype == mx.float32:
                continue
            wanted = read(model, make_prompt_cache(model, policy), tokens(), CHUNKS)
            with AttentionPatch(model, backend=counted):
                assert mx.array_equal(read(model, make_prompt_cache(model, policy), tokens(), CHUNKS), wanted).item()
        assert counted.answered == 0
        assert counted.handed_on > 0


# --- when it is there -------------------------------------------------------------------------------------------------


def test_it_goes_when_the_model_goes() -> None:
    own, models = attention_of("qwen3"), [make_model("qwen3", seed) for seed in (0, 1)]
    for model in models:
        use_cpu_attention(model)
    del model
    standing = attention_of("qwen3")
    assert standing is not own
    for there in (standing, own):
        models.pop()
        gc.collect()
        assert attention_of("qwen3") is there


def test_whoever_asks_for_mlx_gets_it(monkeypatch: pytest.MonkeyPatch) -> None:
    own, model = attention_of("qwen3"), make_model("qwen3")
    monkeypatch.setenv("MLX_KV_ATTENTION", "mlx")
    use_cpu_attention(model)
    assert attention_of("qwen3") is own
    monkeypatch.delenv("MLX_KV_ATTENTION")
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(cpu.mx, "default_device", lambda: mx.Device(mx.gpu))
        use_cpu_attention(model)
    assert attention_of("qwen3") is own
    use_cpu_attention(model)
    assert attention_of("qwen3") is not own


def test_what_is_loaded_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []
    monkeypatch.setattr(loading, "use_cpu_attention", given.append)
    model, _ = mlx_kv.load(model_path("draft"))
    assert given == [model]
