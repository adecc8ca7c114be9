"""How many bytes rows will take, before they take any: planned from a model, a policy, and the tokens of each row.

Decides which rows fit a limit together. What a row holds at its peak is in `planning.RowMemory`; how far rows of one
batch are as long as the longest of them, the rule of `cache.classes`. Integers only, once a plan is made: it does not
depend on jobs or threads.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

import mlx.core as mx

from mlx_kv.cache.classes.moving import LEAST_SAVED
from mlx_kv.cache.classes.rule import KEPT
from mlx_kv.cache.growth import SLOT_MULTIPLE, round_up
from mlx_kv.generation.prefill import MOST_TOKENS_AHEAD
from mlx_kv.generation.two_pass_prefill import Instructions
from mlx_kv.mlxlm.observing import attends_by_class
from mlx_kv.planning import Planner, RowMemory
from mlx_kv.policy import CachePolicy
from mlx_kv.ranks.splitting import weights_of
from mlx_kv.server.models import Models

log = logging.getLogger("mlx_kv.server")
MOST_SLACK = 8192  # slots that a cache which grows takes beyond what it needs, at the most
OF_THE_DEVICE = 0.8  # of its memory is the limit where nobody says: activations, copies and others want some, too


class RowSlots(NamedTuple):
    """What one row needs.

    Attributes:
        prompt: tokens of its prompt.
        slots: for prompt and answer, where every token is kept.
    """

    prompt: int
    slots: int


@dataclass(frozen=True)
class RowPlan:
    """What rows of one policy take.

    Attributes:
        memory: the sizes of a row.
        draft: those of what a draft model keeps of it.
        drafted: tokens that may be drafted at once.
        class_slots: slots that rows of one batch may hold beyond what they need, before they are parted into classes;
            None where they never are, and each row is as long as the longest.
    """

    memory: RowMemory
    draft: RowMemory = field(default_factory=RowMemory)
    drafted: int = 0
    class_slots: int | None = None

    def slots(self, prompt: int, answer: int) -> RowSlots:
        """Slots that a prompt and an answer of so many tokens need, where every token is kept."""
        slots = prompt + answer + self.drafted
        grows = answer > MOST_TOKENS_AHEAD  # room is made for so many tokens at once, and later for more than is needed
        return RowSlots(prompt, round_up(slots + (min(slots // 2, MOST_SLACK) if grows else 0)))

    def nbytes(self, slots: int) -> int:
        """Bytes of one row in a batch whose longest row has so many slots."""
        return self.memory.read_once(slots, SLOT_MULTIPLE) + self.draft.read_once(slots, SLOT_MULTIPLE)

    def read_twice(self, row: RowSlots) -> int:
        """Bytes of one row while its prompt is read twice, outside of the batch; 0 where prompts are read once."""
        if self.memory.instructions is None:
            return 0
        return self.memory.read_twice(*row, SLOT_MULTIPLE) + self.draft.read_once(row.slots, SLOT_MULTIPLE)

    def together(self, rows: Sequence[RowSlots]) -> int:
        """Bytes of the rows of one policy. They may be in one batch, or all reading their prompts twice."""
        if not rows:
            return 0
        longest = self.nbytes(max(row.slots for row in rows))
        held = sum(max(longest, self.read_twice(row)) for row in rows)
        if self.class_slots is None or self.memory.instructions is not None:
            return held
        of_a_slot = self.memory.bytes_per_slot + self.draft.bytes_per_slot
        apart = int(KEPT * sum(self.nbytes(row.slots) for row in rows)) + self.class_slots * of_a_slot
        return min(held, apart)


def plan_rows(models: Models, policy: CachePolicy, drafted: int, batch: int, chunk: int | None = None) -> RowPlan:
    """The plan of a policy. Builds a graph of the model, and evaluates nothing.

    Args:
        drafted: tokens that may be drafted at once.
        batch: rows at the most.
        chunk: prompt tokens read at once; None is no more than the max_write of the policy.

    Raises:
        ValueError: the policy cannot store what the model has.
    """
    planner = Planner(models.model, Instructions.for_policy(policy, models.tokenizer, models.model))
    apart = batch > 1 and attends_by_class(models.model)
    return RowPlan(
        planner.row(policy, step=1 + drafted, chunk=chunk or 0),
        RowMemory() if models.draft is None else Planner(models.draft).row(CachePolicy()),
        drafted,
        2 * LEAST_SAVED[mx.default_device().type] if apart else None,
    )


@dataclass(frozen=True)
class MemoryLimit:
    """What may be held: weights, keys and values of rows, and prompts that are kept.

    Attributes:
        limit: bytes; None is no limit.
        weights: bytes that are held anyway.
    """

    limit: int | None = None
    weights: int = 0

    @property
    def for_rows(self) -> int | None:
        """Bytes for rows, and for prompts that are kept as far as rows leave any; None is no limit."""
        return None if self.limit is None else self.limit - self.weights

    def fits(self, planned: int) -> bool:
        return self.for_rows is None or planned <= self.for_rows

    def left(self, planned: int) -> int | None:
        """Bytes that rows which take so many leave to prompts that are kept; None is no limit."""
        return None if self.for_rows is None else max(0, self.for_rows - planned)

    def refusal(self, plan: RowPlan, prompt: int, answer: int) -> str | None:
        """Why a prompt and an answer of so many tokens never fit; None where they do."""
        needed = plan.together([plan.slots(prompt, answer)])
        if self.fits(needed):
            return None
        room = self.for_rows
        return (
            f"a prompt of {prompt:,} tokens and an answer of up to {answer:,} take {needed / 1e6:,.1f} MB, and this "
            f"server has {max(0, room or 0) / 1e6:,.1f} MB for keys and values: shorten the prompt, or lower max_tokens"
        )


def limited(limit: int | Literal["device"] | None, models: Models) -> MemoryLimit:
    """The limit of a server that has loaded its models.

    Args:
        limit: "device" is what the device can bear, or none where that is less than the models want.

    Raises:
        ValueError: weights alone take more.
    """
    networks = [network for network in (models.model, models.draft) if network is not None]
    weights = sum(weight.nbytes for network in networks for weight in weights_of(network))
    if limit == "device":
        limit = default_limit()
        if limit is not None and limit <= weights:
            log.warning("weights of %.1f MB leave nothing of this device's memory: there is no limit", weights / 1e6)
            limit = None
    if limit is not None and limit <= weights:
        raise ValueError(
            f"a memory limit of {limit / 1e6:,.1f} MB leaves nothing for rows: the weights take {weights / 1e6:,.1f} MB"
        )
    return MemoryLimit(limit, weights)


def default_limit() -> int | None:
    """Of the device's memory, what all may take together where nobody says; None where the device does not say."""
    described: dict[str, Any] = mx.device_info()
    if mx.default_device().type == mx.DeviceType.cpu:
        memory = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
        container = Path("/sys/fs/cgroup/memory.max")
        if container.exists() and (text := container.read_text().strip()).isdigit():
            memory.append(int(text))
        return int(OF_THE_DEVICE * min(memory))
    for name in ("max_recommended_working_set_size", "total_memory", "memory_size"):
        if described.get(name):
            return int(OF_THE_DEVICE * int(described[name]))
    return None
