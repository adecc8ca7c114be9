"""The fields of a `CachePolicy`: defaults, bounds, help and option names. Imports no MLX, so that `--help` is fast."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mlx_kv.cache.eviction.allocation import REMOVED
from mlx_kv.cache.growth import DEFAULT, FixedStep, Geometric, Growth, Tapered
from mlx_kv.settings import setting

if TYPE_CHECKING:
    from mlx_kv.cache.codecs import Bits, Choice
    from mlx_kv.cache.eviction.allocation import LayerAllocation, Scope
    from mlx_kv.cache.eviction.calibration import Calibration
    from mlx_kv.cache.eviction.scores import Function, Score

SINKS = 4  # first tokens that are never dropped: mlx-lm's number, after StreamingLLM (Xiao et al. 2023)
GROWTHS: Mapping[str, Growth] = {"tapered": Tapered(), "geometric": Geometric(), "step": FixedStep()}
SHARES = ("layers", "layer", "head", "adaptive")
ALLOCATIONS = ("uniform", "calibrated")


def _tokens(default: int | None, help: str, option: str | tuple[str, ...] = (), minimum: int = 0, **more: Any) -> Any:
    return setting(default, help=help, option=option, metavar="N", minimum=minimum, unit="tokens", **more)


@dataclass(frozen=True)
class PolicySettings:
    """The settings of `CachePolicy`, which documents them, unchecked."""

    bits: Bits | None = setting(
        None,
        option="--kv-bits",
        summary="Bits of keys and values: auto, 8, 8,4 or 4.",
        metavar="N[,N]",
        help="Bits of quantised keys and values: 2, 3, 4, 5, 6 or 8; 8,4 is 8 for keys and 4 for values; auto is the "
        "fewest with little loss.",
    )
    group_size: int = setting(
        64, option="--kv-group-size", metavar="N", help="Elements that share a scale when quantised: 32, 64 or 128."
    )
    growth: Growth = setting(
        DEFAULT,
        option="--kv-growth",
        words=GROWTHS,
        help="Growth of full caches: by half of the slots and at most 8,192 (tapered), to twice as many (geometric), "
        "or by 256 as in mlx-lm (step).",
    )
    reserve: int = _tokens(0, "Tokens for which memory is reserved at once.")
    quantized_start: int = _tokens(
        0,
        "Number of tokens from which keys and values are quantised.",
        option=("--quantized-kv-start", "--kv-quantized-start"),
    )
    max_kv_size: int | None = _tokens(
        None,
        "Maximum tokens in full-attention layers: the first 4 and the newest are kept.",
        option="--max-kv-size",
        summary="Keep only the newest tokens, at most N.",
        minimum=1,
    )
    max_write: int = _tokens(
        512, "Longest write for which windows and budgets reserve memory.", option="--max-write", minimum=1
    )
    max_rollback: int = _tokens(0, "Tokens that windows can take back at any time.")
    budget: int | None = _tokens(
        None,
        "Tokens that full-attention layers keep: the N that matter most. Memory peaks at the budget, the margin and "
        "one prefill chunk.",
        option=("--kv-budget", "--compact-kv-budget"),
        summary="Keep the N tokens that matter most.",
        minimum=1,
    )
    keep_recent: int = _tokens(
        None,
        "Number of newest tokens that a budget never evicts.",
        option="--kv-keep-recent",
        default_text="64; at most N/4",
    )
    sinks: int = _tokens(SINKS, "Number of first tokens that are never evicted.", option="--kv-sinks")
    score: str | Function | Score = setting(
        None,
        option="--kv-score",
        metavar="NAME",
        default_text="fitted with a calibration, else key_diff",
        help="Score by which a budget keeps tokens: fitted, key_diff, key_norm, recent, …",
    )
    share: Scope = setting(
        None,
        option="--kv-share",
        choices=SHARES,
        default_text="layers, or what --kv-layers needs",
        help="Scope in which the same tokens are kept: all layers, the heads of a layer, or each head alone; adaptive: "
        "the heads of a layer compete.",
    )
    margin: int | None = _tokens(
        None,
        "Tokens above the budget before it evicts.",
        option="--kv-margin",
        default_text="max(64, N/16)",
    )
    codec: Choice | None = setting(
        None,
        option="--kv-codec",
        metavar="NAME[,NAME]",
        help="Storage format: mxfp8, mxfp4, nvfp4, …, or rotated or centred beside --kv-bits; two names are for keys "
        "and for values.",
    )
    layers: LayerAllocation = setting(
        None,
        option="--kv-layers",
        choices=ALLOCATIONS,
        removed=REMOVED,
        default_text="calibrated with a calibration, else uniform",
        help="Allocation of the budget: the same for all layers, or as measured for each head.",
    )
    residual_length: int = _tokens(
        0,
        "Number of newest tokens that attention sees unquantised, such as 64.",
        option=("--kv-residual", "--kv-residual-length"),
        summary="Newest tokens that are not quantised.",
    )
    calibration: Calibration | None = setting(None, help="Measurements of the model.")
    allocation: LayerAllocation | None = setting(None, repr=False, help="Another name for layers.")
    residual: int | None = setting(None, repr=False, help="Another name for residual_length.")
