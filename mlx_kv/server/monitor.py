"""Measurements of a server: Prometheus metrics, tokens per second over time, snapshots of memory, reuse of prompts.

How much of a prompt was reused from cached prefixes, and if not all of it, why not, is reported in the log, in /memory,
and in a metric.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from importlib import metadata
from typing import Any

import mlx.core as mx
import numpy as np
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from mlx_kv.cache.layout import PLACES
from mlx_kv.generation.statistics import SpeculationStatistics
from mlx_kv.prefixes.index import MIN_SHARED
from mlx_kv.prefixes.memory import PromptMemory
from mlx_kv.ranks.group import TotalMemory
from mlx_kv.server.memory import BatchOccupancy, occupancy_of, tokens_evicted
from mlx_kv.server.output import Job

ALONE = TotalMemory()
BYTES = ("bytes_live", "bytes_allocated", "bytes_full")
UPDATE_EVERY = 0.25  # seconds between two snapshots
WATCHED_SECONDS = 3.0  # after a request for /memory, in which snapshots contain positions
RATE_SECONDS = 10.0  # over which tokens per second are averaged
SLOTS, RECENT_SLOTS = 240, 120  # of a history: since the start, and of one second each
Batch = tuple[Sequence[Job], Sequence[Any]]  # jobs, in the order of the rows of the caches; one cache for each layer

FIRST_TOKEN = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
BETWEEN_TOKENS = (0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.3, 0.6, 1.2, 2.5, 5, 10)
DURATION = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
CONTEXT_TOKENS = 40  # on each side of a difference; a token has a character or more
CONTEXT_CHARACTERS = 40
MAX_REPORTS = 16  # in /memory
Drafts = tuple[SpeculationStatistics | None, SpeculationStatistics | None]  # of an engine; a copy of the last update
Decode = Callable[[Sequence[int]], str]
log = logging.getLogger("mlx_kv.server")


# --- metrics ----------------------------------------------------------------------------------------------------------


class Metrics:
    """The Prometheus metrics of one server, in their own registry."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"mlx_kv_{name}", text, labels, registry=registry)

        def gauge(name: str, text: str, *labels: str) -> Gauge:
            return Gauge(f"mlx_kv_{name}", text, labels, registry=registry)

        def histogram(name: str, text: str, buckets: Sequence[float], *labels: str) -> Histogram:
            return Histogram(f"mlx_kv_{name}", text, labels, buckets=buckets, registry=registry)

        self.requests = counter(
            "requests", "Requests by endpoint and HTTP status; 499: the client hung up.", "endpoint", "status"
        )
        self.finished = counter("finished", "Finished rows by finish reason.", "reason")
        self.prompt_tokens = counter("prompt_tokens", "Prompt tokens, cached ones included.")
        self.cached_tokens = counter("prompt_tokens_cached", "Prompt tokens found in the prefix cache.")
        self.generated_tokens = counter("generated_tokens", "Tokens generated.")
        self.prefix_hits = counter("prefix_hits", "Prompts with a cached prefix.")
        self.prefix_misses = counter("prefix_misses", "Prompts without a cached prefix.")
        self.prefix_shortfalls = counter(
            "prefix_shortfalls", "Prompts of which no or not all tokens could be reused, by reason.", "reason"
        )
        self.evicted = counter("tokens_evicted", "Tokens evicted by budgets, in the busiest layer of each row.")
        self.drafted = counter("draft_tokens", "Draft tokens proposed.")
        self.accepted = counter("draft_tokens_accepted", "Draft tokens accepted.")
        self.draft_passes = counter("draft_passes", "Forward passes with drafts, each of all rows.")
        self.engine_failures = counter("engine_failures", "Errors that ended all rows of an engine, which restarted.")
        self.first_token = histogram(
            "time_to_first_token_seconds", "Seconds from a request to its first token.", FIRST_TOKEN
        )
        self.queue = histogram(
            "request_queue_seconds", "Seconds from a request to the beginning of its prompt's reading.", FIRST_TOKEN
        )
        self.between_tokens = histogram(
            "inter_token_latency_seconds",
            "Seconds between two tokens of an answer; means where several come at once.",
            BETWEEN_TOKENS,
        )
        self.duration = histogram(
            "request_duration_seconds", "Seconds from a request to the end of its response.", DURATION, "endpoint"
        )
        self.out_of_memory = counter("out_of_memory", "Requests ended because memory had run out.")
        self.preemptions = counter("preemptions", "Rows that made room for others, to go on later where they were.")
        self.thinking_limits = counter("thinking_limits", "Answers whose thinking was ended by its limit.")
        self.rows = gauge("rows", "Requests in prefill or decoding.")
        self.waiting = gauge("requests_waiting", "Requests waiting for a row.")
        self.tokens_per_second = gauge("tokens_per_second", "Tokens generated per second, over the last 10 seconds.")
        self.draft_length = gauge("draft_length", "Maximum draft tokens of a row in the last pass.")
        self.draft_tokens_per_pass = gauge("draft_tokens_per_pass", "Average tokens of a row per pass.")
        self.draft_gain = gauge("draft_gain", "Speed relative to decoding without drafts; 0 if unknown.")
        self.drafters = gauge("drafter", "1 for each drafter in use.", "drafter")
        self.bytes_live = gauge("kv_bytes_live", "Bytes of visible keys and values of decoding rows.")
        self.bytes_allocated = gauge("kv_bytes_allocated", "Bytes allocated for keys and values, dead slots included.")
        self.bytes_full = gauge("kv_bytes_full", "Bytes of all tokens' keys and values, without eviction.")
        self.prompt_memory = gauge("prompt_memory_bytes", "Bytes of cached prefixes in memory.")
        self.bytes_planned = gauge("kv_bytes_planned", "Maximum bytes of the current rows, prompts and answers.")
        self.memory_limit = gauge("memory_limit_bytes", "Limit for weights, rows and cached prefixes; 0: none.")
        self.policies = gauge("cache_policies", "Cache policies with an engine.")
        self.model_loaded = gauge("model_loaded", "Whether the weights of a model are in memory.", "model")
        self.model_weights = gauge("model_weight_bytes", "Bytes of the weights of a model.", "model")
        self.model_rows = gauge("model_rows", "Requests to a model in prefill or decoding.", "model")
        self.model_loads = counter("model_loads", "How often the weights of a model were read.", "model")
        build = gauge("build_info", "1, with the versions.", "version", "mlx", "mlx_lm")
        build.labels(*map(metadata.version, ("mlx-kv", "mlx", "mlx-lm"))).set(1)
        self.active_memory = gauge("active_memory_bytes", "Bytes of all MLX arrays: weights, caches, and others.")
        self.freed_memory = gauge("freed_memory_bytes", "Bytes of freed buffers that MLX keeps for reuse.")

    def total(self, name: str) -> int:
        """The value of a counter without labels, by its name without mlx_kv_."""
        return int(self.registry.get_sample_value(f"mlx_kv_{name}_total") or 0)


