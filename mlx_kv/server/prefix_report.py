"""Reports why prompts were not reused: in the log, in /memory, in a metric and in a response header."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from prometheus_client import Counter

from mlx_kv.prefixes.index import MIN_SHARED
from mlx_kv.prefixes.prefix_match import PrefixMatch, Reason
from mlx_kv.server.job import Job

HEADER = "X-MLX-KV-Prefix"
MAX_REPORTS = 16  # in /memory
Decode = Callable[[Sequence[int]], str]
log = logging.getLogger("mlx_kv.server")


class PrefixReports:
    """Counts and logs prefix matches, and keeps the newest reports.

    Args:
        counter: of matches with a reason, by reason.

    Attributes:
        allows_text: whether reports may contain text of prompts. They do if the log level is INFO or lower, too, and
            the request lets its prompt be cached.
    """

    def __init__(self, counter: Counter) -> None:
        self._counter, self._reports = counter, deque[dict[str, Any]](maxlen=MAX_REPORTS)
        self.allows_text = False

    def add(self, job: Job, match: PrefixMatch, decode: Decode) -> None:
        """Reports the match of a job.

        Args:
            decode: returns the text of token ids.
        """
        logs = log.isEnabledFor(logging.INFO)
        report: dict[str, Any] = {"number": job.number, "prompt_tokens": match.tokens, "reused_tokens": match.reused}
        report |= {"reason": match.reason, "offered_tokens": match.offered, "difference": None}
        if match.difference is not None and logs and self.allows_text and job.keep:
            before, prompt, cached = match.difference.texts(decode)
            report["difference"] = {"before": before, "prompt": prompt, "cached": cached}
        self._reports.append(report)
        if match.reason is None:
            return
        self._counter.labels(match.reason).inc()
        if logs:
            log.info(
                "request %d: %d of %d prompt tokens reused: %s",
                job.number, match.reused, match.tokens, _why(match, report["difference"]),
            )  # fmt: skip

    def newest(self) -> list[dict[str, Any]]:
        """The newest reports, the oldest of them first."""
        return list(self._reports)


def _why(match: PrefixMatch, texts: dict[str, str] | None) -> str:
    offered = f"{match.offered} tokens"
    if match.reason is Reason.DIFFERS:
        short = f" (below {MIN_SHARED} tokens nothing is reused)" if match.offered < MIN_SHARED else ""
        where = f"differs from a cached prompt at token {match.offered}{short}"
        if texts is None:
            return where
        return f"{where}: after {texts['before']!r} it has {texts['prompt']!r}, the cached one {texts['cached']!r}"
    return {
        Reason.NONE_KEPT: "no prompt is cached",
        Reason.BELOW_64_TOKENS: f"prompts of up to {MIN_SHARED} tokens are not reused",
        Reason.EVICTED: f"{offered} or more were cached and evicted: raise --prompt-memory-bytes",
        Reason.NOT_TRIMMABLE: f"{offered} are cached, but caches of this policy cannot be trimmed back to them",
        None: "",
    }[match.reason]


def prefix_header(jobs: Iterable[Job]) -> str:
    """Reused and all tokens of the prompts of a request, each prompt once."""
    prompts = {id(job.tokens): job for job in jobs}.values()
    return f"{sum(job.cached for job in prompts)}/{sum(len(job.tokens) for job in prompts)}"
