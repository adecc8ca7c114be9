"""Figure: positions that several scores keep of one text, a row for each score, darker where more heads keep them.

W columns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.cm import ScalarMappable
from matplotlib.colors import LinearSegmentedColormap, Normalize
from matplotlib.figure import Figure
from matplotlib.ticker import FixedFormatter, FixedLocator

from mlx_kv.plots.kept import DPI, draw_attention, mark_protected, name_shares
from mlx_kv.plots.style import colour_bar, plain_axes, position_axis

ROW_INCHES = 0.42
# White is kept by no head; darkness rises evenly.
COLOURS = LinearSegmentedColormap.from_list("kept", ["#ffffff", "#9ecae1", "#2171b5", "#08306b"])


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
    colour_bar(figure, ScalarMappable(Normalize(0, 100), COLOURS), everything, label, fraction=0.03)
    figure.draw_without_rendering()  # the layout, and so the width in pixels, is known after this
    columns = min(tokens, int(cells.get_window_extent().width))
    image = np.stack([columns_of(shares, columns) for shares in kept.values()])
    extent = (0, tokens, len(kept), 0)
    cells.imshow(image, cmap=COLOURS, vmin=0, vmax=1, aspect="auto", interpolation="nearest", extent=extent)
    return figure
