"""The figure of how many tokens each head holds: a cell for each head, a column for each layer."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib import colormaps
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from mlx_kv.plots import GREY, axis_label

COLOURS = ListedColormap(colormaps["viridis_r"](np.linspace(0.02, 1, 256)), "held")
MOST_WRITTEN = 40  # cells in a row, up to which each has its number


def tokens_by_head(title: str, held: Sequence[Sequence[int]], budget: int) -> Figure:
    """Tokens that each head holds.

    Args:
        title: what the figure is of.
        held: by layer and head; a layer whose heads keep the same tokens has one number.
        budget: the mean.
    """
    layers, heads = len(held), max(map(len, held))
    cells = np.full((heads, layers), np.nan)
    for layer, own in enumerate(held):
        cells[: len(own), layer] = own
    written = layers <= MOST_WRITTEN
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
    for layer, own in enumerate(held if written else ()):
        for head, count in enumerate(own):
            colour = "white" if count > 0.55 * top else "black"
            axes.text(layer, head, f"{count:,}", ha="center", va="center", fontsize=6.5, color=colour)
    bar = figure.colorbar(image, ax=axes, fraction=0.04, pad=0.015)
    bar.ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: axis_label(value) if value else "0"))
    bar.set_label(f"tokens; the mean is {budget:,}")
    bar.ax.tick_params(length=0, labelcolor=GREY)
    bar.outline.set_visible(False)
    return figure
