"""The attention patch: seen, served, handed on bit for bit, and taken out again."""

from __future__ import annotations

import contextlib
import copy
import gc
import importlib
import sys
import threading
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from families import shared_family
from family_model import read, tokens
from mlx_lm.models import cache as stock
from mlx_lm.models import llama

from mlx_kv import CachePolicy, make_prompt_cache
from mlx_kv.inspection import attention_of_last
from mlx_kv.mlxlm.attention import AttentionCall, AttentionPatch, attention_hooked, attention_modules
from mlx_kv.mlxlm.traverse import attention_caches, leaves

CHUNKS = (20, 1, 1)


class Observer:
    """Looks at calls and hands them on."""

    def __init__(self) -> None:
        self.calls: list[AttentionCall] = []

    def attend(self, call: AttentionCall) -> mx.array:
        self.calls.append(call)
        return call.forward()


class Deaf:
    """Answers with zeros, as many as values have."""

    def attend(self, call: AttentionCall) -> mx.array:
        return mx.zeros((*call.queries.shape[:3], call.values.shape[3]), call.queries.dtype)


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return shared_family("qwen3")


@pytest.fixture(autouse=True)
def untouched() -> Any:
    """Whatever a test does, the modules of mlx-lm's models are as they were before."""
    gc.collect()  # a patch that others have left behind would go just now
    before = {name: _attention(module) for name, module in sys.modules.items() if name.startswith("mlx_lm.models.")}
    yield
    gc.collect()
    assert all(_attention(sys.modules[name]) is own for name, own in before.items())


def _attention(module: ModuleType) -> Any:
    return getattr(module, "scaled_dot_product_attention", None)


def answer(model: nn.Module, caches: Sequence[Any], chunks: Sequence[int] = CHUNKS) -> mx.array:
    return read(model, caches, tokens(), chunks)


# --- handing on -------------------------------------------------------------------------------------------------------


