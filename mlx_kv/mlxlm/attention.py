"""The one place where the attention of mlx-lm's models can be seen, and served.

mlx-lm's models call `scaled_dot_product_attention(queries, keys, values, cache=..., ...)` by a global name of the
module in which their layer lies. While an `AttentionSeam` of a model is open, that name stands for a function of ours
in each of these modules: a call whose cache carries an `attention_hook` goes to that hook, every other one is handed on
as it came, which costs half a microsecond a layer (a step of a tiny model takes thousands). Closed, the modules are as
they were; nothing is touched before. Which layers call it at all, `observing` finds out.
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
from typing import Any, Protocol, Self

import mlx.core as mx
import mlx.nn as nn

from mlx_kv.mlxlm.traverse import leaves

NAME = "scaled_dot_product_attention"
HOOK = "attention_hook"
# Its arguments, in the order in which mlx-lm gives them; some models give them by name, some by place.
ARGUMENTS = ("queries", "keys", "values", "cache", "scale", "mask", "sinks")


class AttentionCall:
    """One call of attention: what a layer asks, and a way to have it answered.

    Attributes:
        queries: (B, Hq, S, D), after RoPE.
        keys, values: as the layer hands them on: mostly what the cache returned, (B, H, N, D) or packed planes.
        cache: the cache of the layer.
        scale: of the products of queries and keys.
        mask: "causal", an array of bool or of addends that broadcasts to (B, Hq, S, N), or None.
        sinks: (Hq,) logits of attention sinks, or None.
    """

    __slots__ = (*ARGUMENTS, "_function", "_named", "_placed")

    queries: mx.array
    keys: Any
    values: Any
    cache: Any
    scale: float
    mask: mx.array | str | None
    sinks: mx.array | None

    def __init__(self, function: Callable[..., mx.array], placed: tuple[Any, ...], named: dict[str, Any]) -> None:
        self._function, self._placed, self._named = function, placed, named
        given = dict(zip(ARGUMENTS, placed, strict=False)) | named
        for name in ARGUMENTS:
            setattr(self, name, given.get(name))

    def hand_on(self, **changes: Any) -> mx.array:
        """(B, Hq, S, D), what the layer would have got: of the same arguments, but for those that are given anew.

        Raises:
            TypeError: a change of something that is no argument of attention.
        """
        if not isinstance(changes.get("keys", self.keys), mx.array) and "queries" not in changes:
            changes["queries"] = self.queries[...]  # mlx-lm scales them in place there: those of the hook stay
        placed, named = self._arguments(changes)
        return self._function(*placed, **named)

    def changed(self, **changes: Any) -> AttentionCall:
        """The same call with other arguments.

        Raises:
            TypeError: as `hand_on`.
        """
        return AttentionCall(self._function, *self._arguments(changes))

    def before(self, hook: AttentionHook) -> AttentionCall:
        """The same call, answered by a hook when it is handed on."""

        def function(*placed: Any, **named: Any) -> mx.array:
            return hook.attend(AttentionCall(self._function, placed, named))

        return AttentionCall(function, self._placed, self._named)

    def _arguments(self, changes: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if not changes.keys() <= set(ARGUMENTS):
            raise TypeError(f"attention has no {', '.join(changes.keys() - set(ARGUMENTS))}: {', '.join(ARGUMENTS)}")
        placed = tuple([changes.pop(name, value) for name, value in zip(ARGUMENTS, self._placed, strict=False)])
        return placed, self._named | changes


class AttentionHook(Protocol):
    """What a cache carries as `attention_hook` if its attention is to be seen, or answered in mlx-lm's place."""

    def attend(self, call: AttentionCall) -> mx.array:
        """(B, Hq, S, D): `call.hand_on()`, after a look at it or with other arguments; or an answer of its own."""


class AttentionSeam:
    """Gives the attention of a model's layers to the hooks of their caches, from its making until it is closed.

    It ends with its block, with `close`, or with its last reference: caches that ask can carry it. A copy is the
    seam itself. Seams may overlap in any order, also those of several models of one module; a module gets its own
    function back with the last of them.

    Args:
        model: any model of mlx-lm. Layers of other modules, as wrappers of models have, are found.
        otherwise: what gets the calls that no hook asks for, also those that name no cache. In overlapping seams the
            last one.
        answering: what computes attention in mlx-lm's place, after any hook has seen the call. In overlapping seams
            the last one.
    """

    def __init__(
        self, model: nn.Module, otherwise: AttentionHook | None = None, answering: AttentionHook | None = None
    ) -> None:
        number = next(_numbers)
        modules = attention_modules(model)
        self._finalizer = weakref.finalize(self, _leave, modules, number)
        self._finalizer.atexit = False
        _changes.make(functools.partial(_enter, modules, number, otherwise, answering))

    def close(self) -> None:
        """Ends it; again, nothing happens."""
        self._finalizer()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __deepcopy__(self, memo: Any) -> Self:
        return self


