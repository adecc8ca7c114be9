"""How many bytes the keys and values of a model will take, from its configuration alone.

Decides which slots a strategy fills at a context, and adds up. What a slot costs it asks the caches themselves: one
token goes through the model, the graph is built and dropped, nothing is evaluated, no weight is read or made. Knows
nothing about files, tables or figures. Bytes are of live slots: neither rounded up to 256, nor grown ahead.

    bytes = batch * sum over caches of (state bytes + bytes per slot * slots(layer, context))
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import cache as stock

from mlx_kv.cache.codecs import Bits
from mlx_kv.cache.growth import DEFAULT
from mlx_kv.cache.layout import NO_LIMIT
from mlx_kv.mlxlm.convert import kind_and_window, make_prompt_cache
from mlx_kv.mlxlm.traverse import leaves
from mlx_kv.policy import CachePolicy
from mlx_kv.ranks.splitting import PlannedRank, check_split, planned_part, weights_of

BITS: dict[str, Bits] = {"8 bits": 8, "K8V4": (8, 4), "4 bits": 4}  # that are compared
DTYPES = {"bfloat16": mx.bfloat16, "float16": mx.float16, "float32": mx.float32}


@dataclass(frozen=True)
class Layer:
    """One cache of a model: layers that share keys and values share a cache.

    Attributes:
        kind: "full", "sliding", "chunked" (a window that starts anew every `window` tokens), "recurrent", or
            "not planned: " and the class of a cache that this module does not know; such a one counts nothing.
        window: tokens that a query sees, at the most; None is all, or a recurrent layer.
        heads, key_dim, value_dim: what is stored of each token, before any quantisation.
        bytes_per_slot: of one sequence, all heads, keys and values, as a policy stores them.
        most_slots: slots that a sequence ever fills under a policy.
        state_bytes: of one sequence, the same at any context; with those that it can go back to while it decodes.
        ours: whether the cache becomes one of this library, which the policy can quantise, or stays mlx-lm's.
    """

    kind: str
    window: int | None = None
    heads: int = 0
    key_dim: int = 0
    value_dim: int = 0
    bytes_per_slot: int = 0
    most_slots: int = NO_LIMIT
    state_bytes: int = 0
    ours: bool = True


Slots = Callable[[Layer, int], int]


def every_token(layer: Layer, context: int) -> int:
    """Windows are ignored."""
    return context


def double_window(layer: Layer, context: int) -> int:
    """A buffer of two windows for layers that have one, as some engines keep."""
    return context if layer.window is None else min(context, 2 * layer.window)


def as_laid_out(layer: Layer, context: int) -> int:
    """What the layout of the policy uses: window + max_write - 1 where there is a window."""
    return min(context, layer.most_slots)


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


def strategies(policy: CachePolicy) -> list[Strategy]:
    """What to compare: the usual ways, ours with this max_write and group size, and the policy where it sets anything.

    A strategy that depends on more than the window of a layer (a budget, say) is one more line here.
    """
    ring = CachePolicy(max_write=policy.max_write, group_size=policy.group_size)
    name = "window + max_write - 1"
    compared = [
        Strategy("full", ring, every_token),
        Strategy("double window", ring, double_window),
        Strategy(name, ring),
        *(Strategy(f"{name}, {how}", replace(ring, bits=bits)) for how, bits in BITS.items()),
    ]
    return [*compared, Strategy("this policy", policy)] if policy.changed() else compared


@dataclass(frozen=True)
class StrategyMemory:
    """A strategy at several contexts: bytes held at each, or why this model cannot be kept so."""

    name: str
    bytes_held: tuple[int, ...] = ()
    refused: str | None = None


class Planner:
    """Bytes that the caches of one model hold under any strategy.

    Args:
        model: any model of mlx-lm; its weights are never evaluated.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._layers: dict[CachePolicy, list[Layer]] = {}

    def layers(self, policy: CachePolicy) -> list[Layer]:
        """The caches of the model in order, as the policy stores them once it quantises.

        Raises:
            ValueError: the policy cannot store these head dims, or the model cannot read a token.
        """
        policy = replace(policy, quantized_start=0, growth=DEFAULT)
        if policy not in self._layers:
            stored = _read_one_token(self.model, policy)
            own = leaves(stock.make_prompt_cache(self.model))
            plain = stored if policy.stores_plain else _read_one_token(self.model, policy.plain())
            self._layers[policy] = [_describe(*caches) for caches in zip(own, plain, stored, strict=True)]
        return self._layers[policy]

    def bytes_held(self, strategy: Strategy, context: int, batch_size: int = 1) -> int:
        """Bytes of the live slots of all caches when each of `batch_size` sequences holds `context` tokens.

        Raises:
            ValueError: as `layers`.
        """
        policy = strategy.policy
        if context <= policy.quantized_start:  # the write that comes next is the first to be quantised
            policy = policy.plain()
        return batch_size * sum(
            layer.state_bytes + layer.bytes_per_slot * strategy.slots(layer, context) for layer in self.layers(policy)
        )

    def compare(
        self, strategies: Iterable[Strategy], contexts: Iterable[int], batch_size: int = 1
    ) -> list[StrategyMemory]:
        """Every strategy at every context, in bytes; one that the head dims refuse says so in its row."""
        contexts, rows = list(contexts), []
        for strategy in strategies:
            try:
                held = tuple(self.bytes_held(strategy, context, batch_size) for context in contexts)
                rows.append(StrategyMemory(strategy.name, held))
            except ValueError as error:
                rows.append(StrategyMemory(strategy.name, refused=str(error)))
        return rows


