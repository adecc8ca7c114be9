"""Figures: memory against context, and the tokens that a budget keeps; and the common style of figures.

Needs matplotlib (extra `plot`); no global state is used. R rows, W columns.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.cm import ScalarMappable
from matplotlib.colorbar import Colorbar
from matplotlib.colors import ListedColormap, Normalize
from matplotlib.figure import Figure
from matplotlib.ticker import FixedFormatter, FixedLocator, FuncFormatter, LogLocator, MaxNLocator, NullLocator

# --- style ------------------------------------------------------------------------------------------------------------

SUFFIXES = (".png", ".svg", ".pdf")
# Okabe and Ito's colours for any colour vision, without the pale yellow; dashes tell them apart in print.
COLOURS = ("#000000", "#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
DASHES = ((), (5, 2), (), (4, 1.5, 1, 1.5), (1.5, 1.5), (7, 1.5), (2, 1))
GREY, LIGHT_GREY = "#666666", "#dddddd"


def new_figure(title: str, x: str, y: str) -> tuple[Figure, Axes]:
    """An empty figure with logarithmic axes, its title, and the labels of the axes, units included."""
    figure = Figure(figsize=(8, 4.8), dpi=110, layout="constrained")
    axes = figure.add_subplot()
    axes.set_title(title, loc="left", fontsize=12)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.grid(color=LIGHT_GREY, linewidth=0.6)
    plain_axes(axes)
    return figure, axes


def plain_axes(axes: Axes, labelsize: float = 10) -> None:
    """No frame at the top and on the right, no tick marks, grey numbers."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(length=0, labelcolor=GREY, labelsize=labelsize)


def colour_bar(figure: Figure, mappable: Any, axes: Axes | Sequence[Axes], label: str, fraction: float) -> Colorbar:
    """A colour bar without frame and tick marks on the right of the axes."""
    bar = figure.colorbar(mappable, ax=axes, fraction=fraction, pad=0.015)
    bar.set_label(label)
    bar.ax.tick_params(length=0, labelcolor=GREY)
    bar.outline.set_visible(False)
    return bar


def position_axis(axes: Axes, tokens: int) -> None:
    """The positions of a text of `tokens` tokens from left to right."""
    axes.set_xlim(0, tokens)
    axes.set_xlabel("position in the text, tokens")
    axes.xaxis.set_major_locator(MaxNLocator(8, integer=True))
    count_labels(axes.xaxis)


def count_labels(axis: Axis) -> None:
    """Labels of whole numbers from 0 up."""
    axis.set_major_formatter(FuncFormatter(lambda value, _: axis_label(value) if value else "0"))


def axis_label(value: float) -> str:
    """A number of an axis: 0.25, 8, 4,096."""
    return f"{value:,.0f}" if value >= 1 else f"{value:.3g}"


def apart(values: Sequence[int]) -> list[int]:
    """The values of a rising sequence with room for their labels on a logarithmic axis, the last one included."""
    min_ratio = (values[-1] / values[0]) ** 0.11
    kept = [values[-1]]
    for value in reversed(values[:-1]):
        if kept[-1] / value >= min_ratio:
            kept.append(value)
    return kept


# --- memory against context -------------------------------------------------------------------------------------------

LINE_POINTS = 12.0  # height of a line of text


def memory_against_context(
    title: str, contexts: Sequence[int], sizes_by_name: Mapping[str, Sequence[int]], marked: Sequence[int]
) -> Figure:
    """Draws memory against context, both axes logarithmic.

    Args:
        title: the model and its settings.
        contexts: tokens, rising.
        sizes_by_name: for each strategy, the bytes at each context; at least one strategy.
        marked: contexts with a dot and a label on the axis.
    """
    unit, size = ("GiB", 2**30) if max(map(max, sizes_by_name.values())) >= 2**30 else ("MiB", 2**20)
    figure, axes = new_figure(f"Memory of keys and values: {title}", "tokens in the context", f"memory, {unit}")
    colours, ends = {}, {}
    for index, (name, counts) in enumerate(merged(sizes_by_name).items()):
        colours[name] = COLOURS[index % len(COLOURS)]
        sizes = [count / size for count in counts]
        (line,) = axes.plot(contexts, sizes, color=colours[name], linewidth=1.8)
        if dashes := DASHES[index % len(DASHES)]:
            line.set_dashes(dashes)
        dots = [(x, y) for x, y in zip(contexts, sizes, strict=True) if x in marked]
        axes.plot(*zip(*dots, strict=True), "o", color=colours[name], markersize=3.5)
        ends[name] = (contexts[-1], sizes[-1])
    axes.margins(x=0.02)
    axes.xaxis.set_major_locator(FixedLocator(apart(sorted(marked))))
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_minor_locator(NullLocator())
        axis.set_major_formatter(FuncFormatter(lambda value, _: axis_label(value)))
    name_lines(figure, axes, ends, colours)
    return figure


