"""Which score keeps what is asked for: scores x budgets x tasks on an instruct model, as docs/eval-results.md says.

    python tools/smollm2.py build/smollm2
    python -m benchmarks.eval.score_table --model build/smollm2 --out build/scores.jsonl [--seeds 0,1,2] [--rows 1] ...
    python -m benchmarks.eval.score_rule build/scores.jsonl --plot build/scores.png

Each finished cell, a case under a policy, is a line of --out; called again, it goes on where it ended, and with more
seeds, rows, scores or contexts it adds what is missing. Ctrl-C loses one cell. One case is in memory at a time: the
keys and values of a context twice, and what was asked of attention while it was read.

The physics. A context of C tokens is read once for all policies. Then each policy has its C tokens written again (46 kB
a token for SmolLM2 in float32), scores and compacts them, and reads the questions and replies, about 100 tokens, or 50
where the questions were seen: so with 8 scores at 3 budgets a case costs C + 25 x 100 tokens. kvzip reads all of them
again. On a busy machine, one case of 1,024 tokens at one budget: 9 s for any other score and 411 s for kvzip, where 100
tokens took 9 s. On two quiet cores those take about 0.7 s. By that the default, 8 tasks x 2 x 3 seeds, takes less than
half an hour without kvzip:

    --scores key_diff,snap_kv,tova,...                                          all but kvzip, three budgets
    --scores kvzip --kept 0.25                                                  half an hour more, and then 0.125

Progress and time left go to stderr. One JSON line last: cells, seconds of each part, seconds by score.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

# Ours first: importing the package loads a tuned BLAS ahead of MLX.
from mlx_kv.cache.eviction.scores import score_names

# isort: split
from mlx_kv.cli.output import duration
from mlx_kv.files.calibration_file import load_calibration
from mlx_kv.generation.prefill import Instructions
from mlx_kv.mlxlm.loading import load

from . import quick_softmax
from .measure import answers_of
from .questions import QUESTIONS, Room, Talk, case_of, python_texts, trial_of
from .results import Settings
from .score_cells import Cell, Kept, Place, Table, places

KEEP_RECENT = 64
SHARES_KEPT = (0.5, 0.25, 0.125)
SECONDS_BETWEEN = 30.0


def names(text: str) -> tuple[str, ...]:
    return tuple(text.split(","))


def numbers(text: str) -> tuple[int, ...]:
    return tuple(int(word) for word in text.split(","))


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="an instruct model: a directory, or a hub id")
    parser.add_argument("--out", required=True, type=Path, help="JSON lines; what it holds is not measured again")
    parser.add_argument("--scores", type=names, default=tuple(score_names()))
    parser.add_argument("--tasks", type=names, default=tuple(QUESTIONS))
    parser.add_argument("--contexts", type=numbers, default=(1024,))
    parser.add_argument("--kept", type=lambda text: tuple(map(float, text.split(","))), default=SHARES_KEPT)
    parser.add_argument("--seeds", type=numbers, default=(0, 1, 2))
    parser.add_argument("--rows", type=int, default=1, help="cases of each task and seed")
    parser.add_argument("--questions", choices=("unseen", "seen", "both"), default="both")
    parser.add_argument("--shares", type=names, default=("layers",), help="layers, layer, head, adaptive")
    parser.add_argument("--layers", type=names, default=("uniform",), help="uniform, calibrated")
    parser.add_argument(
        "--policies", type=names, help="SCORE:SHARE:LAYERS:KEPT,…, such as fitted:head:calibrated:0.25, instead of all"
    )
    parser.add_argument("--calibration", type=Path, help="FILE of mlx-kv calibrate, for fitted and calibrated")
    parser.add_argument("--keep-recent", type=int, default=KEEP_RECENT)
    parser.add_argument("--rolling", action="store_true", help="compact while a context is read, as in decoding")
    return parser.parse_args()


class Measuring:
    """A model, and the tasks at each length of context."""

    def __init__(self, model: str, calibration: Path | None, keep_recent: int) -> None:
        self.model, self.tokenizer = load(model)
        self.calibration = None if calibration is None else load_calibration(calibration, self.model)
        self.keep_recent = keep_recent
        quick_softmax.install()
        quick_softmax.check(self.model, self.tokenizer.encode(" ".join(__doc__.split())))
        self.talk, self.instructions = Talk(self.tokenizer), Instructions.of(self.tokenizer, self.model)

    def ask(self, place: Place, missing: Sequence[Kept]) -> Iterator[Cell]:
        common: dict[str, Any] = {"context": place.context, "keep_recent": self.keep_recent}
        case = case_of(place.task, self.talk, python_texts(), Room(**common), place.seed, place.row)
        trial = trial_of(self.talk, case, place.seen)
        common |= {"budgets": (), "calibration": self.calibration, "rolling": place.rolling}
        alike: dict[tuple[str | None, str | None], list[Kept]] = {}
        for kept in missing:
            alike.setdefault((kept.share, kept.layers), []).append(kept)
        for (share, layers), some in alike.items():
            changes: dict[str, Any] = {} if share is None else {"share": share, "layers": layers}
            scores = tuple({kept.score for kept in some if kept.score is not None})
            settings = Settings(scores=scores, **common, **changes)
            answered = answers_of(self.model, trial, [(k.score, k.budget) for k in some], settings, self.instructions)
            for kept, each in zip(some, answered, strict=True):
                right = int((each.right & each.counts).sum())
                yield Cell(place, kept, right, int(each.counts.sum()), each.seconds, each.slots)


def go_together(share: str, layers: str) -> bool:
    return layers == "uniform" or share != "layers"


def policies(chosen: argparse.Namespace, place: Place) -> list[Kept]:
    if chosen.policies:
        each = [policy.split(":") for policy in chosen.policies]
        return [Kept(), *(Kept(*how, round(float(kept) * place.context)) for *how, kept in each)]
    budgets = [round(share * place.context) for share in chosen.kept]
    pairs = [(share, layers) for share in chosen.shares for layers in chosen.layers if go_together(share, layers)]
    made = [Kept(score, *pair, budget) for pair in pairs for score in chosen.scores for budget in budgets]
    return [Kept(), *made]


def work(place: Place, missing: Sequence[Kept]) -> float:
    """Roughly the tokens that are read for it."""
    return place.context + len(missing) * (place.context if place.rolling else 100 + place.context / 20)


def main() -> None:
    chosen = options()
    seen = {"unseen": (False,), "seen": (True,), "both": (False, True)}[chosen.questions]
    wanted = places(chosen.tasks, chosen.contexts, seen, chosen.seeds, chosen.rows, chosen.rolling)
    table, measuring = Table(chosen.out), Measuring(chosen.model, chosen.calibration, chosen.keep_recent)
    missing = {place: table.missing(place, policies(chosen, place)) for place in wanted}
    left = sum(work(place, some) for place, some in missing.items() if some)
    total = sum(map(len, missing.values()))
    begun = said = time.monotonic()
    done, through, parts = 0, 0.0, [0.0, 0.0, 0.0]
    by_score: dict[str, float] = {}
    try:
        for cell in table.fill(wanted, lambda place: policies(chosen, place), measuring.ask):
            done += 1
            through += work(cell.place, missing[cell.place]) / len(missing[cell.place])
            parts = [a + b for a, b in zip(parts, cell.seconds, strict=True)]
            name = cell.kept.score or "full cache"
            by_score[name] = by_score.get(name, 0.0) + sum(cell.seconds)
            if time.monotonic() - said >= SECONDS_BETWEEN:
                said = time.monotonic()
                spent = duration((said - begun) * (left - through) / through)
                print(f"{cell.place.task}: {done} of {total} cells, {spent} left", file=sys.stderr)
    except KeyboardInterrupt:
        print(f"interrupted: {done} of {total} cells; call it again to go on", file=sys.stderr)
    told = dict(zip(("filling", "compacting", "answering"), (round(part, 1) for part in parts), strict=True))
    spent_by = {name: round(seconds, 1) for name, seconds in by_score.items()}
    whole = round(time.monotonic() - begun, 1)
    print(json.dumps({"cells": done, "of": total, "seconds": whole, "parts": told, "by_score": spent_by}))


if __name__ == "__main__":
    main()
