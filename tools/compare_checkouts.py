"""Ratios of the benchmarks in two checkouts, measured in turns: has a change made anything slower?

    git worktree add ../before COMMIT
    .venv/bin/python tools/compare_checkouts.py ../before [--rounds 3] [--only host,batch]

Each benchmark runs as a process of its own, once in each checkout and round, in alternating order. Each of its ratios
is compared: the median here over the median there, inverted where less is better, so that more than 1 is faster here.
The spread between rounds of one checkout stands beside it: a change smaller than the spread shows nothing.
Exit code 1 if a ratio is below --least. One JSON line last.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import statistics
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tqdm import tqdm

HERE = Path(__file__).parent.parent
BENCHMARKS = {
    "host": "--rounds 60",
    "batch": "--rounds 3",
    "server": "--rounds 1",
    "shared_prefix": "--part both --grid 16x500,4x2000 --policies full,budget",
    "compaction": "--rounds 3",
    "growth": "--rounds 3",
    "conversations": "--conversations 12",
}
LESS_IS_BETTER = {"shared_prefix", "conversations"}  # ratios of seconds or bytes: ours / theirs


def ratios(value: Any, name: str = "") -> Iterator[tuple[str, float]]:
    """All ratios of a benchmark's JSON line, with the path to each."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from ratios(item, f"{name}.{key}" if name else key)
    elif isinstance(value, int | float) and ("ratio" in name or "over_plain" in name):
        yield name, float(value)


def run(checkout: Path, benchmark: str, options: str) -> dict[str, float]:
    """The ratios of one run, in `checkout`."""
    command = [sys.executable, f"benchmarks/{benchmark}.py", *shlex.split(options)]
    environment = {**os.environ, "PYTHONPATH": str(checkout)}
    done = subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{benchmark} failed in {checkout}:\n{done.stderr[-2000:]}")
    return dict(ratios(json.loads(done.stdout.splitlines()[-1])))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path, help="a checkout of the commit to compare with")
    parser.add_argument("--rounds", type=int, default=3, help="runs in each checkout (default 3)")
    parser.add_argument("--only", default=",".join(BENCHMARKS), help="benchmarks, separated by commas")
    parser.add_argument("--least", type=float, default=0.97, help="smallest ratio that passes (default 0.97)")
    arguments = parser.parse_args()
    sides = {"before": arguments.before.resolve(), "now": HERE}
    names = arguments.only.split(",")
    line: dict[str, Any] = {"benchmark": "compare_checkouts"}
    below = 0
    with tqdm(total=len(names) * arguments.rounds * 2, unit="run", disable=None) as progress:
        for benchmark in names:
            runs: dict[str, dict[str, list[float]]] = {side: defaultdict(list) for side in sides}
            for number in range(arguments.rounds):
                for side in list(sides)[:: 1 if number % 2 else -1]:
                    for name, value in run(sides[side], benchmark, BENCHMARKS[benchmark]).items():
                        runs[side][name].append(value)
                    progress.update()
            line[benchmark] = {}
            for name in runs["before"].keys() & runs["now"].keys():
                before, now = (statistics.median(runs[side][name]) for side in ("before", "now"))
                change = before / now if benchmark in LESS_IS_BETTER else now / before
                spread = max(max(values) / min(values) - 1 for values in (runs["before"][name], runs["now"][name]))
                line[benchmark][name] = round(change, 3)
                below += change < arguments.least
                mark = " <" if change < arguments.least else ""
                tqdm.write(
                    f"{benchmark:14} {name:52} {before:8.3f} {now:8.3f} {change:7.3f} (+-{spread:.0%}){mark}",
                    file=sys.stderr,
                )
    print(json.dumps(line))
    sys.exit(1 if below else 0)


if __name__ == "__main__":
    main()
