"""The worker without HTTP: models of any family, disks that fail, rows that wait for each other."""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from tiny_models import make_model

from mlx_kv import CachePolicy, PromptStore
from mlx_kv.server.output import Job, OutputChunk
from mlx_kv.server.rows import Models, WorkerSettings
from mlx_kv.server.served import Served
from mlx_kv.server.worker import Worker

PROMPT = [(7 * i * i + 3 * i) % 90 for i in range(700)]


class Submitted:
    """A job, and what came of it."""

    def __init__(self, job: Job) -> None:
        self.job, self.ended, self.chunks = job, threading.Event(), list[OutputChunk]()
        self.first = 0.0

    def wait(self) -> list[int]:
        assert self.ended.wait(20), "it never ended"
        assert self.chunks[-1].error is None, self.chunks[-1].error
        return self.job.answer


class WorkerClient:
    """A worker, and somebody to ask it."""

    def __init__(self, worker: Worker) -> None:
        self.worker, self.submitted = worker, dict[int, Submitted]()
        worker.deliver = self.deliver

    def deliver(self, chunks: list[OutputChunk]) -> None:
        for chunk in chunks:
            asked = self.submitted[chunk.job.number]
            asked.chunks.append(chunk)
            asked.first = asked.first or time.monotonic()
            if chunk.finish_reason is not None:
                asked.ended.set()

    def ask(self, tokens: list[int], max_tokens: int = 8) -> Submitted:
        job = Job(list(tokens), max_tokens)
        self.submitted[job.number] = Submitted(job)
        self.worker.submit(job)
        return self.submitted[job.number]


WHERE = ("memory", "store")


@contextlib.contextmanager
def worker_at_work(
    reference: Any,
    family: str,
    policy: CachePolicy | None = None,
    prompt_memory_bytes: int = 2**28,
    draft: bool = False,
    open_store: Callable[[Models], PromptStore] | None = None,
    **options: Any,
) -> Iterator[WorkerClient]:
    def models() -> Models:
        model = make_model(family, max_position_embeddings=8192)
        return Models(model, reference[1], model if draft else None)  # a draft that is always right

    settings = WorkerSettings(
        policy or CachePolicy(), prompt_memory_bytes=prompt_memory_bytes, open_store=open_store, **options
    )
    worker = Worker([Served(family, models, settings)])
    worker.start()
    try:
        yield WorkerClient(worker)
    finally:
        worker.stop()


@pytest.mark.parametrize(
    ("family", "where", "draft"),
    [
        *[(family, where, False) for family in ("lfm2", "falcon_h1", "gemma3_text", "gpt_oss") for where in WHERE],
        ("lfm2", "memory", True),
        ("falcon_h1", "store", True),
    ],
)
@pytest.mark.slow
def test_prompts_of_other_families_are_found_again(
    family: str, where: str, draft: bool, reference: Any, tmp_path: Path
) -> None:
    """Recurrent state serves exactly what it has read, drafts or not; windows and sinks go back as far as they can."""
    store = {"prompt_memory_bytes": 0, "open_store": lambda models: PromptStore(tmp_path)} if where == "store" else {}
    with (
        worker_at_work(reference, family, draft=draft, prefill_step_size=64, **store) as kept,
        worker_at_work(reference, family, prompt_memory_bytes=0, prefill_step_size=64) as anew,
    ):
        first = kept.ask(PROMPT)
        first.wait()
        for tokens in (PROMPT, [*PROMPT[:650], 1, 2, 3, 4, 5], [*first.job.all_tokens, 5, 6]):
            if kept.worker.default.rows.prefixes.store is not None:
                time.sleep(0.2)
                kept.worker.default.rows.prefixes._disk.submit(kept.worker.default.rows.prefixes.store.refresh).result()
            asked = kept.ask(tokens)
            assert asked.wait() == anew.ask(tokens).wait()
            assert asked.job.cached >= 576  # the chunk before 640 at the least
        assert kept.worker.metrics.total("engine_failures") == 0


