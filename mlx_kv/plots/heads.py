"""Figure: tokens held by each head, a column for each layer."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib import colormaps
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from mlx_kv.plots.style import GREY, colour_bar, count_labels

COLOURS = ListedColormap(colormaps["viridis_r"](np.linspace(0.02, 1, 256)), "held")
MAX_NUMBERED = 40  # layers, up to which each cell shows its number


def tokens_by_head(title: str, held: Sequence[Sequence[int]], budget: int) -> Figure:
    """Draws the tokens that each head holds.

    Args:
        title: the model and its policy.
        held: tokens by layer and head; one number for a layer in which all heads keep the same tokens.
        budget: their mean.
    """
    layers, heads = len(held), max(map(len, held))
    cells = np.full((heads, layers), np.nan)
    for layer, counts in enumerate(held):
        cells[: len(counts), layer] = counts
    figure = Figure(figsize=(max(5.0, 1.6 + 0.42 * layers), 1.7 + 0.32 * heads), dpi=110, layout="constrained")
    axes = figure.add_subplot()
    axes.set_title(f"Tokens held by each head: {title}", loc="left", fontsize=12)
    axes.set_xlabel("layer")
    axes.set_ylabel("head")
    top = max(float(np.nanmax(cells)), budget)
    image = axes.imshow(cells, cmap=COLOURS, vmin=0, vmax=top, aspect="auto", interpolation="nearest")
    axes.xaxis.set_major_locator(MaxNLocator(12, integer=True))
    axes.yaxis.set_major_locator(MaxNLocator(8, integer=True))
    axes.tick_params(length=0, labelcolor=GREY)
    axes.spines[:].set_visible(False)
    for layer, counts in enumerate(held if layers <= MAX_NUMBERED else ()):
        for head, count in enumerate(counts):
            colour = "white" if count > 0.55 * top else "black"
            axes.text(layer, head, f"{count:,}", ha="center", va="center", fontsize=6.5, color=colour)
    bar = colour_bar(figure, image, axes, f"tokens; the mean is {budget:,}", fraction=0.04)
    count_labels(bar.ax.yaxis)
    return figure
