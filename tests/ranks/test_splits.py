"""Models in parts say what the whole model says, and keep the tokens that it keeps, on every rank."""

from __future__ import annotations

import itertools
import json
import shutil
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
import split_programs  # it says where families are
from effort import THOROUGH
from families import configuration
from launching import run_ranks, succeeded
from mlx.utils import tree_flatten

from mlx_kv.bundled import model_path
from mlx_kv.mlxlm.loading import model_from_config

# Several kinds of attention: full and windowed in turn, sinks, latent, recurrent, lists of caches for each layer.
HEADS = "llama qwen3 deepseek_v3 deepseek_v2 gpt_oss longcat_flash minimax_m3_vl qwen3_5 step3p5 glm4_moe".split()
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
    if case[0]["policy"].startswith("head") and case[0]["part"]["kept"] != case[0]["alone"]["kept"]:
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
        return [f"{name}:{','.join(split_programs.POLICIES)}" for name in ("qwen2/4", *names)]
    return [
        "qwen2/4:layers",
        *(f"{name}:layers,{turn}" for name, turn in zip(names, itertools.cycle(TURNS), strict=False)),
    ]


@pytest.mark.parametrize(("split", "names"), [("heads", HEADS), ("layers", LAYERS)])
@pytest.mark.slow
def test_families(split: str, names: list[str]) -> None:
    asked = cases(names)
    found = told(2, split_programs.families, split, "", *asked)
    assert len(found) == sum(len(case.partition(":")[2].split(",")) for case in asked)
    for case in found:
        check(case, split)
    assert sum("refused" in case[0]["alone"] for case in found) < len(found) / 4
    copies = {case[0]["family"] for case in found if case[0]["copies"]}
    assert copies == ({"deepseek_v3", "longcat_flash"} if split == "heads" else set())


@pytest.mark.parametrize("split", ["heads", "layers"])
@pytest.mark.slow
def test_scores_that_look_at_attention(split: str) -> None:
    for case in told(2, split_programs.families, split, "", "qwen2/4:snap_kv,tova"):
        check(case, split)
        assert not any("refused" in rank["alone"] for rank in case), "they are kept, and not refused alike"


@pytest.mark.slow
def test_uneven_layers_on_three_ranks() -> None:
    for case in told(3, split_programs.families, "layers", "1,2,1", "qwen3_moe:layers,bits", "deepseek_v2:norm"):
        check(case, "layers")


@pytest.mark.slow
def test_three_heads_on_three_ranks() -> None:
    for case in told(3, split_programs.three_heads):
        check(case, "heads")


@pytest.mark.parametrize(("size", "split", "layers"), [(2, "heads", ""), (2, "layers", "1,3"), (3, "layers", "1,2,1")])
@pytest.mark.slow
def test_budgets_of_heads_and_layers_by_a_table(size: int, split: str, layers: str) -> None:
    """Each rank has the rows or columns of its part; what needs more than that is refused by name."""
    found = {case[0]["policy"]: case for case in told(size, split_programs.tables, split, layers)}
    assert len(found) == 10
    refused = {}
    if split == "heads":
        adaptive = {f"adaptive, {score}": "share='adaptive' compares" for score in ("key_diff", "key_norm")}
        refused |= adaptive | dict.fromkeys(
            ("fitted", "fitted, layers"), "score='fitted' reads the keys and values of all"
        )
    for name, case in found.items():
        if name in refused:
            assert all(refused[name] in rank["part"]["refused"] for rank in case)
            continue
        check(case, split)
        if name == "head, more rows":
            assert "has 5 rows, and this model has 4 layers" in case[0]["alone"]["refused"]
            continue
        lengths = [len(head) for layer in case[0]["alone"]["kept"] for head in layer]
        assert len(set(lengths)) > 1 or name == "fitted, layers"
        assert case[0]["part"]["compactions"] > 2


@pytest.mark.parametrize("split", ["heads", "layers"])
@pytest.mark.slow
def test_a_compaction_is_one_collective_at_the_most(split: str) -> None:
    """And without it, other tokens are left than one process would leave."""
    *found, unheard = told(2, split_programs.unheard, split)
    assert len(found) == 3
    for case in found:
        check(case, split)
        asks = {"layers": True, "layer": split == "heads", "head": False}[case[0]["policy"]]
        for rank in case:
            assert rank["part"]["compactions"] > 3
            assert rank["part"]["collectives"] == (rank["part"]["compactions"] if asks else 0)
    kept = [rank["part"]["kept"] for rank in unheard]
    assert any(layer not in unheard[0]["alone"]["kept"] for part in kept for layer in part)


@pytest.mark.slow
def test_what_is_heard_is_in_the_order_of_one_process() -> None:
    """Or the last bits of sums would be others."""
    assert told(3, split_programs.order) == [[{"heads": True}] * 3, [{"rows": 1}] * 3, [{"layers": True}] * 3]


@pytest.mark.slow
def test_a_rank_that_has_windows_alone_is_told() -> None:
    for case in told(2, split_programs.windows_alone):
        if case[0]["policy"] == "layers":
            assert all("a rank has no layer of full attention" in rank["part"]["refused"] for rank in case)
        else:
            check(case, "layers")


@pytest.mark.parametrize(
    ("size", "split", "first"), [(2, "heads", 0), (2, "layers", 100), (3, "layers", 200), (2, "copies", 300)]
)
@pytest.mark.slow
def test_random_lives_of_rows(size: int, split: str, first: int) -> None:
    """All ranks keep what one process keeps, whatever becomes of the rows; of copies, what the first would keep."""
    lives = 200 if THOROUGH else 14 - 3 * size  # three ranks on two cores take long
    found = told(size, split_programs.random_rows, split, first, first + lives)
    assert len(found) == lives
    for case in found:
        for rank in case:
            assert rank["kept"] == rank["alone"]
    assert sum(case[0]["compactions"] > 1 for case in found) > lives / 2


@pytest.fixture(scope="module")
def several_layers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that can be split by layers, in 16 bits, on disk."""
    folder, reference = tmp_path_factory.mktemp("model"), Path(model_path("reference"))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(reference / name, folder)
    sizes = {"vocab_size": 8000, "hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 5}
    config = configuration("qwen2") | sizes
    model = model_from_config(config, mx.float16)
    mx.save_safetensors(str(folder / "model.safetensors"), dict(tree_flatten(model.parameters())))
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(("split", "layers"), [("", ""), ("layers", "1,4")])
@pytest.mark.slow
def test_a_rank_reads_its_part_alone(split: str, layers: str, several_layers: Path) -> None:
    """Nothing is ever in memory but the part, and one tensor of the whole."""
    path = several_layers if layers else model_path("reference")
    [case] = told(2, split_programs.loading, path, split, layers)
    for rank in case:
        assert rank["split"] == (split or "heads")
        assert rank["part"]["tokens"] == rank["alone"]["tokens"]
        assert rank["peak"] <= rank["held"] + rank["biggest"]
    held, whole = [rank["held"] for rank in case], case[0]["whole"]
    assert held[1] > 1.3 * held[0] if layers else held[0] == held[1]
    assert sum(held) < 1.4 * whole  # embeddings are on both
