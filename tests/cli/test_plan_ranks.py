"""`mlx-kv plan --ranks`: the parts of all ranks make up what one process holds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from tiny_models import FAMILIES

from mlx_kv import CachePolicy
from mlx_kv.mlxlm.loading import model_from_config
from mlx_kv.planning import Planner, Ranks, Strategy, of_ranks

QWEN: dict[str, Any] = {**FAMILIES["qwen3"], "model_type": "qwen2", "num_hidden_layers": 4, "hidden_size": 128}


def written(folder: Path) -> Path:
    (folder / "config.json").write_text(json.dumps(QWEN))
    return folder


@pytest.mark.parametrize(("how", "layers"), [(["--split", "heads"], [4, 4]), (["--layers", "1,3"], [1, 3])])
def test_each_rank_has_its_part(how: list[str], layers: list[int], command: Any, tmp_path: Path) -> None:
    folder = written(tmp_path)
    usual = f"plan --model {folder} --context 100,1000 --kv-bits 8 --kv-group-size 32 --json".split()
    alone = json.loads(command(*usual).out)
    told = json.loads(command(*usual, "--ranks", "2", *how).out)
    ranks = told.pop("ranks")
    assert told == alone
    assert ranks["split"] == ("layers" if "--layers" in how else "heads")
    assert [part["layers"] for part in ranks["parts"]] == layers
    held = [part["bytes_held"] for part in ranks["parts"]]
    whole = next(row["bytes_held"] for row in alone["strategies"] if row["name"] == "this policy")
    assert [sum(each) for each in zip(*held, strict=True)] == whole
    assert held[0] == ([count // 2 for count in whole] if "--split" in how else [count // 4 for count in whole])
    assert all(part["weights"] > 0 for part in ranks["parts"])


@pytest.mark.parametrize(("split", "layers"), [("heads", None), ("layers", (1, 3))])
def test_budgets_by_a_table_are_planned_for_each_rank(split: str, layers: tuple[int, ...] | None) -> None:
    """Of layers, each rank has its own rows; of heads, each is planned as the longest of a layer."""
    table = [[3, 0.1], [1, 0.5], [0, 1.4], [0.5, 0.5]]
    policy = CachePolicy(budget=200, keep_recent=32, share="head", layers=table, margin=10)
    strategy = Strategy("table", policy)
    _, parts = of_ranks(QWEN, mx.float32, Ranks(2, split, layers), strategy, [3000])
    (whole,) = Planner(model_from_config(QWEN, mx.float32)).compare([strategy], [3000])
    assert sum(part.bytes_held[0] for part in parts) == whole.bytes_held[0]
    if split == "layers":
        _, equal = of_ranks(QWEN, mx.float32, Ranks(2, split, layers), Strategy("", CachePolicy(budget=200)), [3000])
        assert parts[1].bytes_held[0] > equal[1].bytes_held[0]  # the last rank has the first layers
    with pytest.raises(ValueError, match="has 4 rows, and this model has 3 layers"):
        of_ranks(QWEN | {"num_hidden_layers": 3}, mx.float32, Ranks(2, "layers", (1, 2)), strategy, [3000])


def test_a_table_of_ranks(command: Any, tmp_path: Path) -> None:
    said = command("plan", "--model", str(written(tmp_path)), "--context", "4096", "--ranks", "2").out
    assert "Over 2 ranks, heads split, caches by 'full':" in said
    rows = [line.split() for line in said.splitlines() if line.strip().startswith("rank ")]
    assert [row[1:3] for row in rows] == [["0", "4"], ["1", "4"]]
    assert "embeddings" in said


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--split", "heads"], "--split and --layers are for several ranks: give their number with --ranks"),
        (["--ranks", "2", "--layers", "4,x"], "'x' is not a number of layers: give one for each rank, such as 20,12"),
        (["--ranks", "2", "--layers", "3,3"], "layers are 3,3, but qwen2 has 4"),
        (["--ranks", "3", "--split", "heads"], "4 heads of qwen2 cannot be shared by 3 ranks"),
        (["--ranks", "1"], "Invalid value for '--ranks'"),
    ],
)
def test_ranks_that_do_not_fit(options: list[str], words: str, command: Any, tmp_path: Path) -> None:
    done = command("plan", "--model", str(written(tmp_path)), *options)
    assert done.code == 2
    assert words in " ".join(done.err.split())
