"""What was read of prompts is not read again: in memory, on a disk, in a row that still decodes."""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import mlx.core as mx
import pytest
from serving import ENDS, LONG, PLENTY, SOURCE, Running, Troubled, cached, running

from mlx_kv import CachePolicy, KVCache, PromptMemory, PromptStore
from mlx_kv.server import rows
from mlx_kv.server.rows import Models


@pytest.mark.parametrize("stop", [None, "="], ids=["to the last token", "to a stop string"])
@pytest.mark.parametrize("draft", [False, True], ids=["plain", "draft"])
def test_a_conversation_goes_on_from_its_answer(draft: bool, stop: str | None) -> None:
    with running() as plain, running(draft=draft, prompt_memory_bytes=PLENTY) as server:
        first = server.post(prompt=SOURCE[:400], max_tokens=20, stop=stop).json()
        text = SOURCE[:400] + first["choices"][0]["text"] + "\n\n    def other"
        second = server.post(prompt=text, max_tokens=20).json()
        assert cached(first) == 0
        # A stop string ends within a token that is then another one in the next prompt; and a draft is a step behind.
        assert 0 <= first["usage"]["total_tokens"] - cached(second) <= (0 if stop is None and not draft else 4)
        assert second["choices"][0]["text"] == plain.complete(text, 20)
        assert (server.metrics.total("prefix_hits"), server.metrics.total("prefix_misses")) == (1, 1)
        assert server.metrics.total("prompt_tokens_cached") == cached(second)
        server.wait_until_empty()
        server.wait_until(lambda: server.http.get("/memory").json()["prompt_memory"] > 0)


@pytest.mark.parametrize(
    ("policy", "draft"),
    [(CachePolicy(), False), (CachePolicy(bits=8), False), (CachePolicy(), True)],
    ids=["full", "8 bits", "draft"],
)
def test_conversations_that_fill_the_room_are_reused(policy: CachePolicy, draft: bool) -> None:
    """There is no room for the prefix of a conversation beside its row, nor for that of another one."""
    with running(policy, draft=draft) as plain:
        plan, weights = plain.worker.default.plan, plain.worker.limit.weights
        room = plan.nbytes(2816)
        with running(policy, draft=draft, prompt_memory_bytes=room, memory_limit=weights + room) as server:
            texts, reused = [LONG[:4200], LONG[-1500:]], list[int]()
            for turn in range(4):
                for number, text in enumerate(texts):
                    answer = server.post(prompt=text, max_tokens=8).json()
                    assert answer["choices"][0]["text"] == plain.complete(text, 8)
                    usage = answer["usage"]
                    assert turn == 0 or usage["prompt_tokens"] - cached(answer) <= 24
                    reused.append(cached(answer))
                    texts[number] = text + answer["choices"][0]["text"] + f"\n\n    def other{turn}"
            assert max(reused) > 1408  # more than half of the room
            reports = server.http.get("/memory").json()["prefixes"]
            assert {report["reason"] for report in reports[2:]} <= {None, "differs"}
            assert server.worker.monitor.snapshot.prompt_memory <= room


@pytest.mark.parametrize("ends", ["before it is read", "without being kept"])
def test_a_prefix_without_room_beside_its_row_comes_back(ends: str) -> None:
    with running() as free:
        plan, weights = free.worker.default.plan, free.worker.limit.weights
    room = plan.nbytes(3328)
    with running(prompt_memory_bytes=room, memory_limit=weights + room, max_batch_size=2) as server:
        first = server.post(prompt=LONG, max_tokens=4).json()["usage"]["prompt_tokens"]
        server.wait_until_kept()
        if ends == "before it is read":
            started = threading.Event()
            step = server.rows.engine.step

            def no_step() -> Any:
                started.set()
                time.sleep(0.02)
                return []

            server.rows.engine.step = no_step  # type: ignore[method-assign]
            with contextlib.suppress(httpx.ReadTimeout):
                httpx.post(f"{server.url}/v1/completions", json={"prompt": LONG + "#", "max_tokens": 9}, timeout=0.5)
            assert started.wait(5)
            server.wait_until(lambda: not server.rows.active)
            server.rows.engine.step = step  # type: ignore[method-assign]
        else:  # what its row has from the prefix is not counted beside it
            server.worker.monitor.due = lambda idle: True  # type: ignore[method-assign]
            assert server.post(prompt=LONG + "#", max_tokens=9, cache={"keep": False}).status_code == 200
        again = server.post(prompt=LONG + "\n# 2", max_tokens=4).json()
        assert cached(again) >= (first - 4 if ends == "before it is read" else 512)


@functools.cache
def unshared(policy: CachePolicy) -> list[str]:
    """What a server that keeps nothing answers to each of the prompts that share all but their ends."""
    with running(policy) as plain:
        return [plain.complete(LONG + end, 20) for end in ENDS]


