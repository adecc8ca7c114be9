"""The figure of what a budget kept: a row for each layer or head, a cell for each position, coloured by its score.

Decides how many positions share a column of pixels, what colour a cell has, and what is written around them. Knows
nothing about models or caches; it is given numbers. Everything is one raster: no artist for a token.
R rows, W columns.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import ListedColormap, Normalize
from matplotlib.figure import Figure
from matplotlib.ticker import FixedFormatter, FixedLocator, FuncFormatter, MaxNLocator

from mlx_kv.plots import GREY, axis_label

ScoredPositions = tuple[Sequence[int], Sequence[float]]  # positions kept, rising, and their scores
DPI = 160
ROW_INCHES = 0.2
MOST_INCHES = 7.0  # of rows, as long as each has its pixels
ROW_PIXELS = 2
BINS = 120  # of the share above the rows
LEAST_SHARE = 0.005  # % of attention: less is not drawn
# Uniform to the eye; dark is high. The palest end is left out: it would be lost on white.
COLOURS = ListedColormap(colormaps["viridis_r"](np.linspace(0.08, 1, 256)), "kept")


def ranks(scores: Sequence[float]) -> np.ndarray:
    """Where each score stands among them, 0 the lowest and 1 the highest; equal scores share a place."""
    distinct, place = np.unique(np.asarray(scores, np.float64), return_inverse=True)
    return place.reshape(-1) / max(1, len(distinct) - 1)


def raster(rows: Sequence[ScoredPositions], tokens: int, columns: int) -> np.ndarray:
    """The highest rank among the kept positions of each column, (R, W); NaN where all were evicted."""
    image = np.full((len(rows), columns), -np.inf)
    for line, (positions, scores) in zip(image, rows, strict=True):
        np.maximum.at(line, np.asarray(positions, np.int64) * columns // tokens, ranks(scores))
    image[np.isneginf(image)] = np.nan
    return image


def share_kept(rows: Sequence[ScoredPositions], tokens: int, bins: int) -> np.ndarray:
    """The share of the cells of each stretch of the text that were kept, (bins,)."""
    kept = np.zeros(bins)
    for positions, _ in rows:
        kept += np.bincount(np.asarray(positions, np.int64) * bins // tokens, minlength=bins)
    sizes = np.bincount(np.arange(tokens) * bins // tokens, minlength=bins)
    return kept / (len(rows) * sizes)


def kept_positions(
    title: str,
    layers: Sequence[Sequence[ScoredPositions]],
    tokens: int,
    sinks: int,
    recent: int,
    attention: Sequence[float] | None = None,
    attention_kept: Sequence[float | None] | None = None,
) -> Figure:
    """Which positions each layer kept: rows of cells coloured by the rank of the score, and above them the share kept.

    Args:
        title: what the figure is of.
        layers: for each layer its rows, one, or one a head; at least one layer.
        tokens: in the text, at least one.
        sinks, recent: so many first and last tokens that are never evicted, to be marked.
        attention: that each token of the text receives, to be drawn above, too.
        attention_kept: of each layer, the share of it that goes to what is kept, to be said beside its rows.
    """
    rows = [row for layer in layers for row in layer]
    inches = max(1.2, min(len(rows) * ROW_INCHES, MOST_INCHES), len(rows) * ROW_PIXELS / DPI)
    panels = [0.6, inches] if attention is None else [0.6, 0.9, inches]
    figure = Figure(figsize=(10, sum(panels) + 1.8), dpi=DPI, layout="constrained")
    above, *between, cells = figure.subplots(len(panels), 1, sharex=True, height_ratios=panels)
    above.set_title(f"Tokens kept: {title}", loc="left", fontsize=12, pad=20)
    draw_share(above, share_kept(rows, tokens, min(tokens, BINS)), tokens)
    for axes in between:
        draw_attention(axes, attention or (), tokens)
    mark_protected([above, *between, cells], tokens, sinks, recent)
    cells.set_xlim(0, tokens)
    cells.set_ylim(len(rows), 0)
    cells.set_xlabel("position in the text, tokens")
    cells.set_ylabel("layer" if len(rows) == len(layers) else "layer, a row a head")
    cells.xaxis.set_major_locator(MaxNLocator(8, integer=True))
    cells.xaxis.set_major_formatter(FuncFormatter(lambda value, _: axis_label(value) if value else "0"))
    every = name_layers(cells, [len(layer) for layer in layers], inches)
    cells.spines[["top", "right"]].set_visible(False)
    for axes in (above, *between, cells):
        axes.tick_params(length=0, labelcolor=GREY)
    if attention_kept is not None:
        name_shares(cells, attention_kept, every)
    everything = [above, *between, cells]
    bar = figure.colorbar(ScalarMappable(Normalize(0, 1), COLOURS), ax=everything, fraction=0.03, pad=0.015)
    bar.set_ticks([0, 0.5, 1], labels=["lowest", "middle", "highest"])
    bar.set_label("score, by rank among the kept of its row")
    bar.ax.tick_params(length=0, labelcolor=GREY)
    bar.outline.set_visible(False)
    figure.draw_without_rendering()  # places everything: now a pixel's width is known
    columns = min(tokens, int(cells.get_window_extent().width))
    cells.imshow(
        raster(rows, tokens, columns),
        cmap=COLOURS,
        vmin=0,
        vmax=1,
        aspect="auto",
        interpolation="nearest",
        extent=(0, tokens, len(rows), 0),
    )
    return figure


def draw_share(axes: Axes, share: np.ndarray, tokens: int) -> None:
    edges = np.linspace(0, tokens, len(share) + 1)
    axes.stairs(100 * share, edges, fill=True, color="#bbbbbb")
    axes.set_ylim(0, 100)
    axes.yaxis.set_major_locator(FixedLocator([0, 100]))
    axes.yaxis.set_major_formatter(FixedFormatter(["0", "100"]))
    axes.set_ylabel("kept, %")
    axes.spines[["top", "right"]].set_visible(False)


def draw_attention(axes: Axes, attention: Sequence[float], tokens: int) -> None:
    """The share of attention that each stretch of the text gets, in %: from thousandths to nearly all, so by powers."""
    bins = min(tokens, BINS)
    share = 100 * np.bincount(np.arange(tokens) * bins // tokens, weights=np.asarray(attention), minlength=bins)
    axes.stairs(share, np.linspace(0, tokens, bins + 1), fill=True, color="#7aa6c2", baseline=LEAST_SHARE)
    axes.set_yscale("log")
    axes.set_ylim(LEAST_SHARE, 100)
    axes.yaxis.set_major_locator(FixedLocator([0.01, 1, 100]))
    axes.yaxis.set_major_formatter(FixedFormatter(["0.01", "1", "100"]))
    axes.yaxis.set_minor_locator(FixedLocator([]))
    axes.set_ylabel("attention, %")
    axes.spines[["top", "right"]].set_visible(False)


def name_shares(cells: Axes, shares: Sequence[float | None], every: int = 1) -> None:
    """Says at the right end of each row that has a name at the left how much of the attention is left.

    Args:
        shares: of all rows, of which every so many have a name.
    """
    told = cells.secondary_yaxis("right")
    places: Any = cells.yaxis.get_major_locator()
    shown = shares[::every]
    told.yaxis.set_major_locator(FixedLocator(places.locs))
    told.yaxis.set_major_formatter(FixedFormatter(["" if share is None else f"{100 * share:.0f}%" for share in shown]))
    told.set_ylabel("attention kept")
    told.tick_params(length=0, labelcolor=GREY)
    told.spines["right"].set_visible(False)


def mark_protected(panels: Sequence[Axes], tokens: int, sinks: int, recent: int) -> None:
    """Says where the tokens are that are never evicted: a line at their edge, in words above the first panel."""
    above = panels[0]
    style: dict[str, Any] = {"fontsize": 9, "color": GREY, "textcoords": "offset points", "va": "bottom"}
    style["xycoords"] = above.get_xaxis_transform()
    if 0 < sinks < tokens:
        above.annotate(f"↓ {sinks} sinks" if sinks > 1 else "↓ 1 sink", (0, 1), (-3, 3), ha="left", **style)
    if 0 < recent < tokens:
        above.annotate(f"{recent:,} recent ↓", (tokens, 1), (3, 3), ha="right", **style)
    for edge in (sinks, tokens - recent):
        if 0 < edge < tokens:
            for axes in panels:
                axes.axvline(edge, color=GREY, linewidth=0.6, linestyle=(0, (3, 2)))


def name_layers(axes: Axes, heads: Sequence[int], inches: float) -> int:
    """A number for each layer, or for every so many of them, in the middle of its rows; lines between layers.

    Returns:
        of how many layers one has its number.
    """
    edges = np.cumsum([0, *heads])
    room = max(1, int(inches / ROW_INCHES))
    every = next(step for step in (1, 2, 4, 5, 10, 20, 50, 100, len(heads)) if math.ceil(len(heads) / step) <= room)
    shown = range(0, len(heads), every)
    axes.yaxis.set_major_locator(FixedLocator([(edges[i] + edges[i + 1]) / 2 for i in shown]))
    axes.yaxis.set_major_formatter(FixedFormatter([str(i) for i in shown]))
    axes.hlines(edges[1:-1], 0, 1, transform=axes.get_yaxis_transform(), color="#cccccc", linewidth=0.5)
    return every
