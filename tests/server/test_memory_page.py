"""What a server shows of itself: metrics, rows in memory, the page in a browser."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
from classes import anywhere
from prometheus_client.parser import text_string_to_metric_families
from serving import LONG, PLENTY, SOURCE, Running, running
from tiny_models import make_model

from mlx_kv import CachePolicy, cache_statistics, make_prompt_cache
from mlx_kv.cache import row_classes
from mlx_kv.cache.eviction.evictor import Evictor
from mlx_kv.generation.prefill import read_ragged
from mlx_kv.mlxlm.batching import RowsByClass
from mlx_kv.server.memory import occupancy_of, position_ranges, tokens_evicted
from mlx_kv.server.rows import Rows

# --- what it shows of itself ------------------------------------------------------------------------------------------


def test_metrics_are_prometheus_text(server: Running) -> None:
    server.complete("import", 5)
    answer = server.http.get("/metrics")
    families = {family.name: family for family in text_string_to_metric_families(answer.text)}
    samples = {(s.name, *s.labels.values()): s.value for family in families.values() for s in family.samples}
    assert samples["mlx_kv_requests_total", "completions", "200"] >= 1
    assert samples["mlx_kv_generated_tokens_total",] >= 5
    assert samples["mlx_kv_time_to_first_token_seconds_count",] >= 1
    for name in ("kv_bytes_live", "kv_bytes_allocated", "tokens_evicted", "prefix_hits", "tokens_per_second", "rows"):
        assert f"mlx_kv_{name}" in families


@pytest.mark.slow
def test_rows_in_memory() -> None:
    """Each row is shown with its own tokens, and with the positions that are really kept."""
    with running(CachePolicy(budget=128, keep_recent=32)) as server, ThreadPoolExecutor(6) as pool:
        prompts = [SOURCE[: 150 * n] for n in (6, 1, 4, 2, 5, 3)]
        asked = [pool.submit(server.complete, prompt, 400) for prompt in prompts]
        seen, most = [], 0
        while not all(each.done() for each in asked):
            seen = server.http.get("/memory").json()["rows"]
            for row in (row for row in seen if row["state"] == "decoding" and row["layers"]):
                (layer,) = row["layers"]
                assert 0 <= layer["offset"] - row["prompt_tokens"] - row["generated_tokens"] <= 2
                assert layer["live"] + layer["evicted"] == layer["offset"]
                assert layer["live"] <= layer["capacity"]
                if layer["kept"] is not None:
                    most = max(most, layer["evicted"])
                    assert sum(last - first for first, last in layer["kept"]) == layer["live"]
                    assert layer["kept"][0][0] == 0  # the sinks
                    assert layer["kept"][-1][1] == layer["offset"]
            time.sleep(0.05)
        assert most > 200
        server.wait_until_empty()
        assert server.http.get("/memory").json()["rows"] == []


SHARED, TOO_FEW = LONG[:3000], LONG[:900]  # some 300 tokens are not worth to be read from one place
SEEN = {
    "all tokens": (CachePolicy(), SHARED),
    "too few to share": (CachePolicy(), TOO_FEW),
    "8 bits": (CachePolicy(bits=8), SHARED),
    "a residual": (CachePolicy(bits=4, residual_length=64), SHARED),
    "a budget": (CachePolicy(budget=256, keep_recent=32), SHARED),
    "a window": (CachePolicy(max_kv_size=256), SHARED),
}


@pytest.mark.parametrize(("policy", "beginning"), SEEN.values(), ids=SEEN)
def test_the_figures_of_the_page_follow_from_its_rows(policy: CachePolicy, beginning: str) -> None:
    """Six prompts, five of which begin alike, while they are answered and afterwards."""
    alike = [f"{beginning}\n# {number}\n" for number in range(5)]
    with running(policy, prompt_memory_bytes=PLENTY) as server, ThreadPoolExecutor(6) as pool:
        asked = [pool.submit(server.post, prompt=prompt, max_tokens=60) for prompt in (*alike, "class Other:\n" * 20)]
        seen, args = [], server.worker.default.models.model.args
        while not all(each.done() for each in asked):
            seen.append(server.http.get("/memory").json())
            time.sleep(0.02)
        answers = [each.result().json() for each in asked]
        server.wait_until_empty()
        after = server.http.get("/memory").json()
        kept = sum(served.rows.prefixes.memory.nbytes for served in server.worker.served)
    slot = 2 * args.num_hidden_layers * args.num_key_value_heads * args.head_dim * 4  # float32
    slot = {8: slot * 9 // 32, 4: slot * 5 // 32}.get(policy.bits, slot)  # with scales and biases
    checked = 0
    for report in seen:
        rows = report["rows"]
        states = [row["state"] for row in rows]
        assert report["waiting"] == states.count("waiting") + report["in_flight"] - len(rows)
        assert report["bytes_live"] <= report["bytes_full"]
        assert report["bytes_live"] <= report["bytes_allocated"]
        if states != ["decoding"] * len(asked) or not all(row["layers"] for row in rows):
            continue  # of a row that has just ended, the totals may still have the bytes
        layers = [layer for row in rows for layer in row["layers"]]
        assert all(layer["layers"] == args.num_hidden_layers for layer in layers)
        shared = max(layer["shared"] for layer in layers)  # once, by all rows that have it
        live = shared + sum(layer["live"] - layer["shared"] for layer in layers)
        residual = report["bytes_full"] - slot * sum(layer["offset"] for layer in layers)
        assert (residual > 0) == (policy.residual_length > 0)
        assert report["bytes_live"] == slot * live + residual
        evicted = [layer["evicted"] for row in rows for layer in row["layers"] if not row["cached_tokens"]]
        assert report["tokens_evicted"] >= (policy.budget is not None) * sum(evicted)  # copied ones count once
        checked += 1
    assert checked > 0
    used = [answer["usage"] for answer in answers]
    assert after["generated_tokens"] == sum(each["completion_tokens"] for each in used)
    assert after["generated_tokens"] == sum(after["history"]["since_start"]["tokens"])
    reused = [each["prompt_tokens_details"]["cached_tokens"] for each in used]
    assert after["prefix_hits"] == sum(count > 0 for count in reused) == 4
    assert after["prefix_hits"] + after["prefix_misses"] == len(answers)
    assert sorted(match["reused_tokens"] for match in after["prefixes"]) == sorted(reused)
    assert after["prompt_memory"] == kept
    assert after["active_memory"] >= after["weights"]
    assert (after["rows"], after["in_flight"], after["bytes_live"], after["bytes_full"]) == ([], 0, 0, 0)


@pytest.mark.slow
@pytest.mark.parametrize("kept", [0, PLENTY], ids=["read by the engine", "read with checkpoints"])
@pytest.mark.parametrize("policy", [CachePolicy(), CachePolicy(bits=8), CachePolicy(budget=128, keep_recent=32)])
def test_rows_in_prefill_are_counted(policy: CachePolicy, kept: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the tokens that they have read, and the bytes of these."""
    step = Rows.step

    def slowly(rows: Rows) -> None:
        time.sleep(0.3)
        step(rows)

    with running(policy, prompt_memory_bytes=kept) as server, ThreadPoolExecutor(2) as pool:
        monkeypatch.setattr(Rows, "step", slowly)
        asked = [pool.submit(server.complete, LONG[start:], 2) for start in (0, 1000)]
        seen = []
        while not all(each.done() for each in asked):
            report = server.http.get("/memory").json()
            rows = [row for row in report["rows"] if row["state"] == "reading" and row["layers"]]
            if rows and not any(row["state"] == "decoding" for row in report["rows"]):
                for row in rows:
                    (layer,) = row["layers"]
                    ahead = row["read_tokens"] - layer["offset"]  # at most the last token, or a chunk just read
                    assert ahead >= 0
                    assert layer["offset"] <= row["prompt_tokens"]
                    assert layer["live"] + layer["evicted"] == layer["offset"]
                    if ahead <= 1:
                        seen.append(layer["offset"])
                assert (report["bytes_live"] > 0) == any(row["read_tokens"] for row in rows)
                assert report["bytes_allocated"] >= report["bytes_live"]
        assert len({each for each in seen if each}) > 1
        server.wait_until_empty()


