"""A patch of the attention function of mlx-lm's models, through which calls can be observed and computed here.

mlx-lm's models call `scaled_dot_product_attention(queries, keys, values, cache=..., ...)` by a global name of their
module. While an `AttentionPatch` of a model is open, that name is a function of ours in its modules: calls with a cache
that has an `attention_hook` go to that hook, all others to the original function, which costs half a microsecond a
layer. After the last patch has closed, the original function is back.

Some models call an attention function of their own, read the tokens of another layer's cache, attend to other keys than
the cached ones, or make their own masks. Probes find which layers call the function, and how. Scores of attention,
residuals and different lengths of heads, layers or rows need layers that do; for other models their caches are refused.
B rows, Hq query heads, H KV heads, S queries, N tokens that a cache holds, D head dim.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from types import ModuleType
from typing import Any, Literal, Self

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import cache as stock

from mlx_kv.cache.checks import cache_list
from mlx_kv.cache.codecs import Codecs, Packing, packings_of
from mlx_kv.cache.kv_cache import KVCache
from mlx_kv.cache.protocol import AttentionCall, Call, Hook
from mlx_kv.cache.segmented import DeferredMask
from mlx_kv.mlxlm.probe import (
    ATTENTION,
    FAR,
    ROWS,
    ProbeCache,
    architecture,
    cached_per_model,
    check_model,
    graph_error,
    indexers,
    probe_caches,
    refuses_ragged,
    takes_packed,
)
from mlx_kv.mlxlm.traverse import leaves, mapped, parts_of
from mlx_kv.settings import SettingError

NAME = "scaled_dot_product_attention"
HOOK = "attention_hook"
Sight = Literal["seen", "derived", "hidden"]
WORST = ("hidden", "derived", "seen")
# New tokens and those before: models read prompts and decode in different ways, and some select tokens of long texts.
TRIALS = ((2, 0), (2, FAR), (1, FAR))


# --- the patch --------------------------------------------------------------------------------------------------------


class AttentionPatch:
    """Passes the attention of a model's layers to the hooks of their caches, until it is closed.

    It closes at the end of its `with` block, by `close`, or with its last reference: caches can hold one. A copy is the
    patch itself. Patches may overlap in any order, also for several models of one module; the module's own function
    returns with the last of them.

    Args:
        model: any model of mlx-lm. Layers of other modules, as wrappers of models have, are found.
        default_hook: the hook of calls whose cache has none, and of those without a cache. The latest patch wins.
        backend: computes attention instead of mlx-lm, after the hook of the cache. The latest patch wins.
    """

    def __init__(self, model: nn.Module, default_hook: Hook | None = None, backend: Hook | None = None) -> None:
        number = next(_numbers)
        modules = attention_modules(model)
        self._finalizer = weakref.finalize(self, _changes.make, functools.partial(_close, modules, number))
        self._finalizer.atexit = False
        _changes.make(functools.partial(_open, modules, number, default_hook, backend))

    def close(self) -> None:
        """Ends the patch; a second call does nothing."""
        self._finalizer()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __deepcopy__(self, memo: Any) -> Self:
        return self


def use_backend(model: nn.Module, backend: Hook) -> None:
    """Attention of a model's layers is computed by a backend, for as long as the model lives."""
    weakref.finalize(model, AttentionPatch(model, backend=backend).close).atexit = False


@contextlib.contextmanager
def attention_hooked(model: nn.Module, caches: Iterable[Any], hook: Hook | None) -> Iterator[None]:
    """Passes the attention over these caches, ours or mlx-lm's, to a hook inside a `with` block.

    Caches with a hook of their own get what this hook forwards.
    """
    in_front = None if hook is None else _InFront(hook)
    everything = list(leaves(caches))
    before = [getattr(cache, HOOK, None) for cache in everything]
    with AttentionPatch(model):
        try:
            for cache in everything:
                setattr(cache, HOOK, in_front)
            yield
        finally:
            for cache, previous in zip(everything, before, strict=True):
                setattr(cache, HOOK, previous)


def attention_modules(model: nn.Module) -> list[ModuleType]:
    """The model's modules that call attention by its global name."""
    return modules_with(model, NAME)


