"""Rows that lose their place and get it back, at any step and in any order: each has the answer that it has alone."""

from __future__ import annotations

import random
from collections import defaultdict, deque
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import mlx.core as mx
import pytest
from serving import SOURCE

from mlx_kv import CachePolicy
from mlx_kv.bundled import model_path
from mlx_kv.generation.generate import StopStrings
from mlx_kv.generation.grammar import Constraint, GrammarCompiler
from mlx_kv.generation.sequence import TokenScore
from mlx_kv.generation.settings import SamplingSettings
from mlx_kv.mlxlm.loading import load
from mlx_kv.server.memory import MemoryLimit
from mlx_kv.server.monitor import Monitor
from mlx_kv.server.output import Job, OutputChunk
from mlx_kv.server.rows import Models, Rows, WorkerSettings

POLICIES = {
    "plain": CachePolicy(),
    "8 bits": CachePolicy(bits=8),
    "window": CachePolicy(max_kv_size=300),
    "budget": CachePolicy(budget=300, margin=32),
    "snap_kv in 8 bits": CachePolicy(budget=300, margin=32, score="snap_kv", bits=8),
    "kvzip": CachePolicy(budget=300, margin=32, score="kvzip"),
}
WAYS = [
    *[(name, drafts, keeps) for name in ("plain", "8 bits", "budget") for drafts in (0, 1) for keeps in (0, 1)],
    *[(name, 0, 1) for name in ("window", "snap_kv in 8 bits", "kvzip")],
    ("window", 1, 1),
]
TIE = 0.1  # of log-probabilities, where codes of 8 bits are rounded anew
SCHEDULES = 4  # of each way; 40 are 600 in all


class Answer(NamedTuple):
    text: str
    tokens: list[tuple[int, TokenScore]]
    end: str | None

    def check(self, alone: Answer, exact: bool) -> None:
        """Fails unless this is what it is alone.

        Args:
            exact: else it may part from that at tokens that are as likely.
        """
        pairs = list(zip(self.tokens, alone.tokens, strict=False))
        parts = next((i for i, ((ours, _), (theirs, _)) in enumerate(pairs) if ours != theirs), len(pairs))
        if exact or parts == len(pairs):
            assert (self.text, self.end) == (alone.text, alone.end)
        else:
            (_, first), (_, second) = alone.tokens[parts][1].top
            assert first - second < TIE
        for (_, ours), (_, theirs) in pairs[:parts]:
            assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-3 if exact else TIE)


