"""Communication between the processes that run one model together, and its form for a single process.

Each process holds some heads of every layer, or some of the layers, and runs the same loop, so that all of them call
the same methods in the same order. One process is the leader: prompts, samplers and drafts are its own.
B rows, H KV heads of this process, n tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar

import mlx.core as mx

T = TypeVar("T")
Steps: TypeAlias = Generator[T, None, None]


class CacheCommunicator:
    """What a budget needs of the other processes, so that all of them keep the tokens that a single one would keep.

    This class is that of a whole model; subclasses gather scores.

    Attributes:
        splits_layers: whether other processes hold layers that are not here.
        first_layer: full-attention layers before those of this process.
        unsupported: budget settings that do not work in this split, as (name, value): the template of a `SettingError`.
    """

    splits_layers = False
    first_layer = 0
    unsupported: Mapping[tuple[str, str], str] = {}

    def total_layers(self, layers: int) -> int:
        """Full-attention layers of all processes, of which `layers` are here."""
        return layers

    def first_head(self, heads: int) -> int:
        """KV heads of a layer before the `heads` of this process."""
        return 0

    def total_heads(self, heads: int) -> int:
        """KV heads of a layer in all processes, of which `heads` are here."""
        return heads

    def needs_all_heads(self, scope: str) -> bool:
        """Whether the scores of heads in other processes decide which tokens the heads here keep.

        Args:
            scope: a `cache.eviction.allocation.Scope`.
        """
        return False

    def gather_heads(self, scores: Sequence[mx.array]) -> Sequence[mx.array]:
        """Scores of all heads, (B, all heads, n), from those of the heads here, (B, H, n), of several layers."""
        return scores

    def gather_layers(self, scores: Sequence[mx.array]) -> Sequence[mx.array]:
        """Scores of all layers in their order, from those of the layers here: (1, n) each, at least one.

        Layers of zeros may be among them.
        """
        return scores


class Communicator:
    """Communication of generation loops. This class is that of a single process; `RankGroup` is that of several."""

    @property
    def distributed(self) -> bool:
        """Whether there are other processes."""
        return False

    @property
    def leads(self) -> bool:
        """Whether this process is the leader."""
        return True

    def for_caches(self, model: Any) -> CacheCommunicator:
        """The communicator for the caches of a model, which this process may hold in part or whole."""
        return LOCAL

    def broadcast(self, make: Callable[[], T]) -> T:
        """The leader's value, which JSON can represent. The other processes do not call `make`.

        Raises:
            ValueError: in all processes, if `make` raises one.
        """
        return make()

    def all_min(self, values: Sequence[int]) -> list[int]:
        """The minimum of each number over all processes; waits for all of them."""
        return list(values)

    def all_reduce_sum(self, x: mx.array) -> mx.array:
        """The sum over all processes, not evaluated: one collective on the stream of the model."""
        return x

    def sync_steps(self, steps: Steps[T], key: Callable[[T], object]) -> Steps[T]:
        """The same steps, of which every process takes as many, wherever its caller stops.

        If the leader's caller stops, the steps of the other processes end. If another caller stops, its process takes
        the remaining steps without it, since the leader needs them.

        Args:
            key: what of a step must be equal in all processes.
        """
        return steps

    def progress(self) -> None:
        """Reports that a part of a step is done, such as a chunk of a long prompt."""

    # --- built on these -------------------------------------------------------------------------------------------

    def on_leader(self, make: Callable[[], T]) -> T | None:
        """What the leader makes; None in the other processes.

        Raises:
            ValueError: in all processes, if the leader cannot make it.
        """
        made: list[T] = []
        self.broadcast(lambda: made.append(make()))
        return made[0] if made else None

    def all_any(self, *flags: bool) -> list[bool]:
        """For each flag, whether any process has it set."""
        return [not lowest for lowest in self.all_min([not flag for flag in flags])]

    def all_max(self, value: int) -> int:
        """The maximum over all processes."""
        return -self.all_min([-value])[0]

    def leader_tokens(self, tokens: mx.array) -> mx.array:
        """The leader's tokens, of the shape of this process's, which follow from its logits; not evaluated."""
        if not self.distributed:
            return tokens
        tokens = tokens.astype(mx.uint32)
        # Zeros that depend on the logits: so the collective comes after all that the model sends, in every process.
        return self.all_reduce_sum(tokens if self.leads else tokens * 0)


class LocalCommunicator(Communicator, CacheCommunicator):
    """A single process, which holds the whole model: nothing is sent."""


LOCAL = LocalCommunicator()
