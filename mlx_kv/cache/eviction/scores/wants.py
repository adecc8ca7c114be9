"""What a score wants to know of the attention over the tokens that it is asked about. Nothing is seen unasked."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Wants:
    """What is to be observed for a score; see the fields of `ScoredTokens`.

    Attributes:
        queries: so many of the last queries of each row, as they were asked.
        received: how much attention each token received.
        moments: mean and covariance of all queries, before RoPE turned them.
        reread: the text is read once more when it is whole, and what each token receives then is kept.

    Raises:
        ValueError: nothing is wanted, or a number of queries below 0.
    """

    queries: int = 0
    received: bool = False
    moments: bool = False
    reread: bool = False

    def __post_init__(self) -> None:
        if type(self.queries) is not int or self.queries < 0:
            raise ValueError(f"queries is {self.queries!r}: give a number of queries from 0 up")
        if not (self.queries or self.received or self.moments or self.reread):
            raise ValueError("wants nothing: a score that sees no attention has no Wants at all (wants=None)")

    @property
    def observes(self) -> bool:
        """Whether anything is to be seen while a text is read for the first time."""
        return bool(self.queries or self.received or self.moments)
