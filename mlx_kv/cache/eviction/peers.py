"""What the caches of one part of a model must hear from its other parts before they evict.

A model may be parted over several processes: each has some heads of every layer, or some of the layers. All of them are
to keep the same tokens, and those that one process alone would keep; so scores are put together before anybody decides.
Here is what the caches ask for; who sends it over which wire they don't know. Alone, there is nothing to hear.
B rows, H KV heads of this part, n tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import mlx.core as mx

from mlx_kv.cache.eviction.allocation import Allocation, Granularity


class Peers(Protocol):
    """The other parts of the model. All parts ask in the same order, each as often as all the others."""

    @property
    def have_layers(self) -> bool:
        """Whether they have layers that are not here."""
        ...

    @property
    def first_layer(self) -> int:
        """Layers of full attention that come before those here."""
        ...

    def all_layers(self, layers: int) -> int:
        """Layers of full attention, those here and those of the other parts, of which `layers` are here."""
        ...

    def first_head(self, heads: int) -> int:
        """KV heads of a layer that come before the `heads` here."""
        ...

    def all_heads(self, heads: int) -> int:
        """KV heads of a layer, those here and those of the other parts, of which `heads` are here."""
        ...

    def have_heads(self, granularity: Granularity) -> bool:
        """Whether heads that are not here have a say in which tokens the heads here keep."""
        ...

    def check(self, granularity: Granularity, layers: Allocation = "uniform", fitted: bool = False) -> None:
        """Raises ValueError where some part lacks what a budget needs of it.

        Args:
            fitted: whether the score reads keys and values of all heads of a layer.
        """
        ...

    def with_heads(self, scores: Sequence[mx.array]) -> Sequence[mx.array]:
        """The scores of all heads, (B, all heads, n), from those of the heads here, (B, H, n), of several layers."""
        ...

    def with_layers(self, scores: Sequence[mx.array]) -> Sequence[mx.array]:
        """The scores of all layers in their order, from those of the layers here: of each (1, n), of at least one.

        There may be layers of zeros among them.
        """
        ...


class Alone:
    """No other parts: this model is whole."""

    have_layers = False
    first_layer = 0

    def all_layers(self, layers: int) -> int:
        return layers

    def first_head(self, heads: int) -> int:
        return 0

    def all_heads(self, heads: int) -> int:
        return heads

    def check(self, granularity: Granularity, layers: Allocation = "uniform", fitted: bool = False) -> None:
        pass

    def have_heads(self, granularity: Granularity) -> bool:
        return False

    def with_heads(self, scores: Sequence[mx.array]) -> Sequence[mx.array]:
        return scores

    def with_layers(self, scores: Sequence[mx.array]) -> Sequence[mx.array]:
        return scores


ALONE = Alone()
