"""How much of a prompt was reused from cached prefixes, and if not all of it, why not.

Reported in the log, in /memory, in a metric and in a response header.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np
from prometheus_client import Counter

from mlx_kv.prefixes.index import MIN_SHARED, shared
from mlx_kv.prefixes.memory import PromptMemory
from mlx_kv.server.job import Job

CONTEXT_TOKENS = 40  # on each side of a difference; a token has a character or more
CONTEXT_CHARACTERS = 40
HEADER = "X-MLX-KV-Prefix"
MAX_REPORTS = 16  # in /memory
Decode = Callable[[Sequence[int]], str]
log = logging.getLogger("mlx_kv.server")


class Reason(StrEnum):
    """Why a prompt was not reused, or not as far as it could have been."""

    NONE_KEPT = "none_kept"  # there are no cached prompts
    BELOW_64_TOKENS = "below_64_tokens"  # the prompt is too short to be cached
    DIFFERS = "differs"
    EVICTED = "evicted"
    NOT_TRIMMABLE = "not_trimmable"  # the caches can't be trimmed back to the tokens in common


@dataclass(frozen=True)
class Difference:
    """The first difference of two prompts, as token ids.

    Attributes:
        position: tokens in common.
        before: the last of them.
        first, second: the next tokens of each prompt; empty where it ends.
    """

    position: int
    before: tuple[int, ...]
    first: tuple[int, ...]
    second: tuple[int, ...]

    @classmethod
    def of(cls, first: bytes, second: bytes) -> Difference:
        """Of two packed prompts."""
        position = shared(first, second)

        def ids(tokens: bytes, start: int, stop: int) -> tuple[int, ...]:
            return tuple(np.frombuffer(tokens[4 * max(0, start) : 4 * stop], ">u4").tolist())

        end = position + CONTEXT_TOKENS
        before = ids(first, position - CONTEXT_TOKENS, position)
        return cls(position, before, ids(first, position, end), ids(second, position, end))

    def texts(self, decode: Callable[[Sequence[int]], str]) -> tuple[str, str, str]:
        """The texts of `before`, `first` and `second`, at most CONTEXT_CHARACTERS of each."""
        before = decode(self.before) if self.before else ""

        def after(tokens: tuple[int, ...]) -> str:
            # Decoded with the tokens before: alone, some tokenizers drop a leading space.
            text = decode([*self.before, *tokens]) if tokens else before
            return (text[len(before) :] if text.startswith(before) else decode(tokens))[:CONTEXT_CHARACTERS]

        return before[-CONTEXT_CHARACTERS:], after(self.first), after(self.second)


@dataclass(frozen=True)
class PrefixMatch:
    """What the lookup of a prompt found.

    Attributes:
        tokens: of the prompt.
        reused: tokens that are not read again.
        reason: why a cached prompt was not reused, or only in part; None if it offers no more.
        offered: tokens that the prompt has in common with a cached or evicted prompt.
        difference: from the cached prompt, which is its second one; only with `Reason.DIFFERS`.
    """

    tokens: int
    reused: int
    reason: Reason | None = None
    offered: int = 0
    difference: Difference | None = None


def match_prefix(tokens: bytes, reused: int, memory: PromptMemory) -> PrefixMatch:
    """Compares a packed prompt, of which some tokens are reused, with all cached prompts."""
    count = len(tokens) // 4
    if reused >= count - 1:
        return PrefixMatch(count, reused)
    if count <= MIN_SHARED:  # the last token is always read
        return PrefixMatch(count, reused, Reason.BELOW_64_TOKENS)
    found = memory.nearest(tokens)
    offered = reused if found is None else max(reused, found[1])
    evicted = memory.evicted.longest(tokens)
    if evicted >= offered + MIN_SHARED or offered < MIN_SHARED <= evicted:
        return PrefixMatch(count, reused, Reason.EVICTED, evicted)
    if found is None:
        return PrefixMatch(count, reused, None if reused else Reason.NONE_KEPT)
    entry, common = found
    if common < min(len(entry), count):
        return PrefixMatch(count, reused, Reason.DIFFERS, common, Difference.of(tokens, entry.tokens))
    return PrefixMatch(count, reused, None if reused >= min(common, count - 1) else Reason.NOT_TRIMMABLE, common)


# --- reports ----------------------------------------------------------------------------------------------------------


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
