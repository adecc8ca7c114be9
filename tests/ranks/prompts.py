"""Requests to a worker, of one process and of several ranks: what is found of their prompts, and what ranks keep.

A case is a policy and the bytes of the memory. Cached tokens and answers are the same for all numbers of ranks.
"""

from __future__ import annotations

import mlx_kv  # noqa: F401  it loads a tuned BLAS before MLX

# isort: split
import gc
import json
import time
from typing import Any

import mlx.core as mx
from generating import joined, model_of, tokenizer

from mlx_kv import CachePolicy
from mlx_kv.prefixes.memory import BlockCaches
from mlx_kv.ranks.group import RankGroup
from mlx_kv.server.output import Job
from mlx_kv.server.rows import Models, WorkerSettings
from mlx_kv.server.served import Served
from mlx_kv.server.worker import Worker

PLENTY = 2**28
TEXT = [(7 * i * i + 3 * i) % 90 for i in range(400)]
PROMPTS = [
    TEXT[:150],
    [*TEXT[:130], *TEXT[200:240]],
    TEXT[:150],
    [*TEXT[:100], *TEXT[300:380]],
    TEXT[200:330],
    [*TEXT[:130], *TEXT[200:240], *TEXT[90:150]],
]
POLICIES = {
    "plain": CachePolicy(),
    "8 bits": CachePolicy(bits=8, group_size=32),
    "budget": CachePolicy(budget=96, keep_recent=8, margin=8, sinks=2),
}


def worker_of(family: str, model: Any, policy: str, memory: int, group: RankGroup | None) -> Worker:
    settings = WorkerSettings(POLICIES[policy], max_batch_size=3, prefill_step_size=32, prompt_memory_bytes=memory)
    return Worker([Served(family, lambda: Models(model, tokenizer()), settings)], group)


def until(done: Any) -> None:
    deadline = time.monotonic() + 60
    while not done():
        assert time.monotonic() < deadline, "a request takes too long"
        time.sleep(0.01)


def asked(worker: Worker) -> dict[str, Any]:
    """Of each request the cached tokens and the answer, and the number of entries at the end."""
    ended: set[int] = set()
    worker.deliver = lambda chunks: ended.update(each.job.number for each in chunks if each.finish_reason is not None)
    worker.start()
    told = []
    for number, prompt in enumerate(PROMPTS):
        job = Job(prompt, 6)
        worker.submit(job)
        if number == 2:
            told.append(beside(worker, ended))
        until(lambda job=job: job.number in ended)
        told.append([job.cached, job.answer])
    time.sleep(0.8)  # an update of the figures, at which the others free what is no longer needed
    entries = worker.default.rows.prefixes.memory
    result = {"told": told, "entries": len(entries), "nbytes": entries.nbytes}
    assert worker.stop(20)
    return result


def beside(worker: Worker, ended: set[int]) -> list[Any]:
    """Of a request that shares its beginning with nobody, beside one that begins alike and is cancelled."""
    cancelled, private = Job([*TEXT[220:], 7], 2000), Job([*TEXT[220:390], 3, 5], 6, keep=False)
    worker.submit(cancelled)
    worker.submit(private)
    until(lambda: len(cancelled.answer) > 3)
    worker.cancel(cancelled)
    until(lambda: private.number in ended)
    return [private.cached, private.answer]


def alone(family: str, policy: str, memory: int) -> dict[str, Any]:
    return asked(worker_of(family, model_of(family), policy, memory, None))


def ranked(family: str, split: str, policy: str, memory: str) -> None:
    """The leader writes down what came of the requests, and the others what they still have at the end."""
    with joined(family, split) as (model, group):
        mx.eval(model.parameters())  # here: the worker has its own thread
        worker = worker_of(family, model, policy, int(memory), group)
        if group.leads:
            print(json.dumps(asked(worker)))
            return
        worker.follow()
        gc.collect()
        blocks = {block: size for part in group.parts.values() for block, size in part.blocks.items()}
        entries = sum(isinstance(part, BlockCaches) for part in group.parts.values())
        print(json.dumps({"parts": len(group.parts), "entries": entries, "nbytes": sum(blocks.values())}))
