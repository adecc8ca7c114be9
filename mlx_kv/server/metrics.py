"""What Prometheus reads.

Decides names, labels and buckets. Knows nothing about how rows are kept: the worker counts, the gauges are set from its
snapshot when somebody asks.
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

FIRST_TOKEN = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
DURATION = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)


class Metrics:
    """All counters and gauges of one server, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"mlx_kv_{name}", text, labels, registry=registry)

        def gauge(name: str, text: str) -> Gauge:
            return Gauge(f"mlx_kv_{name}", text, registry=registry)

        self.requests = counter(
            "requests", "Requests by endpoint and HTTP status; 499: the client hung up.", "endpoint", "status"
        )
        self.finished = counter("finished", "Rows by what ended them.", "reason")
        self.prompt_tokens = counter("prompt_tokens", "Tokens of prompts, those that were cached included.")
        self.cached_tokens = counter("prompt_tokens_cached", "Tokens of prompts that had been read before.")
        self.generated_tokens = counter("generated_tokens", "Tokens generated.")
        self.prefix_hits = counter("prefix_hits", "Prompts of which a beginning had been read before.")
        self.prefix_misses = counter("prefix_misses", "Prompts of which nothing was there.")
        self.evicted = counter("tokens_evicted", "Tokens that budgets evicted, by the busiest layer of each row.")
        self.drafted = counter("draft_tokens", "Tokens that were drafted.")
        self.accepted = counter("draft_tokens_accepted", "Drafted tokens that were right.")
        self.draft_passes = counter("draft_passes", "Passes of the model where it speculates, each of all rows.")
        self.engine_failures = counter("engine_failures", "Errors that ended all rows; the engine was made anew.")
        self.first_token = Histogram(
            "mlx_kv_time_to_first_token_seconds",
            "From the request to its first token.",
            buckets=FIRST_TOKEN,
            registry=registry,
        )
        self.duration = Histogram(
            "mlx_kv_request_duration_seconds",
            "From the request to the end of its answer.",
            ("endpoint",),
            buckets=DURATION,
            registry=registry,
        )
        self.out_of_memory = counter("out_of_memory", "Requests that were ended since memory had run out.")
        self.rows = gauge("rows", "Requests that are being read or decoded.")
        self.waiting = gauge("requests_waiting", "Requests that wait for a row.")
        self.tokens_per_second = gauge("tokens_per_second", "Tokens generated per second, in the last 10 seconds.")
        self.draft_length = gauge("draft_length", "Tokens that were drafted for a row in the last pass, at the most.")
        self.draft_tokens_per_pass = gauge("draft_tokens_per_pass", "Tokens that a row got of a pass, on average.")
        self.draft_gain = gauge("draft_gain", "How many times as fast as without drafts; 0 where nobody can tell.")
        self.bytes_live = gauge(
            "kv_bytes_live", "Bytes of keys and values that can still be seen, of rows that decode."
        )
        self.bytes_allocated = gauge("kv_bytes_allocated", "Bytes allocated for them, dead slots included.")
        self.bytes_full = gauge("kv_bytes_full", "Bytes that all tokens would take if none were evicted.")
        self.prompt_memory = gauge("prompt_memory_bytes", "Bytes of prompts that are kept in memory.")
        self.planned = gauge("kv_bytes_planned", "Bytes that rows will take at the most, prompts and answers.")
        self.memory_limit = gauge("memory_limit_bytes", "What weights, rows and kept prompts may take; 0: no limit.")
        self.policies = gauge("cache_policies", "Cache policies that have an engine.")
        self.active_memory = gauge("active_memory_bytes", "What MLX holds in arrays: weights, caches, all.")

    def total(self, name: str) -> int:
        """What a counter without labels says, by its name without mlx_kv_."""
        return int(self.registry.get_sample_value(f"mlx_kv_{name}_total") or 0)

    def text(self) -> bytes:
        """The text format of Prometheus."""
        return generate_latest(self.registry)