@pytest.mark.slow
@pytest.mark.parametrize("draft", [False, True], ids=["plain", "draft"])
@pytest.mark.parametrize("where", ["memory", "store", "both"])
@pytest.mark.parametrize(
    "policy",
    [CachePolicy(), CachePolicy(bits=8), CachePolicy(max_kv_size=200), CachePolicy(budget=200)],
    ids=["full", "8 bits", "windowed", "budget"],
)
def test_a_shared_prefix_is_read_once(policy: CachePolicy, where: str, draft: bool, tmp_path: Path) -> None:
    """Also by a second server, where there is a store: only the rest is read, and the text is the same."""
    asked = [LONG + end for end in ENDS[:3]]

    def open_store(models: Models) -> PromptStore:
        store = PromptStore(tmp_path, fingerprint="reference")
        store.refresh()
        return store

    answers = []
    for prompts in (asked[:2], asked[2:]) if where != "memory" else (asked,):
        with running(
            policy,
            draft=draft,
            prompt_memory_bytes=0 if where == "store" else PLENTY,
            open_store=None if where == "memory" else open_store,
        ) as server:
            for prompt in prompts:
                answers.append(server.post(prompt=prompt, max_tokens=20).json())
                server.wait_until_kept()
            server.wait_until_empty()
    assert cached(answers[0]) == 0
    for answer in answers[1:]:
        assert cached(answer) >= 0.95 * answer["usage"]["prompt_tokens"]
    if policy.budget is None:  # what a budget keeps depends on where a prompt was read from
        assert [answer["choices"][0]["text"] for answer in answers] == unshared(policy)[: len(asked)]


@pytest.mark.slow
def test_prompts_that_come_together_read_what_they_share_once() -> None:
    asked = [LONG + end for end in ENDS]
    wanted = unshared(CachePolicy())
    with running(prompt_memory_bytes=PLENTY) as server, ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda prompt: server.post(prompt=prompt, max_tokens=20).json(), asked))
        assert [answer["choices"][0]["text"] for answer in answers] == wanted
        assert sorted(cached(answer) > 0.95 * answer["usage"]["prompt_tokens"] for answer in answers) == [
            False,
            True,
            True,
            True,
        ]
        server.wait_until_empty()


@pytest.mark.slow
@pytest.mark.parametrize("draft", [False, True], ids=["plain", "draft"])
def test_a_prompt_goes_on_from_a_row_that_still_decodes(draft: bool) -> None:
    with running() as plain:
        wanted = plain.complete(LONG + ENDS[0], 20)
    with running(draft=draft, prompt_memory_bytes=PLENTY) as server, ThreadPoolExecutor(1) as pool:
        long = pool.submit(server.post, prompt=LONG, max_tokens=600)
        server.wait_until(lambda: bool(server.worker.monitor.snapshot.decoding))
        answer = server.post(prompt=LONG + ENDS[0], max_tokens=20).json()
        assert not long.done()
        assert cached(answer) >= 0.95 * answer["usage"]["prompt_tokens"]
        assert answer["choices"][0]["text"] == wanted
        assert long.result().json()["usage"]["completion_tokens"] == 600


@pytest.mark.slow
def test_a_long_prompt_is_read_between_the_tokens_of_others() -> None:
    """Caches of a window are read chunk by chunk; the longest silence of another row is that of a chunk, not of all."""
    with running(CachePolicy(max_kv_size=200, max_write=64), prompt_memory_bytes=PLENTY) as server:
        reading: list[int] = []  # tokens that the other row had got when the prompt was seen to be read

        def other() -> None:
            body = {"prompt": "import os", "max_tokens": 500, "stream": True}
            with server.http.stream("POST", "/v1/completions", json=body) as answer:
                for _ in filter(lambda line: line.startswith("data: {"), answer.iter_lines()):
                    now = sum(job.has_row and not job.answer for job in server.api.admission.jobs)
                    reading.append(now)

        thread = threading.Thread(target=other)
        thread.start()
        server.wait_until(lambda: len(reading) > 10)
        server.post(prompt=LONG, max_tokens=1)
        thread.join()
        assert sum(reading) >= 5


@pytest.mark.slow
@pytest.mark.parametrize("trouble", ["slow", "broken", "full", "damaged", "cancelled"])
def test_nobody_waits_for_a_disk(trouble: str, tmp_path: Path) -> None:
    """Rows that decode go on; a prompt whose entry cannot be had is read; the answer is the same."""
    stores: list[Troubled] = []

    def open_store(models: Models) -> PromptStore:
        stores.append(Troubled(tmp_path, "slow" if trouble == "cancelled" else trouble))
        stores[-1].refresh()
        return stores[-1]

    with running(open_store=open_store) as server:
        wanted = server.complete(LONG + ENDS[0], 20)
        server.wait_until_empty()
    if trouble == "damaged":
        for path in tmp_path.glob("*.safetensors"):
            path.write_bytes(path.read_bytes()[:-1])
    with running(open_store=open_store) as server, ThreadPoolExecutor(2) as pool:
        if trouble == "cancelled":
            with contextlib.suppress(httpx.ReadTimeout):
                server.http.post("/v1/completions", json={"prompt": LONG + ENDS[0]}, timeout=0.5)
            server.wait_until(lambda: not server.rows.active)
            other = pool.submit(server.post, prompt=LONG + ENDS[0], max_tokens=20)
            server.wait_until(lambda: bool(server.rows.active))
            stores[-1].go_on.set()
            answer = other.result().json()
        else:
            slow = pool.submit(server.post, prompt=LONG + ENDS[0], max_tokens=20)
            prefixes = server.rows.prefixes
            server.wait_until(lambda: server.metrics.total("prefix_misses") > 0 or prefixes._load is not None)
            if trouble == "slow":
                server.complete("class A:\n    ", 30)
                assert not slow.done()
                stores[-1].go_on.set()
            answer = slow.result().json()
        assert answer["choices"][0]["text"] == wanted
        assert (cached(answer) > 0) == (trouble in ("slow", "cancelled"))
        assert stores[-1].damaged == (trouble == "damaged")
        server.wait_until_empty()


