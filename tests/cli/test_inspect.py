"""`mlx-kv inspect`: it shows what the caches hold and marks what was evicted, no more; bad input is one line."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.generate import generate_step
from tiny_models import VOCAB, make_model

from mlx_kv.cli import inspect as inspect_module
from mlx_kv.cli.inspect import blocks, mark_evicted, tenths, text_lines, token_texts
from mlx_kv.evaluation import inspection
from mlx_kv.evaluation.attention import attention_of_last
from mlx_kv.evaluation.inspection import KeptLayer, KeptTokens, inspect_prompt
from mlx_kv.generation.encoding import encode_prompt
from mlx_kv.mlxlm.convert import make_prompt_cache
from mlx_kv.mlxlm.traverse import attention_caches
from mlx_kv.plots.kept import kept_positions, ranks, raster, share_kept
from mlx_kv.policy import CachePolicy

PROMPT = "".join(f"def function_{i}(a, b):\n    return a * {i} + b\n\n\n" for i in range(12))
SMALL = ("--kv-budget", "40", "--kv-keep-recent", "8", "--kv-margin", "0", "--max-write", "32")


@pytest.fixture
def call(command: Any, monkeypatch: pytest.MonkeyPatch, reference: Any) -> Any:
    monkeypatch.setattr("mlx_kv.mlxlm.loading.load", lambda path: reference)  # once for all tests
    return lambda *arguments: command("inspect", *arguments)


def ids(tokens: int) -> list[int]:
    return [(7 * i * i + 3 * i) % VOCAB for i in range(tokens)]


# --- the library --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", [None, 8])
@pytest.mark.parametrize("score", ["key_diff", "key_norm"])
@pytest.mark.parametrize("share", ["layers", "layer", "head"])
def test_it_says_what_the_caches_hold(
    share: Any, score: str, bits: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Any] = []

    def spy(*arguments: Any) -> list[Any]:
        made.append(make_prompt_cache(*arguments))
        return made[-1]

    monkeypatch.setattr(inspection, "make_prompt_cache", spy)
    policy = CachePolicy(
        budget=24, keep_recent=6, sinks=3, margin=5, max_write=16, share=share, score=score, bits=bits, group_size=32
    )
    found = inspect_prompt(make_model("llama"), ids(90), policy)
    (caches,) = made
    assert (found.tokens, found.kept, found.evicted) == (90, 24, 66)
    assert [(layer.index, layer.cache) for layer in found.layers] == [(0, 0), (1, 1), (2, 2)]
    assert found.compactions == caches[0].evictor.compactions > 1
    for cache, layer in zip(caches, found.layers, strict=True):
        scores = np.array(cache.evictor.live_scores(0)).reshape(-1, 24)
        positions = np.array(cache.positions[0])
        assert len(layer.heads) == len(positions) == len(scores) == (2 if share == "head" else 1)
        for head, own_positions, own_scores in zip(layer.heads, positions, scores, strict=True):
            assert list(head.positions) == sorted(set(own_positions.tolist()))
            assert dict(zip(head.positions, head.scores, strict=True)) == dict(
                zip(own_positions.tolist(), own_scores.tolist(), strict=True)
            )
            assert head.positions[:3] == (0, 1, 2)
            assert head.positions[-6:] == tuple(range(84, 90))
    same = len({head.positions for layer in found.layers for head in layer.heads}) == 1
    assert same == (share == "layers")


def test_a_prompt_is_read_in_the_chunks_of_generation() -> None:
    model, seen, expected = make_model("llama"), [], []
    policy = CachePolicy(budget=24, keep_recent=6, max_write=16)
    inspect_prompt(model, ids(50), policy, progress=lambda done, total: seen.append((done, total)))
    options = {"prefill_step_size": 16, "prompt_cache": make_prompt_cache(model, policy), "max_tokens": 1}
    steps = generate_step(
        mx.array(ids(50)), model, prompt_progress_callback=lambda *step: expected.append(step), **options
    )
    next(steps)
    assert seen == [step for step in expected if step[0]] == [(16, 50), (32, 50), (48, 50), (49, 50), (50, 50)]


@pytest.mark.parametrize("share", ["layers", "head"])
@pytest.mark.parametrize("tokens", [1, 24])
def test_within_the_budget_nothing_is_evicted(tokens: int, share: Any) -> None:
    policy = CachePolicy(budget=24, keep_recent=6, share=share)
    found = inspect_prompt(make_model("llama"), ids(tokens), policy)
    assert (found.kept, found.evicted, found.compactions) == (tokens, 0, 0)
    assert [len(layer.heads) for layer in found.layers] == [2 if share == "head" else 1] * 3
    assert all(head.positions == tuple(range(tokens)) for layer in found.layers for head in layer.heads)
    assert found.share_evicted() == [0.0] * tokens


@pytest.mark.parametrize(("family", "places"), [("gemma3_text", [1, 3]), ("lfm2", None), ("falcon_h1", None)])
def test_only_layers_with_a_budget_are_listed(family: str, places: list[int] | None) -> None:
    policy = CachePolicy(budget=24, keep_recent=6, max_write=16)
    model = make_model(family)
    found = inspect_prompt(model, ids(60), policy)
    caches = make_prompt_cache(model, policy)
    expected = [i for i, each in enumerate(caches) if any(c.evictor is not None for c in attention_caches([each]))]
    assert [layer.cache for layer in found.layers] == expected
    assert places is None or expected == places
    assert [layer.index for layer in found.layers] == list(range(len(expected)))
    assert found.without_budget > 0


@pytest.mark.parametrize("share", ["layers", "layer", "head"])
def test_the_attention_that_is_left(share: Any) -> None:
    """What each head keeps of it, and all of it where nothing goes."""
    model, tokens = make_model("llama"), ids(90)
    policy = CachePolicy(budget=24, keep_recent=6, share=share, max_write=16)
    steps: list[tuple[int, int]] = []
    found = inspect_prompt(model, tokens, policy, attention_of=8, progress=lambda *step: steps.append(step))
    received = attention_of_last(model, tokens, 8)
    assert [layer.heads for layer in inspect_prompt(model, tokens, policy).layers] == [
        tuple(replace(head, attention=None) for head in layer.heads) for layer in found.layers
    ]
    for layer in found.layers:
        of_heads = received[layer.index]
        rows = of_heads if share == "head" else of_heads.mean(axis=0, keepdims=True)
        expected = [sum(row[position] for position in h.positions) for h, row in zip(layer.heads, rows, strict=True)]
        assert [head.attention for head in layer.heads] == pytest.approx(expected, abs=1e-6)
        assert layer.attention_kept == pytest.approx(sum(expected) / len(expected), abs=1e-6)
        assert layer.attention == pytest.approx(of_heads.mean(axis=0), abs=1e-6)
        assert 0.0 < layer.attention_kept < 0.999
    assert steps[-1] == (180, 180)
    assert [done for done, _ in steps] == sorted(done for done, _ in steps)
    whole = inspect_prompt(model, tokens, CachePolicy(budget=90, keep_recent=6), attention_of=8)
    assert [layer.attention_kept for layer in whole.layers] == pytest.approx([1.0] * 3, abs=1e-5)


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


def test_the_share_of_heads_that_evicted() -> None:
    heads = [
        KeptTokens((0, 1), (0.0, 0.0)),
        KeptTokens((0, 3), (0.0, 0.0)),
        KeptTokens((0, 1), (0.0, 0.0)),
        KeptTokens((0, 1), (0.0, 0.0)),
    ]
    layers = (KeptLayer(0, 0, tuple(heads[:2])), KeptLayer(1, 1, tuple(heads[2:])))
    found = inspection.Inspection(4, 2, 2, 1, 0, layers)
    assert found.share_evicted() == [0.0, 0.25, 1.0, 0.75]
    assert found.share_evicted(1) == [0.0, 0.0, 1.0, 1.0]
    with pytest.raises(ValueError, match=r"there is no layer 2 with a budget: give one from 0 to 1"):
        found.share_evicted(2)


def test_the_library_refuses_what_it_cannot_show() -> None:
    with pytest.raises(ValueError, match="has no budget"):
        inspect_prompt(make_model("llama"), ids(9), CachePolicy())
    with pytest.raises(ValueError, match="the prompt is empty"):
        inspect_prompt(make_model("llama"), [], CachePolicy(budget=100))


# --- rows and JSON ------------------------------------------------------------------------------------------------


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
    counts = tenths(layer, 100)
    assert counts == [10, 1, 5, 0, 0, 0, 0, 0, 0, 1]
    assert blocks(counts, 100) == "█▁▄······▁"
    assert blocks(tenths(KeptLayer(0, 0, (KeptTokens((0, 2), (0.0, 0.0)),)), 3), 3) == "█·····█···"


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
    "no budget": (["--prompt", "x"], "inspect needs --kv-budget: say how many tokens to keep"),
    "no budget, a score": (["--prompt", "x", "--kv-score", "recent"], "inspect needs --kv-budget"),
    "no prompt": (["--kv-budget", "100"], "no prompt: give --prompt"),
    "score": ([*GOOD, "--kv-score", "nonsense"], "there is no score 'nonsense': choose one of"),
    "budget": (["--prompt", "x", "--kv-budget", "40"], "--kv-budget 40, but 4 sinks and --kv-keep-recent 64 are kept"),
    "bound": ([*GOOD, "--max-kv-size", "99"], "got a budget and --max-kv-size"),
    "layer without text": ([*GOOD, "--layer", "1"], "--layer needs --text"),
    "no such layer": ([*GOOD, "--text", "--layer", "4"], "there is no layer 4 with a budget: give one from 0 to 3"),
    "negative layer": ([*GOOD, "--text", "--layer", "-1"], "there is no layer -1 with a budget"),
    "two answers": ([*GOOD, "--text", "--json", "-"], "--json - and --text both write to stdout"),
    "folder of JSON": ([*GOOD, "--json", "/nowhere/a.json"], "there is no folder /nowhere; make it first"),
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
