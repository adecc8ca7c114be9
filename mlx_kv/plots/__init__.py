"""Figures of what the library measures or plans, in one style.

Decides how a figure looks: sizes, colours, ticks, where a line's name goes. Knows nothing about models or caches; it is
given numbers. Needs the optional matplotlib (extra `plot`), of which it uses the objects and no global state.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullLocator

SUFFIXES = (".png", ".svg", ".pdf")
# Okabe and Ito's colours, told apart with any colour vision, without the pale yellow; dashes tell them apart in print.
COLOURS = ("#000000", "#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
DASHES = ((), (5, 2), (), (4, 1.5, 1, 1.5), (1.5, 1.5), (7, 1.5), (2, 1))
GREY = "#666666"
POINTS_A_LINE = 12.0  # of a name


def new_figure(title: str, x: str, y: str) -> tuple[Figure, Axes]:
    """An empty figure in the common style, with log axes, its title, and what the axes count, units included."""
    figure = Figure(figsize=(8, 4.8), dpi=110, layout="constrained")
    axes = figure.add_subplot()
    axes.set_title(title, loc="left", fontsize=12)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color="#dddddd", linewidth=0.6)
    axes.tick_params(length=0, labelcolor=GREY)
    return figure, axes


def name_lines(figure: Figure, axes: Axes, ends: Mapping[str, tuple[float, float]], colours: Mapping[str, str]) -> None:
    """Writes each line's name to the right of its end (x, y), moved apart where ends lie close together.

    Ask for it last: places are worked out from the limits and the size that the axes then have.
    """
    figure.draw_without_rendering()
    low, high = map(math.log10, axes.get_ylim())
    points = axes.get_window_extent().height * 72 / figure.dpi / (high - low)  # of one decade
    above = -math.inf  # everything below this is taken
    for name, (x, y) in sorted(ends.items(), key=lambda item: item[1][1]):
        own, half = (math.log10(y) - low) * points, POINTS_A_LINE * (1 + name.count("\n")) / 2
        place = max(own, above + half)
        above = place + half
        axes.annotate(
            name,
            xy=(x, y),
            xytext=(20, place - own),
            textcoords="offset points",
            va="center",
            color=colours[name],
            fontsize=9,
            annotation_clip=False,
            arrowprops={"arrowstyle": "-", "color": colours[name], "linewidth": 0.7, "shrinkB": 3, "relpos": (0, 0.5)},
        )


def axis_label(value: float) -> str:
    """A number of an axis: 0.25, 8, 4,096."""
    return f"{value:,.0f}" if value >= 1 else f"{value:.3g}"


def memory_against_context(
    title: str, contexts: Sequence[int], held: Mapping[str, Sequence[int]], marked: Sequence[int]
) -> Figure:
    """Bytes of keys and values against tokens in the context, a line for each strategy, both axes logarithmic.

    Args:
        title: what the figure is of.
        contexts: tokens, rising.
        held: for each strategy, bytes at each of them; at least one strategy.
        marked: the contexts to mark, and to name on the axis.
    """
    unit, size = ("GiB", 2**30) if max(map(max, held.values())) >= 2**30 else ("MiB", 2**20)
    figure, axes = new_figure(f"Memory of keys and values: {title}", "tokens in the context", f"memory, {unit}")
    colours, ends = {}, {}
    for index, (name, counts) in enumerate(merged(held).items()):
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


def apart(values: Sequence[int]) -> list[int]:
    """Those of rising values whose names fit side by side on a logarithmic axis, the last one among them."""
    least = (values[-1] / values[0]) ** 0.11
    kept = [values[-1]]
    for value in reversed(values[:-1]):
        if kept[-1] / value >= least:
            kept.append(value)
    return kept


def merged(lines: Mapping[str, Sequence[int]]) -> dict[str, Sequence[int]]:
    """Lines that coincide become one with all their names, or the last would hide the others."""
    names: dict[tuple[int, ...], list[str]] = {}
    for name, counts in lines.items():
        names.setdefault(tuple(counts), []).append(name)
    return {",\n".join(same): counts for counts, same in names.items()}
