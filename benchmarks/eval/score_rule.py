"""The rule of docs/eval-results.md applied to the cells that score_table.py measured: tables, a figure, the verdict.

    python -m benchmarks.eval.score_rule build/scores.jsonl [--plot build/scores.png] [--draw NAME,NAME] [--rolling]

Nothing is measured here. The first table says which tasks are instruments (the full cache right in nine of ten
answers), the next ones each score's accuracy at each budget, mean ± standard deviation of the seeds, and then each
condition of the rule, score by score: means over instruments, points against key_diff seed by seed, the worst
instrument. The last one has each policy at each budget, with the slots that it takes, against key_diff at a uniform
quarter. What the rule asks of time and memory is measured elsewhere (benchmarks/observing.py) and not decided here.
One JSON line last.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path

from mlx_kv.cli.output import aligned

from .results import Result, summary
from .score_cells import Cell, Kept, cells_of, measurements, named, policy_name

LEAST = 0.9  # of the full cache's answers are right, or a task is no instrument
DEFAULT, CONTROL, TWICE = "key_diff", "random", "kvzip"
TIGHT = (250, 125)  # thousandths of the context
GAIN, LOSS, WORST = 0.05, 0.02, 0.10
PUBLISHED = {"key_diff": 74.2, "tova": 64.2, "recent": 40.2, "snap_kv": 39.9, "key_norm": 28.9, "random": 0.5}


class Cells:
    """Right answers and those that count, by what one asks for; tasks are instruments only."""

    def __init__(self, cells: Sequence[Cell]) -> None:
        by_task: dict[str, list[Cell]] = {}
        for cell in cells:
            by_task.setdefault(named(cell.place), []).append(cell)
        full = {
            task: share([cell for cell in some if cell.kept == Kept()])
            for task, some in by_task.items()
            if any(cell.kept == Kept() for cell in some)
        }
        self.full = full
        self.instruments = [task for task, right in full.items() if right >= LEAST]
        self._cells = {task: by_task[task] for task in self.instruments}
        self.measured = [cell for some in self._cells.values() for cell in some]
        self.seeds = sorted({cell.place.seed for cell in cells})
        self.scores = list(dict.fromkeys(name for cell in cells if (name := policy_name(cell.kept))))

    def accuracy(self, task: str, score: str | None, budget: int | None, seed: int | None = None) -> float | None:
        """Of one instrument; None where nothing was measured."""
        some = [
            cell
            for cell in self._cells[task]
            if policy_name(cell.kept) == score and thousandths(cell) == budget and seed in (None, cell.place.seed)
        ]
        return share(some) if some and any(cell.counted for cell in some) else None

    def mean(
        self, score: str, budgets: Sequence[int], seed: int | None = None, wanted: Callable[[str], bool] | None = None
    ) -> float | None:
        """Over instruments and budgets, questions seen and not seen half each; None where a cell is missing."""
        halves = []
        for seen in (False, True):
            tasks = [t for t in self.instruments if ("question seen" in t) == seen and (wanted is None or wanted(t))]
            values = [self.accuracy(task, score, budget, seed) for task in tasks for budget in budgets]
            if values:
                known = [value for value in values if value is not None]
                if len(known) < len(values):
                    return None
                halves.append(statistics.fmean(known))
        return statistics.fmean(halves) if halves else None


def share(cells: Sequence[Cell]) -> float:
    return sum(cell.right for cell in cells) / max(1, sum(cell.counted for cell in cells))


def thousandths(cell: Cell) -> int | None:
    return None if cell.kept.budget is None else round(1000 * cell.kept.budget / cell.place.context)


def unseen(task: str) -> bool:
    return "question seen" not in task


def verdicts(cells: Cells) -> list[dict[str, object]]:
    """What the rule says of each score but the default."""
    base = {seed: cells.mean(DEFAULT, TIGHT, seed) for seed in [None, *cells.seeds]}
    base_unseen = cells.mean(DEFAULT, TIGHT, wanted=unseen)
    found = []
    for score in cells.scores:
        mean, of_unseen = cells.mean(score, TIGHT), cells.mean(score, TIGHT, wanted=unseen)
        if mean is None or base[None] is None or of_unseen is None or base_unseen is None:
            found.append({"score": score, "mean": mean})
            continue
        gains = []
        for seed in cells.seeds:
            own, usual = cells.mean(score, TIGHT, seed), base[seed]
            gains.append(None if own is None or usual is None else own - usual)
        lost, beaten = {}, True
        for task in cells.instruments:
            own, usual, control = (cells.accuracy(task, name, TIGHT[0]) for name in (score, DEFAULT, CONTROL))
            if own is not None and usual is not None:
                lost[task] = usual - own
            if own is not None and control is not None:
                beaten = beaten and own > control
        worst = max(lost, key=lambda task: lost[task])
        gain = mean - base[None]
        conditions = {
            "gains": gain >= GAIN and all(each is not None and each > 0 for each in gains),
            "unseen": of_unseen - base_unseen >= -LOSS,
            "worst": lost[worst] <= WORST,
            "random": beaten,
            "once": score.split()[0] != TWICE,
        }
        found.append(
            {
                "score": score,
                "mean": mean,
                "unseen": of_unseen,
                "gain": gain,
                "gains": gains,
                "worst": worst,
                "lost": lost[worst],
                "conditions": conditions,
                "passes": all(conditions.values()),
            }
        )
    return sorted(found, key=lambda each: -float(str(each["mean"] or 0)))


def by_bytes(cells: Cells) -> list[dict[str, object]]:
    """Each policy at each budget: its mean, the slots it takes, and its gain over the default at a uniform quarter."""
    quarter = {seed: cells.mean(DEFAULT, TIGHT[:1], seed) for seed in [None, *cells.seeds]}
    found: list[dict[str, object]] = []
    for name in cells.scores:
        own = [cell for cell in cells.measured if policy_name(cell.kept) == name]
        for budget in sorted({thousandths(cell) or 0 for cell in own}, reverse=True):
            slots = [cell.slots / cell.place.context for cell in own if thousandths(cell) == budget and cell.slots]
            means = {seed: cells.mean(name, [budget], seed) for seed in quarter}
            gains = [
                None if mean is None or quarter[seed] is None else mean - float(str(quarter[seed]))
                for seed, mean in means.items()
            ]
            taken = statistics.fmean(slots) if slots else None
            measured = {"policy": name, "kept": budget, "slots": taken, "mean": means[None], "gain": gains[0]}
            found.append(measured | {"gains": gains[1:]})
    return sorted(found, key=lambda each: -float(str(each["mean"] or 0)))


def points(value: object) -> str:
    return "-" if value is None else f"{100 * float(str(value)):.1f}"


def table(heads: Sequence[str], lines: Sequence[Sequence[object]]) -> str:
    return "\n".join(aligned([list(heads), *([str(cell) for cell in line] for line in lines)]))


def by_budget(results: Sequence[Result], task: str) -> str:
    rows = [result for result in results if result.task == task]
    budgets = sorted({result.budget for result in rows if result.budget is not None}, reverse=True)
    lines = []
    for score in dict.fromkeys(result.score for result in rows):
        line = [score or "full cache"]
        for budget in budgets:
            of = [r for r in rows if r.score == score and r.budget == (budget if score else None)]
            spread = "" if not of or of[0].deviation is None else f" ± {100 * of[0].deviation:.1f}"
            line.append(f"{points(of[0].mean)}{spread}" if of else "-")
        lines.append(line)
    return table([task, *(f"{budget / 10:g}%" for budget in budgets)], lines)


def draw(results: Sequence[Result], cells: Cells, scores: Sequence[str], file: Path) -> None:
    from .plots import Panel, quality_against_budget

    contexts = {cell.place.context for cell in cells.measured}
    context = contexts.pop() if len(contexts) == 1 else None  # one length is said once, above; else shares are drawn
    panels = []
    for task in cells.instruments:
        rows = [result for result in results if result.task == task]
        lines: dict[str, list[tuple[int, float, float]]] = {}
        for result in sorted(rows, key=lambda each: each.budget or 0):
            if result.score in scores and result.budget is not None:
                kept = result.budget if context is None else result.budget * context // 1000
                lines.setdefault(result.score, []).append((kept, result.mean, result.deviation or 0.0))
        full = next(result.mean for result in rows if result.score is None)
        title = task if context is None else task.replace(f", {context:,} tokens", "")
        if lines:
            panels.append(Panel(title.replace("question ", ""), "accuracy, %", full, lines))
    title = "shares of the context in thousandths" if context is None else f"contexts of {context:,} tokens"
    quality_against_budget(title, context or 1000, panels).savefig(file)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, help="what score_table.py wrote")
    parser.add_argument("--plot", type=Path, help=".png, .svg or .pdf: quality against tokens kept")
    parser.add_argument("--draw", help="NAME,NAME: scores of the figure; all of them without it")
    parser.add_argument("--rolling", action="store_true", help="the cells of caches that compact as they read")
    chosen = parser.parse_args()
    some = [cell for cell in cells_of(chosen.file) if cell.place.rolling == chosen.rolling]
    if not some:
        parser.error(f"{chosen.file} has no such cells: measure them with score_table.py")
    cells, results = Cells(some), summary(measurements(some))
    lines = [[task, points(right), "yes" if right >= LEAST else "no"] for task, right in cells.full.items()]
    print(table(["task", "full cache, %", "an instrument"], lines))
    for task in cells.full:
        print("\n" + by_budget(results, task))
    found = verdicts(cells)
    rows = []
    for each in found:
        conditions = each.get("conditions")
        failed = (
            [name for name, holds in conditions.items() if not holds] if isinstance(conditions, dict) else ["cells"]
        )
        gains = each.get("gains")
        by_seed = " ".join(points(gain) for gain in gains) if isinstance(gains, list) else "-"
        worst = f"{points(each.get('lost'))} ({each.get('worst', '-')})"
        mine = [each["score"], points(each["mean"]), points(each.get("unseen")), points(each.get("gain")), by_seed]
        rows.append([*mine, worst, "passes" if not failed else "fails: " + ", ".join(failed)])
    heads = ["score", "mean, %", "unseen", "gain", "by seed", "worst loss", "the rule"]
    print("\n" + table(heads, rows))
    allocated = by_bytes(cells)
    rows = []
    for each in allocated:
        gains = each["gains"]
        by_seed = " ".join(points(gain) for gain in gains) if isinstance(gains, list) else "-"
        rows.append([each["policy"], f"{int(str(each['kept'])) / 10:g}", points(each["slots"]), points(each["mean"])])
        rows[-1] += [points(each["gain"]), by_seed]
    print("\n" + table(["policy", "tokens, %", "slots, %", "mean, %", "against a uniform quarter", "by seed"], rows))
    means = {str(each["score"]): each["mean"] for each in found if each["mean"] is not None}
    both = sorted(set(means) & set(PUBLISHED), key=lambda name: -PUBLISHED[name])
    order = sorted(both, key=lambda name: -float(str(means[name])))
    print(f"\npublished order: {', '.join(both)}\nhere:            {', '.join(order)}")
    if chosen.plot is not None and cells.instruments:
        draw(results, cells, chosen.draw.split(",") if chosen.draw else cells.scores, chosen.plot)
    passed = [each["score"] for each in found if each.get("passes") and each["score"] != DEFAULT]
    print(json.dumps({"instruments": cells.instruments, "passed": passed, "verdicts": found, "allocated": allocated}))


if __name__ == "__main__":
    main()