def name_lines(figure: Figure, axes: Axes, ends: Mapping[str, tuple[float, float]], colours: Mapping[str, str]) -> None:
    """Writes the name of each line to the right of its end (x, y); names that would overlap are moved apart.

    Call it last: it uses the final limits and size of the axes.
    """
    figure.draw_without_rendering()
    low, high = map(math.log10, axes.get_ylim())
    points_per_decade = axes.get_window_extent().height * 72 / figure.dpi / (high - low)
    top = -math.inf  # of the last name
    for name, (x, y) in sorted(ends.items(), key=lambda item: item[1][1]):
        end, half = (math.log10(y) - low) * points_per_decade, LINE_POINTS * (1 + name.count("\n")) / 2
        centre = max(end, top + half)
        top = centre + half
        axes.annotate(
            name,
            xy=(x, y),
            xytext=(20, centre - end),
            textcoords="offset points",
            va="center",
            color=colours[name],
            fontsize=9,
            annotation_clip=False,
            arrowprops={"arrowstyle": "-", "color": colours[name], "linewidth": 0.7, "shrinkB": 3, "relpos": (0, 0.5)},
        )


def merged(lines: Mapping[str, Sequence[int]]) -> dict[str, Sequence[int]]:
    """Joins lines that coincide into one with all their names, since the last would hide the others."""
    names: dict[tuple[int, ...], list[str]] = {}
    for name, counts in lines.items():
        names.setdefault(tuple(counts), []).append(name)
    return {",\n".join(same): counts for counts, same in names.items()}


# --- tokens kept ------------------------------------------------------------------------------------------------------

ScoredPositions = tuple[Sequence[int], Sequence[float]]  # positions kept, rising, and their scores
DPI = 160
ROW_INCHES = 0.2
MAX_INCHES = 7.0  # of rows, unless they need more for `ROW_PIXELS`
ROW_PIXELS = 2
BINS = 120  # of the panels above the rows
MIN_SHARE = 0.005  # % of attention: less is not drawn
# Perceptually uniform, dark is high, without the palest end, which is hard to see on white.
RANK_COLOURS = ListedColormap(colormaps["viridis_r"](np.linspace(0.08, 1, 256)), "kept")


def ranks(scores: Sequence[float]) -> np.ndarray:
    """The rank of each score, from 0 for the lowest to 1 for the highest; equal scores have the same rank."""
    distinct, rank = np.unique(np.asarray(scores, np.float64), return_inverse=True)
    return rank.reshape(-1) / max(1, len(distinct) - 1)