class Recorder:
    """A module with attention of its own, which writes down what it is given, and a layer that calls it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.module = ModuleType("a_module_with_attention")
        self.given: list[Any] = []
        self.module.scaled_dot_product_attention = lambda *placed, **named: self.given.append((placed, named))
        monkeypatch.setitem(sys.modules, self.module.__name__, self.module)
        self.model = type("Layer", (nn.Module,), {"__module__": self.module.__name__})()

    def call(self, *placed: Any, **named: Any) -> None:
        self.module.scaled_dot_product_attention(*placed, **named)


@pytest.mark.parametrize("hook", [None, Observer()])
def test_arguments_are_handed_on_as_they_came(hook: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder, cache, q, k, v = Recorder(monkeypatch), stock.KVCache(), *(mx.zeros((1, 1, 1, 8)) for _ in range(3))
    cache.attention_hook = hook
    with AttentionPatch(recorder.model):
        recorder.call(q, k, v, cache, 0.5, mask=None, sinks=v)
        recorder.call(q, k, values=v, cache=cache, scale=0.5, mask="causal")
        recorder.call(q, k, v, mask="causal")
    (first, named), (second, by_name), (third, rest) = recorder.given
    assert [id(x) for x in first] == [id(x) for x in (q, k, v, cache, first[4])]
    assert (first[4], named) == (0.5, {"mask": None, "sinks": v})
    assert [id(x) for x in second] == [id(q), id(k)]
    assert by_name == {"values": v, "cache": cache, "scale": 0.5, "mask": "causal"}
    assert [id(x) for x in third] == [id(q), id(k), id(v)]
    assert rest == {"mask": "causal"}


def test_a_hook_hands_on_what_it_changed_and_nothing_that_attention_does_not_know(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Changing:
        def attend(self, call: AttentionCall) -> Any:
            with pytest.raises(TypeError, match="attention has no query: queries, keys"):
                call.forward(query=1)
            return call.forward(queries="other", scale=2.0)

    recorder, cache = Recorder(monkeypatch), stock.KVCache()
    cache.attention_hook = Changing()
    keys = mx.zeros((1, 1, 1, 8))
    with AttentionPatch(recorder.model):
        recorder.call("own", keys, "values", cache, 1.0, mask=None)
        recorder.call("own", keys, "values", cache=cache, scale=1.0, mask=None)
    assert recorder.given[0] == (("other", keys, "values", cache, 2.0), {"mask": None})
    assert recorder.given[1] == (("other", keys, "values"), {"cache": cache, "scale": 2.0, "mask": None})


@pytest.mark.parametrize("bits", [None, 8])
@pytest.mark.parametrize("hook", [None, Observer()])
def test_answers_stay_bit_for_bit_also_on_packed_planes(model: nn.Module, hook: Any, bits: int | None) -> None:
    policy = CachePolicy(bits=bits, group_size=32)
    wanted, caches = answer(model, make_prompt_cache(model, policy)), make_prompt_cache(model, policy)
    with attention_hooked(model, caches, hook):
        got = answer(model, caches)
    assert mx.array_equal(got, wanted).item()


def test_queries_stay_as_they_were_seen_where_mlx_lm_scales_them_in_place(model: nn.Module) -> None:
    observer, kept = Observer(), []

    class Keeping:
        def attend(self, call: AttentionCall) -> mx.array:
            kept.append(mx.array(call.queries))
            return observer.attend(call)

    caches = make_prompt_cache(model, CachePolicy(bits=8, group_size=32))
    with attention_hooked(model, caches, Keeping()):
        answer(model, caches)
    packed = [isinstance(call.keys, tuple) for call in observer.calls]
    assert any(packed)
    assert not all(packed)
    assert all(mx.array_equal(call.queries, own) for call, own in zip(observer.calls, kept, strict=True))


# --- seeing and serving -----------------------------------------------------------------------------------------------


def test_a_cache_that_asks_sees_its_own_calls_beside_one_that_does_not(model: nn.Module) -> None:
    wanted, caches, observer = answer(model, make_prompt_cache(model)), make_prompt_cache(model), Observer()
    caches[1].attention_hook = observer
    with AttentionPatch(model):
        got = answer(model, caches)
    assert mx.array_equal(got, wanted).item()
    assert [call.cache for call in observer.calls] == [caches[1]] * len(CHUNKS)
    assert [call.queries.shape for call in observer.calls] == [(1, 4, n, 32) for n in CHUNKS]
    assert [call.keys.shape[2] for call in observer.calls] == [20, 21, 22]
    assert [call.mask for call in observer.calls] == ["causal", None, None]


def test_a_hook_can_answer_itself(model: nn.Module) -> None:
    wanted, caches = answer(model, make_prompt_cache(model)), make_prompt_cache(model)
    with attention_hooked(model, caches[2:3], Deaf()):
        got = answer(model, caches)
    assert not mx.allclose(got, wanted).item()
    assert caches[2].attention_hook is None


def test_a_hook_can_serve_keys_that_are_stored_otherwise(model: nn.Module) -> None:
    """Rotated queries find rotated keys."""
    rotation = mx.linalg.qr(mx.random.normal((32, 32), key=mx.random.key(0)), stream=mx.cpu)[0]

    class Rotating:
        def attend(self, call: AttentionCall) -> mx.array:
            return call.forward(queries=call.queries @ rotation, keys=call.keys @ rotation)

    wanted, caches = answer(model, make_prompt_cache(model)), make_prompt_cache(model)
    with attention_hooked(model, caches, Rotating()):
        got = answer(model, caches)
    assert mx.allclose(got, wanted, rtol=1e-4, atol=1e-4).item()


def test_caches_of_mlx_lm_can_ask_too() -> None:
    model, observer = shared_family("gemma3_text"), Observer()
    caches = stock.make_prompt_cache(model)
    with attention_hooked(model, caches, observer):
        answer(model, caches, [5])
    assert [call.cache for call in observer.calls] == list(leaves(caches))


def test_calls_that_name_no_cache_go_to_who_takes_all_others() -> None:
    model, others, observer = shared_family("afm7"), Observer(), Observer()
    caches = make_prompt_cache(model)
    with AttentionPatch(model, default_hook=others), attention_hooked(model, caches[:1], observer):
        answer(model, caches, [5])
    assert [call.cache for call in observer.calls] == caches[:1]
    assert [call.cache for call in others.calls] == [caches[1], None, None]


@pytest.mark.parametrize(
    ("family", "module"),
    [("qwen3_vl", "qwen3"), ("lfm2-vl", "lfm2"), ("kimi_k25", "deepseek_v3"), ("qwen3_5", "qwen3_next")],
)
@pytest.mark.slow
def test_layers_of_other_modules_are_found(family: str, module: str) -> None:
    model = shared_family(family)
    assert [found.__name__ for found in attention_modules(model)] == [f"mlx_lm.models.{module}"]
    caches, observer = make_prompt_cache(model), Observer()
    with attention_hooked(model, caches, observer):
        answer(model, caches, [5])
    assert len(observer.calls) == len(attention_caches(caches))


def test_layers_that_inherit_are_found(model: nn.Module) -> None:
    class Derived(type(model)):  # type: ignore[misc]
        """Somebody's own, of a module without attention."""

    derived = Derived(model.args)
    assert importlib.import_module("mlx_lm.models.qwen3") in attention_modules(derived)


