"""Routes about the server: its models, health, metrics, and its pages for browsers."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from mlx_kv.generation.statistics import SpeculationStatistics
from mlx_kv.policy import CachePolicy
from mlx_kv.server.handler import AdmissionController
from mlx_kv.server.job import Job, Snapshot
from mlx_kv.server.json_http import ApiError, JsonResponse
from mlx_kv.server.memory import RowOccupancy
from mlx_kv.server.models import ModelNames
from mlx_kv.server.rows import policy_name
from mlx_kv.server.worker import Worker

PAGE = Path(__file__).with_name("page.html")
CHAT_PAGE = Path(__file__).with_name("chat.html")
PAGE_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'; img-src data:"
)
COUNTERS = ("generated_tokens", "tokens_evicted", "prefix_hits", "prefix_misses")


class StatusRoutes:
    """Endpoints that generate nothing."""

    def __init__(self, worker: Worker, admission: AdmissionController, names: ModelNames) -> None:
        self._worker, self._admission, self._names = worker, admission, names
        self._created = time.time()

    # --- models ---------------------------------------------------------------------------------------------------

    async def models(self, request: Request) -> Response:
        """All names of the model."""
        names = self._names.all
        data = {"object": "list", "data": [self._description(name) for name in names], "has_more": False}
        return JsonResponse(data | {"first_id": names[0], "last_id": names[-1]})

    async def model(self, request: Request) -> Response:
        """One name of the model."""
        name = request.path_params["name"]
        if name not in self._names:
            raise ApiError(404, "there is no such model here", "model", "model_not_found")
        return JsonResponse(self._description(name))

    def _description(self, name: str) -> dict[str, Any]:
        """With the fields of OpenAI's API, and those of Anthropic's."""
        created = int(self._created)
        openai = {"id": name, "object": "model", "created": created, "owned_by": "mlx-kv"}
        since = datetime.fromtimestamp(created, UTC).isoformat()
        anthropic = {"type": "model", "display_name": self._names.name, "created_at": since}
        return openai | {"sampling": self._worker.models.sampling.changed} | anthropic

    # --- health ---------------------------------------------------------------------------------------------------

    async def ready(self, request: Request) -> Response:
        """Whether requests are admitted."""
        alive = self._worker.alive
        reason = self._admission.closing if alive else self._worker.failure
        if reason is not None or not alive:
            return JsonResponse({"status": "not ready", "reason": reason}, 503)
        return JsonResponse({"status": "ready"})

    async def health(self, request: Request) -> Response:
        """Whether the worker is alive."""
        if not self._worker.alive:
            return JsonResponse({"status": "failed", "reason": self._worker.failure}, 503)
        return JsonResponse({"status": "ok"})

    # --- memory ---------------------------------------------------------------------------------------------------

    def _gauges(self, snapshot: Snapshot) -> dict[str, float]:
        """The gauges of /memory and /metrics, by their names in both."""
        occupancy = snapshot.occupancy
        return {
            "waiting": self._admission.admitted - sum(job.joined for job in self._admission.jobs),
            "tokens_per_second": round(snapshot.tokens_per_second, 1),
            "bytes_live": occupancy.bytes_live,
            "bytes_allocated": occupancy.bytes_allocated,
            "bytes_full": occupancy.bytes_full,
            "bytes_planned": snapshot.planned,
            "active_memory": snapshot.active_memory,
            "prompt_memory": snapshot.prompt_memory,
            "freed_memory": snapshot.freed_memory,
        }

    async def metrics(self, request: Request) -> Response:
        """Prometheus metrics; the gauges are set from the newest snapshot."""
        snapshot, metrics = self._worker.snapshot, self._worker.metrics
        for name, value in self._gauges(snapshot).items():
            getattr(metrics, name).set(value)
        metrics.rows.set(sum(job.joined for job in self._admission.jobs))
        metrics.memory_limit.set(self._worker.limit.limit or 0)
        metrics.policies.set(1)
        if snapshot.speculation is not None:
            metrics.draft_length.set(snapshot.speculation.length)
            metrics.draft_tokens_per_pass.set(snapshot.speculation.tokens_per_pass)
            metrics.draft_gain.set(snapshot.speculation.gain or 0)
        return Response(metrics.text(), media_type="text/plain; version=0.0.4")

    async def page(self, request: Request) -> Response:
        """The page that shows `memory`."""
        return _html(PAGE)

    async def chat_page(self, request: Request) -> Response:
        """A chat in the browser, through /v1/chat/completions."""
        return _html(CHAT_PAGE)

    async def memory(self, request: Request) -> Response:
        """Memory by request and in total, as JSON.

        A snapshot is up to a quarter of a second old; requests admitted since are included. For some seconds from now,
        snapshots contain the positions of rows.
        """
        worker, admission = self._worker, self._admission
        snapshot, jobs, metrics = worker.monitor.watch(), admission.jobs, worker.metrics
        occupancy, drafts = snapshot.occupancy, snapshot.speculation
        counts = zip((*snapshot.generated, *[0] * len(snapshot.reading)), occupancy.rows, strict=False)
        held = dict(zip((*snapshot.decoding, *snapshot.reading), counts, strict=False))
        report = {
            **{name: metrics.total(name) for name in COUNTERS},
            "model": self._names.name,
            "max_batch_size": worker.settings.max_batch_size,
            "rows": [_row(job, worker.policy, drafts, *held.get(job, (len(job.answer), ()))) for job in jobs],
            **self._gauges(snapshot),
            "in_flight": admission.admitted,
            "history": worker.monitor.history.figures(time.monotonic()),
            "memory_limit": worker.limit.limit,
            "freed_memory_limit": worker.freed_limit,
            "weights": worker.limit.weights,
            "policies": [{"policy": policy_name(worker.policy), "rows": sum(job.joined for job in jobs)}],
            "keeps_prompts": worker.settings.keeps_prompts,
            "prefixes": worker.monitor.prefixes.newest(),
            "drafts": None if drafts is None else drafts.figures(),
            "seconds": round(time.time() - self._created, 1),
        }
        return JsonResponse(report, headers={"Cache-Control": "no-store"})


def _html(page: Path) -> Response:
    headers = {"Content-Security-Policy": PAGE_POLICY, "Cache-Control": "no-store", "X-Frame-Options": "DENY"}
    return Response(page.read_bytes(), media_type="text/html", headers=headers)


def _row(
    job: Job,
    policy: CachePolicy,
    drafts: SpeculationStatistics | None,
    generated: int,
    layers: Sequence[RowOccupancy],
) -> dict[str, Any]:
    return {
        "number": job.number,
        "policy": policy_name(policy),
        "state": "decoding" if job.answer else "reading" if job.joined else "waiting",
        "prompt_tokens": len(job.tokens),
        "cached_tokens": job.cached,
        "read_tokens": len(job.tokens) if job.answer else max(job.read, job.cached),
        "drafts": None if drafts is None else _row_drafts(job, drafts),
        "generated_tokens": generated,
        "seconds": round(time.monotonic() - job.since, 1),
        "layers": [asdict(layer) | {"evicted": layer.evicted} for layer in layers],
    }


def _row_drafts(job: Job, total: SpeculationStatistics) -> dict[str, float | int | None]:
    """Drafts of one row. A pass takes equally long for all rows, so a row gains by its tokens per pass."""
    per_pass = len(job.answer) / max(1, len(job.answer) - job.accepted)
    gain = None
    if total.gain is not None and total.tokens_per_pass:
        gain = total.gain * per_pass / total.tokens_per_pass
    return {
        "draft_length": job.drafted,
        "accepted": job.accepted,
        "tokens_per_pass": round(per_pass, 2),
        "draft_gain": None if gain is None else round(gain, 2),
    }
