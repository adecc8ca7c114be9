"""How one budget is given out to the layers of a model, when lower ones get more of it: a pyramid.

After PyramidKV (Cai et al. 2024, "PyramidKV: Dynamic KV Cache Compression based on Pyramidal Information Funneling"):
lower layers look at many tokens, upper ones at few. Linearly fewer from layer to layer, the last has a twentieth of the
mean, and all together as much as if each had the mean. Integers only: knows nothing about layers but their number.
"""

from __future__ import annotations

STEEPNESS = 20  # the mean, divided by the budget of the last layer; the number of the paper


def layer_budget(mean: int, layer: int, layers: int, least: int) -> int:
    """Tokens of one of so many layers; the sum over all of them is layers * mean.

    Args:
        mean: tokens of a layer on average, at least `least`.
        least: tokens that every layer needs.
    """
    if 2 * layer + 1 == layers:
        return mean
    if 2 * layer >= layers:  # the other half of the pyramid: what one layer gets over the mean, another gives
        return 2 * mean - layer_budget(mean, layers - 1 - layer, layers, least)
    last = max(mean / STEEPNESS, least)
    return round(2 * mean - last - layer * 2 * (mean - last) / (layers - 1))
