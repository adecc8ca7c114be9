"""`mlx-kv inspect`: it shows what the caches hold and marks what was evicted, no more; bad input is one line."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_models import VOCAB

from mlx_kv.cli import inspect as inspect_module
from mlx_kv.cli.inspect import blocks, mark_evicted, tenths, text_lines, token_texts
from mlx_kv.generation.encoding import encode_prompt
from mlx_kv.inspection import KeptLayer, KeptTokens, inspect_prompt
from mlx_kv.plots import kept_positions, ranks, raster, share_kept
from mlx_kv.policy import CachePolicy

PROMPT = "".join(f"def function_{i}(a, b):\n    return a * {i} + b\n\n\n" for i in range(12))
SMALL = ("--kv-budget", "40", "--kv-keep-recent", "8", "--kv-margin", "0", "--max-write", "32")


@pytest.fixture
def call(command: Any, monkeypatch: pytest.MonkeyPatch, reference: Any) -> Any:
    monkeypatch.setattr("mlx_kv.mlxlm.loading.load", lambda path, **options: reference)  # once for all tests
    return lambda *arguments: command("inspect", *arguments)


def ids(tokens: int) -> list[int]:
    return [(7 * i * i + 3 * i) % VOCAB for i in range(tokens)]


# --- rows and JSON ------------------------------------------------------------------------------------------------


def test_attention_is_shown_beside_what_is_kept(call: Any, tmp_path: Path) -> None:
    plot = tmp_path / "kept.png"
    done = call("--prompt", PROMPT, *SMALL, "--attention", "--plot", str(plot))
    assert done.code == 0
    assert plot.stat().st_size > 10_000
    header, *rows = done.out.split("\n\n")[1].splitlines()
    assert header.split()[:5] == ["layer", "kept", "evicted", "attention", "tenths"]
    shares = [float(row.split()[3].removesuffix("%")) for row in rows]
    assert len(shares) == 4
    assert all(0 < share < 100 for share in shares)
    assert "of what the last 64 tokens look at" in done.out


def test_scores_side_by_side(call: Any) -> None:
    """Each as it is alone, whatever it stands beside."""
    names = ["recent", "key_norm", "key_diff"]
    options = ("--prompt", PROMPT, *SMALL, "--kv-share", "layer")
    told = json.loads(call(*options, "--scores", ",".join(names), "--json", "-").out)
    assert list(told["scores"]) == names
    for name, one in told["scores"].items():
        alone = json.loads(call(*options, "--kv-score", name, "--json", "-").out)
        assert {key: alone[key] for key in one} == one
        assert alone["score"] == name
    rows = call(*options, "--scores", ",".join(names)).out.split("\n\n")[1].splitlines()
    assert [row.split()[0] for row in rows] == ["score", *names]
    for row, name in zip(rows[1:], names, strict=True):
        layers = told["scores"][name]["layers"]
        kept = [position for layer in layers for position in layer["heads"][0]["positions"]]
        tokens = told["scores"][name]["tokens"]
        counts = [sum(p * 10 // tokens == tenth for p in kept) / len(layers) for tenth in range(10)]
        assert [float(count) for count in row.split()[2:]] == pytest.approx(counts, abs=0.5)


def test_json_is_the_same_data(call: Any, tmp_path: Path, reference: Any) -> None:
    options = ("--prompt", PROMPT, *SMALL, "--kv-share", "head")
    done = call(*options, "--json", "-")
    assert (done.code, done.err) == (0, "")
    policy = CachePolicy(budget=40, keep_recent=8, margin=0, max_write=32, share="head")
    found = inspect_prompt(reference[0], encode_prompt(reference[1], PROMPT), policy)
    answer = json.loads(done.out)
    settings = {"model": "reference", "budget": 40, "score": "key_diff", "share": "head", "sinks": 4, "keep_recent": 8}
    assert answer == {**settings, **json.loads(json.dumps(asdict(found)))}
    assert {len(head["positions"]) for layer in answer["layers"] for head in layer["heads"]} == {40}
    file = tmp_path / "kept.json"
    done = call(*options, "--json", file)
    assert (json.loads(file.read_text()), done.err) == (answer, f"mlx-kv: wrote {file}\n")
    assert "tokens kept of each tenth" in done.out


def test_the_table_counts_tokens(call: Any) -> None:
    done = call("--prompt", PROMPT, *SMALL)
    assert (done.code, done.err) == (0, "")
    (row,) = [line.split() for line in done.out.splitlines()[3:]]  # all layers keep the same
    assert row[:2] == ["0-3", "40"]
    assert sum(map(int, row[4:])) == 40
    assert len(row[4:]) == len(row[3]) == 10
    rows = [line.split() for line in call("--prompt", PROMPT, *SMALL, "--kv-share", "layer").out.splitlines()[3:]]
    assert [row[0] for row in rows] == ["0", "1", "2", "3"]
    assert [sum(map(int, row[4:])) for row in rows] == [40] * 4


def test_blocks_are_full_only_where_all_was_kept() -> None:
    layer = KeptLayer(0, 0, (KeptTokens((*range(10), 10, 20, 21, 22, 23, 24, 99), (0.0,) * 17),))
    counts = tenths([layer], 100)
    assert counts == [10, 1, 5, 0, 0, 0, 0, 0, 0, 1]
    assert blocks(counts, 100) == "█▁▄······▁"
    assert blocks(tenths([KeptLayer(0, 0, (KeptTokens((0, 2), (0.0, 0.0)),))], 3), 3) == "█·····█···"


def test_a_short_prompt_is_said_to_be_whole(call: Any) -> None:
    done = call("--prompt", "import os", "--kv-budget", "100")
    assert done.code == 0
    assert "0-3" in done.out
    assert done.err.startswith("mlx-kv: note: nothing is evicted: ")
    assert done.err.endswith(" tokens are within the budget of 100\n")
    assert call("--prompt", "import os", "--kv-budget", "100", "--text").out == "import os\n"


# --- the text -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("more", [(), ("--kv-share", "layer", "--layer", "2"), ("--kv-share", "layer")])
def test_text_marks_exactly_the_evicted_tokens(more: tuple[str, ...], call: Any, reference: Any) -> None:
    tokenizer = reference[1]
    tokens = encode_prompt(tokenizer, PROMPT)
    share = ("--kv-share", "layer") if more else ()
    layers = json.loads(call("--prompt", PROMPT, *SMALL, *share, "--json", "-").out)["layers"]
    shown = [layers[2]] if "--layer" in more else layers
    expected = ""
    for position, token in enumerate(tokens):
        kept = sum(position in layer["heads"][0]["positions"] for layer in shown)
        text = tokenizer.decode([token])
        expected += text if 2 * kept >= len(shown) else "".join(c if c.isspace() else "·" for c in text)
    done = call("--prompt", PROMPT, *SMALL, *more, "--text")
    assert (done.code, done.err, done.out) == (0, "", expected)
    assert 0 < done.out.count("·") < len(PROMPT)


def test_characters_of_several_tokens_stay_whole(reference: Any) -> None:
    tokenizer = reference[1]
    text = "café 漢字 🎉🎉 naïve\n\t« x »"
    tokens = encode_prompt(tokenizer, text)
    found = list(token_texts(tokenizer, tokens))
    assert "".join(piece for _, _, piece in found) == text
    assert [first for first, _, _ in found] == [0, *(last for _, last, _ in found[:-1])]
    assert found[-1][1] == len(tokens) > len(found)
    assert not any("\ufffd" in piece for _, _, piece in found)
    for chosen in (0, 1):  # every second token gone: a character goes as most of its tokens do
        shown = text_lines(tokenizer, tokens, [float(i % 2 == chosen) for i in range(len(tokens))], dim=False)
        assert len(shown) == len(text)
        assert "\ufffd" not in shown
        assert all(a in (b, "·") for a, b in zip(shown, text, strict=True))


def test_a_terminal_gets_dimmed_text_unless_no_color(call: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inspect_module.sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.delenv("NO_COLOR", raising=False)
    dimmed = call("--prompt", PROMPT, *SMALL, "--text").out
    assert "\x1b[2m" in dimmed
    assert dimmed.replace("\x1b[2m", "").replace("\x1b[0m", "") == PROMPT
    monkeypatch.setenv("NO_COLOR", "1")
    plain = call("--prompt", PROMPT, *SMALL, "--text").out
    assert "\x1b" not in plain
    assert "·" in plain
    assert mark_evicted("a\n\nb", dim=True) == "\x1b[2ma\n\x1b[0m\n\x1b[2mb\x1b[0m"


# --- the figure ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("share", ["layers", "head"])
def test_a_figure_is_written(share: str, call: Any, tmp_path: Path) -> None:
    file = tmp_path / "a.png"
    done = call("--prompt", PROMPT, *SMALL, "--kv-share", share, "--plot", file)
    assert (done.code, done.err) == (0, f"mlx-kv: wrote {file}\n")
    from matplotlib.image import imread

    image = imread(file)
    assert image.shape[0] > 400
    assert image.shape[1] == 1600
    assert len(np.unique(image.reshape(-1, image.shape[2]), axis=0)) > 30  # many scores, many colours
    (tmp_path / "b.png").mkdir()
    assert call("--prompt", PROMPT, *SMALL, "--plot", tmp_path / "b.png").code == 2


def test_cells_are_the_kept_positions_pooled_by_the_highest() -> None:
    assert ranks([3.0, -1.0, 3.0, 0.5]).tolist() == [1.0, 0.0, 1.0, 0.5]
    assert ranks([2.0]).tolist() == [0.0]
    rows = [((0, 3, 7), (5.0, 1.0, 3.0)), ((1, 2, 3), (1.0, 2.0, 3.0))]
    nan = np.nan
    np.testing.assert_array_equal(
        raster(rows, 8, 8), [[1, nan, nan, 0, nan, nan, nan, 0.5], [nan, 0, 0.5, 1, nan, nan, nan, nan]]
    )
    np.testing.assert_array_equal(raster(rows, 8, 2), [[1, 0.5], [1, nan]])
    assert share_kept(rows, 8, 4).tolist() == [0.5, 0.75, 0, 0.25]


def test_a_large_figure_has_one_raster_and_few_artists() -> None:
    row = (tuple(range(0, 8000, 8)), tuple(float(i % 17) for i in range(1000)))
    figure = kept_positions("a model", [[row, row] for _ in range(36)], 8000, 4, 64)
    cells = figure.axes[1]
    (image,) = cells.images
    assert image.get_array().shape[0] == 72
    assert 1000 < image.get_array().shape[1] < 8000
    assert len(cells.get_children()) < 40
    assert [text.get_text() for text in figure.axes[0].texts] == ["↓ 4 sinks", "64 recent ↓"]


# --- bad input ----------------------------------------------------------------------------------------------------

GOOD = ["--prompt", PROMPT, *SMALL]
BAD: dict[str, tuple[list[str], str]] = {
    "no budget": (["--prompt", "x"], "inspect needs --kv-budget: give the number of tokens to keep"),
    "no budget, a score": (["--prompt", "x", "--kv-score", "recent"], "inspect needs --kv-budget"),
    "no prompt": (["--kv-budget", "100"], "no prompt: give --prompt"),
    "score": ([*GOOD, "--kv-score", "nonsense"], "there is no score 'nonsense': choose one of"),
    "scores": ([*GOOD, "--scores", "recent,nonsense"], "there is no score 'nonsense': choose one of"),
    "text of scores": ([*GOOD, "--scores", "recent,random", "--text"], "--text shows what one score keeps"),
    "budget": (["--prompt", "x", "--kv-budget", "5"], "--kv-budget 5, but 4 sinks and --kv-keep-recent 1 are kept"),
    "bound": ([*GOOD, "--max-kv-size", "99"], "got a --kv-budget and --max-kv-size"),
    "layer without text": ([*GOOD, "--layer", "1"], "--layer needs --text"),
    "no such layer": ([*GOOD, "--text", "--layer", "4"], "there is no layer 4 with a budget: give one from 0 to 3"),
    "negative layer": ([*GOOD, "--text", "--layer", "-1"], "there is no layer -1 with a budget"),
    "two answers": ([*GOOD, "--text", "--json", "-"], "--json - and --text both write to stdout"),
    "folder of JSON": ([*GOOD, "--json", "/nowhere/a.json"], "there is no folder /nowhere; make it first"),
    "figure of scores": (
        [*GOOD, "--scores", "recent,random", "--plot", "a.png"],
        "--plot draws what one score keeps: leave out --scores, or give --json FILE",
    ),
    "figure of heads": (
        [*GOOD, "--plot-heads", "a.png"],
        "--plot-heads was removed in 0.4: give --json FILE and draw it in a checkout: python -m",
    ),
    "kind of figure": ([*GOOD, "--plot", "a.xyz"], "give a file that ends in .png, .svg, .pdf"),
    "folder of the figure": ([*GOOD, "--plot", "/nowhere/a.png"], "there is no folder /nowhere; make it first"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_line_and_exit_code_2(case: str, call: Any) -> None:
    arguments, message = BAD[case]
    done = call(*arguments)
    assert done.code == 2, done.err
    assert message in done.err
    assert done.err.startswith("mlx-kv: error: ")
    assert done.err.count("\n") == 1
    assert done.out == ""


def test_help_has_examples(call: Any) -> None:
    done = call("--help")
    assert done.code == 0
    assert "Examples:" in done.out
    assert "mlx-kv inspect --prompt-file" in done.out
