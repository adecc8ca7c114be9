"""Figure: quality against budget, a panel for each task, a line for each score, the full cache as a dashed line."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from mlx_kv.plots.style import COLOURS, DASHES, GREY, LIGHT_GREY, apart, axis_label, plain_axes

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