def test_attention_of_wrapped_models_is_evaluated() -> None:
    received = attention_of_last(shared_family("qwen3_vl"), tokens(0, 20)[0].tolist(), queries=4)
    assert [each.shape[1] for each in received.values()] == [20] * 4
    assert all(each.sum(axis=1) == pytest.approx(1, rel=1e-4) for each in received.values())


# --- answering --------------------------------------------------------------------------------------------------------


def test_who_answers_gets_calls_that_nobody_saw_and_those_that_are_handed_on(model: nn.Module) -> None:
    wanted, caches = answer(model, make_prompt_cache(model)), make_prompt_cache(model)
    backend, seeing = Observer(), Observer()
    caches[1].attention_hook = seeing
    with AttentionPatch(model, backend=backend):
        got = answer(model, caches)
    assert mx.array_equal(got, wanted).item()
    assert [call.cache for call in backend.calls] == list(caches) * len(CHUNKS)
    assert [call.cache for call in seeing.calls] == [caches[1]] * len(CHUNKS)
    assert [call.mask for call in backend.calls[1 :: len(caches)]] == ["causal", None, None]


def test_who_answers_does_so_in_mlx_lms_place_but_not_in_that_of_a_hook(model: nn.Module) -> None:
    wanted, observer = answer(model, make_prompt_cache(model)), Observer()
    with AttentionPatch(model, backend=Deaf()):
        assert not mx.allclose(answer(model, make_prompt_cache(model)), wanted).item()
    caches = make_prompt_cache(model)
    with AttentionPatch(model, backend=observer), attention_hooked(model, caches[2:3], Deaf()):
        answer(model, caches)
    assert {id(call.cache) for call in observer.calls} == {id(cache) for cache in caches if cache is not caches[2]}


def test_a_budget_that_looks_at_attention_hands_it_on_to_who_answers(model: nn.Module) -> None:
    policy, backend = CachePolicy(budget=12, keep_recent=4, sinks=2, score="snap_kv"), Observer()
    wanted, caches = answer(model, make_prompt_cache(model, policy)), make_prompt_cache(model, policy)
    with AttentionPatch(model, backend=backend):
        got = answer(model, caches)
    assert mx.array_equal(got, wanted).item()
    assert [call.cache for call in backend.calls] == list(caches) * len(CHUNKS)


def test_who_takes_calls_without_a_cache_hands_them_on_to_who_answers() -> None:
    model, others, backend = shared_family("afm7"), Observer(), Observer()
    caches = make_prompt_cache(model)
    with AttentionPatch(model, default_hook=others, backend=backend):
        answer(model, caches, [5])
    assert [call.cache for call in backend.calls] == [call.cache for call in others.calls] == [*caches, None, None]


@pytest.mark.parametrize("order", [(0, 1, 2), (0, 2, 1), (1, 0, 2), (1, 2, 0), (2, 0, 1), (2, 1, 0)])
@pytest.mark.slow
def test_the_last_seam_that_is_open_answers(model: nn.Module, order: tuple[int, ...]) -> None:
    qwen3 = importlib.import_module("mlx_lm.models.qwen3")
    own, wanted, hooks = qwen3.scaled_dot_product_attention, answer(model, make_prompt_cache(model)), (Observer(), None)
    backend = [*hooks, Observer()]  # the one in the middle only looks
    seams = [AttentionPatch(model, backend=hook) for hook in backend]
    still = [0, 1, 2]
    for closed in (*order, None):
        before = [0 if hook is None else len(hook.calls) for hook in backend]
        assert mx.array_equal(answer(model, make_prompt_cache(model)), wanted).item()
        now = [0 if hook is None else len(hook.calls) for hook in backend]
        last = max((i for i in still if backend[i] is not None), default=None)
        assert [i for i in range(3) if now[i] > before[i]] == ([] if last is None else [last])
        if closed is not None:
            seams[closed].close()
            still.remove(closed)
    assert qwen3.scaled_dot_product_attention is own


