"""Attention, activation and output head on a Linux CPU, where MLX's take longer than they have to.

Calls in float32 are computed here where `benchmarks/cpu_attention.py --calls` measures at least 1.2 times MLX's speed:
attention with many scores, and mlx-lm's `swiglu` of thousands of numbers, with another exponential; and the logits of
a few rows. All this stays for as long as a model of `mlx_kv.load` lives. MLX_KV_ATTENTION=mlx and MLX_KV_ACTIVATION=mlx
turn the first two off. On a GPU nothing is changed.
"""

from __future__ import annotations

import functools
import os
import sys
import weakref
from collections.abc import Callable
from types import ModuleType
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import activations

from mlx_kv.cache.attention import MAX_X, Dense, PackedAttention, attend, exponential
from mlx_kv.cache.codecs import Packing
from mlx_kv.cache.protocol import AttentionCall
from mlx_kv.mlxlm.attention import Changes, modules_with, use_backend

# Below these sizes MLX's one operation costs less than several.
MIN_SCORES = 2**15  # of a call of attention
MIN_GATES = 2**12  # of a call of swiglu
SINGLE_QUERY_BITS = 8  # of packed keys and values, one query is faster here only over those of 8 bits
SWIGLU = "swiglu"
BLOCK_ELEMENTS = 2**17  # computed at once: what is larger is memory that the allocator gives back, and gets anew
_users: dict[ModuleType, int] = {}  # how many models want our swiglu in a module
_changes = Changes()  # models end at any moment


def on_linux_cpu() -> bool:
    """Whether MLX computes on a Linux CPU: elsewhere it has vectorised exponentials, and a BLAS for every shape."""
    return sys.platform == "linux" and mx.default_device().type == mx.DeviceType.cpu


def slow_exponential(variable: str) -> bool:
    """Whether MLX's exponential is worth going around here, and the environment variable does not say `mlx`."""
    return on_linux_cpu() and os.environ.get(variable) != "mlx"


class CpuAttention:
    """Computes attention in float32 where that is faster than mlx-lm's."""

    def attend(self, call: AttentionCall) -> mx.array:
        """(B, Hq, S, Dv)."""
        queries, keys, values = call.queries, call.keys, call.values
        packed = not isinstance(keys, mx.array)
        slots = (keys[0] if packed else keys).shape[2]
        single = queries.shape[2] == 1 and packed and call.cache.bits != SINGLE_QUERY_BITS
        small = queries.size // queries.shape[3] * slots < MIN_SCORES
        exact = queries.dtype == mx.float32 and (packed or keys.dtype == values.dtype == mx.float32)
        refused = packed and call.sinks is not None  # mlx-lm raises an error
        if single or small or refused or not exact:
            return call.forward()
        if packed:
            packing = Packing(call.cache.bits, call.cache.group_size)
            return PackedAttention(packing, packing).attend(call)
        return attend(queries, Dense(keys), Dense(values), call.scale, call.mask, call.sinks)


def use_cpu_attention(model: nn.Module) -> None:
    """On a CPU, attention of this model's layers is computed here, for as long as the model lives."""
    if slow_exponential("MLX_KV_ATTENTION"):
        use_backend(model, CpuAttention())


@mx.compile
def _negated(gate: mx.array) -> mx.array:
    return mx.minimum(-gate, MAX_X)


@mx.compile
def _gated(gate: mx.array, x: mx.array, exponentials: mx.array) -> mx.array:
    return gate * x / (1.0 + exponentials)


def _block(gate: mx.array, x: mx.array) -> mx.array:
    return _gated(gate, x, exponential(_negated(gate)))


