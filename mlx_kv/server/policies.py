"""The rows of every policy that is served now: engines side by side, which share the weights.

Decides for how many policies there is an engine at once, and which of them is let go for another. Knows nothing about
what a request asks for, nor how rows are continued.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from mlx_kv.mlxlm.traverse import leaves
from mlx_kv.policy import CachePolicy
from mlx_kv.server.cache_requests import in_words
from mlx_kv.server.job import Job
from mlx_kv.server.kept_prompts import KeptPrompts
from mlx_kv.server.memory_plan import RowPlan, plan_rows
from mlx_kv.server.policy_rows import PolicyRows, Served

MOST_PLANS = 256  # policies whose bytes are remembered


def policy_name(policy: CachePolicy) -> str:
    """A policy in words."""
    settings = [name for name in policy.changed() if name != "growth"]
    return ", ".join(f"{name} {in_words(getattr(policy, name))}" for name in settings) or "all tokens as they are"


class RowsByPolicy:
    """Rows of one policy that always has an engine, and of others that have one while they are asked for.

    Args:
        policy: that of the server.
        most: engines at once.
    """

    def __init__(self, served: Served, policy: CachePolicy, kept: KeptPrompts, most: int) -> None:
        self._served, self._kept, self._most = served, kept, most
        self._plans: dict[CachePolicy, RowPlan] = {}
        self.main = self._rows(policy)
        self._all: dict[CachePolicy, PolicyRows] = {policy: self.main}  # those that were used last at the end

    def __iter__(self) -> Iterator[PolicyRows]:
        return iter(self._all.values())

    def __len__(self) -> int:
        return len(self._all)

    @property
    def active(self) -> list[Job]:
        """The jobs that have a row."""
        return [job for rows in self for job in rows.active.values()]

    @property
    def waits(self) -> bool:
        """Whether none of them has anything to do."""
        return all(rows.waits for rows in self)

    def _rows(self, policy: CachePolicy) -> PolicyRows:
        return PolicyRows(self._served, policy, partial(self._kept.open, policy))

    def of(self, policy: CachePolicy) -> PolicyRows | None:
        """The rows of a policy, with an engine; None while all engines that may be are at work for others.

        Raises:
            ValueError: what the model or the policy refuses.
        """
        if policy not in self._all:
            if self._most == 1:
                raise ValueError("this server has one engine: leave cache out")
            idle = [rows for rows in self if rows is not self.main and not rows.active]
            if len(self._all) >= self._most:
                if not idle:
                    return None
                self._let_go(idle[0])
            rows = self._rows(policy)
            rows.begin()
            self._all[policy] = rows
        elif policy != self.main.policy:
            self._all[policy] = self._all.pop(policy)
        return self._all[policy]

    def _let_go(self, rows: PolicyRows) -> None:
        del self._all[rows.policy]
        rows.close()
        self._kept.forget(set(self._all))

    def plan(self, policy: CachePolicy) -> RowPlan:
        """What rows of a policy take.

        Raises:
            ValueError: what the model or the policy refuses.
        """
        if policy not in self._plans:
            settings, models = self._served.settings, self._served.models
            if policy not in self._all:
                self._rows(policy).try_out()
            drafts = models.draft is not None or settings.drafting.drafter is not None
            drafted = settings.drafting.draft_tokens if drafts else 0
            if len(self._plans) >= MOST_PLANS:
                del self._plans[next(iter(self._plans))]
            self._plans[policy] = plan_rows(
                models, policy, drafted, settings.max_batch_size, settings.prefill_step_size
            )
        return self._plans[policy]

    def planned(self, coming: Job | None = None) -> int:
        """Bytes that all rows take at the most, and with them one that may join them.

        A batch that has just lost its longest row may hold more than the others need: then what it holds counts.
        """
        by_policy = {policy: list(rows.active.values()) for policy, rows in self._all.items()}
        if coming is not None:
            by_policy.setdefault(coming.policy or self.main.policy, []).append(coming)
        return sum(self._together(policy, jobs) for policy, jobs in by_policy.items() if jobs)

    def _together(self, policy: CachePolicy, jobs: list[Job]) -> int:
        plan, rows = self.plan(policy), self._all.get(policy)
        needed = plan.together([plan.slots(len(job.tokens), job.max_tokens) for job in jobs])
        decode = 0 if rows is None else len(rows.engine.rows)
        if rows is None or not decode:
            return needed
        held = sum(int(cache.nbytes) for cache in leaves(rows.engine.caches))
        return max(needed, held * len(jobs) // decode)

    def close(self) -> None:
        for rows in self:
            rows.close()
        self._kept.close()
