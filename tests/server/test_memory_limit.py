"""Requests are let in by the bytes that they will take: what is planned is what comes, and nobody fails for it."""

from __future__ import annotations

import random
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import mlx.core as mx
import pytest
from serving import LONG, check_error, running

from mlx_kv import CachePolicy, planning
from mlx_kv.generation import sequence
from mlx_kv.generation.prefill import TwoPassPrefill
from mlx_kv.generation.statistics import cache_statistics
from mlx_kv.planning import Layer, RowMemory, default_limit
from mlx_kv.prefixes.index import packed
from mlx_kv.server import memory
from mlx_kv.server.api import Limits
from mlx_kv.server.memory import MemoryLimit, RowPlan, RowSlots, with_shared
from mlx_kv.server.worker import Worker

KEPT = {"prompt_memory_bytes": 2**28}


class Watched:
    """Compares what rows take with what was planned, after every step."""

    def __init__(self, worker: Worker) -> None:
        self.worker, self.steps, self.most, self.rows = worker, 0, 0.0, 0
        engine = worker.default.rows.engine
        step = engine.step
        engine.step = lambda: self.looked(step())  # type: ignore[method-assign]

    def looked(self, told: Any) -> Any:
        rows = self.worker.default.rows
        held = cache_statistics(rows.engine.caches).bytes_allocated
        self.rows = max(self.rows, len(rows.active))
        planned, decoding = rows.planned(), rows.decoding
        if decoding and len(decoding) == len(rows.active):
            self.steps, self.most = self.steps + 1, max(self.most, held / planned)
        return told


@pytest.mark.parametrize(
    ("policy", "draft"),
    [
        pytest.param(CachePolicy(), False, marks=pytest.mark.slow),
        pytest.param(CachePolicy(), True, marks=pytest.mark.slow),
        pytest.param(CachePolicy(bits=8), True, marks=pytest.mark.slow),
        pytest.param(CachePolicy(budget=128), False, marks=pytest.mark.slow),
        pytest.param(CachePolicy(bits=8, quantized_start=300), False, marks=pytest.mark.slow),
        pytest.param(CachePolicy(budget=128, score="snap_kv"), True, marks=pytest.mark.slow),
        pytest.param(CachePolicy(budget=128, score="kvzip"), False, marks=pytest.mark.slow),
    ],
)
def test_rows_take_no_more_than_was_planned(policy: CachePolicy, draft: bool) -> None:
    chance = random.Random(1)
    with running(policy, max_batch_size=6, draft=draft) as server, ThreadPoolExecutor(6) as pool:
        watched = Watched(server.worker)
        lengths = [chance.randrange(20, chance.choice([400, 3000])) for _ in range(14)]
        asked = [pool.submit(server.complete, LONG[:length], chance.randrange(5, 40)) for length in lengths]
        assert all(each.result() is not None for each in asked)
    assert watched.steps > 10
    assert 0.05 < watched.most <= 1


