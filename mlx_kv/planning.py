"""How many bytes the keys and values of a model will take, from its configuration alone.

    bytes = sum over caches of (state bytes + bytes per slot * slots + records of a budget)

Sizes are read from caches after one token: the graph is built and dropped, nothing is evaluated, no weight is read.
Strategies are compared at several contexts, also over several ranks; the server's admission uses the same `RowMemory`.
Slots are counted as they fill: neither rounded up to 256, nor grown ahead.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import cache as stock

from mlx_kv.cache.buffers import on_cpu
from mlx_kv.cache.codecs import Bits
from mlx_kv.cache.eviction.allocation import BY_HEAD, max_head_tokens, max_layer_tokens
from mlx_kv.cache.eviction.compaction import SAFEGUARD
from mlx_kv.cache.eviction.evictor import Evictor
from mlx_kv.cache.eviction.scoring import ObservedBytes
from mlx_kv.cache.growth import DEFAULT, Growth, round_up
from mlx_kv.cache.layout import NO_LIMIT
from mlx_kv.communicator import CacheCommunicator
from mlx_kv.generation.admission import shares_up_to
from mlx_kv.generation.prefill import NO_INSTRUCTIONS, OVERLAP, Instructions, gpu_memory
from mlx_kv.mlxlm.attention import attends_by_class
from mlx_kv.mlxlm.convert import FULL, kind_and_window, make_prompt_cache
from mlx_kv.mlxlm.loading import weight_bytes
from mlx_kv.mlxlm.traverse import leaves
from mlx_kv.policy import CachePolicy
from mlx_kv.ranks.communicator import SplitLayers, cache_communicator_of
from mlx_kv.ranks.splitting import PlannedRank, check_split, planned_part

# --- one sequence -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TokenRecords:
    """What a budget records of the tokens of one sequence in one layer, besides keys and values.

    Attributes:
        cut: slots before the recent block.
        per_kept: bytes of each of them: a position (int32), and a score (float32) where it is computed only once, by
            head where heads keep different tokens (`KeptTokens`).
        dead: bytes of the slots without a token that each head has (int32), where heads keep different numbers.
        per_reread: bytes of each token of a prompt that is read twice, float32 of each head (`Reread`); else 0.
        observed: the attention that the score observes.
    """

    cut: int
    per_kept: int
    dead: int
    per_reread: int
    observed: ObservedBytes

    def nbytes(self, slots: int) -> int:
        """Bytes of a sequence that uses `slots` slots."""
        kept = min(self.cut, slots) * self.per_kept + self.dead
        return kept + slots * self.per_reread + self.observed.nbytes(slots)


@dataclass(frozen=True)
class Layer:
    """One cache of a model: layers that share keys and values share a cache.

    Attributes:
        kind: "full", "sliding", "chunked" (a window that starts anew every `window` tokens), "recurrent", or
            "not planned: " and the class of an unsupported cache, which counts as 0 bytes.
        window: maximum tokens that a query sees; None is all, or a recurrent layer.
        heads, key_dim, value_dim: of each token, before any quantisation.
        bytes_per_slot: of one sequence, all heads, keys and values, as a policy stores them.
        plain_bytes_per_slot: the same before they are quantised.
        max_slots: maximum slots of a sequence under a policy, except during a second pass over its prompt.
        state_bytes: of one sequence at any context: recurrent state, including the states for rollback while it
            decodes, or the ring of a residual, which is allocated at the first token.
        records: what a budget records of tokens; None without one.
        ours: whether the cache is converted to one of this library, which the policy can quantise, or stays mlx-lm's.
    """

    kind: str
    window: int | None = None
    heads: int = 0
    key_dim: int = 0
    value_dim: int = 0
    bytes_per_slot: int = 0
    plain_bytes_per_slot: int = 0
    max_slots: int = NO_LIMIT
    state_bytes: int = 0
    records: TokenRecords | None = None
    ours: bool = True

    @property
    def read_twice(self) -> bool:
        """Whether it holds a whole prompt and its repetition until the second pass is complete."""
        return self.records is not None and self.records.per_reread > 0

    def nbytes(self, slots: int, plain: bool = False) -> int:
        """Bytes of one sequence that uses `slots` slots, as the policy stores them or, if `plain`, unquantised."""
        of_slots = slots * (self.plain_bytes_per_slot if plain else self.bytes_per_slot)
        return self.state_bytes + of_slots + (0 if self.records is None else self.records.nbytes(slots))


Slots = Callable[[Layer, int], int]


def every_token(layer: Layer, context: int) -> int:
    """All tokens: windows are ignored."""
    return context


def double_window(layer: Layer, context: int) -> int:
    """A buffer of two windows for layers that have one, as some engines keep."""
    return context if layer.window is None else min(context, 2 * layer.window)


def as_laid_out(layer: Layer, context: int) -> int:
    """The slots of the policy's layout: window + max_write - 1 where there is a window."""
    return min(context, layer.max_slots)


