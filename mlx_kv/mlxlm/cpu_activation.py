"""The activation of gated MLPs on a Linux CPU, where MLX's exponential takes a third of reading a prompt.

Decides which calls of mlx-lm's `swiglu` are answered here: those of float32, under the name that a model's modules have
for it, while a model that came by `mlx_kv.load` lives. The environment variable MLX_KV_ACTIVATION=mlx leaves all to
MLX. On a GPU nothing is changed.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from types import ModuleType

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import activations

from mlx_kv.cache.attention.exponential import MOST, exponential
from mlx_kv.mlxlm.attention import modules_with
from mlx_kv.mlxlm.changes import Changes
from mlx_kv.mlxlm.cpu_attention import slow_exponential

NAME = "swiglu"
BLOCK_ELEMENTS = 2**17  # computed at once: what is larger is memory that the allocator gives back, and gets anew
_wanting: dict[ModuleType, int] = {}  # how many models want it there
_changes = Changes()  # models end at any moment


@mx.compile
def _negated(gate: mx.array) -> mx.array:
    return mx.minimum(-gate, MOST)


@mx.compile
def _gated(gate: mx.array, x: mx.array, exponentials: mx.array) -> mx.array:
    return gate * x / (1.0 + exponentials)


def _block(gate: mx.array, x: mx.array) -> mx.array:
    return _gated(gate, x, exponential(_negated(gate)))


@mx.custom_function
def _quick(gate: mx.array, x: mx.array) -> mx.array:
    if gate.size <= BLOCK_ELEMENTS:
        return _block(gate, x)
    width = gate.shape[-1]
    some = max(1, BLOCK_ELEMENTS // width)
    gates, others = gate.reshape(-1, width), x.reshape(-1, width)
    parts = [_block(gates[i : i + some], others[i : i + some]) for i in range(0, gates.shape[0], some)]
    return mx.concatenate(parts).reshape(gate.shape)


@_quick.vjp
def _gradients(primals: list[mx.array], cotangent: mx.array, _: mx.array) -> tuple[mx.array, ...]:
    return tuple(mx.vjp(activations.swiglu, list(primals), [cotangent])[1])


def swiglu(gate: mx.array, x: mx.array) -> mx.array:
    """silu(gate) * x, elementwise, of two arrays of the same shape."""
    if gate.dtype == x.dtype == mx.float32 and gate.shape == x.shape:
        answer: mx.array = _quick(gate, x)  # type: ignore[assignment]
        return answer
    theirs: mx.array = activations.swiglu(gate, x)
    return theirs


def answer_activation(model: nn.Module) -> Callable[[], None]:
    """Has this model's modules call `swiglu` of here; until what is returned is called, once."""
    modules = [module for module in modules_with(model, NAME) if getattr(module, NAME) in (activations.swiglu, swiglu)]
    _changes.make(functools.partial(_enter, modules))
    return functools.partial(_changes.make, functools.partial(_leave, modules))


def use_cpu_activation(model: nn.Module) -> None:
    """On a CPU, the activations of this model's modules are computed here, for as long as the model lives."""
    if slow_exponential("MLX_KV_ACTIVATION"):
        weakref.finalize(model, answer_activation(model)).atexit = False


def _enter(modules: list[ModuleType]) -> None:
    for module in modules:
        _wanting[module] = _wanting.get(module, 0) + 1
        setattr(module, NAME, swiglu)


def _leave(modules: list[ModuleType]) -> None:
    for module in modules:
        _wanting[module] -= 1
        if not _wanting[module] and getattr(module, NAME) is swiglu:
            setattr(module, NAME, activations.swiglu)
