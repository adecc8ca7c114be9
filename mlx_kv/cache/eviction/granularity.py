"""Which tokens are kept together. The option that says so is called `share`."""

from __future__ import annotations

from typing import Literal, get_args

# The same tokens in all layers; in each layer its own; in each head its own, and of those either as many as in all
# others, or those that matter most among the tokens of all heads.
Granularity = Literal["layers", "layer", "head", "adaptive"]
BY_HEAD: tuple[Granularity, ...] = ("head", "adaptive")


def check_granularity(share: object) -> None:
    """Raises ValueError for what is none."""
    if share not in get_args(Granularity):
        raise ValueError(f"share is {share!r}: choose one of {', '.join(get_args(Granularity))}")
