"""Figure: memory of keys and values against tokens in the context, a line for each strategy."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullLocator

from mlx_kv.plots.style import COLOURS, DASHES, apart, axis_label, new_figure

LINE_POINTS = 12.0  # height of a line of text


def memory_against_context(
    title: str, contexts: Sequence[int], held: Mapping[str, Sequence[int]], marked: Sequence[int]
) -> Figure:
    """Draws memory against context, both axes logarithmic.

    Args:
        title: the model and its settings.
        contexts: tokens, rising.
        held: for each strategy, the bytes at each context; at least one strategy.
        marked: contexts with a dot and a label on the axis.
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
