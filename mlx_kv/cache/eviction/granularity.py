"""Which tokens are kept together, and how many in each layer. The options that say so are `share` and `layers`."""

from __future__ import annotations

from typing import Literal, get_args

from mlx_kv.cache.eviction.allocation import HeadBudgets, head_budgets

# The same tokens in all layers; in each layer its own; in each head its own, and of those either as many as in all
# others, or those that matter most among the tokens of all heads.
Granularity = Literal["layers", "layer", "head", "adaptive"]
BY_HEAD: tuple[Granularity, ...] = ("head", "adaptive")


# All layers keep as many tokens; the lower ones more; or as many as one ranking of all heads of all layers leaves them.
LayerBudgets = Literal["uniform", "pyramid", "global"]
# Of these, or as many in each head of each layer as a table says.
Allocation = LayerBudgets | HeadBudgets


def check_granularity(share: object, layers: object = "uniform") -> None:
    """Raises ValueError for what is none, or for two that don't go together."""
    if not isinstance(share, str) or share not in get_args(Granularity):
        raise ValueError(f"share is {share!r}: choose one of {', '.join(get_args(Granularity))}")
    if isinstance(layers, str):
        if layers not in get_args(LayerBudgets):
            raise ValueError(
                f"layers is {layers!r}: choose one of {', '.join(get_args(LayerBudgets))}, or give a table"
            )
        name = repr(layers)
    else:
        head_budgets(layers)  # type: ignore[arg-type]
        name = "a table"
    if layers != "uniform" and share == "layers":
        raise ValueError(
            f"layers is {name}, but share='layers' keeps the same tokens in all of them: use share='layer', 'head' "
            "or 'adaptive'"
        )
    if layers == "global" and share != "adaptive":
        raise ValueError("layers is 'global', one ranking of the tokens of all heads: use share='adaptive' with it")
