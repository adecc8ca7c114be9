"""Every figure that was measured stands below a comment that says what makes it, and that exists.

    <!-- figures: benchmarks/growth.py; mlx-kv plan --context -->

covers the tables and paragraphs below it, up to the next such comment or heading. A source is a benchmark, a tool or
a test of this checkout, with options that it has; a command `mlx-kv` with options that it has; a file of the package
for a figure that is a setting (`mlx_kv/server/requests.py`); `reckoned`, what the text itself works out; or `once:
WHY`, for a figure that no command here makes again. Of those there are as many as `ONCE` says, and there shall be
fewer.

What counts as a measured figure: a number with a unit of time, memory, rate or share, or a table of decimals. Whether a
figure is still what its command gives, nobody can say without running it.
"""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from mlx_kv.cli.main import command as group

sys.path.append(str(Path(__file__).parent.parent / "tools"))

from performance_sections import SECTIONS

ROOT = Path(__file__).parent.parent
PAGES = sorted([*(ROOT / "docs").glob("*.md"), ROOT / "README.md"])
ONCE = 6
COMMENT = re.compile(r"<!-- figures: (.+?) -->", re.S)
UNITS = (
    "ms|µs|s|seconds?|minutes|microseconds|hours|kB|KB|MB|GB|TB|GFLOP/s|GB/s|tokens/s|tokens (?:per|a) second|times"
    "|points?|nats"
)
FIGURE = re.compile(rf"(?<![\w.-])\d[\d.,]*(?: to \d[\d.,]*)?(?:-| )?(?:(?:{UNITS})\b|%)")
NUMBER = re.compile(r"(?<![\w.,-])\d[\d,]*(?:\.\d+)?(?![\w.])")
DECIMAL = re.compile(r"\|\s*\**-?\d[\d,]*\.\d+")
FOLDERS = ("benchmarks/", "tools/", "tests/")


def without_code(text: str) -> str:
    """Blocks of code as empty lines, and no code within lines."""
    text = re.sub(r"^```.*?^```$", lambda block: "\n" * block[0].count("\n"), text, flags=re.M | re.S)
    return re.sub(r"`[^`]*`", "``", re.sub(r"^    .*$", "", text, flags=re.M))


def has_figures(block: str) -> bool:
    return bool(FIGURE.search(block)) or len(DECIMAL.findall(block)) >= 3


def without_source(text: str) -> list[str]:
    """The first line of each table or paragraph that has figures and no comment above it in its section."""
    found, covered = [], False
    for block in re.split(r"\n\s*\n", without_code(text)):
        first = block.strip().partition("\n")[0]
        if first.startswith("#"):
            covered = False
        covered = covered or "<!-- figures: " in block
        if has_figures(COMMENT.sub("", block)) and not covered:
            found.append(first)
    return found


def sources(text: str) -> Iterator[str]:
    for told in COMMENT.findall(text):
        yield from (" ".join(each.split()) for each in told.split(";"))


def commands() -> dict[str, set[str]]:
    with click.Context(group) as context:
        found = {name: group.get_command(context, name) for name in group.list_commands(context)}
    return {
        name: {option for parameter in each.params for option in (*parameter.opts, *parameter.secondary_opts)}
        for name, each in found.items()
        if each is not None
    }


def wrong(source: str) -> str | None:
    """What is not so about a source; None for a good one."""
    if source == "reckoned" or re.fullmatch(r"once: .{10,}", source):
        return None
    first, *words = shlex.split(source)
    options = {word.partition("=")[0] for word in words if word.startswith("--")}
    if first == "mlx-kv":
        known = commands()
        if not words or words[0] not in known:
            return f"no command {source}"
        return f"no options {options - known[words[0]]}" if options - known[words[0]] else None
    path, _, name = first.partition("::")
    file = ROOT / path
    if not path.startswith((*FOLDERS, "mlx_kv/")) or not file.is_file():
        return f"no file {path}"
    if name and f"def {name}(" not in file.read_text(encoding="utf-8"):
        return f"no test {name}"
    if path.startswith("mlx_kv/") and (options or words):
        return "a setting has no options"
    shared = ROOT / "benchmarks" / "common.py"
    said = file.read_text(encoding="utf-8") + shared.read_text(encoding="utf-8") if options else ""
    missing = {option for option in options if f'"{option}"' not in said}
    return f"no options {missing}" if missing else None


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_figures_say_what_makes_them(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert without_source(text) == []
    assert {source: why for source in sources(text) if (why := wrong(source))} == {}


def test_what_the_performance_page_has_stands_there_alone() -> None:
    """One number for one benchmark: other pages link to it, and have what its sections do not."""
    sections = {f"benchmarks/{section.name}.py" for section in SECTIONS}
    found = {
        (page.name, words[0])
        for page in PAGES
        for source in sources(page.read_text(encoding="utf-8"))
        if (words := source.split())[0] in sections
    }
    alone = {
        ("budgets.md", "benchmarks/compaction.py"),  # scores that the section does not have
        ("generate.md", "benchmarks/cpu_attention.py"),
        ("speculative.md", "benchmarks/speculation.py"),
    }
    assert {(page, source) for page, source in found if page != "performance.md"} == alone


def test_rows_that_quote_the_performance_page_have_its_figures() -> None:
    said = set(NUMBER.findall((ROOT / "docs" / "performance.md").read_text(encoding="utf-8")))
    rows = [row for page in PAGES for row in re.findall(r"^\| .*\(.*performance\.md#gpu\).*$", page.read_text(), re.M)]
    assert rows
    for row in rows:
        _claim, *cells = row.strip("| ").split(" | ")
        assert [figure for cell in cells[:-1] for figure in NUMBER.findall(cell) if figure not in said] == [], row


def test_figures_that_no_command_makes_become_fewer() -> None:
    once = [source for page in PAGES for source in sources(page.read_text(encoding="utf-8")) if source[:5] == "once:"]
    assert len(once) == ONCE


UNNAMED = [
    "It takes 5 ms.",
    "| a | b |\n|-|-|\n| 1.5 | 2.5 |\n| x | 3.5 |",
    "Read at 1,780 tokens per second.",
    "84% are kept.",
    "<!-- figures: reckoned -->\n\n1 ms\n\n## More\n\n2 ms",
]


@pytest.mark.parametrize("text", UNNAMED)
def test_figures_without_a_source_are_seen(text: str) -> None:
    assert len(without_source(text)) == 1
    assert without_source(f"<!-- figures: reckoned -->\n\n{text.rpartition('## More')[2]}") == []


@pytest.mark.parametrize(
    "text", ["Python 3.11 and 8 heads", "`--wait 5 s`", "    5 ms", "```\n5 ms\n```", "window 512"]
)
def test_what_is_no_figure(text: str) -> None:
    assert without_source(text) == []


@pytest.mark.parametrize(
    ("source", "why"),
    [("benchmarks/gone.py", "no file"), ("benchmarks/growth.py --nothing", "no options"), ("README.md", "no file"),
     ("mlx-kv nothing", "no command"), ("mlx-kv plan --nothing", "no options"), ("once: no", "no file"),
     ("tests/test_figures.py::test_nothing", "no test"), ("mlx_kv/policy.py --kv-bits", "a setting")],
)  # fmt: skip
def test_sources_that_do_not_exist_are_seen(source: str, why: str) -> None:
    assert (wrong(source) or "").startswith(why)