# --- in and out -------------------------------------------------------------------------------------------------------


def test_it_is_in_place_only_while_it_is_open(model: nn.Module) -> None:
    qwen3 = importlib.import_module("mlx_lm.models.qwen3")
    own, of_llama = qwen3.scaled_dot_product_attention, llama.scaled_dot_product_attention
    make_prompt_cache(model)
    assert qwen3.scaled_dot_product_attention is own
    with contextlib.suppress(RuntimeError), AttentionPatch(model) as patch:
        assert qwen3.scaled_dot_product_attention is not own
        assert llama.scaled_dot_product_attention is of_llama
        raise RuntimeError
    assert qwen3.scaled_dot_product_attention is own
    patch.close()  # again
    assert qwen3.scaled_dot_product_attention is own


def test_hooks_are_taken_off_also_after_an_error_and_those_before_come_back(model: nn.Module) -> None:
    caches, first, second = make_prompt_cache(model), Observer(), Observer()
    with attention_hooked(model, caches, first):
        with contextlib.suppress(RuntimeError), attention_hooked(model, caches, second):
            answer(model, caches, [5])
            raise RuntimeError
        answer(model, caches, [1])
    assert len(second.calls) == len(first.calls) == len(caches)
    assert all(cache.attention_hook is None for cache in caches)


@pytest.mark.parametrize("last", [0, 1])
def test_seams_of_two_models_of_one_module_end_in_any_order(model: nn.Module, last: int) -> None:
    qwen3 = importlib.import_module("mlx_lm.models.qwen3")
    own, seams = (
        qwen3.scaled_dot_product_attention,
        [AttentionPatch(model), AttentionPatch(shared_family("qwen3", seed=1))],
    )
    standing = qwen3.scaled_dot_product_attention
    seams[1 - last].close()
    assert qwen3.scaled_dot_product_attention is standing
    seams[last].close()
    assert qwen3.scaled_dot_product_attention is own


def test_a_seam_ends_with_the_last_cache_that_carries_it(model: nn.Module) -> None:
    """Copies of caches carry the same."""
    qwen3 = importlib.import_module("mlx_lm.models.qwen3")
    own, caches = qwen3.scaled_dot_product_attention, stock.make_prompt_cache(model)
    caches[0].seam = AttentionPatch(model)
    copied = copy.deepcopy(caches)
    assert copied[0].seam is caches[0].seam
    del caches
    gc.collect()
    assert qwen3.scaled_dot_product_attention is not own
    del copied
    gc.collect()
    assert qwen3.scaled_dot_product_attention is own


def test_who_stands_in_front_is_left_there(model: nn.Module) -> None:
    qwen3 = importlib.import_module("mlx_lm.models.qwen3")
    own, caches, observer = qwen3.scaled_dot_product_attention, make_prompt_cache(model), Observer()
    patch = AttentionPatch(model)
    ours = qwen3.scaled_dot_product_attention
    qwen3.scaled_dot_product_attention = in_front = lambda *placed, **named: ours(*placed, **named)
    try:
        with attention_hooked(model, caches, observer):
            pass
        patch.close()
        assert qwen3.scaled_dot_product_attention is in_front
        answer(model, caches, [5])
        assert not observer.calls
    finally:
        qwen3.scaled_dot_product_attention = own


def test_threads_open_and_close_without_harm(model: nn.Module) -> None:
    qwen3 = importlib.import_module("mlx_lm.models.qwen3")
    own = qwen3.scaled_dot_product_attention

    def open_and_close() -> None:
        for _ in range(200):
            with AttentionPatch(model):
                assert qwen3.scaled_dot_product_attention is not own

    threads = [threading.Thread(target=open_and_close) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert qwen3.scaled_dot_product_attention is own
