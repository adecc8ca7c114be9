"""Compares strategies for the tokens of a context by the bytes that they take, also over several ranks.

Slots are counted as they fill: neither rounded up to 256, nor grown ahead.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import cache as stock

from mlx_kv.cache.buffers import on_cpu
from mlx_kv.cache.codecs import Bits
from mlx_kv.cache.growth import DEFAULT
from mlx_kv.communicator import CacheCommunicator
from mlx_kv.generation.admission import shares_up_to
from mlx_kv.generation.prefill import Instructions
from mlx_kv.mlxlm.attention import attends_by_class
from mlx_kv.mlxlm.convert import FULL, make_prompt_cache
from mlx_kv.mlxlm.loading import weight_bytes
from mlx_kv.mlxlm.traverse import leaves
from mlx_kv.planning.row_memory import Layer, RowMemory, Slots, as_laid_out, double_window, every_token, layers_of
from mlx_kv.policy import CachePolicy
from mlx_kv.ranks.communicator import SplitLayers
from mlx_kv.ranks.splitting import PlannedRank, check_split, planned_part

BITS: dict[str, Bits] = {"8 bits": 8, "K8V4": (8, 4), "4 bits": 4}
DTYPES = {"bfloat16": mx.bfloat16, "float16": mx.float16, "float32": mx.float32}


@dataclass(frozen=True)
class Strategy:
    """One way to keep the tokens of a context.

    Attributes:
        name: for tables and figures.
        policy: how a slot is stored, and the layouts.
        slots: (layer, context) -> slots that one sequence fills in that layer.
    """

    name: str
    policy: CachePolicy
    slots: Slots = as_laid_out


def strategies(policy: CachePolicy, windows: bool = True) -> list[Strategy]:
    """Common strategies, rings with the max_write and group size of the policy, and the policy unless it is plain.

    Args:
        windows: whether any layer of the model has a window; else there are no rows for windows.
    """
    ring = CachePolicy(max_write=policy.max_write, group_size=policy.group_size)
    name = "window + max_write - 1" if windows else "full"
    compared = [Strategy("full", ring, every_token), Strategy("double window", ring, double_window)] if windows else []
    compared.append(Strategy(name, ring))
    compared += [Strategy(f"{name}, {how}", replace(ring, bits=bits)) for how, bits in BITS.items()]
    return [*compared, Strategy("this policy", policy)] if policy.changed() else compared


@dataclass(frozen=True)
class StrategyMemory:
    """A strategy at several contexts: the peak of bytes until each, and the bytes after it.

    Attributes:
        refused: why the model does not support the strategy; there are no bytes then.
    """

    name: str
    bytes_held: tuple[int, ...] = ()
    bytes_after: tuple[int, ...] = ()
    refused: ValueError | None = None


class Planner:
    """Bytes that the caches of one model hold under any strategy.

    Args:
        model: any model of mlx-lm; its weights are never evaluated.
        instructions: what comes before the repetition of a prompt, for scores that read prompts twice. None counts no
            tokens for it, which a tokenizer would make: some tens (`Instructions.of`).
        peers: the communicator with the other ranks, as for `make_prompt_cache`.
    """

    def __init__(
        self, model: nn.Module, instructions: Instructions | None = None, peers: CacheCommunicator | None = None
    ) -> None:
        self.model, self._communicator = model, peers
        self.instructions = Instructions.of(None, model) if instructions is None else instructions
        self._layers: dict[tuple[CachePolicy, int, int], list[Layer]] = {}

    def layers(self, policy: CachePolicy, step: int = 1, chunk: int = 0) -> list[Layer]:
        """The caches of the model in order, as the policy stores them once it quantises.

        Args:
            step: tokens of a step of decoding: more than one with drafts.
            chunk: prompt tokens read at once, where that may be more than the max_write of the policy.

        Raises:
            ValueError: the policy cannot store these head dims, or the model cannot read a token.
        """
        policy = replace(policy, quantized_start=0, growth=DEFAULT)  # which change nothing here
        if (policy, step, chunk) not in self._layers:
            self._layers[policy, step, chunk] = layers_of(self.model, policy, step, chunk, self._communicator)
        return self._layers[policy, step, chunk]

    def row(self, policy: CachePolicy, step: int = 1, chunk: int = 0) -> RowMemory:
        """The sizes of one sequence under a policy; arguments as of `layers`.

        Raises:
            ValueError: as `layers`.
        """
        return RowMemory.of(self.layers(policy, step, chunk), policy, self.instructions)

    def shares_up_to(self, policy: CachePolicy) -> int:
        """Tokens of sequences of one batch up to which they hold first tokens in common once (`cache.segments`)."""
        caches = make_prompt_cache(self.model, policy, strict=False)
        return shares_up_to(caches) if attends_by_class(self.model) else 0

    def bytes_held(self, strategy: Strategy, context: int, batch_size: int = 1, shared: int = 0) -> int:
        """The most bytes that all caches hold until each of `batch_size` sequences has read `context` tokens.

        With quantized_start that is before they are quantised; with a score that reads a prompt twice, during the
        second reading.

        Args:
            shared: first tokens that all sequences have in common.

        Raises:
            ValueError: as `layers`.
        """
        row = self.row(strategy.policy)
        whole = batch_size * row.at_peak(context, context, slots=strategy.slots)
        return whole - self._shared_bytes(strategy, row, context, batch_size, shared)

    def bytes_after(self, strategy: Strategy, context: int, batch_size: int = 1, shared: int = 0) -> int:
        """Bytes that all caches hold when each of `batch_size` sequences has read `context` tokens as a prompt.

        Args:
            shared: as of `bytes_held`.

        Raises:
            ValueError: as `layers`.
        """
        row = self.row(strategy.policy)
        whole = batch_size * row.after(context, slots=strategy.slots)
        return whole - self._shared_bytes(strategy, row, context, batch_size, shared)

    def _shared_bytes(self, strategy: Strategy, row: RowMemory, context: int, batch_size: int, shared: int) -> int:
        """Bytes that sequences do not hold because they share first tokens."""
        if shared == 0 or batch_size == 1 or context > self.shares_up_to(strategy.policy):
            return 0
        return (batch_size - 1) * min(shared, context) * row.bytes_per_slot  # each has records of its own

    def compare(
        self, strategies: Iterable[Strategy], contexts: Iterable[int], batch_size: int = 1, shared: int = 0
    ) -> list[StrategyMemory]:
        """The bytes of every strategy at every context; an unsupported strategy has the reason in its row.

        Args:
            shared: as of `bytes_held`.
        """
        contexts, rows = list(contexts), []
        for strategy in strategies:
            try:
                held = tuple(self.bytes_held(strategy, context, batch_size, shared) for context in contexts)
                after = tuple(self.bytes_after(strategy, context, batch_size, shared) for context in contexts)
                rows.append(StrategyMemory(strategy.name, held, after))
            except ValueError as error:
                rows.append(StrategyMemory(strategy.name, refused=error))
        return rows


@dataclass(frozen=True)
class RankMemory:
    """The part of a model on one rank.

    Attributes:
        layers: number of layers, with some or all of their heads.
        weights: bytes; while they are loaded, one tensor of the whole model is in memory besides them.
        bytes_held: bytes of its caches at each context.
    """

    rank: int
    layers: int
    weights: int
    bytes_held: tuple[int, ...]


@dataclass(frozen=True)
class Ranks:
    """The number of ranks, and how a model is split over them; None as for `check_split`."""

    size: int
    split: str | None = None
    layers: tuple[int, ...] | None = None


def of_ranks(
    config: dict[str, Any],
    dtype: mx.Dtype,
    ranks: Ranks,
    strategy: Strategy,
    contexts: Sequence[int],
    batch_size: int = 1,
) -> tuple[str, list[RankMemory]]:
    """How the model of a config.json is split over ranks, and the part of each.

    Raises:
        ValueError: it cannot be split so; as `Planner.layers`.
    """
    split = check_split(config, ranks.size, ranks.split, ranks.layers)
    places: list[Any] = [PlannedRank(rank, ranks.size) for rank in range(ranks.size)]
    models = [planned_part(config, dtype, place, split, ranks.layers) for place in places]
    full = [sum(type(cache) in FULL for cache in leaves(stock.make_prompt_cache(model))) for model in models]
    parts = []
    for rank, (place, model) in enumerate(zip(places, models, strict=True)):
        communicator = SplitLayers(place, full) if split == "layers" else None
        planner, weights = Planner(model, peers=communicator), weight_bytes(model)
        held = tuple(planner.bytes_held(strategy, context, batch_size) for context in contexts)
        parts.append(RankMemory(rank, len(stock.make_prompt_cache(model)), weights, held))
    return split, parts


def config_dtype(config: dict[str, Any]) -> str:
    """The name of the dtype that a configuration gives its weights: one of `DTYPES`, bfloat16 by default."""
    text = config.get("text_config")
    for part in (config, text if isinstance(text, dict) else {}):
        for key in ("dtype", "torch_dtype"):
            name = str(part.get(key)).removeprefix("torch.")
            if name in DTYPES:
                return name
    return "bfloat16"


# --- this device ------------------------------------------------------------------------------------------------------

DEVICE_SHARE = 0.8  # of the device's memory, as the default limit; activations and copies need some, too


def device_dtype(config: dict[str, Any]) -> str:
    """The name of the dtype in which the model of a configuration computes here: on a CPU float32 (`mlxlm.loading`)."""
    return "float32" if on_cpu() else config_dtype(config)


def default_limit() -> int | None:
    """A share of the device's memory in bytes; None if its size is unknown."""
    info: dict[str, Any] = mx.device_info()
    if on_cpu():
        memory = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
        container = Path("/sys/fs/cgroup/memory.max")
        if container.exists() and (text := container.read_text().strip()).isdigit():
            memory.append(int(text))
        return int(DEVICE_SHARE * min(memory))
    for name in ("max_recommended_working_set_size", "total_memory", "memory_size"):
        if info.get(name):
            return int(DEVICE_SHARE * int(info[name]))
    return None