@pytest.mark.parametrize("prompt_memory_bytes", [2**26, 0], ids=["prompts are kept", "prompts are not kept"])
@pytest.mark.parametrize("stored", [{}, {"bits": 8}, {"bits": 8, "quantized_start": 100}], ids=str)
@pytest.mark.slow
def test_a_row_whose_prompt_is_read_twice_is_planned_at_its_peak(
    stored: dict[str, int], prompt_memory_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole prompt and its repetition are held until it has been read twice."""
    held, step = [], TwoPassPrefill.step

    def watched(reading: TwoPassPrefill) -> None:
        step(reading)
        held.append(cache_statistics(reading._caches).bytes_allocated)

    monkeypatch.setattr(TwoPassPrefill, "step", watched)
    policy = CachePolicy(budget=128, score="kvzip", **stored)
    with running(policy, prompt_memory_bytes=prompt_memory_bytes) as server:
        usage = server.post(prompt=LONG, max_tokens=24).json()["usage"]
        plan = server.worker.default.plan
        planned = plan.together([plan.slots(usage["prompt_tokens"], 24)])
    assert usage["prompt_tokens"] > 1000
    assert max(held) <= planned <= 1.15 * max(held)
    assert max(held) > 1.5 * plan.nbytes(2048)  # what such a row holds while it decodes


@pytest.mark.slow
def test_a_limit_of_three_rows_serves_sixteen_clients_without_an_error() -> None:
    with running(max_batch_size=16) as free:
        plan, weights = free.worker.default.plan, free.worker.limit.weights
        prompts = [f"def number_{index}(n):\n" + LONG[index : index + 400] for index in range(16)]
        wanted = [free.complete(prompt, 24) for prompt in prompts]
    room = 3 * plan.nbytes(256)
    with running(max_batch_size=16, memory_limit=weights + room) as server, ThreadPoolExecutor(16) as pool:
        watched = Watched(server.worker)
        assert list(pool.map(lambda prompt: server.complete(prompt, 24), prompts)) == wanted
        report = server.http.get("/memory").json()
        assert report["memory_limit"] == weights + room
        told = re.search(r"^mlx_kv_memory_limit_bytes (\S+)$", server.http.get("/metrics").text, re.MULTILINE)
        assert told is not None
        assert float(told[1]) == weights + room
    assert watched.rows == 3


@pytest.mark.parametrize(
    ("policy", "how"),
    [
        (CachePolicy(), KEPT),
        (CachePolicy(), {}),
        pytest.param(CachePolicy(), {**KEPT, "draft": True}, marks=pytest.mark.slow),
        pytest.param(CachePolicy(bits=8), KEPT, marks=pytest.mark.slow),
        pytest.param(CachePolicy(max_kv_size=300), KEPT, marks=pytest.mark.slow),
        pytest.param(CachePolicy(budget=400), KEPT, marks=pytest.mark.slow),
        pytest.param(CachePolicy(budget=400), {}, marks=pytest.mark.slow),
        pytest.param(CachePolicy(budget=400, score="kvzip"), KEPT, marks=pytest.mark.slow),
        pytest.param(CachePolicy(budget=400, bits=8, score="snap_kv"), KEPT, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_rows_that_outgrow_the_limit_give_way_and_go_on_where_they_were(
    policy: CachePolicy, how: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever was expected of the answers, each client gets what it gets alone: greedy, drawn, and under a grammar."""
    monkeypatch.setattr(sequence, "FIRST_EXPECTED", 16)
    prompts = [f"def number_{index}(n):\n" + LONG[index : index + 40 * index] for index in range(10)]
    with running(policy, max_batch_size=10, **how) as free:
        plan, weights = free.worker.default.plan, free.worker.limit.weights
        bias = {str(free.worker.default.models.tokenizer.eos_token_id): -100}
        kinds: list[dict[str, Any]] = [
            {"logit_bias": bias},
            {"logit_bias": bias, "temperature": 1, "seed": 3, "frequency_penalty": 0.5},
            {"regex": "[a-c ]{250}", "logprobs": 1},
        ]
        bodies = [{"prompt": p, "max_tokens": 200, **kinds[index % 3]} for index, p in enumerate(prompts)]
        wanted = [free.post(**body).json()["choices"] for body in bodies]
    limit = weights + 3 * plan.nbytes(512) + plan.nbytes(256)
    with running(policy, max_batch_size=10, memory_limit=limit, **how) as server, ThreadPoolExecutor(10) as pool:
        watched = Watched(server.worker)
        told = [each.json()["choices"] for each in pool.map(lambda body: server.post(**body), bodies)]
        server.wait_until_empty()
        preemptions = server.worker.metrics.total("preemptions")
    assert [choices[0]["text"] for choices in told] == [choices[0]["text"] for choices in wanted]
    assert [choices[0]["finish_reason"] for choices in told] == [choices[0]["finish_reason"] for choices in wanted]
    tokens = [choices[0]["logprobs"] and choices[0]["logprobs"]["tokens"] for choices in told]
    assert tokens == [choices[0]["logprobs"] and choices[0]["logprobs"]["tokens"] for choices in wanted]
    assert watched.rows > 3
    assert preemptions > 0


@pytest.mark.slow
@pytest.mark.parametrize("prompt_memory_bytes", [2**28, 0], ids=["prompts are kept", "prompts are not kept"])
def test_a_limit_of_four_copies_serves_sixteen_clients_that_share_a_prompt_at_once(prompt_memory_bytes: int) -> None:
    with running(max_batch_size=16) as free:
        plan, weights = free.worker.default.plan, free.worker.limit.weights
        prompts = [LONG[:6000] + f"\n{letter} = {letter}" for letter in "abcdefghijklmnop"]  # they part at one place
        wanted = [free.complete(prompt, 96) for prompt in prompts]
        tokens = free.post(prompt=prompts[0], max_tokens=1).json()["usage"]["prompt_tokens"]
    limit = weights + 4 * plan.nbytes(tokens + 96)
    settings = {"max_batch_size": 16, "memory_limit": limit, "prompt_memory_bytes": prompt_memory_bytes}
    refused: list[int] = []

    class Recorded(MemoryLimit):
        def fits(self, planned: int) -> bool:
            fits = super().fits(planned)
            refused.extend([] if fits else [planned])
            return fits

    with running(**settings) as server, ThreadPoolExecutor(16) as pool:
        watched = Watched(server.worker)
        server.worker.limit = Recorded(**vars(server.worker.limit))
        assert list(pool.map(lambda prompt: server.complete(prompt, 96), prompts)) == wanted
    assert refused == []  # no request waited for memory
    assert watched.rows > 4
    assert 0.2 < watched.most <= 1


def test_rows_that_share_are_planned_with_what_they_share_once() -> None:
    plan = RowPlan(RowMemory.of((Layer("full", bytes_per_slot=1),), CachePolicy()), class_slots=4096, shares_up_to=2064)
    common, rows = packed(range(2000)), [RowSlots(2010, 2064)] * 16
    prompts: list[bytes | None] = [common + packed([5000 + row] * 10) for row in range(16)]
    assert [(row.first, row.shared) for row in with_shared(rows, prompts)] == [(0, 2000), *[(2000, 2000)] * 15]
    assert plan.together(with_shared(rows, prompts)) == 2000 + 16 * 96 + 2 * 2304
    whole = plan.together(rows)
    assert whole == 16 * 2304
    assert plan.together(with_shared(rows, [None] * 16)) == whole
    few = with_shared(rows[:3], prompts[:3])  # saves less than it takes to be sure that they share
    assert plan.together(few) == plan.together(rows[:3])
    for short in (0, 2063):  # longer rows evict, and then have copies
        assert replace(plan, shares_up_to=short).together(with_shared(rows, prompts)) == whole


def test_what_never_fits_is_refused_with_the_figure() -> None:
    with running(max_batch_size=4) as free:
        plan, weights = free.worker.default.plan, free.worker.limit.weights
    with running(memory_limit=weights + plan.nbytes(512), limits=Limits(max_tokens=16)) as server:
        assert server.complete(LONG[:400], 16)
        for stream in (False, True):
            error = check_error(server.post(prompt=LONG, max_tokens=1500, stream=stream), 400)
            assert error["code"] == "memory_limit_exceeded"
            assert "tokens and 256 of an answer take " in error["message"]
            assert re.match(
                r"prompt is too long: \d+ tokens > 256 maximum: ", error["message"]
            )  # the rest is the answer's
            assert f"has {plan.nbytes(512) / 1e6:,.1f} MB" in error["message"]
        server.wait_until_empty()


def test_an_answer_that_outgrows_the_limit_alone_is_an_error_with_the_figure() -> None:
    with running(max_batch_size=4) as free:
        plan, weights = free.worker.default.plan, free.worker.limit.weights
    bias = {str(free.worker.default.models.tokenizer.eos_token_id): -100}
    with running(memory_limit=weights + plan.nbytes(768)) as server:
        error = check_error(server.post(prompt="import", max_tokens=5000, logit_bias=bias), 400)
        assert f"has {plan.nbytes(768) / 1e6:,.1f} MB for keys and values: shorten" in error["message"]
        server.wait_until_empty()
        assert server.complete("import", 600)  # fits
    prompt = (LONG * 2)[:8200]
    with running(memory_limit=weights + plan.nbytes(3328), **KEPT) as server:  # and what was read is not read again
        check_error(server.post(prompt=prompt, max_tokens=5000, logit_bias=bias), 400)
        usage = server.post(prompt=prompt + "#", max_tokens=4).json()["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] >= usage["prompt_tokens"] - 4 > 2900


def test_kept_prompts_make_room_for_rows() -> None:
    with running() as free:
        plan, weights = free.worker.default.plan, free.worker.limit.weights
    room = plan.nbytes(1280)
    with running(memory_limit=weights + room, prompt_memory_bytes=2**28) as server:
        for start in range(0, 2000, 250):  # each is kept, all together are too many
            server.complete(LONG[start : start + 800], 4)
        server.wait_until(lambda: 0 < server.worker.monitor.snapshot.prompt_memory <= room)
        assert server.complete(LONG[:2500], 100)  # takes nearly all that there is


def test_prompts_are_kept_in_what_the_limit_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    assert MemoryLimit(1000, 400).for_prompts(None) == 600
    assert MemoryLimit(1000, 400).for_prompts(50) == 50
    monkeypatch.setattr(memory, "device_memory", lambda: 8000)
    assert MemoryLimit().for_prompts(None) == 2000  # a quarter of the device, whose weights need more than its share


def test_a_prompt_larger_than_the_memory_keeps_its_beginning_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    with running() as free:
        plan = free.worker.default.plan
    with running(prompt_memory_bytes=plan.nbytes(512)) as server:
        first, again, other = (server.post(prompt=LONG[start:], max_tokens=4).json()["usage"] for start in (0, 0, 9))
        server.wait_until_empty()
        reports = server.http.get("/memory").json()["prefixes"]
    for told, reused in ((first, 0), (again, 512), (other, 0)):
        assert told["prompt_tokens"] > 1000
        assert told["prompt_tokens_details"]["cached_tokens"] == pytest.approx(reused, abs=64)
    assert [report["reason"] for report in reports] == ["none_kept", "too_large", "differs"]
    warnings = [record.getMessage() for record in caplog.records if "does not fit into" in record.getMessage()]
    assert len(warnings) == 1
    assert f"a prompt of {first['total_tokens']:,} tokens does not fit" in warnings[0]


def test_a_limit_that_weights_alone_exceed_ends_the_start() -> None:
    with (
        pytest.raises(ValueError, match=r"leaves nothing for rows: the weights take [\d.]+ MB"),
        running(memory_limit=1),
    ):
        pass


def test_a_plan_counts_slots_as_caches_take_them() -> None:
    layers = Layer("sliding", bytes_per_slot=10, max_slots=512), Layer("full", bytes_per_slot=4, state_bytes=100)
    plan = RowPlan(RowMemory.of(layers, CachePolicy()))
    assert plan.slots(200, 56).slots == 256
    grown = plan.grow(1000, 20_000, 32_000, slack=True)
    assert grown == 82 * 256 + 8192 - 1000  # from the capacity before, by 8,192 at most
    assert plan.grow(1000, 20_000, 32_000, slack=False) == 83 * 256 - 1000
    assert plan.grow(1000, 20_000, 20_100, slack=True) == 20_100  # never more than it may have
    assert plan.grow(200, 57, 1000, slack=True) == 512 - 200
    assert plan.nbytes(257) == plan.nbytes(512)  # in multiples of 256
    assert plan.nbytes(256) == 100 + 256 * 14
    assert plan.nbytes(1024) == 100 + 5120 + 4096
    rows = [RowSlots(100, 256), RowSlots(900, 1024)]
    assert plan.together(rows) == 2 * plan.nbytes(1024)  # where rows cannot be parted
    assert plan.together([]) == 0
    layer = Layer("full", bytes_per_slot=1, plain_bytes_per_slot=4)
    late = RowPlan(RowMemory(((layer, 10),), quantized_start=1000))
    assert late.nbytes(256) == 10 * 256 * 4
    assert late.nbytes(1280) == 10 * 1280 * 4 + 1280  # all slots plain, and one layer quantised, too
    assert MemoryLimit().refusal(plan, 10**6, 10**6) is None


def test_the_limit_of_a_device_is_below_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    assert 2**28 < (default_limit() or 0) < 2**43
    monkeypatch.setattr(planning, "on_cpu", lambda: False)
    for info, limit in (
        ({"memory_size": 32e9, "max_recommended_working_set_size": 22e9}, 19.8e9),  # a Mac
        ({"total_memory": 80e9}, 64e9),
        ({}, None),
    ):
        monkeypatch.setattr(mx, "device_info", lambda info=info: info)
        assert default_limit() == limit
