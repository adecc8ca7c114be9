"""Probes: how a model of mlx-lm uses its caches, found by running the model, since no list of models stays complete.

Each probe runs once for a model. Most pass a few tokens through the model over `ProbeCache`s, which record how they are
used. Graphs are built and dropped; nothing is evaluated (unless the model itself evaluates something). Probes of
attention are in `observing`, those of RoPE in `rope`.
B rows, N new tokens, K slots.
"""

from __future__ import annotations

import ast
import functools
import inspect
import sys
import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from typing import Any, Concatenate, ParamSpec, TypeVar

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import cache as stock

from mlx_kv.mlxlm.traverse import leaves, mapped

P = ParamSpec("P")
T = TypeVar("T")
ATTENTION = {stock.KVCache, stock.QuantizedKVCache, stock.RotatingKVCache, stock.ChunkedKVCache}
# A length at which whatever a model does in long texts only has begun. Graphs of any length cost the same.
FAR = 1 << 20
# Rows, when each has a length of its own: as no model has heads, so that no axis of rows passes for one of heads.
ROWS = 13
# Dead slots, when they are to make a difference: blocks of any size have more than one more then.
MORE_SLOTS = 4097
FETCHES = ("update_and_fetch", "keys_and_values")
Stored = tuple[tuple[int, ...], mx.Dtype]  # the shape and the dtype of keys or values
_results: dict[int, dict[Any, Any]] = {}


# --- results, kept for each model -------------------------------------------------------------------------------------


def cached_per_model(probe: Callable[Concatenate[nn.Module, P], T]) -> Callable[Concatenate[nn.Module, P], T]:
    """Decorates a function of a model: each result is computed once, and kept for as long as the model lives."""

    @functools.wraps(probe)
    def cached(model: nn.Module, *args: P.args, **kwargs: P.kwargs) -> T:
        results, key = _results_of(model), (probe.__name__, args, tuple(kwargs.items()))
        if key not in results:
            results[key] = probe(model, *args, **kwargs)
        result: T = results[key]
        return result

    return cached  # type: ignore[return-value]


def copy_results(model: nn.Module, other: nn.Module, *probes: Callable[[nn.Module], Any]) -> None:
    """Gives a model the results of another one: a part of a split model may not be able to run alone."""
    for probe in probes:
        _results_of(model)[probe.__name__, (), ()] = probe(other)


def _results_of(model: nn.Module) -> dict[Any, Any]:
    if id(model) not in _results:  # models compare and hash as the dicts that they are
        _results[id(model)] = {}
        weakref.finalize(model, _results.pop, id(model), None)
    return _results[id(model)]


# --- caches that record how they are used -----------------------------------------------------------------------------


class ProbeCache:
    """A layer's cache of zeros, at any position, which records how the model uses it.

    Args:
        position: tokens that were read before.
        extra: dead slots after the last token, which the mask hides.
        rows: of the batch; each is one token shorter than the one before it.
        packed: group size and bits of the planes that it returns; None for plain arrays.
    """

    start_position = 0

    def __init__(self, position: int, extra: int = 0, rows: int = 1, packed: tuple[int, int] | None = None) -> None:
        self._position, self._extra, self._rows, self._packed = position, extra, rows, packed
        self.windows: list[int | None] = []  # of the masks that were made
        self.written = False
        self.has_values = True  # whether the values that it was given are more than the keys again, or nothing
        self.keys: mx.array | None = None
        self.values: mx.array | None = None
        self.given: tuple[mx.array, mx.array] | None = None  # the last keys and values that were to be stored

    @property
    def offset(self) -> int | mx.array:
        return self._position if self._rows == 1 else self._position - mx.arange(self._rows)

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> Any:
        self.windows.append(window_size)
        if self._position == 0 and self._rows == 1:
            return stock.create_attention_mask(N, 0, return_array, window_size)
        shape = (N, self._position + N + self._extra)
        return mx.ones(shape if self._rows == 1 else (self._rows, 1, *shape), dtype=mx.bool_)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> Any:
        self._position += keys.shape[2]
        self.given = keys, values
        self.written, self.has_values = True, values is not keys and values.shape[3] > 0
        self.keys, self.values = (
            mx.zeros((*x.shape[:2], self._position + self._extra, x.shape[3]), x.dtype) for x in (keys, values)
        )
        return self.keys_and_values()

    def keys_and_values(self) -> Any:
        stored: Any = self.keys, self.values
        if self._planes is None:
            return stored
        group_size, bits = self._planes
        return tuple(mx.quantize(x, group_size=group_size, bits=bits) for x in stored)

    @property
    def _planes(self) -> tuple[int, int] | None:
        """Group size and bits of what is handed out; None also where keys and values differ in head dim."""
        if self.keys is None or self.values is None or self.keys.shape[3] != self.values.shape[3]:
            return None
        return self._packed

    @property
    def group_size(self) -> int:
        return self._of_planes(0)

    @property
    def bits(self) -> int:
        return self._of_planes(1)

    def _of_planes(self, which: int) -> int:
        if self._planes is None:
            raise AttributeError("only packed planes have bits and a group size")
        return self._planes[which]

    def maybe_trim_front(self) -> None:
        pass