@pytest.mark.parametrize("said", [False, True], ids=["another answer", "the answer"])
@pytest.mark.parametrize(
    ("family", "policy", "draft"),
    [
        *[(family, CachePolicy(), False) for family in ("llama", "gemma3_text", "gpt_oss", "qwen3_next")],
        ("gemma3_text", CachePolicy(bits=8, group_size=32), False),
        ("lfm2", CachePolicy(), True),
    ],
    ids=str,
)
def test_a_conversation_fills_the_room(
    family: str, policy: CachePolicy, draft: bool, said: bool, reference: Any
) -> None:
    """What the end of the row does not hold of the end of the prompt waits for it, where both have no room."""
    with worker_at_work(reference, family, policy, 0, draft) as alone:
        plan, weights = alone.worker.default.plan, alone.worker.limit.weights
        room = plan.nbytes(1280)
        with worker_at_work(reference, family, policy, room, draft, memory_limit=weights + room) as one:
            tokens, known = PROMPT, 0
            for turn in range(5):
                before, asked = len(tokens), one.ask(tokens)
                assert asked.wait() == alone.ask(tokens).wait()
                assert asked.job.cached >= known
                known = len(asked.job.all_tokens) - 1 - 2 * draft if said else before - 1
                tokens = [*(asked.job.all_tokens if said else [*tokens, 91]), *PROMPT[turn : turn + 60]]
            assert before > 900
            assert one.worker.monitor.metrics.total("engine_failures") == 0


def test_who_waited_for_a_prompt_goes_on_when_that_ends_with_its_first_token(reference: Any) -> None:
    with worker_at_work(reference, "llama") as one:
        one.ask(PROMPT[::-1], 2).wait()
        first, second = one.ask(PROMPT[:600], 1), one.ask([*PROMPT[:600], 3, 4], 1)
        second.wait()
        assert second.job.cached == 600
        assert second.first - first.first < 0.2  # a look at what is in memory comes later than that


@pytest.mark.slow
def test_what_a_draft_had_right_beyond_the_end_is_not_kept(reference: Any) -> None:
    with (
        worker_at_work(reference, "llama", draft=True) as one,
        worker_at_work(reference, "llama", prompt_memory_bytes=0) as alone,
    ):
        for tokens in (1, 2, 3, 4, 5):
            prompt = PROMPT[tokens : 200 + tokens]
            other = one.ask(PROMPT[::-1], 100)  # as long as it has tokens to come, rounds are long
            first = one.ask(prompt, tokens)
            first.wait()
            assert not other.ended.is_set()
            again = one.ask([*first.job.all_tokens, 3, 4], 10)
            assert again.wait() == alone.ask([*first.job.all_tokens, 3, 4], 10).wait()
            assert again.job.cached >= len(first.job.all_tokens) - 2
            other.wait()


