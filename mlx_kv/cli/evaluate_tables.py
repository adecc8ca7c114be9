"""What `mlx-kv eval` shows of its results: tables by budget, by part and by layer, and the figure.

Decides rows, columns, units and digits. Knows nothing about how results are measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mlx_kv.cli.output import aligned, save_figure

if TYPE_CHECKING:
    from mlx_kv.evaluation.results import Result, Settings


def value_cell(unit: str, mean: float, deviation: float | None = None) -> str:
    """A value and its spread; accuracies in percent."""
    scale, digits = (100, 1) if unit == "accuracy" else (1, 3)
    spread = "" if deviation is None else f" ± {scale * deviation:.{digits}f}"
    return f"{scale * mean:.{digits}f}{spread}"


def cell(result: Result) -> str:
    """Accuracy; nats per token of the full cache, and what others add to them."""
    if result.unit == "accuracy" or result.score is None:
        return value_cell(result.unit, result.mean, result.deviation)
    sign = "+" if result.difference >= 0 else ""
    return sign + value_cell(result.unit, result.difference, result.difference_deviation)


def by_budget(results: Sequence[Result], budgets: Sequence[int], spread: bool) -> list[str]:
    """A block for each task: rows of scores, columns of budgets; "-" is what was not measured.

    Args:
        spread: whether there are several seeds.
    """
    # Tasks are shown one after the other, and stand below each other all the same.
    widest = "+0.000" + " ± 0.000" * spread
    lines = [["perplexity, one-shot, nats per token", *[widest] * len(budgets)]]
    for task in dict.fromkeys(result.task for result in results):
        found = {(r.score, r.budget): cell(r) for r in results if r.task == task}
        unit = next(r.unit for r in results if r.task == task)
        title = f"{task}, {unit.replace('accuracy', 'accuracy in %')}"
        lines.append([title, *(f"{budget:,}" for budget in budgets)])
        for score in dict.fromkeys(score for score, _ in found):
            cells = [found.get((score, budget if score else None), "-") for budget in budgets]
            lines.append([f"  {score or 'full cache'}", *cells])
    return aligned(lines)[1:]


def by_part(results: Sequence[Result], budget: int) -> list[str]:
    """A block for each task that has parts, of one budget: rows of scores, columns of depths or quarters."""
    tables = []
    for task in dict.fromkeys(r.task for r in results if r.parts):
        rows = [r for r in results if r.task == task and r.budget in (budget, None)]
        lines = [[f"{task} at {budget:,}, accuracy in %", *rows[0].parts]]
        lines += [[f"  {r.score or 'full cache'}", *(value_cell(r.unit, v) for v in r.parts.values())] for r in rows]
        tables += ["", *aligned(lines)]
    return tables


def by_layer(results: Sequence[Result]) -> list[str]:
    """A block for each kind of attention: rows of scores, columns of layers."""
    tables = []
    for task in dict.fromkeys(r.task for r in results):
        rows = [r for r in results if r.task == task]
        lines = [[f"{task}, rank correlation", "all layers", *rows[0].parts]]
        for r in rows:
            mean = value_cell(r.unit, r.mean, r.deviation)
            lines.append([f"  {r.score}", mean, *(value_cell(r.unit, value) for value in r.parts.values())])
        tables += ["", *aligned(lines)]
    return tables


def draw(title: str, results: Sequence[Result], settings: Settings, file: Path) -> None:
    """Writes the figure.

    Raises:
        click.UsageError, ValueError: the file cannot be written.
    """
    from mlx_kv.plots.quality import Panel, quality_against_budget

    panels = []
    for task in dict.fromkeys(r.task for r in results):
        rows = [r for r in results if r.task == task]
        full = next(r for r in rows if r.score is None)
        share = full.unit == "accuracy"
        lines: dict[str, list[tuple[int, float, float]]] = {}
        for r in rows:
            if r.score is not None and r.budget is not None:
                spread = (r.mean, r.deviation) if share else (r.difference, r.difference_deviation)
                lines.setdefault(r.score, []).append((r.budget, spread[0], spread[1] or 0.0))
        name = task if share else f"{task} (full: {full.mean:.2f})"
        panels.append(Panel(name, "accuracy, %" if share else "added nats per token", full.mean * share, lines, share))
    save_figure(quality_against_budget(title, settings.context, panels), file)
