"""Engines whose settings, and those of drafts, are given by name; as on a GPU; and what attention they ask for."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Set
from dataclasses import fields
from typing import Any
from unittest import mock

import mlx.core as mx
import mlx.nn as nn

from mlx_kv import CachePolicy
from mlx_kv.cache.buffers import on_cpu
from mlx_kv.cache.plan import READ_MULTIPLES
from mlx_kv.cache.protocol import Call
from mlx_kv.communicator import LOCAL, Communicator
from mlx_kv.generation import engine
from mlx_kv.generation.speculation import DraftSettings
from mlx_kv.generation.statistics import SpeculationStatistics

CPU, GPU = mx.DeviceType.cpu, mx.DeviceType.gpu
DRAFTING = {field.name for field in fields(DraftSettings)}


@contextlib.contextmanager
def as_on_a_gpu() -> Iterator[None]:
    """Everything that is chosen by device is as on a GPU, and computed here."""
    with contextlib.ExitStack() as stack:
        for name, module in list(sys.modules.items()):
            if name.startswith("mlx_kv.") and getattr(module, "on_cpu", None) is on_cpu:
                stack.enter_context(mock.patch.object(module, "on_cpu", return_value=False))
        stack.enter_context(mock.patch.dict(READ_MULTIPLES, {CPU: READ_MULTIPLES[GPU]}))
        yield


class Shapes:
    """A hook of attention that records how many rows, queries and keys calls with several queries have."""

    def __init__(self) -> None:
        self.seen: dict[tuple[int, int, int], int] = {}

    def attend(self, call: Call) -> mx.array:
        rows, _, new, _ = call.queries.shape
        if new > 2:  # probes of models have one and two
            key = rows, new, call.keys.shape[2]
            self.seen[key] = self.seen.get(key, 0) + 1
        return call.forward()


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
