"""The interface of drafters. B rows, V the vocabulary."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import mlx.nn as nn

from mlx_kv.generation.speculation.acceptance import Choice


@dataclass(frozen=True)
class DrafterContext:
    """The arguments with which a drafter is created.

    Attributes:
        model: the model that verifies drafts.
        vocabulary: V, of the model.
        draft_tokens: maximum drafted tokens of a row in one round.
        draft_model: a small model to draft with, if the user gave one.
        lookup_min, lookup_max: minimum and maximum number of last tokens that a drafter searches for in the text, if it
            searches for a certain number.
    """

    model: nn.Module
    vocabulary: int
    draft_tokens: int
    draft_model: nn.Module | None = None
    lookup_min: int = 2
    lookup_max: int = 4


class Drafter(Protocol):
    """Proposes tokens that continue the rows. Proposals never change the text: a wrong one only costs time.

    Rows are identified by their order: `join` appends new rows, and `keep` removes all but some. Each round calls
    `propose` once at most, and then passes the tokens that each row received. A subclass implements the abstract
    methods; the others have the behaviour of a drafter without caches.

    Attributes:
        step_size: tokens of a prompt that it reads at once; None for any number.
        equal_rows: whether it supports a single row only.
        proposals_cost: whether proposals take noticeable time, such as a pass of a model. If false, `propose` may also
            be called while nothing is drafted, to estimate its accuracy; those proposals are not used.
    """

    step_size: int | None = None
    equal_rows: bool = False
    proposals_cost: bool = True

    @abstractmethod
    def join(self, prompts: Sequence[Sequence[int]], caches: list[Any]) -> None:
        """New rows.

        Args:
            prompts: all tokens so far of each, at least one.
            caches: those of `make_caches`, of all these rows, which have read all but the last token of each.
        """

    @abstractmethod
    def keep(self, rows: Sequence[int]) -> None:
        """Lets all other rows go."""

    @abstractmethod
    def propose(self, most: int, choice: Choice) -> Sequence[Sequence[int]]:
        """Tokens that each row may go on with: any number up to `most`, also none, and not the same for all rows.

        Args:
            choice: with logits of its own, a drafter guesses by the random numbers with which the model will choose.
        """

    @abstractmethod
    def accepted(self, tokens: Sequence[Sequence[int]]) -> None:
        """What each row got, at least 1 token: those of its draft that were right, and the one that the model chose."""

    def keep_private(self, rows: Sequence[int]) -> None:
        """What these rows, which have just joined, were asked and say is for no other row. Asked only of such rows."""
        return

    def make_caches(self) -> list[Any]:
        """New caches of one row, like those of a model; none by itself."""
        return []

    def read(self, rows: Sequence[Sequence[int]], caches: list[Any]) -> None:
        """Reads some tokens of prompts, of each row any number, into such caches. Not asked where there are none."""

    def behind(self, row: int) -> int:
        """How many tokens of a row its caches have yet to read."""
        return 0

    def extract(self, row: int, behind: int) -> list[Any] | None:
        """Copies of a row's caches, without its last `behind` tokens; None where they cannot be had."""
        return []


class RemoteDrafter(Drafter):
    """Replaces the leader's drafter in the other processes, where it is never called to propose.

    Args:
        step_size, equal_rows: of the leader's drafter.
    """

    def __init__(self, step_size: int | None, equal_rows: bool) -> None:
        self.step_size, self.equal_rows = step_size, equal_rows

    def join(self, prompts: Sequence[Sequence[int]], caches: list[Any]) -> None: ...

    def keep(self, rows: Sequence[int]) -> None: ...

    def propose(self, most: int, choice: Choice) -> Sequence[Sequence[int]]:
        raise AssertionError("the leader drafts")

    def read(self, rows: Sequence[Sequence[int]], caches: list[Any]) -> None: ...

    def accepted(self, tokens: Sequence[Sequence[int]]) -> None: ...
