"""Runs the benchmarks, keeps what each of them said, and writes docs/performance.md from that: `make bench`.

    python tools/performance.py                        all that need no checkpoint, then the page
    python tools/performance.py --model build/smollm2  all; tools/smollm2.py makes that model
    python tools/performance.py --only ring,growth     these; what others said before stays
    python tools/performance.py --add server FILE      the last line of FILE is what benchmarks/server.py printed
    python tools/performance.py --page                 nothing is measured: the page and its pictures alone

Decides which benchmarks are on the page, what is drawn of each (ratios of two sides of one process run, on a scale on
which twice as fast and half as fast are as far from even) and which machine and versions are told beside it. What is
measured, and how, is each benchmark's own. What one said is docs/performance/NAME.json; one that fails leaves what was
there, and the exit code is 1 then.
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
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("svg")
from matplotlib.figure import Figure
from tqdm import tqdm

ROOT = Path(__file__).parent.parent
FOLDER, PAGE = ROOT / "docs" / "performance", ROOT / "docs" / "performance.md"
VERSIONS = ("mlx", "mlx-lm", "numpy", "transformers")  # the peers, and what both sides stand on
MODEL = "MODEL"  # in the place of a checkpoint's directory
OURS, THEIRS, TEXT = "#00897b", "#c2673d", "#808080"  # readable on light and on dark pages


@dataclass(frozen=True)
class Section:
    """A benchmark of the page.

    Attributes:
        name: of the file in benchmarks/.
        arguments: with which it is run here; `MODEL` is the checkpoint.
        ratios: what more than 1 says.
        not_said: what its figures do not prove.
    """

    name: str
    title: str
    arguments: tuple[str, ...]
    ratios: str
    not_said: str

    @property
    def command(self) -> str:
        told = ("build/smollm2" if word == MODEL else word for word in self.arguments)
        return " ".join(["python", f"benchmarks/{self.name}.py", *told])


SECTIONS = (
    Section(
        "growth",
        "Growth",
        ("--rounds", "3"),
        "times as fast as mlx-lm's cache, which grows by 256 slots",
        "Steady decoding is the same: attention reads the same bytes. Memory of a GPU is another allocator's.",
    ),
    Section(
        "host",
        "What a step costs the host",
        ("--rounds", "200"),
        "times as fast as mlx-lm's caches, in Python, for each layer and token",
        "It matters where a device is done before Python is: on a GPU with a small model, not on a CPU.",
    ),
    Section(
        "ring",
        "Sliding windows",
        ("--rounds", "3"),
        "times as fast as mlx-lm's rotating cache",
        "A random model: nothing is said of what a window loses in quality. `decode update` is what stands around a "
        "write of one token, a tenth of a millisecond; `decode step` has one layer's attention in it, `model` all of a "
        "model.",
    ),
    Section(
        "compaction",
        "Eviction",
        ("--rounds", "3"),
        "times as fast as gathering all survivors, or as a cache that keeps all",
        "What is evicted is gone: [evaluate](eval.md) says what that costs in answers.",
    ),
    Section(
        "batch",
        "Rows of different lengths",
        ("--rounds", "3"),
        "times as fast as mlx-lm's left-padded batches; of speculation, as our plain ones",
        "The bundled pair, on source code that it knows: acceptance elsewhere is another.",
    ),
    Section(
        "ragged",
        "One long row among short ones",
        ("--rounds", "3"),
        "times as fast by class as in one buffer, or as two batches one after the other",
        "Random keys and values, decoding alone.",
    ),
    Section(
        "speculation",
        "Speculative decoding",
        ("--rounds", "1", "--model", MODEL),
        "times as fast as plain decoding",
        "Five tasks, one small model, greedy: answers of others repeat more, or less.",
    ),
    Section(
        "cpu_attention",
        "Prompts and decoding on a CPU",
        ("--rounds", "3", "--model", MODEL, "--prompts", "256,1024", "--contexts", "1024,8192"),
        "times as fast as MLX's own attention and activation",
        "x86-64 on Linux, float32. On a GPU and on macOS all is left to MLX.",
    ),
    Section(
        "packed_attention",
        "Decoding from quantised caches",
        ("--contexts", "8192", "--rounds", "3", "--model", MODEL),
        "of the speed of plain caches",
        "On a CPU quantising saves memory and costs time; a GPU reads packed words directly, and was not at hand.",
    ),
    Section(
        "server",
        "The server, by clients",
        ("--rounds", "1", "--tokens", "24", "--workloads", "own,shared,sampled", "--model", MODEL),
        "times mlx_lm.server: its throughput, and its time to a first token over ours",
        "Answers of 24 tokens after prompts of 300: nearly all of a request is its prompt. One round. In 8 bits: "
        "[the server's page](server.md#measured).",
    ),
    Section(
        "token_waits",
        "The wait between two tokens, while a long prompt is read",
        ("--model", MODEL),
        "the longest wait of mlx_lm.server over ours",
        "One prompt of 4,000 tokens beside three streams.",
    ),
    Section(
        "structured",
        "Answers with a form",
        ("--model", MODEL),
        "of the speed without a form",
        "One schema: others take longer to compile.",
    ),
)
ELSEWHERE = {
    "budget_decode": "told on the page of [budgets](budgets.md)",
    "clients": "checks what clients get, and times nothing",
    "cluster_table": "several machines: [clusters](clusters.md)",
    "codecs": "quality, not speed: [quantisation](quantisation.md#quality)",
    "conversations": "found over read, less is better: [stores](store.md#measured)",
    "draft_sizes": "chose the size of the bundled draft",
    "growth_rules": "chose the default growth: [caches](caches.md)",
    "kvpress_equality": "compares what is kept, and times nothing",
    "observing": "what scores that look at attention cost: [budgets](budgets.md)",
    "partial_reads": "quality, not speed: [evaluate](eval-results.md#reading-a-part-of-the-cache)",
    "parsing": "latency of parsing requests, against an older checkout: printed, not kept",
    "peers": "three servers side by side: [batches](batches.md#shared-prefixes)",
    "prefix_soak": "compares answers, and times nothing",
    "quick_softmax": "part of score_table",
    "ranks": "several machines: [clusters](clusters.md)",
    "ranks_equal": "compares tokens, and times nothing",
    "ranks_soak": "compares tokens, and times nothing",
    "score_cells": "part of score_table",
    "score_rule": "quality, not speed: [evaluate](eval.md)",
    "file_questions": "quality, not speed: [evaluate](eval.md)",
    "score_table": "quality, not speed: [evaluate](eval.md)",
    "server_drafts": "in [speculative decoding](speculative.md#speedup)",
    "shared_prefix": "prompts that begin alike: [batches](batches.md#shared-prefixes)",
    "shared_store": "a store in a bucket: [clusters](clusters.md#several-servers-one-store)",
    "soak": "looks for what breaks, and times nothing",
    "uneven_heads": "told on the page of [budgets](budgets.md)",
}
INTRODUCTION = """
All benchmarks in one place, as `make bench` measured them. Each runs both sides in turns in one process (of the server,
two servers in turns), and what counts are ratios: above 1 is in our favour, and bars begin at even. What each measures,
and which bytes must move, its own header says. This page and its pictures are made from what the benchmarks said
(`docs/performance/`), by `tools/performance.py`.
""".strip()
GPU = """## On a GPU