@contextlib.contextmanager
def attention_hooked(model: nn.Module, caches: Iterable[Any], hook: AttentionHook | None) -> Iterator[None]:
    """Gives the attention over these caches, ours or mlx-lm's, to a hook for as long as the block runs.

    Caches that see their attention themselves see what it hands on.
    """
    in_front = None if hook is None else _InFront(hook)
    everything = list(leaves(caches))
    before = [getattr(cache, HOOK, None) for cache in everything]
    with AttentionSeam(model):
        try:
            for cache in everything:
                setattr(cache, HOOK, in_front)
            yield
        finally:
            for cache, own in zip(everything, before, strict=True):
                setattr(cache, HOOK, own)


def attention_modules(model: nn.Module) -> list[ModuleType]:
    """Those of the model's modules that have attention by its global name."""
    return modules_with(model, NAME)


def modules_with(model: nn.Module, name: str) -> list[ModuleType]:
    """The modules that the model's layers come from or inherit from, if they call something by that global name."""
    parts = model.modules()  # type: ignore[no-untyped-call]
    names = {kind.__module__ for part in {type(part) for part in parts} for kind in part.__mro__}
    found = [sys.modules[module] for module in sorted(names) if module in sys.modules]
    return [module for module in found if callable(getattr(module, name, None))]


class _InFront:
    """A hook before the cache's own, which is looked up at each call: copies of a cache keep the hook in front."""

    def __init__(self, hook: AttentionHook) -> None:
        self._hook = hook

    def attend(self, call: AttentionCall) -> mx.array:
        own: AttentionHook | None = getattr(call.cache, "own_hook", None)
        return self._hook.attend(call if own is None else call.before(own))


class _SeamedModule:
    """The function that stands in a module for its attention, and the seams that want it there."""

    def __init__(self, module: ModuleType) -> None:
        own: Callable[..., mx.array] = getattr(module, NAME)
        self.module, self.own = module, own
        self.seams: dict[int, tuple[AttentionHook | None, AttentionHook | None]] = {}
        self.otherwise: AttentionHook | None = None
        self.answering: AttentionHook | None = None
        self.standing = False

        @functools.wraps(own)
        def attention(*placed: Any, **named: Any) -> mx.array:
            cache = named["cache"] if "cache" in named else placed[3] if len(placed) > 3 else None
            hook: AttentionHook | None = getattr(cache, HOOK, None) or self.otherwise
            answering = self.answering
            if answering is None:
                return own(*placed, **named) if hook is None else hook.attend(AttentionCall(own, placed, named))
            call = AttentionCall(own, placed, named)
            return answering.attend(call) if hook is None else hook.attend(call.before(answering))

        self.function = attention

    def enter(self, number: int, otherwise: AttentionHook | None, answering: AttentionHook | None) -> None:
        self.seams[number] = otherwise, answering
        self._settle()
        if not self.standing:
            self.standing = True
            setattr(self.module, NAME, self.function)

    def leave(self, number: int) -> None:
        self.seams.pop(number, None)
        self._settle()
        if not self.seams:
            self.standing = False
            del _seamed[self.module]
            # Else another function replaced ours and calls it: from now on ours hands everything on.
            if getattr(self.module, NAME) is self.function:
                setattr(self.module, NAME, self.own)

    def _settle(self) -> None:
        last_first = [*reversed(self.seams.values())]
        self.otherwise = next((hook for hook, _ in last_first if hook is not None), None)
        self.answering = next((hook for _, hook in last_first if hook is not None), None)


class Changes:
    """Makes changes of what all of a process shares, such as a module of mlx-lm's: one after the other, each whole.

    A destructor runs at any moment, also in the middle of a change by the same thread, which no lock prevents. What it
    wants changed waits for the end of that.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._waiting: deque[Callable[[], None]] = deque()
        self._changing = False

    def make(self, change: Callable[[], None]) -> None:
        """It is made when this returns; or, asked for within another one, when that is."""
        self._waiting.append(change)
        while True:
            with self._lock:
                if self._changing:  # by this thread: it goes on with what waits
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
_seamed: dict[ModuleType, _SeamedModule] = {}
_changes = Changes()  # the garbage of a seam may be collected while another is made


def _enter(
    modules: list[ModuleType], number: int, otherwise: AttentionHook | None, answering: AttentionHook | None
) -> None:
    for module in modules:
        if module not in _seamed:
            _seamed[module] = _SeamedModule(module)
        _seamed[module].enter(number, otherwise, answering)


def _leave(modules: list[ModuleType], number: int) -> None:
    _changes.make(functools.partial(_left, modules, number))


def _left(modules: list[ModuleType], number: int) -> None:
    for module in modules:
        if module in _seamed:
            _seamed[module].leave(number)