@mx.custom_function
def quick_swiglu(gate: mx.array, x: mx.array) -> mx.array:
    """silu(gate) * x of two float32 arrays of the same shape, in blocks."""
    if gate.size <= BLOCK_ELEMENTS:
        return _block(gate, x)
    width = gate.shape[-1]
    some = max(1, BLOCK_ELEMENTS // width)
    gates, others = gate.reshape(-1, width), x.reshape(-1, width)
    parts = [_block(gates[i : i + some], others[i : i + some]) for i in range(0, gates.shape[0], some)]
    return mx.concatenate(parts).reshape(gate.shape)


@quick_swiglu.vjp
def _gradients(primals: list[mx.array], cotangent: mx.array, _: mx.array) -> tuple[mx.array, ...]:
    return tuple(mx.vjp(activations.swiglu, list(primals), [cotangent])[1])


def swiglu(gate: mx.array, x: mx.array) -> mx.array:
    """silu(gate) * x, elementwise, of two arrays of the same shape."""
    if gate.dtype == x.dtype == mx.float32 and gate.shape == x.shape and gate.size >= MIN_GATES:
        answer: mx.array = quick_swiglu(gate, x)  # type: ignore[assignment]
        return answer
    theirs: mx.array = activations.swiglu(gate, x)
    return theirs


def patch_activation(model: nn.Module) -> Callable[[], None]:
    """Puts our `swiglu` into this model's modules; what is returned, called once, takes it out again."""
    named = modules_with(model, SWIGLU)
    modules = [module for module in named if getattr(module, SWIGLU) in (activations.swiglu, swiglu)]
    _changes.make(functools.partial(_enter, modules))
    return functools.partial(_changes.make, functools.partial(_leave, modules))


def use_cpu_activation(model: nn.Module) -> None:
    """On a CPU, the activations of this model's modules are computed here, for as long as the model lives."""
    if slow_exponential("MLX_KV_ACTIVATION"):
        weakref.finalize(model, patch_activation(model)).atexit = False


def _enter(modules: list[ModuleType]) -> None:
    for module in modules:
        _users[module] = _users.get(module, 0) + 1
        setattr(module, SWIGLU, swiglu)


def _leave(modules: list[ModuleType]) -> None:
    for module in modules:
        _users[module] -= 1
        if not _users[module] and getattr(module, SWIGLU) is swiglu:
            setattr(module, SWIGLU, activations.swiglu)


# --- the output head --------------------------------------------------------------------------------------------------
#
# For a product of a few rows by a transposed weight, BLAS copies the whole weight into another order first. With the
# sides exchanged it copies the rows: half the time for 4 rows and 262,144 tokens, two thirds for 8.

MIN_TOKENS = 2**14  # rows of a weight; smaller ones stay in the caches of the CPU
FEW_ROWS = range(2, 33)


def tall_product(x: mx.array, weight: mx.array) -> mx.array:
    """x (..., K) times the transpose of a weight (N, K): (..., N)."""
    if x.size // x.shape[-1] not in FEW_ROWS:
        return x @ weight.T
    product: mx.array = mx.contiguous((weight @ x.reshape(-1, x.shape[-1]).T).T)
    return product.reshape(*x.shape[:-1], -1)


class TallEmbedding(nn.Embedding):
    """An embedding that is also the output head."""

    def as_linear(self, x: mx.array) -> mx.array:
        """Logits (..., V) of states (..., D)."""
        return tall_product(x, self.weight)


class TallLinear(nn.Linear):
    """A linear layer of many outputs."""

    def __call__(self, x: mx.array) -> mx.array:
        product = tall_product(x, self.weight)
        return product + self.bias if "bias" in self else product


def use_cpu_head(model: nn.Module) -> None:
    """On a CPU, a few rows are multiplied by tall weights of this model as is fast there."""
    tall: dict[Any, Any] = {nn.Embedding: TallEmbedding, nn.Linear: TallLinear}
    modules: list[Any] = model.modules() if on_linux_cpu() else []  # type: ignore[no-untyped-call]
    for module in modules:
        if type(module) in tall and module.weight.shape[0] >= MIN_TOKENS:
            module.__class__ = tall[type(module)]
