"""Runs the benchmarks, stores their results, and writes docs/performance.md from those: `make bench`.

    python tools/performance.py                        all that need no checkpoint, then the page
    python tools/performance.py --model build/smollm2  all; tools/smollm2.py makes that model
    python tools/performance.py --only ring,growth     these; results of the others stay
    python tools/performance.py --add server FILE      the last line of FILE is the output of benchmarks/server.py
    python tools/performance.py --page                 measures nothing: the page and its pictures only

Results are in docs/performance/NAME.json, with the machine and the versions. A benchmark that fails leaves the stored
result as it was, and the exit code is 1. `performance_sections.py` has the benchmarks and their words,
`performance_tables.py` the rows. Pictures have logarithmic scales, on which twice and half as fast are equally far
from even.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("svg")
from matplotlib.figure import Figure
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).parent))
from performance_sections import (
    GPU,
    INTRODUCTION,
    MODEL,
    OTHER_PAGES,
    SECTIONS,
    SERVERS,
    SINGLE_RUNS,
    WITHOUT_PAGE,
    Section,
)
from performance_tables import rows_of, table

ROOT = Path(__file__).parent.parent
FOLDER, PAGE = ROOT / "docs" / "performance", ROOT / "docs" / "performance.md"
VERSIONS = ("mlx", "mlx-lm", "numpy", "transformers")  # the peers, and what both sides stand on
OURS, THEIRS, TEXT = "#00897b", "#c2673d", "#808080"  # readable on light and on dark pages


def drawn_of(section: Section, result: Mapping[str, Any]) -> dict[str, float]:
    """The ratios of the picture, by the words of the table."""
    return {row.what: row.ratio for row in rows_of(section.name, result) if row.drawn and row.ratio is not None}


def draw(section: Section, ratios: Mapping[str, float], file: Path) -> None:
    """A bar for each ratio, from even; the scale is logarithmic."""
    mpl.rcParams.update(
        {"svg.hashsalt": "mlx-kv", "svg.fonttype": "none", "font.size": 9, "text.color": TEXT, "axes.edgecolor": TEXT}
    )
    figure = Figure(figsize=(8.4, 0.9 + 0.24 * len(ratios)), layout="constrained")
    figure.patch.set_alpha(0)
    axis = figure.subplots()
    axis.patch.set_alpha(0)
    names, values = list(ratios), list(ratios.values())
    places = range(len(names))
    axis.barh(places, [v - 1 for v in values], left=1, color=[OURS if v >= 1 else THEIRS for v in values], height=0.7)
    axis.set_xscale("log", base=2)
    axis.set_xlim(min(*values, 0.7) / 1.3, max(*values, 1.4) * 1.3)
    axis.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axis.axvline(1, color=TEXT, linewidth=1)
    for place, value in zip(places, values, strict=True):
        aligned = {"ha": "left", "x": value * 1.03} if value >= 1 else {"ha": "right", "x": value / 1.03}
        label = f"{value:,.0f}" if value >= 100 else f"{value:.2f}"
        axis.text(y=place, s=label, va="center", color=TEXT, fontsize=8, **aligned)
    axis.set_yticks(list(places), names)
    axis.invert_yaxis()
    axis.tick_params(colors=TEXT)
    axis.spines[["top", "right", "left"]].set_visible(False)
    figure.supxlabel(section.ratios, color=TEXT, fontsize=9)
    figure.savefig(file, format="svg", metadata={"Date": None})


def machine() -> dict[str, Any]:
    """The machine and the versions, without names of people or places."""
    import mlx.core as mx

    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return {
        "device": str(mx.default_device()),
        "cores": os.cpu_count(),
        "memory_gib": round(memory),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "versions": {name: importlib.metadata.version(name) for name in VERSIONS},
    }


def last_object(text: str) -> dict[str, Any]:
    """The JSON object with which a benchmark ends.

    Raises:
        ValueError: it ends with none.
    """
    lines = text.strip().splitlines()
    try:
        found = json.loads(lines[-1]) if lines else None
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise ValueError("its last line is not a JSON object: it failed, or this is not the output of a benchmark")
    found.pop("model", None)  # a path of this machine
    return found


def measured(section: Section, model: str | None) -> dict[str, Any]:
    """Runs a benchmark.

    Raises:
        ValueError: it failed.
    """
    words = [word if word != MODEL else str(model) for word in section.arguments]
    asked = [sys.executable, str(ROOT / "benchmarks" / f"{section.name}.py"), *words]
    done = subprocess.run(asked, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    if done.returncode != 0:
        raise ValueError(f"it failed: exit code {done.returncode}")
    return last_object(done.stdout)


def keep(section: Section, result: dict[str, Any], seconds: float | None) -> None:
    """Stores the result of a benchmark, with the machine and its duration; None for an unknown one."""
    FOLDER.mkdir(exist_ok=True)
    stored = {"result": result, "machine": machine()} | ({} if seconds is None else {"seconds": round(seconds)})
    (FOLDER / f"{section.name}.json").write_text(json.dumps(stored, indent=1) + "\n", encoding="utf-8")


def kept(section: Section) -> dict[str, Any] | None:
    file = FOLDER / f"{section.name}.json"
    return json.loads(file.read_text(encoding="utf-8")) if file.exists() else None


def described(machine: Mapping[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    return (
        f"{machine['cores']} cores, {machine['memory_gib']} GiB, {machine['system']}, {machine['device']}, "
        f"Python {machine['python']}, {versions}"
    )


def span(ratios: Iterable[float]) -> str:
    least, most = min(ratios), max(ratios)
    return f"{least:.2f}" if least == most else f"{least:.2f} to {most:,.2f}"


def page() -> str:
    """The page of the stored results."""
    results = {section.name: kept(section) for section in SECTIONS}
    machines = {described(found["machine"]) for found in results.values() if found is not None}
    parts = ["# Performance", INTRODUCTION]
    if len(machines) == 1:
        parts.append(f"Measured on {machines.copy().pop()}.")
    parts += ["## Summary", "<!-- figures: tools/performance.py -->", summary(results), GPU.strip()]
    for section in SECTIONS:
        found = results[section.name]
        if found is None:
            continue
        parts += [f"## {section.title}", f"<!-- figures: {section.command.removeprefix('python ')} -->", section.about]
        ratios = drawn_of(section, found["result"])
        in_all = f"a ratio of {span(ratios.values())}" if len(ratios) == 1 else f"ratios from {span(ratios.values())}"
        parts += [
            f"![{section.title}: {in_all}](performance/{section.name}.svg)",
            table(rows_of(section.name, found["result"]), section.other),
            f"{section.limits} Measured with `{section.command}`"
            + ("." if len(machines) == 1 else f" on {described(found['machine'])}."),
        ]
    parts += [SERVERS.strip(), "## Other measurements"]
    parts.append("\n".join(f"- `benchmarks/{name}.py`: {words}" for name, words in sorted(OTHER_PAGES.items())))
    parts.append("Benchmarks whose results are on no page:")
    parts.append("\n".join(f"- `benchmarks/{name}.py`: {words}" for name, words in sorted(WITHOUT_PAGE.items())))
    if missing := [f"- {section.title}: `{section.command}`" for section in SECTIONS if results[section.name] is None]:
        parts += ["Not measured here:", "\n".join(missing)]
    return "\n\n".join(parts) + "\n"


def summary(results: Mapping[str, Mapping[str, Any] | None]) -> str:
    """A table of all sections: the least of all their ratios, and the greatest of the main ones."""
    lines = ["| section | the ratio is | lowest | highest |", "| --- | --- | ---: | ---: |"]
    for section in SECTIONS:
        if (found := results[section.name]) is not None:
            least = min(row.ratio for row in rows_of(section.name, found["result"]) if row.ratio is not None)
            most = max(drawn_of(section, found["result"]).values())
            anchor = section.title.lower().replace(" ", "-")
            lines.append(f"| [{section.title}](#{anchor}) | {section.ratios} | {least:,.2f} | {most:,.2f} |")
    return "\n".join([*lines, *SINGLE_RUNS])


def write_page() -> None:
    for section in SECTIONS:
        if (found := kept(section)) is not None:
            draw(section, drawn_of(section, found["result"]), FOLDER / f"{section.name}.svg")
    PAGE.write_text(page(), encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a checkpoint for those that need one")
    parser.add_argument("--only", type=lambda text: text.split(","), help="names of benchmarks, with commas between")
    parser.add_argument("--add", nargs=2, metavar=("NAME", "FILE"), help="what a benchmark printed before")
    parser.add_argument("--page", action="store_true", help="measure nothing")
    asked = parser.parse_args()
    known = {section.name: section for section in SECTIONS}
    for name in [*(asked.only or []), *(asked.add or [])[:1]]:
        if name not in known:
            parser.error(f"no benchmark of the page is called {name!r}: give some of {', '.join(known)}")
    failed = 0
    if asked.add:
        name, file = asked.add
        try:
            keep(known[name], last_object(Path(file).read_text(encoding="utf-8")), None)
        except (OSError, ValueError) as error:
            parser.error(f"{file}: {error}")
    elif not asked.page:
        wanted = [section for section in SECTIONS if asked.only is None or section.name in asked.only]
        for section in (bar := tqdm(wanted, unit="benchmark", file=sys.stderr)):
            bar.set_description(section.name)
            if MODEL in section.arguments and asked.model is None:
                bar.write(f"{section.name}: needs --model, such as tools/smollm2.py makes: left out", file=sys.stderr)
                continue
            begun = time.monotonic()
            try:
                keep(section, measured(section, asked.model), time.monotonic() - begun)
                bar.write(f"{section.name}: {time.monotonic() - begun:,.0f} s", file=sys.stderr)
            except ValueError as error:
                failed += 1
                bar.write(f"{section.name}: {error}; the stored result stays", file=sys.stderr)
    write_page()
    print(PAGE.relative_to(ROOT))
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main())