def modules_with(model: nn.Module, name: str) -> list[ModuleType]:
    """The modules that the model's layers come from or inherit from, if they call something by that global name."""
    parts = model.modules()  # type: ignore[no-untyped-call]
    names = {kind.__module__ for part in {type(part) for part in parts} for kind in part.__mro__}
    modules = [sys.modules[module] for module in sorted(names) if module in sys.modules]
    return [module for module in modules if callable(getattr(module, name, None))]


class _InFront:
    """A hook before the cache's own, which is looked up at each call: copies of a cache keep the hook in front."""

    def __init__(self, hook: Hook) -> None:
        self._hook = hook

    def attend(self, call: AttentionCall) -> mx.array:
        next_hook: Hook | None = getattr(call.cache, "own_hook", None)
        return self._hook.attend(call if next_hook is None else call.before(next_hook))


class _PatchedModule:
    """The function that replaces a module's attention, and the open patches of the module."""

    def __init__(self, module: ModuleType) -> None:
        forward: Callable[..., mx.array] = getattr(module, NAME)
        self.module, self.original = module, forward
        self.patches: dict[int, tuple[Hook | None, Hook | None]] = {}
        self.default_hook: Hook | None = None
        self.backend: Hook | None = None

        @functools.wraps(forward)
        def attention(*placed: Any, **named: Any) -> mx.array:
            cache = named["cache"] if "cache" in named else placed[3] if len(placed) > 3 else None
            hook: Hook | None = getattr(cache, HOOK, None) or self.default_hook
            backend = self.backend
            if backend is None:
                return forward(*placed, **named) if hook is None else hook.attend(AttentionCall(forward, placed, named))
            call = AttentionCall(forward, placed, named)
            return backend.attend(call) if hook is None else hook.attend(call.before(backend))

        self.function = attention
        setattr(module, NAME, attention)

    def settle(self) -> None:
        """Uses the hooks of the latest patches; without any, the module gets its own function back."""
        last_first = [*reversed(self.patches.values())]
        self.default_hook = next((hook for hook, _ in last_first if hook is not None), None)
        self.backend = next((hook for _, hook in last_first if hook is not None), None)
        if not self.patches:
            del _patched[self.module]
            # Where another function has replaced ours and calls it, ours now forwards every call.
            if getattr(self.module, NAME) is self.function:
                setattr(self.module, NAME, self.original)


