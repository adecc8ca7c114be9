"""The processes that hold other parts of the same model, and what a budget needs of them.

Each process holds some heads of every layer, or some of the layers. All of them keep the tokens that a single process
would keep, so scores are gathered before anything is evicted.
B rows, H KV heads of this process, n tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import mlx.core as mx

from mlx_kv.cache.eviction.allocation import Scope


class Peers:
    """Other processes; each method as if there were none. Subclasses gather over processes, in the same order in each.

    Attributes:
        have_layers: whether they hold layers that are not here.
        first_layer: layers of full attention that come before those here.
        unsupported: settings of a budget that do not work with such peers, as (name, value): the reason and the fix.
    """

    have_layers = False
    first_layer = 0
    unsupported: Mapping[tuple[str, str], str] = {}

    def all_layers(self, layers: int) -> int:
        """Layers of full attention in all processes, of which `layers` are here."""
        return layers

    def first_head(self, heads: int) -> int:
        """KV heads of a layer that come before the `heads` here."""
        return 0

    def all_heads(self, heads: int) -> int:
        """KV heads of a layer in all processes, of which `heads` are here."""
        return heads

    def have_heads(self, scope: Scope) -> bool:
        """Whether the scores of their heads decide which tokens the heads here keep."""
        return False

    def with_heads(self, scores: Sequence[mx.array]) -> Sequence[mx.array]:
        """The scores of all heads, (B, all heads, n), from those of the heads here, (B, H, n), of several layers."""
        return scores

    def with_layers(self, scores: Sequence[mx.array]) -> Sequence[mx.array]:
        """The scores of all layers in their order, from those of the layers here: (1, n) each, at least one.

        There may be layers of zeros among them.
        """
        return scores


class Alone(Peers):
    """No other processes: this one holds the whole model."""


ALONE = Alone()