def _read_one_token(model: nn.Module, policy: CachePolicy, communicator: CacheCommunicator) -> list[Any]:
    """All leaf caches of a model after one token that is not evaluated."""
    try:
        caches = make_prompt_cache(model, policy, strict=False, peers=communicator)
        model(mx.array([[0]]), cache=caches)
    except ValueError:
        raise
    except Exception as error:  # a model's own code, with a configuration that may be anything
        raise ValueError(f"mlx-lm's model cannot read a token: {type(error).__name__}: {error}") from error
    return list(leaves(caches))


def _describe(stock_cache: Any, plain: Any, stored: Any, step: int, chunk: int) -> Layer:
    """One layer, from mlx-lm's unused cache and from two that have seen a token, plain and as the policy stores it."""
    kind, window = kind_and_window(stock_cache)
    if kind == "recurrent":
        state = sum(array.nbytes for array in stored.cache if array is not None)
        kept = getattr(stored, "max_rollback", 0)  # while it decodes, the state after each of so many tokens
        return Layer(kind, state_bytes=(1 + kept) * state, ours=False)
    if kind is None or stored.keys is None:  # unknown, or no layer writes to it
        return Layer(f"not planned: {type(stock_cache).__name__}", ours=False)
    evictor, max_slots = stored.evictor, stored.layout.enough_slots
    heads = plain.keys.shape[1]
    if evictor is not None:  # rings do not grow for a longer write
        max_slots += _longer(evictor, heads) + max(0, chunk - stored.layout.max_write)
    return Layer(
        kind,
        window=plain.layout.window if kind == "sliding" else window,
        heads=heads,
        key_dim=plain.keys.shape[3],
        value_dim=plain.values.shape[3],
        bytes_per_slot=sum(buffer.bytes_per_slot for buffer in stored.view.buffers),
        plain_bytes_per_slot=sum(buffer.bytes_per_slot for buffer in plain.view.buffers),
        max_slots=max_slots,
        state_bytes=stored.nbytes_residual,
        records=None if evictor is None else _records(evictor, heads, step),
    )


