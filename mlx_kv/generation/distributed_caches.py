"""Caches and batches of a model that may be split over several processes: all of them must use the same."""

from __future__ import annotations

import hashlib
from dataclasses import fields
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import generation_stream
from mlx_lm.models.cache import make_prompt_cache as stock_prompt_cache

from mlx_kv.cache.checks import cache_list
from mlx_kv.cache.eviction.calibration import Calibration
from mlx_kv.communicator import LOCAL, Communicator
from mlx_kv.mlxlm.batching import only_attention, padding_is_read, rows_must_be_equal
from mlx_kv.mlxlm.convert import make_prompt_cache
from mlx_kv.policy import CachePolicy


def make_distributed_caches(
    model: nn.Module, policy: CachePolicy, communicator: Communicator = LOCAL, *, strict: bool = True
) -> list[Any]:
    """New caches of the layers of this process, whose budgets keep the same tokens on all ranks.

    Args:
        strict: as for `make_prompt_cache`.

    Raises:
        ValueError: another policy than the leader's, or what `make_prompt_cache` refuses.
    """
    if communicator.distributed:
        _check_same(policy, communicator)
        if policy.reads_twice:
            check_local(communicator)
    return make_prompt_cache(model, policy, strict=strict, peers=communicator.for_caches(model))


def given_caches(name: str, model: nn.Module, given: Any) -> list[Any]:
    """The caches of an argument, for all layers of a model.

    Raises:
        ValueError: caches of another number of layers.
        TypeError: something else than caches.
    """
    caches, wanted = cache_list(name, given), len(stock_prompt_cache(model))
    if len(caches) != wanted:
        raise ValueError(f"{name} has {len(caches)} layers, the model {wanted}: use make_prompt_cache")
    return caches


def check_local(communicator: Communicator) -> None:
    """Raises ValueError for several processes: prompts are read twice by one alone."""
    if communicator.distributed:
        raise ValueError(
            "a score such as kvzip has prompts read twice, which one process does alone: choose another score for "
            "several, such as key_diff"
        )


def _check_same(policy: CachePolicy, communicator: Communicator) -> None:
    """Raises ValueError where a policy is not the leader's, as far as its settings are plain values."""
    own = {each.name: _plain(getattr(policy, each.name)) for each in fields(policy)}
    leaders = communicator.broadcast(lambda: own)
    if leaders != own:
        names = [name for name in own if leaders[name] != own[name]]
        theirs, here = (", ".join(f"{name}={each[name]!r}" for name in names) for each in (leaders, own))
        raise ValueError(f"the leader's policy has {theirs}, that of this rank {here}: give all ranks the same")


def _plain(value: Any) -> Any:
    """A setting as the link between ranks sends it; tables and calibrations by their digest, other objects as None."""
    if isinstance(value, Calibration):
        return value.name
    if isinstance(value, tuple) and all(isinstance(one, tuple) for one in value):
        return f"table {hashlib.blake2b(repr(value).encode(), digest_size=6).hexdigest()}"
    listed = list(value) if isinstance(value, tuple) else [value]
    if not all(isinstance(one, int | float | str | None) for one in listed):
        return None
    return listed if isinstance(value, tuple) else value


def equal_lengths(model: nn.Module, communicator: Communicator) -> tuple[bool, bool]:
    """Whether rows of a batch must always have the same length; and if not, whether prompts read together must."""
    rows, others = communicator.all_any(rows_must_be_equal(model), not only_attention(model))
    with mx.stream(generation_stream):  # a probe runs on all ranks or on none
        (prompts,) = communicator.all_any(others and not rows and padding_is_read(model))
    return rows, prompts
