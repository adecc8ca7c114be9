"""How many bytes the keys and values of a model will take, from its configuration alone.

    row_memory.py  bytes of one sequence: what each cache stores, and all layers at the peak and after that
    planner.py     strategies compared at several contexts, and over several ranks; this device

The server's admission uses the same `RowMemory` as the planner.
"""

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
from mlx_kv.planning.row_memory import Layer, RowMemory, TokenRecords

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