@pytest.mark.parametrize("share", ["head", "layers"])
def test_heads_that_hold_different_numbers_are_counted(share: str) -> None:
    model = make_model("llama")
    table = [[1 + 3 * layer + head for head in range(2)] for layer in range(len(model.layers))]
    uneven: dict[str, Any] = {"share": share} | ({"allocation": table} if share == "head" else {})
    caches = make_prompt_cache(model, CachePolicy(budget=24, keep_recent=6, sinks=2, margin=4, **uneven))
    for _ in range(6):
        read_ragged(model, caches, [[5] * 12])
    for row in occupancy_of(caches, positions=True).rows:
        (layer,) = row
        if share == "layers":
            assert layer.heads is None
            continue
        assert layer.heads is not None
        counts = [count for own in layer.heads for count in own]
        assert sum(counts) == len(counts) * layer.live
        assert counts == sorted(counts)
        assert counts[0] < counts[-1]
    assert all(layer.heads is None for row in occupancy_of(caches, positions=False).rows for layer in row)


@pytest.mark.slow
def test_all_that_was_let_in_is_shown() -> None:
    """Also what the worker has not heard of yet, and what is no tokens yet."""
    with running(max_batch_size=2) as server, ThreadPoolExecutor(8) as pool:
        go_on, encoding = threading.Event(), threading.Event()
        asked = [pool.submit(server.complete, "import os", 400) for _ in range(5)]
        server.wait_until(
            lambda: len(server.worker.monitor.snapshot.decoding) == 2 and len(server.worker._waiting) == 3
        )
        try:
            server.worker._inbox.put(lambda: go_on.wait(20) and None)
            asked += [pool.submit(server.complete, "import os", 4)]
            server.wait_until(lambda: len(server.api.admission.jobs) == 6)
            server.api._handler._tokenizing.submit(lambda: encoding.wait(20))
            asked += [pool.submit(server.complete, "import os", 4)]
            server.wait_until(lambda: server.api.admission.admitted == 7)
            seen = server.http.get("/memory").json()
            assert (seen["in_flight"], seen["waiting"]) == (7, 5)
            states = [row["state"] for row in seen["rows"]]
            assert states == ["decoding"] * 2 + ["waiting"] * 4
            text = server.http.get("/metrics").text
            assert "mlx_kv_rows 2.0" in text
            assert "mlx_kv_requests_waiting 5.0" in text
        finally:
            go_on.set()
            encoding.set()
        assert all(each.result() for each in asked)
        seen = server.http.get("/memory").json()
        assert (seen["in_flight"], seen["waiting"], seen["rows"]) == (0, 0, [])


