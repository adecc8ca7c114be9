"""The page of the benchmarks is what they said, whole; who fails or says nothing leaves it as it was."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
sys.path.append(str(ROOT / "tools"))
import performance  # noqa: E402
from performance_sections import ELSEWHERE  # noqa: E402
from performance_tables import ratios_of, rows_of, table  # noqa: E402

RING = next(section for section in performance.SECTIONS if section.name == "ring")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Nothing is kept yet, and the page is another."""
    monkeypatch.setattr(performance, "ROOT", tmp_path)
    monkeypatch.setattr(performance, "FOLDER", tmp_path / "performance")
    monkeypatch.setattr(performance, "PAGE", tmp_path / "performance.md")
    (tmp_path / "benchmarks").mkdir()
    return tmp_path


def called(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", ["performance.py", *words])
    return performance.main()


def benchmark(folder: Path, name: str, program: str) -> None:
    (folder / "benchmarks" / f"{name}.py").write_text(program, encoding="utf-8")


def test_the_page_is_what_the_benchmarks_said() -> None:
    assert performance.PAGE.read_text(encoding="utf-8") == performance.page(), (
        "make it again: tools/performance.py --page"
    )
    drawn = {path.stem for path in performance.FOLDER.glob("*.svg")}
    assert drawn == {path.stem for path in performance.FOLDER.glob("*.json")} <= {s.name for s in performance.SECTIONS}
    assert len(drawn) >= 12


def test_every_benchmark_has_its_place() -> None:
    here = {path.stem for path in (ROOT / "benchmarks").glob("*.py")} - {"common"}
    shown = {section.name for section in performance.SECTIONS}
    assert shown | ELSEWHERE.keys() == here
    assert not shown & ELSEWHERE.keys()


def test_what_is_kept_names_no_place() -> None:
    for path in performance.FOLDER.glob("*.json"):
        assert "/" not in path.read_text(encoding="utf-8").replace("GB/s", "")


def test_ratios_are_found_at_any_depth_and_in_words() -> None:
    said: dict[str, Any] = {"ring": {"step_ratio": 2, "ms": 7}, "ratio": 0.5, "a_ratio_to_b": 1.25, "same_ratio": True}
    wanted = {"ring step": 2.0, "all": 0.5, "a to b": 1.25, "tokens a second, 4 rows": 3.0}
    assert ratios_of("ring", said | {"ratio_4": 3}) == wanted
    speeds = {"plain": {"tokens_per_second": 8.0}, "K8V8": {"tokens_per_second": 6.0, "bytes": 3}}
    assert ratios_of("packed_attention", {"decode_8": speeds}) == {"decode 8, K8V8": 0.75}


@pytest.mark.parametrize("section", [*filter(performance.kept, performance.SECTIONS)], ids=lambda section: section.name)
def test_every_ratio_has_a_row_and_is_about_that_of_its_values(section: performance.Section) -> None:
    result = performance.kept(section)["result"]
    rows = rows_of(section.name, result)
    assert len({row.what for row in rows}) == len(rows)
    shown = [row.ratio for row in rows]
    assert all(
        any(ratio == pytest.approx(one) for one in shown if one) for ratio in ratios_of(section.name, result).values()
    )
    assert all("_" not in row.what for row in rows), "in words"
    for row in rows:
        if row.ours and row.other and row.ratio and row.unit != "tokens a pass":
            quotient = row.ours / row.other if row.unit == "tokens/s" else row.other / row.ours
            assert 0.8 < row.ratio / quotient < 1.25, row


def test_a_table_has_values_where_there_are_some_and_rows_that_are_not_planned() -> None:
    rows = rows_of("host", {"plain_ratio": 2.0, "plain": 4, "mlx_lm_plain": 8, "new_ratio": 0.5})
    assert table(rows, "mlx-lm").splitlines()[2:] == [
        "| plain | 4 | 8 | µs a layer | 2.00 |",
        "| new |  |  |  | 0.50 |",
    ]
    assert table(rows[1:], "mlx-lm").splitlines() == ["| | ratio |", "| --- | ---: |", "| new | 0.50 |"]


def test_it_runs_them_keeps_what_they_say_and_draws_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    benchmark(folder, "ring", "import sys; print('words'); print('{\"step_ratio\": ' + str(len(sys.argv)) + '}')")
    assert called(monkeypatch, "--only", "ring") == 0
    kept = json.loads((folder / "performance" / "ring.json").read_text())
    assert kept["result"] == {"step_ratio": 1 + len(RING.arguments)}
    assert kept["machine"]["versions"].keys() >= {"mlx", "mlx-lm"}
    page = (folder / "performance.md").read_text()
    assert "a ratio of 3.00](performance/ring.svg)" in page
    assert page.partition("Not measured here:")[2].count("\n- ") == len(performance.SECTIONS) - 1
    before = (folder / "performance" / "ring.svg").read_bytes()
    assert called(monkeypatch, "--page") == 0
    assert (folder / "performance" / "ring.svg").read_bytes() == before


@pytest.mark.parametrize("program", ["raise SystemExit(3)", "print('no object')", "pass", "print(7)"])
def test_one_that_fails_leaves_what_was_there(program: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    performance.keep(RING, {"step_ratio": 2.0}, 1.0)
    benchmark(folder, "ring", program)
    benchmark(folder, "growth", "print('{\"decode_ratio\": 0.5}')")
    assert called(monkeypatch, "--only", "ring,growth") == 1
    results = {path.stem: json.loads(path.read_text())["result"] for path in (folder / "performance").glob("*.json")}
    assert results == {"ring": {"step_ratio": 2.0}, "growth": {"decode_ratio": 0.5}}


def test_what_needs_a_checkpoint_is_left_out_without_one(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    benchmark(
        folder, "structured", 'import sys; print(\'{"model": "x", "rows_ratio": \' + str(len(sys.argv[2])) + \'}\')'
    )
    assert called(monkeypatch, "--only", "structured") == 0
    assert "structured: needs --model" in capsys.readouterr().err
    assert called(monkeypatch, "--only", "structured", "--model", "four") == 0
    assert json.loads((folder / "performance" / "structured.json").read_text())["result"] == {"rows_ratio": 4}


def test_what_was_printed_before_can_be_added(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "said").write_text('a line\n{"own_4_throughput_ratio": 1.5}\n')
    assert called(monkeypatch, "--add", "server", str(folder / "said")) == 0
    assert "a ratio of 1.50](performance/server.svg)" in (folder / "performance.md").read_text()
    (folder / "other").write_text("no object")
    for words in (("server", "other"), ("server", "nowhere"), ("nobody", "said")):
        with pytest.raises(SystemExit) as ended:
            called(monkeypatch, "--add", words[0], str(folder / words[1]))
        assert ended.value.code == 2
    assert json.loads((folder / "performance" / "server.json").read_text())["result"] == {"own_4_throughput_ratio": 1.5}


def test_the_summary_has_the_ratios_of_the_gpu() -> None:
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in performance.GPU.splitlines()]
    servers = [float(row[3]) for row in rows if row[0].startswith("server")]
    shared = [float(row[3]) for row in rows if re.fullmatch(r"\d+ \S [\d,]+", row[0])]
    assert (len(servers), len(shared)) == (4, 7)
    for line, ratios in zip(performance.SINGLE_RUNS, (servers, shared), strict=True):
        assert line.endswith(f"| {min(ratios):.2f} | {max(ratios):.2f} |")
