"""Hidden states of a model, without code for models: what its output head reads, and what layers return.

B sequences, S tokens, D hidden size, V the vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, Self

import mlx.core as mx
import mlx.nn as nn

from mlx_kv.mlxlm.loading import vocabulary_of
from mlx_kv.mlxlm.probe import architecture

METHODS = ("__call__", "as_linear")  # of a linear layer; of an embedding whose weights are the output head's, too
Hidden = Literal["final"] | tuple[int, ...]  # the state after the last norm, or what these layers return, side by side


class HiddenTap:
    """Passes of a model that return hidden states as well, and its embedding and output head.

    The head is found by a probe: of the layers with a weight for each token, the one that the model calls last with
    states; the embedding is the one that it calls with tokens. Other passes of the model are left alone.

    Args:
        hidden: which states; of several layers they are concatenated.

    Attributes:
        vocabulary: V.
        width, dtype: of a state.

    Raises:
        ValueError: the model has no such layers.
    """

    def __init__(self, model: nn.Module, hidden: Hidden = "final") -> None:
        self._model = model
        self.vocabulary = vocabulary = vocabulary_of(model)
        modules: list[Any] = model.modules()  # type: ignore[no-untyped-call]
        # Packed weights have a row for each token, too.
        with Recorder(
            [each for each in modules if "weight" in each and each["weight"].shape[0] == vocabulary]
        ) as probe:
            logits = model(mx.array([[0]]))  # a graph, which is not evaluated
        heads = [call for call in probe.calls if call.reads_states]
        if not heads or heads[-1].x.shape[:-1] != logits.shape[:-1]:
            raise ValueError(f"{architecture(model)} has no output head that could be found")
        # Not the calls themselves: their arrays are graphs of all weights, which could not be freed then.
        self._head, self._method, self.width = heads[-1].module, heads[-1].method, int(heads[-1].x.shape[-1])
        self.dtype = heads[-1].x.dtype
        self._embedding = next((call.module for call in probe.calls if not call.reads_states), None)
        self._recorder, self._of_layers = Recorder([self._head]), hidden != "final"
        if hidden != "final":
            layers: Any = model.layers
            if not 0 <= min(hidden) <= max(hidden) < len(layers):
                raise ValueError(f"{architecture(model)} has {len(layers)} layers, and no states of layers {hidden}")
            self._recorder, self.width = Recorder([layers[i] for i in hidden]), self.width * len(hidden)

    def __call__(self, tokens: mx.array, **options: Any) -> tuple[mx.array, mx.array]:
        """Logits (B, S, V) and hidden states (B, S, width) of tokens (B, S). Logits not evaluated cost nothing.

        Args:
            options: of the model, such as `cache`.
        """
        with self._recorder as recorder:
            logits: mx.array = self._model(tokens, **options)
        calls = recorder.take()
        if not self._of_layers:
            return logits, calls[-1].x
        return logits, mx.concatenate([call.result for call in calls], axis=-1)

    def embed(self, tokens: mx.array) -> mx.array:
        """(B, S, D) of tokens (B, S), as the embedding has them.

        Raises:
            ValueError: the model has no embedding that could be found.
        """
        if self._embedding is None:
            raise ValueError(f"{architecture(self._model)} has no embedding that could be found")
        embedded: mx.array = self._embedding(tokens)
        return embedded

    def project(self, states: mx.array) -> mx.array:
        """Logits (..., V) of states (..., D) after the last norm, by the output head alone."""
        logits: mx.array = getattr(self._head, self._method)(states)
        return logits

    def output_rows(self, tokens: mx.array) -> mx.array:
        """The rows (n, D) of the output head for tokens (n,), also of a quantised one."""
        head = self._head
        if "scales" not in head:
            return head.weight[tokens]  # type: ignore[no-any-return]
        biases = head["biases"][tokens] if "biases" in head else None
        weight, scales = head["weight"][tokens], head["scales"][tokens]
        return mx.dequantize(weight, scales, biases, head.group_size, head.bits, head.mode)


def states_before(states: mx.array, first: mx.array | None = None) -> mx.array:
    """The state before each token, (B, S, width), by those of the tokens themselves.

    Args:
        first: (B, 1, width) before the first tokens; None are zeros.
    """
    first = mx.zeros_like(states[:, :1]) if first is None else first
    return mx.concatenate([first, states[:, :-1]], axis=1)


class Call(NamedTuple):
    """A call of a module: by which method, and what it read and returned, of several arrays the first."""

    module: Any
    method: str
    x: mx.array
    result: mx.array

    @property
    def reads_states(self) -> bool:
        """Whether it reads states, and not tokens."""
        return bool(mx.issubdtype(self.x.dtype, mx.floating))


class Recorder:
    """Records the calls of modules, inside a `with` block. Their classes are other ones there: calls look them up.

    Attributes:
        calls: in their order.
    """

    def __init__(self, modules: Sequence[Any]) -> None:
        self.calls: list[Call] = []
        self._classes = [(module, type(module), self._class(type(module))) for module in modules]

    def _class(self, own: type) -> type:
        def method(name: str) -> Any:
            def call(module: Any, x: mx.array, *others: Any, **named: Any) -> Any:
                result = getattr(own, name)(module, x, *others, **named)
                self.calls.append(Call(module, name, x, result[0] if isinstance(result, tuple) else result))
                return result

            return call

        return type(own.__name__, (own,), {name: method(name) for name in METHODS if hasattr(own, name)})

    def take(self) -> list[Call]:
        """The calls, which are forgotten here."""
        calls, self.calls = self.calls, []
        return calls

    def __enter__(self) -> Self:
        self.calls = []  # of a pass that failed
        for module, _, recording in self._classes:
            module.__class__ = recording
        return self

    def __exit__(self, *error: object) -> None:
        for module, own, _ in self._classes:
            module.__class__ = own