@pytest.mark.slow
@pytest.mark.parametrize("kept", [0, PLENTY], ids=["nothing kept", "prompts kept"])
def test_what_is_evicted_is_counted_once(kept: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts that go on from others, texts that stop, clients that hang up: as many as compactions evict."""
    evicted, real = [0], Evictor.compact_if_due

    def compact_if_due(self: Evictor, rows: Any, on_demand: bool = False) -> Any:
        after = real(self, rows, on_demand)
        if self.layer == 0:
            evicted[0] += sum(before.start - row.start for before, row in zip(rows, after, strict=True))
        return after

    monkeypatch.setattr(Evictor, "compact_if_due", compact_if_due)
    policy = CachePolicy(budget=64, keep_recent=16, margin=8)
    with running(policy, prompt_memory_bytes=kept) as server, ThreadPoolExecutor(4) as pool:
        first = [pool.submit(server.complete, SOURCE[: 300 * n], 30 * n) for n in (1, 2, 3, 4)]
        wanted = [each.result() for each in first]
        stops = [text[len(text) // 2 :][:8] for text in wanted]
        again = [
            pool.submit(server.complete, SOURCE[: 300 * n], 30 * n, stop=stops[n - 1] if n % 2 else None)
            for n in (4, 3, 2, 1)
        ]
        assert all(each.result() for each in again)
        body = {"prompt": SOURCE[:1500], "max_tokens": 3000, "stream": True}
        with server.http.stream("POST", "/v1/completions", json=body) as answer:
            lines = answer.iter_lines()
            for _ in range(100):
                next(lines)
        server.wait_until_empty()
        assert (server.metrics.total("prefix_hits") >= 4) == bool(kept)
        assert server.metrics.total("tokens_evicted") == evicted[0] > 1000


@pytest.mark.parametrize("policy", [CachePolicy(), CachePolicy(budget=24, keep_recent=8, margin=4)])
def test_rows_of_several_classes_are_counted_as_those_of_one(
    policy: CachePolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model("llama")
    by_class = RowsByClass(model, 4)
    monkeypatch.setattr(row_classes, "assign_classes", anywhere(1))
    texts = [[7 * each % 61 for each in range(length)] for length in (60, 5, 33, 12)]  # keys that are alike would tie

    def batch(made: Callable[[list[Any]], list[Any]]) -> list[Any]:
        each = [made(make_prompt_cache(model, policy)) for _ in texts]
        caches = [same[0].merge(list(same)) for same in zip(*each, strict=True)]
        for tokens in (texts, [[3]] * 4):
            read_ragged(model, caches, tokens)
        return caches

    one, several = batch(list), batch(by_class.of)
    assert all(len(cache.parts) > 1 for cache in several)
    seen, wanted = (occupancy_of(caches, positions=True) for caches in (several, one))
    assert [[replace(layer, capacity=0) for layer in row] for row in seen.rows] == [
        [replace(layer, capacity=0) for layer in row] for row in wanted.rows
    ]
    assert (seen.bytes_live, seen.bytes_full) == (wanted.bytes_live, wanted.bytes_full)
    assert seen.bytes_allocated == sum(cache.nbytes for layer in several for cache in layer.parts)
    assert tokens_evicted(several) == tokens_evicted(one)
    held, alike = cache_statistics(several), cache_statistics(one)
    assert (held.tokens_evicted, held.compactions) == (alike.tokens_evicted, alike.compactions)
    by_class.close()


def test_positions_as_ranges() -> None:
    assert position_ranges([]) == []
    assert position_ranges([0, 1, 2, 5, 6, 9]) == [(0, 3), (5, 7), (9, 10)]
    assert position_ranges([0, 1, 2, 5, 6, 9], gap=2) == [(0, 10)]
