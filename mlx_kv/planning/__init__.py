"""How many bytes the keys and values of a model will take, from its configuration alone.

    layers.py      what each cache of a model stores: read from caches, nothing is evaluated
    row_memory.py  bytes of one sequence in all layers, at its peak and after that
    planner.py     strategies compared at several contexts, and over several ranks
    device.py      the dtype and the memory of this device

The server's admission uses the same `RowMemory` as the planner.
"""

from mlx_kv.planning.layers import Layer, TokenRecords
from mlx_kv.planning.planner import (
    BITS,
    DTYPES,
    Planner,
    RankMemory,
    Ranks,
    Strategy,
    StrategyMemory,
    config_dtype,
    of_ranks,
    strategies,
)
from mlx_kv.planning.row_memory import RowMemory

__all__ = [
    "BITS",
    "DTYPES",
    "Layer",
    "Planner",
    "RankMemory",
    "Ranks",
    "RowMemory",
    "Strategy",
    "StrategyMemory",
    "TokenRecords",
    "config_dtype",
    "of_ranks",
    "strategies",
]