def test_all_is_written_at_the_end(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    writes, go_on = threading.Event(), threading.Event()

    class Slow(PromptStore):
        def write(self, new: Any) -> bool:
            writes.set()
            assert go_on.wait(20)
            return super().write(new)

    store = Slow(tmp_path, fingerprint="mine")
    prefixes = rows.TieredPrefixes(PromptMemory(fingerprint="mine"), store, lambda: None, lambda: "mine")
    caches = [KVCache()]
    caches[0].update_and_fetch(mx.zeros((1, 1, 99, 32)), mx.zeros((1, 1, 99, 32)))
    for tokens in (range(99), range(1, 100)):
        prefixes.keep(list(tokens), caches)
    assert writes.wait(20)
    timer = threading.Timer(1.0, go_on.set)
    timer.start()
    prefixes.close()
    assert go_on.is_set()
    assert len(PromptStore(tmp_path, fingerprint="mine").entries()) == 2
    assert not caplog.records


def test_a_full_disk_is_logged_once_and_used_again_when_there_is_room(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under a budget a prompt is stored after each of many chunks."""
    monkeypatch.setattr(rows, "RETRY_SECONDS", 0.1)
    stores: list[Troubled] = []

    def open_store(models: Models) -> PromptStore:
        stores.append(Troubled(tmp_path, "full"))
        return stores[-1]

    def ask(beginning: str) -> list[str]:
        server.complete(beginning + LONG, 1)
        server.wait_until_kept()
        time.sleep(0.1)
        return [line for line in caplog.messages if "prompt store" in line]

    with caplog.at_level(logging.WARNING, "mlx_kv"), running(CachePolicy(budget=128), open_store=open_store) as server:
        ask("# 1\n")
        (line,) = ask("# 2\n")
        assert "cannot be written (No space left on device): free space" in line
        assert not stores[0].entries()
        stores[0].trouble = ""
        assert ask("# 3\n")[1:] == ["the prompt store can be written again"]
        assert stores[0].entries()
        stores[0].trouble = "full"
        assert ask("# 4\n")[2:] == [line]


@pytest.mark.parametrize("ends", ["while it is read", "while it decodes", "with the server"])
@pytest.mark.parametrize(
    "policy",
    [CachePolicy(), CachePolicy(bits=8), CachePolicy(max_kv_size=200), CachePolicy(budget=200)],
    ids=["full", "8 bits", "windowed", "budget"],
)
def test_what_was_read_for_a_request_that_ends_early_is_not_read_again(
    policy: CachePolicy, ends: str, tmp_path: Path
) -> None:
    """A client with a short time-out gets its answer at last."""

    def open_store(models: Models) -> PromptStore:
        return PromptStore(tmp_path)

    def give_up(server: Running) -> None:
        with contextlib.suppress(httpx.ReadTimeout):
            if ends == "while it decodes":
                stream = server.client.completions.create(model="reference", prompt=LONG, max_tokens=500, stream=True)
                for _ in range(5):
                    next(stream)
                stream.close()
            else:
                httpx.post(f"{server.url}/v1/completions", json={"prompt": LONG, "max_tokens": 9}, timeout=0.05)

    stored: dict[str, Any] = (
        {"open_store": open_store} if ends == "with the server" else {"prompt_memory_bytes": PLENTY}
    )
    with running(policy) as plain:
        expected = plain.complete(LONG, 9)
        tokens = plain.post(prompt=LONG, max_tokens=1).json()["usage"]["prompt_tokens"]
    with contextlib.ExitStack() as servers:
        server = servers.enter_context(running(policy, prefill_step_size=128, **stored))
        step = server.rows.engine.step

        def slow_step() -> Any:
            time.sleep(0.1)  # so that the client gives up within the prompt
            return step()

        server.rows.engine.step = slow_step  # type: ignore[method-assign]
        if ends == "with the server":
            with ThreadPoolExecutor(1) as pool:
                pool.submit(server.post, prompt=LONG, max_tokens=9)
                server.wait_until(lambda: any(jobs for jobs, _ in server.rows.reading))
                time.sleep(0.3)
                server.worker.stop()
            server = servers.enter_context(running(policy, **stored))
        else:
            give_up(server)
            server.wait_until_empty()
        answer = server.post(prompt=LONG, max_tokens=9).json()
        assert 128 <= cached(answer) < tokens
        assert answer["choices"][0]["text"] == expected