@dataclass(frozen=True)
class RankMemory:
    """What one rank of a model in parts has.

    Attributes:
        layers: of the model, of which it has some heads or all.
        weights: bytes; each is read whole before it is cut, so that while they are loaded there is one more.
        bytes_held: of its caches, at each context.
    """

    rank: int
    layers: int
    weights: int
    bytes_held: tuple[int, ...]


@dataclass(frozen=True)
class Ranks:
    """So many ranks, and how a model is split over them; None as in `check_split`."""

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
    """How the model of a config.json is split over ranks, and what each of them has of it.

    Raises:
        ValueError: it cannot be split so; as `Planner.layers`.
    """
    split = check_split(config, ranks.size, ranks.split, ranks.layers)
    parts = []
    for rank in range(ranks.size):
        model = planned_part(config, dtype, PlannedRank(rank, ranks.size), split, ranks.layers)
        planner, weights = Planner(model), sum(weight.nbytes for weight in weights_of(model))
        held = tuple(planner.bytes_held(strategy, context, batch_size) for context in contexts)
        parts.append(RankMemory(rank, len(stock.make_prompt_cache(model)), weights, held))
    return split, parts


def _read_one_token(model: nn.Module, policy: CachePolicy) -> list[Any]:
    """The caches of a model, all leaves, after a token that is never computed."""
    try:
        caches = make_prompt_cache(model, policy, strict=False)
        model(mx.array([[0]]), cache=caches)
    except ValueError:
        raise
    except Exception as error:  # a model's own code, with a configuration that may be anything
        raise ValueError(f"mlx-lm's model cannot read a token: {type(error).__name__}: {error}") from error
    return list(leaves(caches))


def _describe(own: Any, plain: Any, stored: Any) -> Layer:
    """One layer, from mlx-lm's own unused cache and from two that have seen a token: one plain, one as it is stored."""
    kind, window = kind_and_window(own)
    if kind == "recurrent":
        state = sum(array.nbytes for array in stored.cache if array is not None)
        kept = getattr(stored, "max_rollback", 0)  # while it decodes, the state after each of so many tokens
        return Layer(kind, state_bytes=(1 + kept) * state, ours=False)
    if kind is None or stored.keys is None:  # unknown, or no layer writes to it
        return Layer(f"not planned: {type(own).__name__}", ours=False)
    return Layer(
        kind,
        window=plain.layout.window if kind == "sliding" else window,
        heads=plain.keys.shape[1],
        key_dim=plain.keys.shape[3],
        value_dim=plain.values.shape[3],
        state_bytes=stored.nbytes_residual,
        bytes_per_slot=(stored.nbytes - stored.nbytes_residual) // stored.capacity,
        most_slots=stored.layout.enough_slots,
    )


def config_dtype(config: dict[str, Any]) -> str:
    """The name of the dtype that a configuration gives its weights: one of `DTYPES`, bfloat16 where it says nothing."""
    text = config.get("text_config")
    for part in (config, text if isinstance(text, dict) else {}):
        for key in ("dtype", "torch_dtype"):
            name = str(part.get(key)).removeprefix("torch.")
            if name in DTYPES:
                return name
    return "bfloat16"
