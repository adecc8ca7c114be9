"""Engines whose settings, and those of drafts, are given by name."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import fields
from typing import Any

import mlx.nn as nn

from mlx_kv import CachePolicy
from mlx_kv.communicator import LOCAL, Communicator
from mlx_kv.generation import engine
from mlx_kv.generation.speculation import DraftSettings
from mlx_kv.generation.statistics import SpeculationStatistics

DRAFTING = {field.name for field in fields(DraftSettings)}


def make_engine(
    model: nn.Module,
    ends: Set[int] = frozenset(),
    policy: CachePolicy | None = None,
    max_batch_size: int = 8,
    prefill_step_size: int | None = None,
    *,
    communicator: Communicator = LOCAL,
    statistics: SpeculationStatistics | None = None,
    **settings: Any,
) -> engine.Engine:
    """An engine for one model and policy; `settings` are those of `EngineSettings` and `DraftSettings`."""
    drafting = DraftSettings(**{name: settings.pop(name) for name in DRAFTING & set(settings)})
    all_settings = engine.EngineSettings(max_batch_size, prefill_step_size, drafting, **settings)
    return engine.make_engine(model, set(ends), policy, all_settings, communicator, statistics)