def probe_caches(
    model: nn.Module,
    position: int,
    packed: tuple[int, int] | None = None,
    plain: frozenset[int] = frozenset(),
    **how: int,
) -> list[Any]:
    """The model's own list of caches, with a `ProbeCache` for each of attention.

    Args:
        plain: the numbers of those, in the order of `leaves`, that never return packed planes.
    """
    number = count()

    def replaced(cache: Any) -> Any:
        index = next(number)
        if type(cache) not in ATTENTION:
            return cache
        # In chunks, the model makes the mask itself, of the slots from the front on: there are no others.
        given = how | {"extra": 0} if type(cache) is stock.ChunkedKVCache else how
        return ProbeCache(position, packed=None if index in plain else packed, **given)

    return mapped(stock.make_prompt_cache(model), replaced)


# --- building graphs --------------------------------------------------------------------------------------------------


class _Built(Exception):  # noqa: N818 - it is no error
    """Ends the building of a graph."""


def graph_error(
    model: nn.Module, shape: tuple[int, int], caches_at: Callable[[int], list[Any]], position: int = FAR
) -> str | None:
    """The error that building the graph of tokens (B, S) after `position` others raises; None where it is built.

    Args:
        shape: of the tokens.
        caches_at: makes the caches of a model that has read so many tokens; called again after a first failure.
    """

    def build(tokens: mx.array, position: int) -> None:
        model(tokens, cache=caches_at(position))
        raise _Built

    tokens = mx.zeros(shape, mx.int32)
    try:
        # In a trace nothing can be evaluated: so far into a text that would take all memory.
        mx.export_function(lambda part: None, lambda traced: build(traced, position), tokens)
    except _Built:
        return None
    except Exception as error:
        if "[eval]" not in str(error):
            return in_words(error)
    try:  # a model that evaluates something on its way: then not so far
        build(tokens, min(position, 2 * ROWS))
    except _Built:
        pass
    except Exception as error:
        return in_words(error)
    return None


def in_words(error: Exception) -> str:
    """The type of an error and the first line of its message."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}".removesuffix(": ")


# --- how a model uses its caches --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CacheUsage:
    """How a model used its caches in one step of two tokens.

    Attributes:
        fault: the error that the model raises also with mlx-lm's own caches; None where it runs.
        windows: the widest window of a mask, by the window that its cache was made for.
        indexers: the numbers of the caches, in the order of `leaves`, that store the keys of an indexer of sparse
            attention: values are empty or the keys again.
        masked_by_unwritten: whether a mask came from a cache that no layer writes to.
        shapes: (B, H, S, D) and dtype of keys and of values, by the number of the cache that they were written to.
    """

    fault: str | None = None
    windows: tuple[tuple[int, int], ...] = ()
    indexers: frozenset[int] = frozenset()
    masked_by_unwritten: bool = False
    shapes: tuple[tuple[int, tuple[Stored, Stored]], ...] = ()


@cached_per_model
def cache_usage(model: nn.Module) -> CacheUsage:
    """How the model uses its caches when it reads its first two tokens."""
    own = list(leaves(stock.make_prompt_cache(model)))
    if not any(type(cache) in ATTENTION for cache in own):
        return CacheUsage()
    caches, tokens = probe_caches(model, 0), mx.zeros((1, 2), mx.int32)
    try:
        model(tokens, cache=caches)
    except Exception:
        try:
            model(tokens, cache=stock.make_prompt_cache(model))
        except Exception as error:
            return CacheUsage(fault=in_words(error))
        return CacheUsage()  # it needs what only mlx-lm's own caches have
    windows: dict[int, int] = {}
    seen = [(index, cache) for index, cache in enumerate(leaves(caches)) if isinstance(cache, ProbeCache)]
    for index, cache in seen:
        if type(own[index]) is stock.RotatingKVCache:
            made_for = own[index].max_size
            windows[made_for] = max(windows.get(made_for, 0), *(window or 0 for window in cache.windows), 0)
    return CacheUsage(
        None,
        tuple((made_for, widest) for made_for, widest in windows.items() if widest > made_for),
        frozenset(index for index, cache in seen if cache.written and not cache.has_values),
        any(cache.windows and not cache.written for _, cache in seen),
        tuple((i, _both_shapes(*cache.given)) for i, cache in seen if cache.given is not None),
    )


def _both_shapes(keys: mx.array, values: mx.array) -> tuple[Stored, Stored]:
    return (keys.shape, keys.dtype), (values.shape, values.dtype)


def window_of(model: nn.Module, made_for: int) -> int:
    """The window of layers with caches made for a window of `made_for`: that of the model's mask, if it is wider."""
    return max(made_for, dict(cache_usage(model).windows).get(made_for, 0))


