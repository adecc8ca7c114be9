"""Figures: quality against budget, the tokens that several scores keep, and the tokens that each head holds.

    mlx-kv inspect --prompt-file notes.py --kv-budget 256 --kv-share head --json kept.json
    python -m benchmarks.eval.plots kept.json heads.png

draws what `mlx-kv inspect --json` wrote: a row for each score with --scores, else the tokens of each head. W columns.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import LinearSegmentedColormap, ListedColormap, Normalize
from matplotlib.figure import Figure
from matplotlib.ticker import FixedFormatter, FixedLocator, FuncFormatter, MaxNLocator, NullLocator

from mlx_kv.cli.output import save_figure
from mlx_kv.plots import (
    COLOURS,
    DASHES,
    DPI,
    GREY,
    LIGHT_GREY,
    apart,
    axis_label,
    colour_bar,
    count_labels,
    draw_attention,
    mark_protected,
    name_shares,
    plain_axes,
    position_axis,
)

# --- quality against budget -------------------------------------------------------------------------------------------

COLUMNS = 4
MARKS = "osD^vPX"
DODGE = 0.035  # octaves between the error bars of scores at one budget
MAX_DODGE = 0.25  # octaves in all
Point = tuple[int, float, float]  # budget, mean, standard deviation


@dataclass(frozen=True)
class Panel:
    """One task.

    Attributes:
        full: mean of the full cache.
        lines: for each score its points, budgets rising.
        is_share: whether values are shares, drawn from 0 to 100%.
    """

    title: str
    unit: str
    full: float
    lines: Mapping[str, Sequence[Point]]
    is_share: bool = True


def quality_against_budget(title: str, context: int, panels: Sequence[Panel]) -> Figure:
    """Draws accuracy, or another measure, against the tokens kept of a context.

    Args:
        title: the model and its contexts.
        context: tokens of the full cache.
        panels: at least one, of the same scores.
    """
    scores = list(dict.fromkeys(score for panel in panels for score in panel.lines))
    columns = min(COLUMNS, len(panels))
    rows = math.ceil(len(panels) / columns)
    beside = rows * columns == len(panels)  # no empty panel is left for the legend
    figure = Figure(figsize=(3 * columns + (1.8 if beside else 0.2), 2.7 * rows + 0.5), dpi=110)
    figure.set_layout_engine("constrained", w_pad=0.08, h_pad=0.08)
    figure.suptitle(f"What a budget costs: {title}", x=0.01, ha="left", fontsize=12)
    figure.supxlabel("tokens kept, and their share of the context", x=0.01, ha="left", fontsize=10)
    grid = figure.subplots(rows, columns, squeeze=False).ravel()
    for index, (axes, panel) in enumerate(zip(grid, panels, strict=False)):
        draw_panel(axes, panel, scores, context)
        if index % columns == 0 or panel.unit != panels[index - 1].unit:
            axes.set_ylabel(panel.unit)
    for axes in grid[len(panels) :]:
        axes.set_axis_off()
    handles, labels = grid[0].get_legend_handles_labels()
    if not beside:
        grid[len(panels)].legend(handles, labels, loc="center left", frameon=False, fontsize=9)
    else:
        figure.legend(handles, labels, loc="outside right center", frameon=False, fontsize=9)
    return figure


def draw_panel(axes: Axes, panel: Panel, scores: Sequence[str], context: int) -> None:
    scale = 100 if panel.is_share else 1
    axes.set_title(panel.title, loc="left", fontsize=10)
    axes.axhline(scale * panel.full, color=GREY, linewidth=1.2, linestyle=(0, (4, 3)), label="full cache", zorder=1)
    budgets = sorted({budget for points in panel.lines.values() for budget, _, _ in points})
    axes.set_xscale("log", base=2)
    for name, points in panel.lines.items():
        index = scores.index(name)
        colour, mark = COLOURS[index % len(COLOURS)], MARKS[(index + index // len(COLOURS)) % len(MARKS)]
        shift = 2 ** (min(DODGE, MAX_DODGE / len(scores)) * (index - (len(scores) - 1) / 2))
        axes.errorbar(
            [budget * shift for budget, _, _ in points],
            [scale * mean for _, mean, _ in points],
            yerr=[scale * deviation for _, _, deviation in points],
            label=name,
            color=colour,
            dashes=DASHES[index % len(DASHES)] or (None, None),
            marker=mark,
            markersize=4,
            linewidth=1.5,
            elinewidth=0.9,
            capsize=2,
        )
    axes.set_xlim(budgets[0] / 2**0.3, budgets[-1] * 2**0.3)
    axes.xaxis.set_major_locator(FixedLocator(apart(budgets)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{axis_label(value)}\n{100 * value / context:.3g}%"))
    if panel.is_share:
        axes.set_ylim(-4, 104)
        axes.yaxis.set_major_locator(FixedLocator([0, 25, 50, 75, 100]))
    axes.grid(color=LIGHT_GREY, linewidth=0.6)
    axes.set_axisbelow(True)
    plain_axes(axes, labelsize=9)


# --- tokens kept by score ---------------------------------------------------------------------------------------------

ROW_INCHES = 0.42
# White is kept by no head; darkness rises evenly.
SHARE_COLOURS = LinearSegmentedColormap.from_list("kept", ["#ffffff", "#9ecae1", "#2171b5", "#08306b"])


def columns_of(shares: Sequence[float], columns: int) -> np.ndarray:
    """The mean of the positions that share each column, (W,)."""
    column = np.arange(len(shares)) * columns // len(shares)
    totals = np.bincount(column, weights=np.asarray(shares, np.float64), minlength=columns)
    means: np.ndarray = totals / np.bincount(column, minlength=columns)
    return means


def kept_by_score(
    title: str,
    kept: Mapping[str, Sequence[float]],
    sinks: int,
    recent: int,
    attention: Sequence[float] | None = None,
    attention_kept: Sequence[float | None] | None = None,
) -> Figure:
    """Draws where in a text each score keeps tokens.

    Args:
        title: the model and its policy.
        kept: for each score, the share of layers and heads that kept each position; at least one position.
        sinks, recent: numbers of first and last tokens that are never evicted; they are marked.
        attention: the attention that each token receives, for a panel above the rows.
        attention_kept: for each score the share of the attention that goes to kept tokens.
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
    cells.set_ylim(len(kept), 0)
    position_axis(cells, tokens)
    cells.yaxis.set_major_locator(FixedLocator([row + 0.5 for row in range(len(kept))]))
    cells.yaxis.set_major_formatter(FixedFormatter(list(kept)))
    cells.hlines(range(1, len(kept)), 0, 1, transform=cells.get_yaxis_transform(), color="#cccccc", linewidth=0.5)
    for axes in everything:
        plain_axes(axes)
    cells.tick_params(axis="y", labelcolor="black")
    if attention_kept is not None:
        name_shares(cells, attention_kept)
    label = "of layers and heads, kept by, %"
    colour_bar(figure, ScalarMappable(Normalize(0, 100), SHARE_COLOURS), everything, label, fraction=0.03)
    figure.draw_without_rendering()  # the layout, and so the width in pixels, is known after this
    columns = min(tokens, int(cells.get_window_extent().width))
    image = np.stack([columns_of(shares, columns) for shares in kept.values()])
    extent = (0, tokens, len(kept), 0)
    cells.imshow(image, cmap=SHARE_COLOURS, vmin=0, vmax=1, aspect="auto", interpolation="nearest", extent=extent)
    return figure


