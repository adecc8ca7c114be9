"""A patch of the attention function of mlx-lm's models, through which calls can be observed and answered.

mlx-lm's models call `scaled_dot_product_attention(queries, keys, values, cache=..., ...)` by a global name of their
module. While an `AttentionPatch` of a model is open, that name is a function of ours in its modules: calls with a cache
that has an `attention_hook` go to that hook, all others to the original function, which costs half a microsecond a
layer. After the last patch has closed, the original function is back. `observing` finds which layers call it at all.
B rows, Hq query heads, H KV heads, S queries, N tokens that a cache holds, D head dim.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import count
from types import ModuleType
from typing import Any, Self

import mlx.core as mx
import mlx.nn as nn

from mlx_kv.cache.protocol import AttentionCall, Hook
from mlx_kv.mlxlm.traverse import leaves

NAME = "scaled_dot_product_attention"
HOOK = "attention_hook"


class AttentionPatch:
    """Passes the attention of a model's layers to the hooks of their caches, until it is closed.

    It closes at the end of its `with` block, by `close`, or with its last reference: caches can hold one. A copy is the
    patch itself. Patches may overlap in any order, also for several models of one module; the module's own function
    returns with the last of them.

    Args:
        model: any model of mlx-lm. Layers of other modules, as wrappers of models have, are found.
        otherwise: the hook of calls whose cache has none, and of those without a cache. The latest patch wins.
        answering: computes attention instead of mlx-lm, after the hook of the cache. The latest patch wins.
    """

    def __init__(self, model: nn.Module, otherwise: Hook | None = None, answering: Hook | None = None) -> None:
        number = next(_numbers)
        modules = attention_modules(model)
        self._finalizer = weakref.finalize(self, _changes.make, functools.partial(_close, modules, number))
        self._finalizer.atexit = False
        _changes.make(functools.partial(_open, modules, number, otherwise, answering))

    def close(self) -> None:
        """Ends the patch; a second call does nothing."""
        self._finalizer()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __deepcopy__(self, memo: Any) -> Self:
        return self


AttentionSeam = AttentionPatch  # its name up to 0.2


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
            for cache, own in zip(everything, before, strict=True):
                setattr(cache, HOOK, own)


def attention_modules(model: nn.Module) -> list[ModuleType]:
    """The model's modules that call attention by its global name."""
    return modules_with(model, NAME)


def modules_with(model: nn.Module, name: str) -> list[ModuleType]:
    """The modules that the model's layers come from or inherit from, if they call something by that global name."""
    parts = model.modules()  # type: ignore[no-untyped-call]
    names = {kind.__module__ for part in {type(part) for part in parts} for kind in part.__mro__}
    found = [sys.modules[module] for module in sorted(names) if module in sys.modules]
    return [module for module in found if callable(getattr(module, name, None))]


class _InFront:
    """A hook before the cache's own, which is looked up at each call: copies of a cache keep the hook in front."""

    def __init__(self, hook: Hook) -> None:
        self._hook = hook

    def attend(self, call: AttentionCall) -> mx.array:
        own: Hook | None = getattr(call.cache, "own_hook", None)
        return self._hook.attend(call if own is None else call.before(own))


class _PatchedModule:
    """The function that replaces a module's attention, and the open patches of the module."""

    def __init__(self, module: ModuleType) -> None:
        own: Callable[..., mx.array] = getattr(module, NAME)
        self.module, self.own = module, own
        self.patches: dict[int, tuple[Hook | None, Hook | None]] = {}
        self.otherwise: Hook | None = None
        self.answering: Hook | None = None

        @functools.wraps(own)
        def attention(*placed: Any, **named: Any) -> mx.array:
            cache = named["cache"] if "cache" in named else placed[3] if len(placed) > 3 else None
            hook: Hook | None = getattr(cache, HOOK, None) or self.otherwise
            answering = self.answering
            if answering is None:
                return own(*placed, **named) if hook is None else hook.attend(AttentionCall(own, placed, named))
            call = AttentionCall(own, placed, named)
            return answering.attend(call) if hook is None else hook.attend(call.before(answering))

        self.function = attention
        setattr(module, NAME, attention)

    def settle(self) -> None:
        """Uses the hooks of the latest patches; without any, the module gets its own function back."""
        last_first = [*reversed(self.patches.values())]
        self.otherwise = next((hook for hook, _ in last_first if hook is not None), None)
        self.answering = next((hook for _, hook in last_first if hook is not None), None)
        if not self.patches:
            del _patched[self.module]
            # Where another function has replaced ours and calls it, ours now forwards every call.
            if getattr(self.module, NAME) is self.function:
                setattr(self.module, NAME, self.own)


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


def _open(modules: list[ModuleType], number: int, otherwise: Hook | None, answering: Hook | None) -> None:
    for module in modules:
        if module not in _patched:
            _patched[module] = _PatchedModule(module)
        _patched[module].patches[number] = otherwise, answering
        _patched[module].settle()


def _close(modules: list[ModuleType], number: int) -> None:
    for module in modules:
        if module in _patched:
            _patched[module].patches.pop(number, None)
            _patched[module].settle()