def indexers(model: nn.Module) -> frozenset[int]:
    """The caches of the indexers of sparse attention, by their numbers in the order of `leaves`."""
    return cache_usage(model).indexers


@cached_per_model
def takes_packed(model: nn.Module, group_size: int, bits: int) -> bool:
    """Whether attention in every layer works on packed planes, at any length.

    It does in mlx-lm's shared attention function, unless the model has attention sinks; mostly not in models with a
    function of their own, nor with masks that have an axis for query heads.
    """
    return not any(_objects(model, new, packed=(group_size, bits)) for new in (1, 2))


@cached_per_model
def refuses_ragged(model: nn.Module) -> str | None:
    """Why the rows of a batch cannot have different lengths; None where they can."""
    for new in (1, 2):
        if (why := _objects(model, new, rows=ROWS)) is not None:
            return f"its attention is not made for them ({why})"
    if cache_usage(model).masked_by_unwritten:
        return "it asks a layer without attention for the mask"
    if counts_slots(model):
        return "its attention counts the slots of the longest one"
    return None


def _objects(model: nn.Module, new: int, rows: int = 1, **how: Any) -> str | None:
    """The error of `new` tokens after many others; None where the graph can be built."""
    if "packed" in how:
        how["plain"] = indexers(model)
    return graph_error(model, (rows, new), lambda position: probe_caches(model, position, rows=rows, **how))


# --- positions that are counted in slots ------------------------------------------------------------------------------


@cached_per_model
def counts_slots(model: nn.Module) -> bool:
    """Whether a model's attention derives positions from the number of slots that a cache returns, not from offsets.

    Two graphs are compared, of the same tokens at the same positions before more or fewer dead slots: where a model
    derives a position from slots, the numbers in them differ.
    """
    try:
        fewer, more = (_numbers(model, extra) for extra in (0, MORE_SLOTS))
    except Exception:
        return _reads_shapes(model)
    return fewer != more


def _numbers(model: nn.Module, extra: int) -> Counter[str]:
    """The numbers in the graph of two tokens: single constants, and what ranges begin, end and step with."""
    found: Counter[str] = Counter()

    def look(part: dict[str, Any]) -> None:
        if part["type"] == "constants":
            found.update(repr(array.item()) for _, array in part["constants"] if array.size == 1)
        elif part.get("name") == "Arange":
            found[repr(part["arguments"])] += 1

    caches = probe_caches(model, FAR, extra=extra)
    with mx.stream(mx.cpu):  # custom kernels, which an export does not show, are for GPUs only
        mx.export_function(look, lambda tokens: model(tokens, cache=caches), mx.zeros((1, 2), mx.int32))
    return found


def _reads_shapes(model: nn.Module) -> bool:
    """Whether the model's source reads the shape of anything that a cache returned.

    For graphs that cannot be inspected: some primitives have no name in an export. It is a coarser test: most models
    that read a shape derive no position from it.
    """
    files = {type(module).__module__ for module in model.modules()}  # type: ignore[no-untyped-call]
    for name in sorted(file for file in files if not file.startswith("mlx.")):
        try:
            tree = ast.parse(inspect.getsource(sys.modules[name]))
        except (OSError, KeyError, TypeError, SyntaxError):
            return True
        fetched = {
            part.id
            for node in ast.walk(tree)
            if isinstance(node, ast.Assign)
            and any(getattr(call, "attr", "") in FETCHES for call in ast.walk(node.value))
            for target in node.targets
            for part in ast.walk(target)
            if isinstance(part, ast.Name)
        }
        shapes = (node.value for node in ast.walk(tree) if isinstance(node, ast.Attribute) and node.attr == "shape")
        if any(isinstance(of, ast.Name) and of.id in fetched for of in shapes):
            return True
    return False