# --- tokens of each head ----------------------------------------------------------------------------------------------

COUNT_COLOURS = ListedColormap(colormaps["viridis_r"](np.linspace(0.02, 1, 256)), "held")
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
    image = axes.imshow(cells, cmap=COUNT_COLOURS, vmin=0, vmax=top, aspect="auto", interpolation="nearest")
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


# --- what inspect wrote -----------------------------------------------------------------------------------------------


def share_kept(found: Mapping[str, Any]) -> list[float]:
    """For each position, the share of layers and heads that kept it."""
    heads = [head["positions"] for layer in found["layers"] for head in layer["heads"]]
    kept = np.zeros(found["tokens"])
    for positions in heads:
        kept[positions] += 1 / len(heads)
    return list(kept)


def mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def attention_of(found: Mapping[str, Any]) -> list[float] | None:
    """The share that each token receives, the mean of layers; None where it was not measured."""
    known = [layer["attention"] for layer in found["layers"] if layer["attention"] is not None]
    return np.mean(known, axis=0).tolist() if known else None


def attention_kept(found: Mapping[str, Any]) -> float | None:
    return mean([mean([head["attention"] for head in layer["heads"]]) for layer in found["layers"]])


def draw_inspection(found: Mapping[str, Any]) -> Figure:
    """The figure of an object that `mlx-kv inspect --json` wrote."""
    title = f"{Path(found['model']).name}, budget {found['budget']:,}, share={found['share']}"
    if "scores" not in found:
        counts = [[len(head["positions"]) for head in layer["heads"]] for layer in found["layers"]]
        return tokens_by_head(f"{title}, {found['tokens']:,} tokens", counts, found["kept"])
    scores = found["scores"]
    attention = attention_of(next(iter(scores.values())))
    shares = None if attention is None else [attention_kept(one) for one in scores.values()]
    kept = {score: share_kept(one) for score, one in scores.items()}
    return kept_by_score(title, kept, found["sinks"], found["keep_recent"], attention, shares)


if __name__ == "__main__":
    source, target = map(Path, sys.argv[1:])
    save_figure(draw_inspection(json.loads(source.read_text(encoding="utf-8"))), target)