# --- tokens over time -------------------------------------------------------------------------------------------------


class CountsSinceStart:
    """Counts since the start in slots of equal length; once there are too many, pairs of slots are merged.

    Attributes:
        seconds: of a slot.
    """

    def __init__(self, slots: int = SLOTS) -> None:
        self._slots, self.seconds = slots, 1
        self._counts = [0]

    def add(self, since_start: float, count: int) -> None:
        """Adds to the slot of a time in seconds; times must not decrease."""
        while since_start >= self._slots * self.seconds:
            pairs = self._counts + [0] * (len(self._counts) % 2)
            self._counts = [pairs[i] + pairs[i + 1] for i in range(0, len(pairs), 2)]
            self.seconds *= 2
        slot = int(since_start // self.seconds)
        self._counts += [0] * (slot + 1 - len(self._counts))
        self._counts[slot] += count

    def counts(self, since_start: float) -> list[int]:
        """Counts of all slots up to a time, oldest first; the last slot is incomplete."""
        counts = list(self._counts)
        return counts + [0] * (min(self._slots, int(since_start // self.seconds) + 1) - len(counts))


class RecentCounts:
    """Counts of the newest slots.

    Attributes:
        seconds: of a slot.
    """

    def __init__(self, slots: int = RECENT_SLOTS, seconds: int = 1) -> None:
        self._slots, self.seconds = slots, seconds
        self._counts: dict[int, int] = {}  # by slot, where above 0

    def add(self, since_start: float, count: int) -> None:
        """Adds to the slot of a time in seconds."""
        slot = int(since_start // self.seconds)
        self._counts = {old: value for old, value in self._counts.items() if old > slot - self._slots}
        self._counts[slot] = self._counts.get(slot, 0) + count

    def counts(self, since_start: float) -> list[int]:
        """Counts of the newest slots up to a time, oldest first; the last slot is incomplete."""
        last, counts = int(since_start // self.seconds), self._counts
        return [counts.get(slot, 0) for slot in range(max(0, last + 1 - self._slots), last + 1)]


class TokenHistory:
    """Generated tokens over time, in constant memory: the last minutes by second, and since the start ever coarser.

    One thread adds, others may read.

    Args:
        started: time of the start, on the clock of the other times.
    """

    def __init__(self, started: float) -> None:
        self._started = started
        self._scales: dict[str, RecentCounts | CountsSinceStart] = {
            "recent": RecentCounts(),
            "since_start": CountsSinceStart(),
        }

    def add(self, now: float, tokens: int) -> None:
        """Counts tokens at a time."""
        for scale in self._scales.values():
            scale.add(now - self._started, tokens)

    def figures(self, now: float) -> dict[str, Any]:
        """For each scale, the seconds of a slot and the tokens of all slots, oldest first."""
        since = now - self._started
        return {name: {"seconds": scale.seconds, "tokens": scale.counts(since)} for name, scale in self._scales.items()}


# --- reuse of prompts -------------------------------------------------------------------------------------------------


class Reason(StrEnum):
    """Why a prompt was not reused, or not as far as it could have been."""

    NONE_KEPT = "none_kept"  # there are no cached prompts
    BELOW_64_TOKENS = "below_64_tokens"  # the prompt is too short to be cached
    DIFFERS = "differs"
    EVICTED = "evicted"
    TOO_LARGE = "too_large"  # for the memory for cached prompts, which has its beginning at most
    NOT_TRIMMABLE = "not_trimmable"  # the caches can't be trimmed back to the tokens in common


def difference_texts(prompt: bytes, cached: bytes, position: int, decode: Decode) -> dict[str, str]:
    """The texts before and after the first difference of two packed prompts, each of at most CONTEXT_CHARACTERS.

    Args:
        position: tokens in common.
        decode: returns the text of token ids.
    """

    def ids(tokens: bytes, start: int, stop: int) -> list[int]:
        listed = np.frombuffer(tokens[4 * max(0, start) : 4 * stop], ">u4").tolist()
        return [token for token in listed if token < PLACES]  # places of images have no text

    in_common = ids(prompt, position - CONTEXT_TOKENS, position)
    before = decode(in_common) if in_common else ""

    def after(tokens: bytes) -> str:
        # Decoded with the tokens before: alone, some tokenizers drop a leading space.
        following = ids(tokens, position, position + CONTEXT_TOKENS)
        text = decode([*in_common, *following]) if following else before
        return (text[len(before) :] if text.startswith(before) else decode(following))[:CONTEXT_CHARACTERS]

    return {"before": before[-CONTEXT_CHARACTERS:], "prompt": after(prompt), "cached": after(cached)}


@dataclass(frozen=True)
class PrefixMatch:
    """What the lookup of a prompt found.

    Attributes:
        tokens: of the prompt.
        reused: tokens that are not read again.
        reason: why a cached prompt was not reused, or only in part; None if it offers no more.
        offered: tokens that the prompt has in common with a cached or evicted prompt.
        cached: the cached prompt that it differs from after those, packed; only with `Reason.DIFFERS`.
    """

    tokens: int
    reused: int
    reason: Reason | None = None
    offered: int = 0
    cached: bytes | None = None


def match_prefix(tokens: bytes, reused: int, memory: PromptMemory) -> PrefixMatch:
    """Compares a packed prompt, of which some tokens are reused, with all cached prompts."""
    count = len(tokens) // 4
    if reused >= count - 1:
        return PrefixMatch(count, reused)
    if count <= MIN_SHARED:  # the last token is always read
        return PrefixMatch(count, reused, Reason.BELOW_64_TOKENS)
    large, nearest = memory.too_large.longest(tokens), memory.nearest(tokens)
    offered = reused if nearest is None else max(reused, nearest[1])
    evicted = memory.evicted.longest(tokens)
    if large >= max(evicted, offered + MIN_SHARED) or offered < MIN_SHARED <= large:
        return PrefixMatch(count, reused, Reason.TOO_LARGE, large)
    if evicted >= offered + MIN_SHARED or offered < MIN_SHARED <= evicted:
        return PrefixMatch(count, reused, Reason.EVICTED, evicted)
    if nearest is None:
        return PrefixMatch(count, reused, None if reused else Reason.NONE_KEPT)
    entry, common = nearest
    if common < reused:  # what was reused has gone on in the row
        return PrefixMatch(count, reused)
    if common < min(len(entry), count):
        return PrefixMatch(count, reused, Reason.DIFFERS, common, entry.tokens)
    return PrefixMatch(count, reused, None if reused >= min(common, count - 1) else Reason.NOT_TRIMMABLE, common)


class PrefixReports:
    """Counts and logs prefix matches, and keeps the newest reports.

    Args:
        counter: of matches with a reason, by reason.

    Attributes:
        reports: the newest ones, the oldest of them first.
        allows_text: whether reports may contain text of prompts. They do if the log level is INFO or lower, too, and
            the request lets its prompt be cached.
    """

    def __init__(self, counter: Counter) -> None:
        self._counter, self.reports = counter, deque[dict[str, Any]](maxlen=MAX_REPORTS)
        self.allows_text = False

    def add(self, job: Job, match: PrefixMatch, decode: Decode) -> None:
        """Reports the match of a job.

        Args:
            decode: returns the text of token ids.
        """
        logs = log.isEnabledFor(logging.INFO)
        report: dict[str, Any] = {"number": job.number, "prompt_tokens": match.tokens, "reused_tokens": match.reused}
        report |= {"reason": match.reason, "offered_tokens": match.offered, "difference": None}
        if match.cached is not None and logs and self.allows_text and job.keep:
            report["difference"] = difference_texts(job.prompt, match.cached, match.offered, decode)
        self.reports.append(report)
        if match.reason is None:
            return
        self._counter.labels(match.reason).inc()
        if logs:
            log.info(
                "request %d: %d of %d prompt tokens reused: %s",
                job.number, match.reused, match.tokens, _why(match, report["difference"]),
            )  # fmt: skip


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
        Reason.EVICTED: f"{offered} or more were cached and evicted: raise --prompt-memory-bytes or --memory-limit",
        Reason.TOO_LARGE: f"{offered} or more did not fit into memory: raise --prompt-memory-bytes or --memory-limit",
        Reason.NOT_TRIMMABLE: f"{offered} are cached, but caches of this policy cannot be trimmed back to them",
        None: "",
    }[match.reason]


# --- snapshots of memory ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Snapshot:
    """Memory of the worker at one moment.

    Attributes:
        decoding, reading: jobs that decode and jobs in prefill, in the order of the rows of `occupancy`.
        generated: tokens of each of them.
        active_memory, prompt_memory: bytes of all arrays, and of cached prefixes.
        speculation: statistics of drafts since the engine was made, of the first that drafts; None without drafts.
        planned: maximum bytes of the current rows.
        freed_memory: bytes of freed buffers that MLX keeps for reuse, of this process.
    """

    occupancy: BatchOccupancy = field(default_factory=BatchOccupancy)
    decoding: tuple[Job, ...] = ()
    generated: tuple[int, ...] = ()
    tokens_per_second: float = 0.0
    active_memory: int = 0
    prompt_memory: int = 0
    speculation: SpeculationStatistics | None = None
    planned: int = 0
    reading: tuple[Job, ...] = ()
    freed_memory: int = 0


class Monitor:
    """Counts tokens and makes snapshots of memory. All but `watch` is called in the worker's thread.

    Attributes:
        snapshot: the newest one.
        prefixes: reports how much of prompts was reused.
    """

    def __init__(self) -> None:
        self.metrics = Metrics()
        self.prefixes = PrefixReports(self.metrics.prefix_shortfalls)
        self._updated, self._watched = 0.0, -WATCHED_SECONDS
        self._generated: deque[tuple[float, int]] = deque()  # (time, tokens)
        self._drafts: list[Drafts] = []  # of each model
        self.snapshot, self.history = Snapshot(), TokenHistory(time.monotonic())

    def watch(self) -> Snapshot:
        """The newest snapshot. Snapshots of the next seconds contain positions of rows."""
        self._watched = time.monotonic()
        return self.snapshot

    @property
    def rate_falls(self) -> bool:
        """Whether tokens per second are above 0, so that updates are needed without new tokens, too."""
        return bool(self._generated)

    def count_generated(self, tokens: int) -> None:
        """Counts new tokens."""
        self.metrics.generated_tokens.inc(tokens)
        now = time.monotonic()
        self._generated.append((now, tokens))
        self.history.add(now, tokens)

    def count_evicted(self, jobs: Iterable[Job], caches: Sequence[Any] | None) -> None:
        """Counts tokens that budgets have evicted of jobs, the rows of caches, since the last count."""
        if caches is None:
            return
        for job, tokens in zip(jobs, tokens_evicted(caches), strict=False):
            self.metrics.evicted.inc(max(0, tokens - job.evicted))
            job.evicted = max(tokens, job.evicted)

    def expire(self) -> None:
        """Makes an update due: the snapshot is outdated."""
        self._updated = 0.0

    def due(self, idle: bool) -> bool:
        """Whether it is time for an update: regularly, and at once when the last row has ended."""
        return time.monotonic() - self._updated >= UPDATE_EVERY or (
            idle and bool(self.snapshot.decoding or self.snapshot.reading)
        )

    def update(
        self,
        decoding: Iterable[Batch],
        reading: Iterable[Batch],
        prompt_memory: int,
        speculation: Sequence[SpeculationStatistics | None] = (),
        ranks: TotalMemory = ALONE,
        planned: int = 0,
    ) -> None:
        """Makes a snapshot.

        Args:
            decoding: of each model, the jobs that decode, and their caches.
            reading: batches of jobs in prefill, as `decoding`.
            prompt_memory: bytes of cached prefixes; with several ranks, of the first.
            speculation: of each model's engine, if it drafts.
            ranks: adds up the memory of all ranks.
            planned: maximum bytes of the current rows.
        """
        self._updated = now = time.monotonic()
        while self._generated and now - self._generated[0][0] > RATE_SECONDS:
            self._generated.popleft()
        rate = 0.0
        if self._generated:
            rate = sum(tokens for _, tokens in self._generated) / max(1.0, now - self._generated[0][0])
        jobs, parts = self._occupancy(decoding)
        in_prefill, more = self._occupancy(reading)
        parts += more
        totals: dict[str, Any] = {name: ranks.of_caches(sum(getattr(part, name) for part in parts)) for name in BYTES}
        self._drafts = list(map(self._count_drafts, speculation, self._drafts or [(None, None)] * len(speculation)))
        self.snapshot = Snapshot(
            BatchOccupancy(tuple(row for part in parts for row in part.rows), **totals),
            tuple(jobs),
            tuple(len(job.answer) for job in jobs),
            rate,
            ranks.active(),
            prompt_memory,
            next((drafts for _, drafts in self._drafts if drafts is not None), None),
            planned,
            tuple(in_prefill),
            mx.get_cache_memory(),
        )

    def _occupancy(self, batches: Iterable[Batch]) -> tuple[list[Job], list[BatchOccupancy]]:
        """The jobs of batches, and the occupancy of each batch, the rows in the same order."""
        jobs: list[Job] = []
        parts: list[BatchOccupancy] = []
        for batch, caches in batches:
            if caches:
                parts.append(occupancy_of(caches, time.monotonic() - self._watched < WATCHED_SECONDS))
                jobs += batch[: len(parts[-1].rows) or len(batch)]  # without jobs that wait in the engine
        return jobs, parts

    def _count_drafts(self, source: SpeculationStatistics | None, last: Drafts) -> Drafts:
        """Counts the drafts of one engine since the last update, and copies its statistics, which change in the
        worker's thread."""
        if source is None:
            return None, None
        known, before = last
        before = before if before is not None and known is source else SpeculationStatistics()
        now = replace(source, caches=[])
        self.metrics.drafters.labels(now.drafter).set(1)
        self.metrics.drafted.inc(now.drafted - before.drafted)
        self.metrics.accepted.inc(now.accepted - before.accepted)
        self.metrics.draft_passes.inc(now.rounds - before.rounds)
        return source, now
