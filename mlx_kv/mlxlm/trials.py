"""Trials: a few tokens go through a model, its graph is built over stand-ins for its caches, and dropped.

Decides how far into a text a trial is. Knows nothing about what stand-ins write down meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_kv.mlxlm.stand_ins import FAR, ROWS


class _Built(Exception):  # noqa: N818 - it is no error
    """The graph is built, and no longer wanted."""


def objection(
    model: nn.Module, shape: tuple[int, int], caches_at: Callable[[int], list[Any]], position: int = FAR
) -> str | None:
    """What Python says to tokens (B, S) after so many others; None where the graph can be built.

    Args:
        shape: of the tokens.
        caches_at: makes the caches of a model that has read so many tokens; another time where one trial fails.
    """

    def build(tokens: mx.array, position: int) -> None:
        model(tokens, cache=caches_at(position))
        raise _Built

    tokens = mx.zeros(shape, mx.int32)
    try:
        # In a trace nothing can be evaluated: so far into a text that would take all memory.
        mx.export_function(lambda part: None, lambda traced: build(traced, position), tokens)
    except _Built:
        return None
    except Exception as error:
        if "[eval]" not in str(error):
            return in_words(error)
    try:  # a model that evaluates something on its way: then not so far
        build(tokens, min(position, 2 * ROWS))
    except _Built:
        pass
    except Exception as error:
        return in_words(error)
    return None


def in_words(error: Exception) -> str:
    """The kind of an error and the first line of what it says."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}".removesuffix(": ")
