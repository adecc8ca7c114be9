"""A line in the log for each request: who, what, how it ended, how long it took; of a completion also its tokens.

Decides what is told: never text of prompts or answers, nor what follows a path. Knows nothing about routes.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Any
from urllib.parse import quote

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mlx_kv.server.job import Job

log = logging.getLogger("mlx_kv.access")
JOBS = "mlx_kv.jobs"  # of a request's scope: what it asks the worker for
HUNG_UP = 499
LONGEST = 200  # characters of a path


def log_from(level: str) -> None:
    """Logs to stderr what is at least of this level, with the time; of other libraries warnings and errors alone."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    root = logging.getLogger()
    root.handlers = [handler]  # without one, `logging.warning` of any library would add its own
    root.setLevel("WARNING" if level in ("DEBUG", "INFO") else level)
    logging.getLogger("mlx_kv").setLevel(level)
    logging.getLogger("uvicorn").setLevel("WARNING" if level == "INFO" else level)


class AccessLog:
    """An application that logs its requests."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not log.isEnabledFor(logging.INFO):
            await self._app(scope, receive, send)
            return
        started, status, whole = time.monotonic(), 0, False

        async def watched(message: Message) -> None:
            nonlocal status, whole
            await send(message)
            status = message.get("status", status)
            whole = whole or (message["type"] == "http.response.body" and not message.get("more_body", False))

        try:
            await self._app(scope, receive, watched)
        finally:
            client, path = scope.get("client"), quote(scope["path"])[:LONGEST]
            ended = status if whole else HUNG_UP
            tokens = _tokens(scope.get(JOBS, ()))
            seconds = time.monotonic() - started
            who = client[0] if client else "-"
            log.info("%s %s %s %d %.3f s%s", who, scope["method"], path, ended, seconds, tokens)


def _tokens(jobs: Sequence[Job]) -> str:
    if not jobs:
        return ""
    counts: dict[str, Any] = {
        "prompt": sum(len(job.tokens) for job in jobs),
        "known": sum(job.cached for job in jobs),
        "generated": sum(len(job.answer) for job in jobs),
    }
    return "".join(f", {count} {name}" for name, count in counts.items())