@pytest.mark.parametrize("error", [RuntimeError("[malloc] out of memory"), KeyError("rows")])
def test_an_entry_that_cannot_be_made_costs_only_time(
    error: Exception, reference: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Failing(PromptStore):
        def restore(self, fetched: Any) -> Any:
            raise error

    def open_store(models: Models) -> PromptStore:
        store = Failing(tmp_path)
        store.refresh()
        return store

    with worker_at_work(reference, "llama", open_store=open_store) as one:
        wanted = one.ask(PROMPT).wait()
    with worker_at_work(reference, "llama", open_store=open_store) as one:
        assert one.worker.default.rows.prefixes.store.serves(PROMPT)
        asked = one.ask(PROMPT)
        assert asked.wait() == wanted
        assert asked.job.cached == 0
        assert one.ask(PROMPT[:50]).wait()
        assert one.worker.alive


def test_all_is_written_by_the_thread_for_the_disk(reference: Any, tmp_path: Path) -> None:
    class Counted(PromptStore):
        written: Sequence[str] = ()

        def write(self, new: Any) -> bool:
            self.written = [*self.written, threading.current_thread().name]
            return super().write(new)

    with worker_at_work(reference, "llama", open_store=lambda models: Counted(tmp_path)) as one:
        for start in range(12):
            one.ask(PROMPT[start : start + 100]).wait()
        store: Any = one.worker.default.rows.prefixes.store
        deadline = time.monotonic() + 10
        while len(store.written) < 12 and time.monotonic() < deadline:
            time.sleep(0.02)
        assert len(store.written) == 12
        assert all(name.startswith("mlx-kv disk") for name in store.written)


def test_a_short_prompt_does_not_wait_for_a_long_one(reference: Any) -> None:
    policy = CachePolicy(max_kv_size=100, max_write=64)
    with worker_at_work(reference, "llama", policy) as one:
        long, short = one.ask(PROMPT * 5, 1), one.ask(PROMPT[::-1][:90], 1)
        long.wait()
        short.wait()
        assert short.first < long.first


@pytest.mark.slow
@pytest.mark.parametrize("policy", [CachePolicy(), CachePolicy(max_kv_size=100, max_write=64)], ids=["full", "window"])
def test_prompts_wait_for_what_they_share_only_where_it_is_much(policy: CachePolicy, reference: Any) -> None:
    with worker_at_work(reference, "llama", policy) as one:
        first, second = one.ask([*PROMPT, 1, 2], 4), one.ask([*PROMPT, 3, 4], 4)
        assert first.wait()
        assert second.wait()
        assert second.job.cached >= 640
    with worker_at_work(reference, "llama", policy) as one:  # 300 tokens are not worth waiting for 6,000
        long, short = one.ask([*PROMPT[:300], *PROMPT[::-1] * 8], 1), one.ask([*PROMPT[:300], 5], 1)
        long.wait()
        short.wait()
        assert short.first < long.first


@pytest.mark.slow
@pytest.mark.parametrize("prompt_memory_bytes", [0, 2**28], ids=["store", "memory and store"])
@pytest.mark.parametrize("policy", [CachePolicy(), CachePolicy(max_kv_size=160)], ids=["full", "window"])
def test_jobs_that_come_and_go_at_any_time(
    policy: CachePolicy, prompt_memory_bytes: int, reference: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts that share parts of any length, two in five cancelled, a store too small: the others are right."""
    monkeypatch.setattr("mlx_kv.server.rows.REFRESH_EVERY", 0.05)
    chance = random.Random(0)
    bases = [[chance.randrange(90) for _ in range(900)] for _ in range(3)]

    def open_store(models: Models) -> PromptStore:
        return PromptStore(tmp_path, max_bytes=3_000_000)

    with (
        worker_at_work(reference, "llama", policy, prompt_memory_bytes, open_store=open_store, max_batch_size=4) as one,
        worker_at_work(reference, "llama", policy, 0, max_batch_size=1) as alone,
    ):
        left = []
        for _ in range(80):
            shared = chance.choice(bases)[: chance.randrange(50, 900)]
            own = [chance.randrange(90) for _ in range(chance.randrange(1, 40))]
            asked = one.ask(shared + own, chance.choice([1, 1, 3, 20]))
            if chance.random() < 0.4:
                time.sleep(chance.random() * 0.05)
                one.worker.cancel(asked.job)
            else:
                left.append(asked)
        answers = [asked.wait() for asked in left]
        sample = chance.sample(range(len(left)), 12)
        for index in sample:
            job = left[index].job
            assert answers[index] == alone.ask(job.tokens, job.max_tokens).wait()
        assert sum(asked.job.cached for asked in left) > 1000
        worker = one.worker
        assert not worker.default.rows.active
        assert not worker.default.rows.prefixes._requests
        assert not worker.default.rows.engine.busy
        assert worker.metrics.total("engine_failures") == 0
