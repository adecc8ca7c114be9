"""The common style of figures: colours, axes, colour bars. Needs matplotlib (extra `plot`); no global state is used."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.colorbar import Colorbar
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

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