def raster(rows: Sequence[ScoredPositions], tokens: int, columns: int) -> np.ndarray:
    """The highest rank among the kept positions of each column, (R, W); NaN where all were evicted."""
    image = np.full((len(rows), columns), -np.inf)
    for line, (positions, scores) in zip(image, rows, strict=True):
        np.maximum.at(line, np.asarray(positions, np.int64) * columns // tokens, ranks(scores))
    image[np.isneginf(image)] = np.nan
    return image


def share_kept(rows: Sequence[ScoredPositions], tokens: int, bins: int) -> np.ndarray:
    """The share of cells that were kept in each bin of the text, (bins,)."""
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
    """Draws the positions that each layer kept, coloured by the rank of their score, and above them the share kept.

    Args:
        title: the model and its policy.
        layers: the rows of each layer: one, or one per head; at least one layer.
        tokens: of the text, at least one.
        sinks, recent: numbers of first and last tokens that are never evicted; they are marked.
        attention: the attention that each token receives, for a panel above the rows.
        attention_kept: for each layer the share of the attention that goes to kept tokens, written beside its rows.
    """
    rows = [row for layer in layers for row in layer]
    inches = max(1.2, min(len(rows) * ROW_INCHES, MAX_INCHES), len(rows) * ROW_PIXELS / DPI)
    panels = [0.6, inches] if attention is None else [0.6, 0.9, inches]
    figure = Figure(figsize=(10, sum(panels) + 1.8), dpi=DPI, layout="constrained")
    above, *between, cells = figure.subplots(len(panels), 1, sharex=True, height_ratios=panels)
    above.set_title(f"Tokens kept: {title}", loc="left", fontsize=12, pad=20)
    draw_share(above, share_kept(rows, tokens, min(tokens, BINS)), tokens)
    for axes in between:
        draw_attention(axes, attention or (), tokens)
    mark_protected([above, *between, cells], tokens, sinks, recent)
    cells.set_ylim(len(rows), 0)
    position_axis(cells, tokens)
    cells.set_ylabel("layer" if len(rows) == len(layers) else "layer, a row a head")
    every = name_layers(cells, [len(layer) for layer in layers], inches)
    everything = [above, *between, cells]
    for axes in everything:
        plain_axes(axes)
    if attention_kept is not None:
        name_shares(cells, attention_kept, every)
    label = "score, by rank among the kept of its row"
    bar = colour_bar(figure, ScalarMappable(Normalize(0, 1), RANK_COLOURS), everything, label, fraction=0.03)
    bar.set_ticks([0, 0.5, 1], labels=["lowest", "middle", "highest"])
    figure.draw_without_rendering()  # the layout, and so the width in pixels, is known after this
    columns = min(tokens, int(cells.get_window_extent().width))
    cells.imshow(
        raster(rows, tokens, columns),
        cmap=RANK_COLOURS,
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


def draw_attention(axes: Axes, attention: Sequence[float], tokens: int) -> None:
    """The share of attention that each bin of the text receives, in %, on a logarithmic axis."""
    bins = min(tokens, BINS)
    share = 100 * np.bincount(np.arange(tokens) * bins // tokens, weights=np.asarray(attention), minlength=bins)
    axes.stairs(share, np.linspace(0, tokens, bins + 1), fill=True, color="#7aa6c2", baseline=MIN_SHARE)
    axes.set_yscale("log")
    axes.set_ylim(MIN_SHARE, 100)
    axes.yaxis.set_major_locator(FixedLocator([0.01, 1, 100]))
    axes.yaxis.set_major_formatter(FixedFormatter(["0.01", "1", "100"]))
    axes.yaxis.set_minor_locator(FixedLocator([]))
    axes.set_ylabel("attention, %")


def name_shares(cells: Axes, shares: Sequence[float | None], every: int = 1) -> None:
    """Writes the share of attention kept on the right of each row that has a label on the left.

    Args:
        shares: of all layers.
        every: one layer in so many has a label.
    """
    right = cells.secondary_yaxis("right")
    labelled: Any = cells.yaxis.get_major_locator()
    shown = shares[::every]
    right.yaxis.set_major_locator(FixedLocator(labelled.locs))
    right.yaxis.set_major_formatter(FixedFormatter(["" if share is None else f"{100 * share:.0f}%" for share in shown]))
    right.set_ylabel("attention kept")
    right.tick_params(length=0, labelcolor=GREY)
    right.spines["right"].set_visible(False)


def mark_protected(panels: Sequence[Axes], tokens: int, sinks: int, recent: int) -> None:
    """Marks the tokens that are never evicted: a line at their edge, and words above the first panel."""
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
    """Writes the number of each layer in the middle of its rows, as many as fit, and draws lines between layers.

    Returns:
        the step between numbered layers.
    """
    edges = np.cumsum([0, *heads])
    max_labels = max(1, int(inches / ROW_INCHES))
    every = next(
        step for step in (1, 2, 4, 5, 10, 20, 50, 100, len(heads)) if math.ceil(len(heads) / step) <= max_labels
    )
    shown = range(0, len(heads), every)
    axes.yaxis.set_major_locator(FixedLocator([(edges[i] + edges[i + 1]) / 2 for i in shown]))
    axes.yaxis.set_major_formatter(FixedFormatter([str(i) for i in shown]))
    axes.hlines(edges[1:-1], 0, 1, transform=axes.get_yaxis_transform(), color="#cccccc", linewidth=0.5)
    return every