@dataclass
class Harness:
    """Rows without a server, and what they deliver."""

    models: Models
    policy: CachePolicy
    keeps: bool
    text: defaultdict[int, str] = field(default_factory=lambda: defaultdict(str))
    tokens: defaultdict[int, list[tuple[int, TokenScore]]] = field(default_factory=lambda: defaultdict(list))
    ends: dict[int, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        settings = WorkerSettings(self.policy, 4, 128, prompt_memory_bytes=2**26 if self.keeps else 0)
        monitor, limit = Monitor(), MemoryLimit()
        self.rows = Rows(self.models, settings, self.policy, monitor, lambda: None, self.deliver, limit)
        self.rows.prefixes.bind()

    def deliver(self, chunks: list[OutputChunk]) -> None:
        for chunk in chunks:
            assert chunk.error is None, chunk.error
            assert chunk.job.number not in self.ends
            self.text[chunk.job.number] += chunk.text
            self.tokens[chunk.job.number] += chunk.scores
            if chunk.finish_reason is not None:
                self.ends[chunk.job.number] = chunk.finish_reason

    def answer(self, job: Job) -> Answer:
        return Answer(self.text[job.number], self.tokens[job.number], self.ends.get(job.number))

    def close(self) -> None:
        """Nothing is left of any row."""
        assert not self.rows.active
        assert not self.rows.engine.busy
        assert self.rows.engine.caches == []
        assert all(not jobs for jobs, _ in self.rows.reading)
        self.rows.close()


class Kinds:
    """Jobs of all kinds, and what each gets alone."""

    def __init__(self, models: Models, policy: CachePolicy) -> None:
        self.models, self.policy = models, policy
        tokenizer = models.tokenizer
        self.grammar = GrammarCompiler(tokenizer).compile(Constraint("regex", "[a-f ]{90}"))
        text = tokenizer.encode(SOURCE[:2400])
        self.prompts = [text[:150], text[:420], text[:150] + text[300:340], text[60:75], text[:420] + text[80:200]]
        self.prompts += [text[150 * n + 7 : 150 * n + 7 + 60 * n] for n in range(1, 6)]  # which begin differently
        self.alone: dict[tuple[int, int], Answer] = {}

    def job(self, prompt: int, kind: int) -> Job:
        tokens, sampling = list(self.prompts[prompt]), SamplingSettings()
        if kind == 1:
            sampling = SamplingSettings(temperature=1.0, seed=prompt, frequency_penalty=0.4)
        job = Job(tokens, 70, sampling, 2 if kind != 1 else None, StopStrings(["e("] if kind == 2 else []), kind != 1)
        if kind == 3:
            job.grammar = self.grammar.processor(len(tokens), None)
        return job

    def expected(self, prompt: int, kind: int) -> Answer:
        if (prompt, kind) not in self.alone:
            harness, job = Harness(self.models, self.policy, False), self.job(prompt, kind)
            harness.rows.add(job)
            while harness.rows.active:
                harness.rows.step()
            self.alone[prompt, kind] = harness.answer(job)
            harness.close()
        return self.alone[prompt, kind]


def play(kinds: Kinds, keeps: bool, chance: random.Random) -> tuple[int, int]:
    """One schedule; returns how often rows were preempted, and how many went on within their answers to the end."""
    exact = kinds.policy.bits is None  # codes of 8 bits are rounded anew where tokens are read in other passes
    harness = Harness(kinds.models, kinds.policy, keeps)
    rows, waiting, preempted = harness.rows, deque[Job](), 0
    # What a budget keeps depends on the chunks that were read, so also on what others have kept of a prompt.
    differ = keeps and kinds.policy.budget is not None
    asked = {job.number: (what, job) for what in _kinds(chance, exact, differ) for job in [kinds.job(*what)]}
    waiting.extend(job for _, job in asked.values())
    gone: set[int] = set()
    while waiting or rows.active:
        what = chance.random()
        if what < 0.08 and waiting and len(rows.active) < 4:
            rows.add(waiting.popleft())
        elif what < 0.11 and rows.active:
            if (job := rows.preempt()) is not None:
                preempted += 1
                waiting.appendleft(job)
        elif what < 0.1105:
            job = chance.choice([*rows.active.values(), *waiting])
            gone.add(job.number)
            if not rows.cancel(job):
                waiting.remove(job)
        elif what < 0.12:
            rows.prefixes.memory.shrink(0)
        else:
            rows.step()
    for number, (what, job) in asked.items():
        if number not in gone:
            harness.answer(job).check(kinds.expected(*what), exact)
        else:
            assert number not in harness.ends
    harness.close()
    return preempted, sum(job.resumed > 0 for number, (_, job) in asked.items() if number not in gone)


def _kinds(chance: random.Random, drawn: bool, differ: bool) -> list[tuple[int, int]]:
    kinds = [0, 1, 2, 3] if drawn else [0, 2, 3]
    prompts = chance.sample(range(5, 10), 5) if differ else chance.choices(range(5), k=chance.randint(3, 7))
    return [(prompt, chance.choice(kinds)) for prompt in prompts]


@pytest.mark.parametrize(
    ("policy", "drafts", "keeps"),
    [pytest.param(*way, marks=[pytest.mark.slow] if number else []) for number, way in enumerate(WAYS)],
)
def test_rows_that_are_preempted_go_on_where_they_were(
    policy: str, drafts: int, keeps: int, reference: Any, draft: Any
) -> None:
    models = Models(*reference, draft if drafts else None)
    kinds = Kinds(models, POLICIES[policy])
    played = [play(kinds, bool(keeps), random.Random(seed)) for seed in range(SCHEDULES)]
    preempted, resumed = map(sum, zip(*played, strict=True))
    assert preempted >= SCHEDULES
    assert resumed > 0


def main() -> None:
    """Plays as many schedules of each way as the first argument says."""
    import sys

    schedules = int(sys.argv[1])
    models = [Models(*load(model_path("reference")), draft) for draft in (None, load(model_path("draft"))[0])]
    for policy, drafts, keeps in WAYS:
        kinds, resumed = Kinds(models[drafts], POLICIES[policy]), 0
        for seed in range(schedules):
            resumed += play(kinds, bool(keeps), random.Random(seed))[1]
            mx.clear_cache()
        print(f"{policy:20} drafts {drafts} keeps {keeps}: {schedules} schedules, {resumed} went on", flush=True)


if __name__ == "__main__":
    main()
