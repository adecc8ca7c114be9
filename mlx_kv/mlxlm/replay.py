"""Layers of the gated delta rule: their state after the first tokens of a pass, without another pass.

Yang, Kautz and Hatamizadeh 2025, "Gated Delta Networks". While a pass is recorded, the inputs of the recurrence and of
the convolutions before it are kept. The state after fewer tokens follows from them by the recurrence alone: a token
that is masked leaves the state as it is, so one call serves rows that keep different numbers of tokens, and the state
of a convolution is a part of its input. No projection, expert or attention is computed again.
B rows, S tokens of a pass, C channels, K tokens of state before a convolution.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import cache as stock

from mlx_kv.mlxlm.attention import modules_with
from mlx_kv.mlxlm.probe import cached_per_model
from mlx_kv.mlxlm.recurrent import recurrent_states, with_checkpoints
from mlx_kv.mlxlm.taps import Recorder

NAME = "gated_delta_update"
PER_TOKEN = ("q", "k", "v", "a", "b")  # arguments (B, S, ...)


class Recurrence(NamedTuple):
    """A call of the recurrence: its function, arguments and options."""

    function: Callable[..., tuple[mx.array, mx.array]]
    arguments: tuple[Any, ...]
    options: dict[str, Any]

    def state_after(self, counts: Sequence[int]) -> mx.array:
        """The state after the first counts[i] tokens of row i."""
        longest = max(counts)
        given = inspect.signature(self.function).bind(*self.arguments, **self.options).arguments
        given |= {name: given[name][:, :longest] for name in PER_TOKEN}
        mask = mx.arange(longest) < mx.array(list(counts))[:, None]
        return self.function(**given | {"mask": mask})[1]


class PassRecord(NamedTuple):
    """What a layer got in a pass.

    Attributes:
        windows: inputs of its convolutions, (B, K + S, C).
        recurrence: behind them.
    """

    windows: tuple[mx.array, ...]
    recurrence: Recurrence

    def after(self, counts: Sequence[int], like: Sequence[mx.array | None]) -> list[mx.array]:
        """The arrays of the state after the first counts[i] tokens of row i.

        Args:
            like: arrays of a state.
        """
        arrays = []
        for window, each in zip(self.windows, like, strict=False):
            kept = each.shape[1] if each is not None else 0
            places = mx.array(list(counts))[:, None] + mx.arange(kept)
            arrays.append(mx.take_along_axis(window, places[..., None], axis=1))
        return [*arrays, self.recurrence.state_after(counts)]


class PassRecorder:
    """Records passes of a model whose recurrent layers are all of the gated delta rule.

    Args:
        model: of mlx-lm.
    """

    def __init__(self, model: nn.Module) -> None:
        self._modules: list[ModuleType] = modules_with(model, NAME)
        everything: list[Any] = model.modules()  # type: ignore[no-untyped-call]
        self._windows = Recorder([module for module in everything if isinstance(module, nn.Conv1d)])

    @contextlib.contextmanager
    def recording(self, caches: Sequence[Any]) -> Iterator[None]:
        """Gives each recurrent state of these caches the record of the pass inside a `with` block."""
        calls: list[Recurrence] = []
        functions = [getattr(module, NAME) for module in self._modules]

        def recorded(function: Callable[..., Any]) -> Callable[..., Any]:
            def call(*arguments: Any, **options: Any) -> Any:
                calls.append(Recurrence(function, arguments, options))
                return function(*arguments, **options)

            return call

        try:
            for module, function in zip(self._modules, functions, strict=True):
                setattr(module, NAME, recorded(function))
            with self._windows:
                yield
        finally:
            for module, function in zip(self._modules, functions, strict=True):
                setattr(module, NAME, function)
            inputs = [call.x for call in self._windows.take()]
        states = recurrent_states(caches)
        each = len(inputs) // max(1, len(states))
        for number, (state, call) in enumerate(zip(states, calls, strict=True)):
            state.record = PassRecord(tuple(inputs[each * number : each * (number + 1)]), call)


@cached_per_model
def can_replay(model: nn.Module) -> bool:
    """Whether passes of a model can be recorded: all its recurrent layers are of the gated delta rule."""
    caches = with_checkpoints(stock.make_prompt_cache(model), 1)
    states = recurrent_states(caches)
    if not (states and modules_with(model, NAME)):
        return False
    try:
        with PassRecorder(model).recording(caches):
            model(mx.array([[0, 0]]), cache=caches)  # a graph, which is not evaluated
        made = [None if state.record is None else state.record.after([1], state.cache) for state in states]
    except Exception:
        return False
    arrays: list[Any] = [[array.shape for array in state.cache if array is not None] for state in states]
    return arrays == [each if each is None else [array.shape for array in each] for each in made]
