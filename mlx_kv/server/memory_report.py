"""What is in memory, for the page and for Prometheus: of every request that is not answered yet.

Decides which figures are shown. Knows nothing about HTTP, nor how rows are kept. A snapshot is up to a quarter of a
second old and may not know of a request that was let in since: those are shown, too.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from mlx_kv.generation.speculation.statistics import SpeculationStatistics
from mlx_kv.policy import CachePolicy
from mlx_kv.server.admission import AdmissionController
from mlx_kv.server.job import Job, Snapshot
from mlx_kv.server.metrics import Metrics
from mlx_kv.server.occupancy import RowOccupancy
from mlx_kv.server.policies import policy_name
from mlx_kv.server.worker import Worker

COUNTERS = ("generated_tokens", "tokens_evicted", "prefix_hits", "prefix_misses")


def set_gauges(metrics: Metrics, snapshot: Snapshot, admission: AdmissionController) -> None:
    """What Prometheus reads of a moment."""
    occupancy, rows = snapshot.occupancy, sum(job.joined for job in admission.jobs)
    metrics.rows.set(rows)
    metrics.waiting.set(admission.admitted - rows)
    metrics.tokens_per_second.set(snapshot.tokens_per_second)
    metrics.bytes_live.set(occupancy.bytes_live)
    metrics.bytes_allocated.set(occupancy.bytes_allocated)
    metrics.bytes_full.set(occupancy.bytes_full)
    metrics.active_memory.set(snapshot.active_memory)
    metrics.prompt_memory.set(snapshot.prompt_memory)
    metrics.planned.set(snapshot.planned)
    metrics.memory_limit.set(admission.worker.limit.limit or 0)
    metrics.policies.set(len(admission.worker.rows_by_policy))
    if snapshot.speculation is not None:
        metrics.draft_length.set(snapshot.speculation.length)
        metrics.draft_tokens_per_pass.set(snapshot.speculation.tokens_per_pass)
        metrics.draft_gain.set(snapshot.speculation.gain or 0)


def memory_report(worker: Worker, admission: AdmissionController, metrics: Metrics) -> dict[str, Any]:
    """What the page shows, in JSON's terms; for some seconds from now positions of rows are looked at, too."""
    snapshot, jobs = worker.watch(), admission.jobs
    occupancy, drafts = snapshot.occupancy, snapshot.speculation
    decoding = dict(zip(snapshot.decoding, zip(snapshot.generated, occupancy.rows, strict=False), strict=False))
    return {
        **{name: metrics.total(name) for name in COUNTERS},
        "model": admission.name,
        "max_batch_size": worker.max_batch_size,
        "rows": [_row(job, worker.policy, drafts, *decoding.get(job, (len(job.answer), ()))) for job in jobs],
        "waiting": admission.admitted - sum(job.joined for job in jobs),
        "in_flight": admission.admitted,
        "history": worker.history.figures(time.monotonic()),
        "tokens_per_second": round(snapshot.tokens_per_second, 1),
        "bytes_live": occupancy.bytes_live,
        "bytes_allocated": occupancy.bytes_allocated,
        "bytes_full": occupancy.bytes_full,
        "active_memory": snapshot.active_memory,
        "prompt_memory": snapshot.prompt_memory,
        "memory_limit": worker.limit.limit,
        "weights": worker.limit.weights,
        "bytes_planned": snapshot.planned,
        "policies": [{"policy": name, "rows": rows} for name, rows in worker.rows_by_policy],
        "keeps_prompts": worker.keeps_prompts,
        "drafts": None if drafts is None else drafts.figures(),
    }


def _row(
    job: Job,
    policy: CachePolicy,
    drafts: SpeculationStatistics | None,
    generated: int,
    layers: Sequence[RowOccupancy],
) -> dict[str, Any]:
    return {
        "number": job.number,
        "policy": policy_name(job.policy or policy),
        "state": "decoding" if job.answer else "reading" if job.joined else "waiting",
        "prompt_tokens": len(job.tokens),
        "cached_tokens": job.cached,
        "read_tokens": len(job.tokens) if job.answer else max(job.read, job.cached),
        "drafts": None if drafts is None else _drafts(job, drafts),
        "generated_tokens": generated,
        "seconds": round(time.monotonic() - job.since, 1),
        "layers": [asdict(layer) | {"evicted": layer.evicted} for layer in layers],
    }


def _drafts(job: Job, of_all: SpeculationStatistics) -> dict[str, float | int | None]:
    """What was drafted for one row. A pass takes as long for all rows, so a row gains by what it gets of it."""
    own = len(job.answer) / max(1, len(job.answer) - job.accepted)  # tokens that it got of a pass
    gain = None if of_all.gain is None or not of_all.tokens_per_pass else of_all.gain * own / of_all.tokens_per_pass
    return {
        "draft_length": job.drafted,
        "accepted": job.accepted,
        "tokens_per_pass": round(own, 2),
        "draft_gain": None if gain is None else round(gain, 2),
    }