No GPU was at hand when this page was made, so nothing is said of one. On a machine that has one:

    make EXTRAS=cuda bench MODEL=build/smollm2-4bit    # Linux, NVIDIA; on macOS leave EXTRAS out

after `python tools/smollm2.py build/smollm2-4bit --bits 4`. `cpu_attention` has nothing to measure there.
"""


def leaves_of(found: Mapping[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], float]]:
    """All numbers of a JSON object, with the names on the way to them."""
    for name, value in found.items():
        if isinstance(value, Mapping):
            yield from leaves_of(value, (*path, name))
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            yield (*path, name), float(value)


def ratios_of(name: str, result: Mapping[str, Any]) -> dict[str, float]:
    """What is drawn of what a benchmark said: in words, and how many times."""
    if name == "packed_attention":  # has seconds and speeds of each codec instead
        return {
            f"{path[0].replace('_', ' ')}, {path[1]}": value / result[path[0]]["plain"]["tokens_per_second"]
            for path, value in leaves_of(result)
            if path[-1] == "tokens_per_second" and path[1] != "plain"
        }
    return {in_words(path): value for path, value in leaves_of(result) if "ratio" in path[-1] and value > 0}


def in_words(path: tuple[str, ...]) -> str:
    words = " ".join(path).replace("_", " ").split()
    told = " ".join(word for word in words if word != "ratio") or "all"
    return f"tokens a second, {told} rows" if told.isdigit() else told


def draw(section: Section, ratios: Mapping[str, float], file: Path) -> None:
    """A bar for each ratio, from even; the scale is logarithmic."""
    mpl.rcParams.update(
        {"svg.hashsalt": "mlx-kv", "svg.fonttype": "none", "font.size": 9, "text.color": TEXT, "axes.edgecolor": TEXT}
    )
    figure = Figure(figsize=(7.2, 0.9 + 0.24 * len(ratios)), layout="constrained")
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
        told = f"{value:,.0f}" if value >= 100 else f"{value:.2f}"
        axis.text(y=place, s=told, va="center", color=TEXT, fontsize=8, **aligned)
    axis.set_yticks(list(places), names)
    axis.invert_yaxis()
    axis.tick_params(colors=TEXT)
    axis.spines[["top", "right", "left"]].set_visible(False)
    axis.set_xlabel(section.ratios, color=TEXT)
    figure.savefig(file, format="svg", metadata={"Date": None})


def machine() -> dict[str, Any]:
    """What is measured on, in words that are nobody's."""
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
        raise ValueError("its last line is no JSON object: it failed, or is no benchmark's output")
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
    """Writes down what a benchmark said, on which machine, and how long that took; None where nobody looked."""
    FOLDER.mkdir(exist_ok=True)
    told = {"result": result, "machine": machine()} | ({} if seconds is None else {"seconds": round(seconds)})
    (FOLDER / f"{section.name}.json").write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")


