"""mlx-lm's filters of log-probabilities, as they are before MLX compiles them.

mlx-lm's functions are compiled for each number that they are given: a server would compile anew for each top_p that a
client makes up, a tenth of a second and more in which all rows wait, and keep all of it. Decides nothing: what a filter
does is mlx-lm's.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from types import FunctionType
from typing import Any

import mlx.core as mx
from mlx_lm import sample_utils

Filter = Callable[..., mx.array]


def as_written(compiled: Any) -> Filter:
    """The function that was compiled; a function as it is. MLX has no other way to ask for it."""
    if type(compiled) is FunctionType:  # what is compiled says that it were one, too
        return compiled
    found: Filter = next((own for own in gc.get_referents(compiled) if type(own) is FunctionType), compiled)
    return found


apply_min_p, apply_top_k = as_written(sample_utils.apply_min_p), as_written(sample_utils.apply_top_k)
apply_top_p, apply_xtc = as_written(sample_utils.apply_top_p), as_written(sample_utils.apply_xtc)