def _longer(evictor: Evictor, heads: int) -> int:
    """Maximum tokens of the longest head beyond the budget; negative where it always holds fewer."""
    layout, table, adaptive = evictor.layout, evictor.table, evictor.scope == "adaptive"
    protected = layout.sinks + layout.keep_recent
    free = layout.budget - protected
    if table is None:
        return (heads - 1) * (layout.budget - max(protected, int(SAFEGUARD * layout.budget))) if adaptive else 0
    if not adaptive:
        return max_head_tokens(table, evictor.layer, free) - free
    together = max_layer_tokens(table, evictor.layer, free) * (heads if len(table[0]) == 1 else 1)
    sure = max(0, int(SAFEGUARD * (together // heads + protected)) - protected)
    return together - (heads - 1) * sure - free  # all for one head but what the others keep in any case


def _records(evictor: Evictor, heads: int, step: int) -> TokenRecords:
    """The records of an evictor that has seen a token."""
    rows = heads if evictor.scope in BY_HEAD else 1
    return TokenRecords(
        cut=evictor.layout.cut + _longer(evictor, heads),
        per_kept=rows * (8 if evictor.score.per_token else 4),
        dead=4 * heads if evictor.uneven_heads else 0,
        per_reread=4 * heads if evictor.wants_second_pass else 0,
        observed=ObservedBytes() if evictor.observation is None else evictor.observation.max_bytes(step),
    )


# --- one sequence -----------------------------------------------------------------------------------------------------


USUAL_PROMPT = 2000  # tokens, where memory is told in words


@dataclass(frozen=True)
class RowMemory:
    """Bytes of one sequence in all layers, at the peak of reading its prompt and after that.

    Slots are counted in multiples of `multiple`: 1 counts them as they fill, 256 as caches allocate them.

    Attributes:
        layers: and how many caches are alike.
        quantized_start: tokens from which on all is quantised. The first write allocates the slots that are reserved
            for prompt and answer, and allocates them plain.
        growth: how capacity grows.
        instructions: what comes before a repetition, where prompts are read twice; else None.
    """

    layers: tuple[tuple[Layer, int], ...] = ()
    quantized_start: int = 0
    growth: Growth = DEFAULT
    instructions: Instructions | None = None

    @classmethod
    def of(
        cls, layers: Iterable[Layer], policy: CachePolicy, instructions: Instructions = NO_INSTRUCTIONS
    ) -> RowMemory:
        alike = Counter(layers)
        twice = instructions if any(layer.read_twice for layer in alike) else None
        return cls(tuple(alike.items()), policy.quantized_start, policy.growth, twice)

    @property
    def bytes_per_slot(self) -> int:
        """Of one slot in every layer, before it is quantised if it is quantised late."""
        late = self.quantized_start > 0
        return sum(count * (each.plain_bytes_per_slot if late else each.bytes_per_slot) for each, count in self.layers)

    @property
    def per_token(self) -> int:
        """Bytes that one token more takes in a long context; 0 where none does."""
        return (self.read_once(2**20) - self.read_once(2**19)) // 2**19

    def after(self, tokens: int, multiple: int = 1, slots: Slots = as_laid_out) -> int:
        """Bytes of a sequence that has read so many tokens as a prompt."""
        plain = tokens <= self.quantized_start  # the write that comes next is the first to be quantised
        return sum(
            count * layer.nbytes(round_up(slots(layer, tokens), multiple), plain) for layer, count in self.layers
        )

    def at_peak(self, prompt: int, tokens: int, multiple: int = 1, slots: Slots = as_laid_out) -> int:
        """The most bytes that a sequence holds from its first token on.

        Args:
            prompt: tokens of the prompt.
            tokens: all that there will be, for which slots are reserved.
        """
        return max(self.read_once(tokens, multiple, slots), self.read_twice(prompt, tokens, multiple, slots))

    def read_once(self, tokens: int, multiple: int = 1, slots: Slots = as_laid_out) -> int:
        """The same but for the second reading of a prompt."""
        sizes = [(layer, count, round_up(slots(layer, tokens), multiple)) for layer, count in self.layers]
        return self._most(sizes, tokens)

    def read_twice(self, prompt: int, tokens: int, multiple: int = 1, slots: Slots = as_laid_out) -> int:
        """The most bytes while a prompt is read for the second time; 0 where it is read once.

        Layers whose score wants it hold the prompt and the part that is repeated, in slots that are allocated at the
        first token; all others are copied for the repetition (`generation.prefill`).
        """
        if (instructions := self.instructions) is None:
            return 0
        chunk = instructions.chunk_after(prompt)
        first = len(instructions.first) + len(instructions.answer) + min(chunk, prompt)
        later = 0
        if prompt > chunk:
            later = len(instructions.later) + OVERLAP + len(instructions.answer) + min(chunk, prompt - chunk)
        # Slots for the prompt and the longest part that is repeated: as reserved, or grown where that is too few.
        whole, needed = round_up(max(tokens, prompt + first + OVERLAP), multiple), prompt + max(first, later)
        if needed > whole:
            whole = needed if multiple == 1 else self.growth.capacity(needed, whole)
        sizes = [
            (layer, count, whole)
            if layer.read_twice
            else (layer, 2 * count, round_up(slots(layer, max(tokens, whole)), multiple))
            for layer, count in self.layers
        ]
        return self._most(sizes, whole)

    def _most(self, sizes: Sequence[tuple[Layer, int, int]], tokens: int) -> int:
        """The most bytes of layers, each with how many caches are alike, and their slots, up to so many tokens.

        Where tensors are quantised late, all slots are plain first; then one layer after the other is quantised, of
        which one is held both plain and quantised.
        """
        stored = sum(count * layer.nbytes(slots) for layer, count, slots in sizes)
        if not self.quantized_start:
            return stored
        plain = sum(count * layer.nbytes(slots, plain=True) for layer, count, slots in sizes)
        if tokens <= self.quantized_start:
            return plain
        return max(stored, plain + max(layer.bytes_per_slot * slots for layer, _, slots in sizes))


# --- strategies -------------------------------------------------------------------------------------------------------

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
        peers: the communicator with the other ranks, as for `make_prompt_cache`; None finds those of a model that was
            split.
    """

    def __init__(
        self, model: nn.Module, instructions: Instructions | None = None, peers: CacheCommunicator | None = None
    ) -> None:
        self.model = model
        self._communicator = cache_communicator_of(model) if peers is None else peers
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
        if (known := self._layers.get((policy, step, chunk))) is not None:
            return known
        stored = _read_one_token(self.model, policy, self._communicator)
        plain = stored if policy.stores_plain else _read_one_token(self.model, policy.plain(), self._communicator)
        caches = zip(leaves(stock.make_prompt_cache(self.model)), plain, stored, strict=True)
        layers = self._layers[policy, step, chunk] = [_describe(*each, step=step, chunk=chunk) for each in caches]
        return layers

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


# --- this device ------------------------------------------------------------------------------------------------------

DEVICE_SHARE = 0.8  # of the device's memory, as the default limit; activations and copies need some, too
RECOMMENDED_SHARE = 0.9  # of what macOS recommends


def device_dtype(config: dict[str, Any]) -> str:
    """The name of the dtype in which the model of a configuration computes here, one of `DTYPES`.

    On a CPU float32 (`mlxlm.loading`), else that of its weights: bfloat16 where the configuration does not say.
    """
    if on_cpu():
        return "float32"
    text = config.get("text_config")
    for part in (config, text if isinstance(text, dict) else {}):
        for key in ("dtype", "torch_dtype"):
            name = str(part.get(key)).removeprefix("torch.")
            if name in DTYPES:
                return name
    return "bfloat16"


def device_memory() -> int | None:
    """Bytes of the device, or those that macOS recommends to use of a Mac's; None if they are unknown."""
    if not on_cpu():
        return gpu_memory()
    memory = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    container = Path("/sys/fs/cgroup/memory.max")
    if container.exists() and (text := container.read_text().strip()).isdigit():
        memory.append(int(text))
    return min(memory)


def default_limit() -> int | None:
    """A share of the device's memory in bytes; None if its size is unknown.

    What macOS recommends leaves room for others already, so a larger share is taken of that.
    """
    size, macos = device_memory(), "max_recommended_working_set_size" in mx.device_info()
    return None if size is None else int((RECOMMENDED_SHARE if macos and not on_cpu() else DEVICE_SHARE) * size)
