"""Hidden states of a model, without code for models: what its output head reads, the state after the last norm."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_kv.mlxlm.loading import vocabulary_of

METHODS = ("__call__", "as_linear")  # of a linear layer; of an embedding whose weights are the output head's, too


class HiddenTap:
    """Passes of a model that return hidden states as well.

    The head is found by a probe: of the layers with a weight for each token, the one that the model calls last. Other
    passes of the model are left alone.

    Raises:
        ValueError: the model has no such layer.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        vocabulary = vocabulary_of(model)
        modules: list[Any] = model.modules()  # type: ignore[no-untyped-call]
        heads = [each for each in modules if "weight" in each and each["weight"].shape[0] == vocabulary]
        calls: list[tuple[nn.Module, mx.array]] = []
        with contextlib.ExitStack() as stack:
            for head in heads:
                stack.enter_context(_recorded(head, calls))
            logits = model(mx.array([[0]]))  # a graph, which is not evaluated
        if not calls or calls[-1][1].shape[:-1] != logits.shape[:-1]:
            raise ValueError(f"{type(model).__module__.rpartition('.')[2]} has no output head that could be found")
        self._head, self.width = calls[-1][0], int(calls[-1][1].shape[-1])

    def __call__(self, tokens: mx.array, **options: Any) -> tuple[mx.array, mx.array]:
        """Logits (B, S, V) and hidden states (B, S, D) of tokens (B, S). Logits that are not evaluated cost nothing.

        Args:
            options: of the model, such as `cache`.
        """
        calls: list[tuple[nn.Module, mx.array]] = []
        with _recorded(self._head, calls):
            logits: mx.array = self._model(tokens, **options)
        return logits, calls[-1][1]


@contextlib.contextmanager
def _recorded(module: Any, calls: list[tuple[nn.Module, mx.array]]) -> Iterator[None]:
    """Records what a module reads, inside a `with` block. Its class is another one there: calls look it up."""
    own = type(module)

    def method(name: str) -> Any:
        def call(self: Any, x: mx.array, *others: Any, **named: Any) -> Any:
            # An embedding is also called with token ids.
            if mx.issubdtype(x.dtype, mx.floating):
                calls.append((self, x))
            return getattr(own, name)(self, x, *others, **named)

        return call

    module.__class__ = type(own.__name__, (own,), {name: method(name) for name in METHODS if hasattr(own, name)})
    try:
        yield
    finally:
        module.__class__ = own
