"""Models in parts say what the whole model says, and keep the tokens that it keeps, on every rank."""

from __future__ import annotations

import itertools
import json
import os
from typing import Any

import pytest
import split_programs
from launching import run_ranks, succeeded

from mlx_kv.bundled import model_path

THOROUGH = os.environ.get("HYPOTHESIS_PROFILE") == "thorough"
# Several kinds of attention: full and windowed in turn, sinks, latent, recurrent, lists of caches for each layer.
HEADS = "llama qwen3 gpt_oss deepseek_v2 deepseek_v3 longcat_flash minimax_m3_vl qwen3_5 step3p5 glm4_moe".split()
LAYERS = (
    "qwen2 qwen3_moe ministral3 deepseek_v2 deepseek_v3 deepseek_v32 qwen3_next qwen3_5 mistral4 glm4_moe_lite".split()
)
TURNS = ("layer", "bits", "head", "norm", "ring", "random", "plain", "budget and bits")

Told = list[dict[str, Any]]


def told(size: int, program: Any, *arguments: Any) -> list[Told]:
    """What each rank said of each case, case by case."""
    found = succeeded(run_ranks(size, program, *arguments, timeout=240 if THOROUGH else 100))
    lines = [[json.loads(line) for line in each.stdout.splitlines()] for each in found]
    return [list(case) for case in zip(*lines, strict=True)]


def joined(case: Told, split: str) -> list[Any]:
    """What the ranks have left, as one process would have it."""
    parts = [rank["part"]["kept"] for rank in case]
    if split == "layers":
        return list(itertools.chain.from_iterable(reversed(parts)))
    if case[0]["policy"] == "head" and case[0]["part"]["kept"] != case[0]["alone"]["kept"]:
        return [list(itertools.chain.from_iterable(layer)) for layer in zip(*parts, strict=True)]
    assert all(part == parts[0] for part in parts)
    return list(parts[0])


def check(case: Told, split: str) -> None:
    alone, parts = case[0]["alone"], [rank["part"] for rank in case]
    if "refused" in alone:
        assert all(part == alone for part in parts)
        return
    assert all(part["logits"] == parts[0]["logits"] for part in parts)
    assert all(part["tokens"] == alone["tokens"] for part in parts)
    assert joined(case, split) == alone["kept"]


def cases(names: list[str]) -> list[str]:
    """A budget that all layers share for each family, and one more policy in turn."""
    if THOROUGH:
        return [f"{name}:{','.join(split_programs.POLICIES)}" for name in names]
    return [f"{name}:layers,{policy}" for name, policy in zip(names, itertools.cycle(TURNS), strict=False)]


@pytest.mark.parametrize(("split", "names"), [("heads", HEADS), ("layers", LAYERS)])
def test_families(split: str, names: list[str]) -> None:
    asked = cases(names)
    found = told(2, split_programs.families, split, "", *asked)
    assert len(found) == sum(len(case.partition(":")[2].split(",")) for case in asked)
    for case in found:
        check(case, split)
    assert sum("refused" in case[0]["alone"] for case in found) < len(found) / 4


def test_uneven_layers_on_three_ranks() -> None:
    for case in told(3, split_programs.families, "layers", "1,2,1", "qwen3_moe:layers,bits", "deepseek_v2:norm"):
        check(case, "layers")


def test_three_heads_on_three_ranks() -> None:
    for case in told(3, split_programs.three_heads):
        check(case, "heads")


@pytest.mark.parametrize("split", ["heads", "layers"])
def test_whoever_hears_nobody_keeps_other_tokens(split: str) -> None:
    [case] = told(2, split_programs.without_peers, split)
    parts, alone = [rank["part"]["kept"] for rank in case], case[0]["alone"]["kept"]
    assert any(layer not in alone for part in parts for layer in part)


@pytest.mark.parametrize("split", ["heads", "layers"])
def test_a_compaction_is_one_collective_at_the_most(split: str) -> None:
    found = told(2, split_programs.families, split, "", "qwen3_moe:layers,layer,head")
    assert len(found) == 3
    for case in found:
        check(case, split)
        asks = {"layers": True, "layer": split == "heads", "head": False}[case[0]["policy"]]
        for rank in case:
            assert rank["part"]["compactions"] > 5
            assert rank["part"]["collectives"] == (rank["part"]["compactions"] if asks else 0)


def test_a_rank_that_has_windows_alone_is_told() -> None:
    for case in told(2, split_programs.windows_alone):
        if case[0]["policy"] == "layers":
            assert all("a rank has no layer of full attention" in rank["part"]["refused"] for rank in case)
        else:
            check(case, "layers")


@pytest.mark.parametrize(("size", "split", "first"), [(2, "heads", 0), (2, "layers", 100), (3, "layers", 200)])
def test_random_lives_of_rows(size: int, split: str, first: int) -> None:
    """All ranks keep what one process keeps, whatever becomes of the rows."""
    lives = 200 if THOROUGH else 16
    found = told(size, split_programs.random_rows, split, first, first + lives)
    assert len(found) == lives
    for case in found:
        for rank in case:
            assert rank["kept"] == rank["alone"]
    assert sum(case[0]["compactions"] > 1 for case in found) > lives / 2


@pytest.mark.parametrize("split", ["heads", ""])
def test_a_rank_reads_its_part_alone(split: str) -> None:
    """Nothing is ever in memory but the part, and one tensor of the whole."""
    [case] = told(2, split_programs.loading, model_path("reference"), split)
    for rank in case:
        assert rank["split"] == "heads"
        assert rank["part"]["tokens"] == rank["alone"]["tokens"]
        assert rank["held"] < 0.75 * rank["whole"]
        assert rank["peak"] <= rank["held"] + 2.1 * rank["biggest"]