def kept(section: Section) -> dict[str, Any] | None:
    file = FOLDER / f"{section.name}.json"
    return json.loads(file.read_text(encoding="utf-8")) if file.exists() else None


def told_of(machine: Mapping[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    return (
        f"{machine['cores']} cores, {machine['memory_gib']} GiB, {machine['system']}, {machine['device']}, "
        f"Python {machine['python']}, {versions}"
    )


def page() -> str:
    """The page of what is kept."""
    parts = [
        "# Performance",
        INTRODUCTION,
    ]
    for section in SECTIONS:
        found = kept(section)
        parts += [f"## {section.title}", f"<!-- figures: {section.command.removeprefix('python ')} -->"]
        if found is None:
            parts.append(f"Not measured here: `{section.command}`.")
            continue
        ratios = ratios_of(section.name, found["result"])
        least, most = (f"{how(ratios.values()):.2f}" for how in (min, max))
        found_in = f"a ratio of {most}" if len(ratios) == 1 else f"{len(ratios)} ratios between {least} and {most}"
        parts += [
            f"`{section.command}`",
            f"![{section.title}: {found_in}](performance/{section.name}.svg)",
            f"{section.not_said} Measured on {told_of(found['machine'])}.",
        ]
    parts += [GPU.strip(), "## What is not here"]
    parts.append("\n".join(f"- `benchmarks/{name}.py`: {why}" for name, why in ELSEWHERE.items()))
    return "\n\n".join(parts) + "\n"


def write_page() -> None:
    for section in SECTIONS:
        if (found := kept(section)) is not None:
            draw(section, ratios_of(section.name, found["result"]), FOLDER / f"{section.name}.svg")
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
                bar.write(f"{section.name}: {error}; what was there stays", file=sys.stderr)
    write_page()
    print(PAGE.relative_to(ROOT))
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main())
