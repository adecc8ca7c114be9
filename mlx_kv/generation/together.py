"""What holds of a model of which each process has a part: its caches, and what of a batch it can take.

Decides that no part is given what another one cannot take. Knows nothing about how processes speak to each other.
"""

from __future__ import annotations

import hashlib
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import generation_stream
from mlx_lm.models.cache import make_prompt_cache as stock_prompt_cache

from mlx_kv.cache.checks import cache_list
from mlx_kv.generation.agreement import ALONE, Agreement, anywhere
from mlx_kv.mlxlm.batching import only_attention, padding_is_read, rows_must_be_equal
from mlx_kv.mlxlm.convert import make_prompt_cache
from mlx_kv.policy import CachePolicy

WORDS = (int, float, str, type(None))  # which tell what they are


def caches_together(
    model: nn.Module, policy: CachePolicy, agreement: Agreement = ALONE, *, strict: bool = True
) -> list[Any]:
    """New caches of the layers that are here, whose budgets keep what all ranks keep.

    Args:
        strict: as for `make_prompt_cache`.

    Raises:
        ValueError: another policy than the leader's, or what `make_prompt_cache` refuses.
    """
    _check_leaders(policy, agreement)
    if policy.reads_twice:
        check_alone(agreement)
    return make_prompt_cache(model, policy, strict=strict, peers=agreement.peers(model))


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


def check_alone(agreement: Agreement) -> None:
    """Raises ValueError where several processes were to read a prompt twice."""
    if agreement is not ALONE:
        raise ValueError(
            "a score such as kvzip has prompts read twice, which one process does alone: choose another score for "
            "several, such as key_diff"
        )


def _check_leaders(policy: CachePolicy, agreement: Agreement) -> None:
    """Raises ValueError where a policy is not the leader's, as far as words and numbers tell."""
    every = policy.settings()
    if not isinstance(policy.layers, str):
        every["layers"] = f"table {hashlib.blake2b(repr(policy.layers).encode(), digest_size=6).hexdigest()}"
    if policy.calibration is not None:
        every["calibration"] = policy.calibration.name
    every |= {name: list(value) for name, value in every.items() if isinstance(value, tuple)}  # as the link tells pairs
    own = {name: value for name, value in every.items() if all(isinstance(one, WORDS) for one in _each(value))}
    leaders = agreement.told(lambda: own)
    if leaders != own:
        told, here = (", ".join(f"{name}={value!r}" for name, value in each.items()) for each in (leaders, own))
        raise ValueError(
            f"the leader's policy has {told or 'all by default'}, that of this rank {here or 'all by default'}: "
            "give all ranks the same"
        )


def _each(value: object) -> list[object]:
    return value if isinstance(value, list) else [value]


def equal_lengths(model: nn.Module, agreement: Agreement) -> tuple[bool, bool]:
    """Whether rows of a batch must always be of one length, and else whether prompts must that are read together."""
    rows, others = anywhere(agreement, rows_must_be_equal(model), not only_attention(model))
    with mx.stream(generation_stream):  # a trial is with all ranks, or with none
        (prompts,) = anywhere(agreement, others and not rows and padding_is_read(model))
    return rows, prompts
