"""The figure of what several scores keep of one text: a row for each score, darker where more layers and heads kept.

Decides how positions share columns of pixels, and what is written beside the rows. Knows nothing about models or
scores; it is given numbers, and draws what is around the rows as `plots.kept` does.
S scores, W columns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.cm import ScalarMappable
from matplotlib.colors import LinearSegmentedColormap, Normalize
from matplotlib.figure import Figure
from matplotlib.ticker import FixedFormatter, FixedLocator, FuncFormatter, MaxNLocator

from mlx_kv.plots import GREY, axis_label
from mlx_kv.plots.kept import DPI, draw_attention, mark_protected, name_shares

ROW_INCHES = 0.42
# White is kept by none, and each step as dark again as it looks.
COLOURS = LinearSegmentedColormap.from_list("kept", ["#ffffff", "#9ecae1", "#2171b5", "#08306b"])


def columns_of(shares: Sequence[float], columns: int) -> np.ndarray:
    """(W,) the mean of the positions that share each column."""
    places = np.arange(len(shares)) * columns // len(shares)
    totals = np.bincount(places, weights=np.asarray(shares, np.float64), minlength=columns)
    means: np.ndarray = totals / np.bincount(places, minlength=columns)
    return means


def kept_by_score(
    title: str,
    kept: Mapping[str, Sequence[float]],
    sinks: int,
    recent: int,
    attention: Sequence[float] | None = None,
    attention_kept: Sequence[float | None] | None = None,
) -> Figure:
    """Where in a text each score keeps tokens.

    Args:
        title: what the figure is of.
        kept: for each score, the share of layers and heads that kept each position, at least one position.
        sinks, recent: so many first and last tokens that are never evicted, to be marked.
        attention: that each token of the text receives, to be drawn above.
        attention_kept: of each score, the share of it that goes to what is kept.
    """
    tokens = len(next(iter(kept.values())))
    inches = ROW_INCHES * len(kept)
    panels = [inches] if attention is None else [0.9, inches]
    figure = Figure(figsize=(10, sum(panels) + 1.5), dpi=DPI, layout="constrained")
    everything = np.atleast_1d(figure.subplots(len(panels), 1, sharex=True, height_ratios=panels)).tolist()
    *above, cells = everything
    everything[0].set_title(f"Tokens kept: {title}", loc="left", fontsize=12, pad=20)
    for axes in above:
        draw_attention(axes, attention or (), tokens)
    mark_protected(everything, tokens, sinks, recent)
    cells.set_xlim(0, tokens)
    cells.set_ylim(len(kept), 0)
    cells.set_xlabel("position in the text, tokens")
    cells.xaxis.set_major_locator(MaxNLocator(8, integer=True))
    cells.xaxis.set_major_formatter(FuncFormatter(lambda value, _: axis_label(value) if value else "0"))
    cells.yaxis.set_major_locator(FixedLocator([place + 0.5 for place in range(len(kept))]))
    cells.yaxis.set_major_formatter(FixedFormatter(list(kept)))
    cells.hlines(range(1, len(kept)), 0, 1, transform=cells.get_yaxis_transform(), color="#cccccc", linewidth=0.5)
    cells.spines[["top", "right"]].set_visible(False)
    for axes in everything:
        axes.tick_params(length=0, labelcolor=GREY)
    cells.tick_params(axis="y", labelcolor="black")
    if attention_kept is not None:
        name_shares(cells, attention_kept)
    bar: Any = figure.colorbar(ScalarMappable(Normalize(0, 100), COLOURS), ax=everything, fraction=0.03, pad=0.015)
    bar.set_label("of layers and heads, kept by, %")
    bar.ax.tick_params(length=0, labelcolor=GREY)
    bar.outline.set_visible(False)
    figure.draw_without_rendering()  # places everything: now a pixel's width is known
    columns = min(tokens, int(cells.get_window_extent().width))
    image = np.stack([columns_of(shares, columns) for shares in kept.values()])
    extent = (0, tokens, len(kept), 0)
    cells.imshow(image, cmap=COLOURS, vmin=0, vmax=1, aspect="auto", interpolation="nearest", extent=extent)
    return figure