class Changes:
    """Makes changes to process-wide state, such as a module of mlx-lm, one after the other.

    A finalizer may run in the middle of a change by the same thread, which no lock prevents: its own change is queued
    until then.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._waiting: deque[Callable[[], None]] = deque()
        self._changing = False

    def make(self, change: Callable[[], None]) -> None:
        """Makes a change before it returns; from within another change, after that one."""
        self._waiting.append(change)
        while True:
            with self._lock:
                if self._changing:  # this thread, further up, makes what waits
                    return
                self._changing = True
                try:
                    while self._waiting:
                        self._waiting.popleft()()
                finally:
                    self._changing = False
            if not self._waiting:  # nothing came at the last moment
                return


_numbers = count()
_patched: dict[ModuleType, _PatchedModule] = {}
_changes = Changes()  # a patch may be collected as garbage while another one opens


def _open(modules: list[ModuleType], number: int, default_hook: Hook | None, backend: Hook | None) -> None:
    for module in modules:
        if module not in _patched:
            _patched[module] = _PatchedModule(module)
        _patched[module].patches[number] = default_hook, backend
        _patched[module].settle()


def _close(modules: list[ModuleType], number: int) -> None:
    for module in modules:
        if module in _patched:
            _patched[module].patches.pop(number, None)
            _patched[module].settle()


# --- caches that need to see it ---------------------------------------------------------------------------------------


def can_attend(model: nn.Module, packing: Packing) -> bool:
    """Whether every layer passes planes packed like these to attention that can be computed here.

    The model is probed with planes of mlx-lm's codec, of the same bits and group size.
    """
    sights = attention_seen(model)
    if not all(sight in ("seen", None) for sight in sights):
        return False
    affine = packing if packing.mode == "affine" else Packing(8, 32)
    return takes_packed(model, affine.group_size, affine.bits)


def reads_packed(model: nn.Module, codecs: Codecs, residual: bool) -> tuple[bool, bool]:
    """Whether attention in every layer of a model reads what codecs store packed, and whether it can be computed here.

    Args:
        residual: whether it must be computed here, beside newest tokens that are not quantised.
    """
    packed = [codec.packed for codec in codecs if codec.packed is not None]
    ours = packings_of(codecs) is not None  # planes that mlx-lm's attention cannot read
    computable = can_attend(model, packed[0] if packed else Packing(8, 32)) if residual or ours else True
    if len(packed) < len(codecs) or ours:
        return len(packed) == len(codecs) and computable, computable
    return takes_packed(model, packed[0].group_size, packed[0].bits), computable


def attach_attention_hooks(model: nn.Module, caches: Sequence[Any]) -> None:
    """Connects caches that need to see their attention to a patch of the model's, if they are not yet.

    Args:
        caches: of this model, one for each layer.

    Raises:
        ValueError: layers that hide it.
    """
    check_model("model", model)
    parts = [parts_of(cache) for cache in leaves(cache_list("caches", caches))]
    hooked = {i: layer for i, layer in enumerate(parts) if any(part.own_hook is not None for part in layer)}
    if not hooked:
        return
    evictors = {i: [part.evictor for part in layer if part.evictor is not None] for i, layer in hooked.items()}
    wanting = {i: layer for i, layer in evictors.items() if any(evictor.wants_attention for evictor in layer)}
    if any(evictor.ragged_heads for layer in wanting.values() for evictor in layer) and not attends_by_class(model):
        raise SettingError(
            "layers or heads of different lengths each need a mask of their own, and {} does not attend with the mask "
            "that it is given: use {layers:='uniform'}, and not {share:='adaptive'}",
            architecture(model),
        )
    sights = dict(enumerate(attention_seen(model)))
    hidden = [i for i in hooked if sights.get(i) not in ("seen", None)]
    if blind := [str(i) for i in hidden if i in wanting]:
        raise ValueError(
            f"a score of attention needs to see it, and {architecture(model)} shows none of layer {', '.join(blind)}: "
            "choose another score, such as key_diff"
        )
    if blind := [str(i) for i in hidden if any(part.view.residual_length for part in hooked[i])]:
        raise SettingError(
            "unquantised newest tokens need attention that can be computed here, and {} shows none of layer {}: leave "
            "out {residual_length}",
            *(architecture(model), ", ".join(blind)),
        )
    # Where packed planes cannot be attended to here, attention gets arrays: such caches need no patch.
    carrying: list[KVCache] = []
    for i, layer in hooked.items():
        packings = [packings_of(part.view.codecs) for part in layer if not part.view.residual_length]
        if i in wanting or all(each is not None and can_attend(model, each[0]) for each in packings):
            carrying += layer
    if unseen := [part for part in carrying if part.seam is None]:
        patch = AttentionPatch(model)
        for part in unseen:
            part.carry(patch)


show_attention = attach_attention_hooks  # the public name


# --- layers that show it ----------------------------------------------------------------------------------------------


@dataclass
class _CallListener:
    """Records the caches of attention calls, and how the calls use them."""

    caches: list[Any] = field(default_factory=list)
    calls: list[tuple[int, Sight]] = field(default_factory=list)

    def attend(self, call: AttentionCall) -> mx.array:
        for index, cache in enumerate(self.caches):
            kept = getattr(cache, "keys", None)
            if cache is call.cache:
                slots = kept.shape[2] if isinstance(cache, ProbeCache) and kept is not None else call.keys.shape[2]
                same: Sight = "seen" if call.keys is kept or not isinstance(cache, ProbeCache) else "derived"
                self.calls.append((index, same if call.keys.shape[2] == slots else "hidden"))
            elif kept is not None and call.keys is kept:
                self.calls.append((index, "hidden"))  # a layer that reads another one's cache, and passes none
        return call.forward()


@cached_per_model
def attention_seen(model: nn.Module) -> tuple[Sight | None, ...]:
    """How the model calls attention over each of its caches, in the order of `leaves`.

    "seen": with the cache, and the keys that the cache returned. "derived": with the cache, and as many keys, in the
    order of its slots, that the layer computes from them (latent attention; part of the products may be in the mask).
    "hidden": never, or not always, or not over all slots. None: without attention, as recurrent layers and indexers.
    """
    stock_caches = list(leaves(stock.make_prompt_cache(model)))
    sights: list[set[Sight | None]] = [set() for _ in stock_caches]
    for new, position in TRIALS:
        for index, sight in enumerate(_probe_attention(model, new, position)):
            sights[index].add(sight)
    return tuple(next((sight for sight in WORST if sight in each), None) for each in sights)


def _probe_attention(model: nn.Module, new: int, position: int) -> list[Sight | None]:
    listener = _CallListener()

    def listening(caches: list[Any]) -> list[Any]:
        listener.caches, listener.calls = list(leaves(caches)), []
        for cache in listener.caches:
            setattr(cache, HOOK, listener)
        return caches

    with AttentionPatch(model, default_hook=listener):
        why = graph_error(model, (1, new), lambda at: listening(probe_caches(model, at)), position)
        if why is not None:  # it needs attributes of mlx-lm's own caches
            model(mx.zeros((1, new), mx.int32), cache=listening(stock.make_prompt_cache(model)))
    sights: list[Sight | None] = []
    for index, cache in enumerate(listener.caches):
        calls = [sight for i, sight in listener.calls if i == index]
        written = cache.written if isinstance(cache, ProbeCache) else not isinstance(cache, stock.ArraysCache)
        uncalled: Sight | None = "hidden" if written and index not in indexers(model) else None
        sights.append(next((sight for sight in WORST if sight in calls), uncalled))
    return sights


# --- layers that use the mask of their cache --------------------------------------------------------------------------


@cached_per_model
def attends_by_class(model: nn.Module) -> bool:
    """Whether a model calls all of its attention with exactly the keys, values and mask that its caches returned.

    Most do. Others make their own mask, call another function, compute keys from the cached ones, or read the tokens of
    another layer. Rows in capacity classes (`cache.segments`), and heads or layers of different lengths need it.
    """
    if refuses_ragged(model) is not None or indexers(model):
        return False
    return all(_passes_through(model, new, position) for new, position in TRIALS)


def _passes_through(model: nn.Module, new: int, position: int) -> bool:
    strict: list[_StrictCache] = []

    def caches_at(position: int) -> list[Any]:
        def replaced(cache: Any) -> Any:
            if type(cache) not in ATTENTION:
                return cache
            strict.append(_StrictCache(position))
            return strict[-1]

        strict.clear()
        return mapped(stock.make_prompt_cache(model), replaced)

    with AttentionPatch(model):
        why = graph_error(model, (ROWS, new), caches_at, position)
    return why is None and bool(strict) and all(cache.attended for cache in strict)


class _StrictCache:
    """Returns what caches of several classes would, and raises an error where a model does not pass it to attention."""

    def __init__(self, position: int) -> None:
        self._position = position
        self._fetched: tuple[mx.array, mx.array] | None = None
        self.attention_hook = self

    @property
    def attended(self) -> bool:
        """Whether attention followed every update."""
        return self._fetched is None

    @property
    def offset(self) -> mx.array:
        if self._fetched is not None:
            raise ValueError("positions were read between an update and its attention")
        return self._position - mx.arange(ROWS)

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> Any:
        return DeferredMask(N, return_array, window_size)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        if self._fetched is not None:
            raise ValueError("an update without attention")
        self._fetched = keys, values
        return keys, values

    def attend(self, call: Call) -> mx.array:
        fetched, self._fetched = self._fetched, None
        if fetched is None or not isinstance(call.mask, DeferredMask):
            raise ValueError("another mask, or no update before")
        keys, values = fetched
        if call.keys is not keys or call.values is not values or call.queries.shape[0] != ROWS:
            raise ValueError("other keys, values or rows than of the update")
        self._position += keys.shape[2]
        return mx.zeros((*call.queries.shape[:3], values.shape[3]), call.queries.dtype)
