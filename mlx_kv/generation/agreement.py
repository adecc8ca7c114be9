"""What processes that run one model together agree on while they generate: what is asked, and one that is alone.

Each of them has a part of the model and runs the same loop over it, so all must take the same steps in the same order.
One leads: prompts, samplers and drafts are its alone, and what it says holds for all. Decides nothing but how often a
loop goes round; how ranks speak to each other is for `ranks`. B rows.
"""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Callable, Generator, Sequence
from typing import Protocol, TypeAlias, TypeVar

import mlx.core as mx
import mlx.nn as nn

from mlx_kv.cache.checks import shown
from mlx_kv.cache.eviction.peers import ALONE as NOBODY
from mlx_kv.cache.eviction.peers import Peers
from mlx_kv.generation.sampling import Sampler

T = TypeVar("T")
Rounds: TypeAlias = Generator[T, None, None]


class Agreement(Protocol):
    """Asked by all ranks alike: in the same order, and equally often."""

    @property
    def leads(self) -> bool:
        """Whether this rank is the one that decides."""
        ...

    def peers(self, model: nn.Module) -> Peers:
        """Who has the other parts of a model, as its caches must know."""
        ...

    def tokens(self, own: mx.array) -> mx.array:
        """The leader's tokens, of the same shape as one's own, which follow from the logits; not evaluated.

        One collective, on the stream of the model, so that it comes after all that the model sends.
        """
        ...

    def told(self, say: Callable[[], T]) -> T:
        """What the leader says, in JSON's terms. The others do not work it out, but wait for it.

        Raises:
            ValueError: on all ranks, if the leader's `say` raises one.
        """
        ...

    def least(self, own: Sequence[int]) -> list[int]:
        """Of each number the least that a rank has; waits for all of them."""
        ...

    def goes_on(self, seen: int) -> bool:
        """Whether all go round once more. The leader's is the first word: it says so by asking.

        Args:
            seen: a checksum of what came of the last round, which must be the leader's.
        """
        ...

    def ends(self) -> None:
        """The leader's last word: nobody goes on."""
        ...

    def watch(self) -> contextlib.AbstractContextManager[None]:
        """For the time of a round: if it takes far longer than those before, all end."""
        ...

    def progress(self) -> None:
        """A part of a round is done, such as a chunk of a long prompt."""
        ...


class Alone:
    """One process, which has the whole model."""

    leads = True

    def peers(self, model: nn.Module) -> Peers:
        return NOBODY

    def tokens(self, own: mx.array) -> mx.array:
        return own

    def told(self, say: Callable[[], T]) -> T:
        return say()

    def least(self, own: Sequence[int]) -> list[int]:
        return list(own)

    def goes_on(self, seen: int) -> bool:
        return True

    def ends(self) -> None:
        """Nobody waits for it."""

    def watch(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def progress(self) -> None:
        """Nobody looks."""


ALONE = Alone()


class Group(Protocol):
    """The ranks that have a model together, as far as generation knows them."""

    @property
    def agreement(self) -> Agreement:
        """What they agree by."""
        ...


def agreement_of(group: Group | None) -> Agreement:
    """None is a process that is alone.

    Raises:
        TypeError: something else than ranks.
    """
    if group is None:
        return ALONE
    if not hasattr(group, "agreement"):
        raise TypeError(f"group is {shown(group)}: give what mlx_kv.join_ranks() returns")
    return group.agreement


def leaders(agreement: Agreement, make: Callable[[], T]) -> T | None:
    """What the leader makes, and the others do without.

    Raises:
        ValueError: on all ranks, if the leader cannot make it.
    """
    made: list[T] = []
    agreement.told(lambda: made.append(make()))
    return made[0] if made else None


def anywhere(agreement: Agreement, *here: bool) -> list[bool]:
    """Of each answer, whether any rank has it: of layers that ranks have to themselves, what holds of one holds."""
    return [not least for least in agreement.least([not answer for answer in here])]


def most(agreement: Agreement, own: int) -> int:
    """The largest number that a rank has."""
    return -agreement.least([-own])[0]


def agreed_sampler(agreement: Agreement, own: Sampler | None) -> Sampler | None:
    """A sampler whose tokens are the leader's, on all ranks."""
    if agreement is ALONE:
        return own

    def draw(logprobs: mx.array) -> mx.array:
        return agreement.tokens(mx.argmax(logprobs, axis=-1) if own is None else own(logprobs))

    return draw


def in_step(agreement: Agreement, rounds: Rounds[T], of: Callable[[T], object]) -> Rounds[T]:
    """What rounds give; on all ranks as many, whoever stops asking for more.

    If the leader's caller has enough, the others' rounds end, too. Another's are then taken without him: each of them
    is needed for the leader's.

    Args:
        of: what of a round must be the same on all ranks.
    """
    return rounds if agreement is ALONE else _in_step(agreement, rounds, of)


def _in_step(agreement: Agreement, rounds: Rounds[T], of: Callable[[T], object]) -> Rounds[T]:
    seen = 0
    while True:
        if not agreement.goes_on(seen):
            return
        try:
            with agreement.watch():
                given = next(rounds)
        except StopIteration:  # of all ranks at once
            return
        seen = checksum(of(given))
        try:
            yield given
        except GeneratorExit:
            if agreement.leads:
                agreement.ends()
            while not agreement.leads and agreement.goes_on(seen) and (more := next(rounds, None)) is not None:
                seen = checksum(of(more))
            raise


def checksum(what: object) -> int:
    """Of plain values, the same in every process."""
    return zlib.crc32(repr(what).encode())
