"""Which models can be split over how many ranks, and what is said of others: from numbers alone, so on every rank."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from tiny_models import COMMON, FAMILIES

from mlx_kv import make_prompt_cache
from mlx_kv.bundled import model_path
from mlx_kv.mlxlm.loading import model_from_config, weights_of
from mlx_kv.mlxlm.probe import cached_per_model, copy_results
from mlx_kv.ranks.splitting import PlannedRank, check_split, cut, part_of, planned_part

LLAMA: dict[str, Any] = {**COMMON, "model_type": "llama"}
QWEN: dict[str, Any] = {**COMMON, "model_type": "qwen2"}
LATENT: dict[str, Any] = {**FAMILIES["deepseek_v3"], "model_type": "deepseek_v3"}


def test_the_default_is_what_the_model_offers() -> None:
    reference = json.loads((Path(model_path("reference")) / "config.json").read_text())
    assert check_split(reference, 2) == "heads"
    assert check_split(LLAMA, 2) == "heads"
    assert check_split(QWEN, 3) == "layers"  # 2 heads don't divide
    assert check_split(QWEN, 2, layers=(1, 2)) == "layers"
    assert check_split(LATENT, 4) == "heads"  # heads share keys and values: every rank has them


@pytest.mark.parametrize(
    ("config", "size", "how", "words"),
    [
        (LLAMA, 4, {}, "2 key/value heads of llama cannot be shared by 4 ranks: use a number of ranks that divides"),
        (LLAMA, 3, {}, "4 heads of llama cannot be shared by 3 ranks"),
        # mlx-lm itself would run it, and say something else
        (
            {**LLAMA, "num_attention_heads": 3, "num_key_value_heads": 3},
            2,
            {},
            "3 heads of llama cannot be shared by 2",
        ),
        (LLAMA, 2, {"split": "layers"}, "mlx-lm cannot split the layers of llama: use split='heads'"),
        (LLAMA, 2, {"layers": (1, 2)}, "mlx-lm cannot split the layers of llama: use split='heads'"),
        (LLAMA, 2, {"split": "heads", "layers": (1, 2)}, "layers are those of each rank, but heads are split"),
        (LLAMA, 2, {"split": "tokens"}, "split is 'tokens': choose one of heads, layers"),
        ({**COMMON, "model_type": "gemma2"}, 2, {}, "mlx-lm cannot split gemma2: run it on one machine"),
        ({**LLAMA, "intermediate_size": 33}, 2, {}, "llama cannot be split over 2 ranks: Cannot shard"),
        (
            {**LLAMA, "intermediate_size": 96, "quantization": {"group_size": 32, "bits": 4}},
            2,
            {},
            "llama cannot be split over 2 ranks: ",
        ),
        (QWEN, 4, {"split": "layers"}, "3 layers of qwen2 cannot be shared by 4 ranks: use 3 ranks at the most"),
        (QWEN, 2, {"layers": (1, 1, 1)}, "layers are 1,1,1, but there are 2 ranks: give a number for each"),
        (QWEN, 2, {"layers": (2, 2)}, "layers are 2,2, but qwen2 has 3: give each rank one at least, and 3 in all"),
        (QWEN, 2, {"layers": (3, 0)}, "layers are 3,0, but qwen2 has 3: give each rank one at least"),
    ],
)
def test_what_does_not_fit_is_refused_in_one_line(
    config: dict[str, Any], size: int, how: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(words)) as caught:
        check_split(config, size, **how)
    assert "\n" not in str(caught.value)


def test_every_rank_says_the_same_line() -> None:
    said = set()
    for rank in range(2):
        model = model_from_config({**LLAMA, "num_attention_heads": 3, "num_key_value_heads": 3}, mx.float32)
        with pytest.raises(ValueError, match="cannot be shared") as caught:
            cut(model, PlannedRank(rank, 2), "heads")
        said.add(str(caught.value))
    assert len(said) == 1


@pytest.mark.parametrize("bits", [None, 4])
@pytest.mark.parametrize(("config", "split"), [(LLAMA, "heads"), (QWEN, "heads"), (QWEN, "layers")])
def test_parts_make_up_the_whole(config: dict[str, Any], split: Any, bits: int | None) -> None:
    """In bytes, but for what every rank has: embeddings, norms, and biases that are added once."""
    config = {**config, "hidden_size": 256, "intermediate_size": 512, "tie_word_embeddings": False}
    if bits is not None:
        config["quantization"] = {"group_size": 32, "bits": bits}
    parts = [planned_part(config, mx.float16, PlannedRank(rank, 2), split) for rank in range(2)]
    whole = planned_part(config, mx.float16, PlannedRank(0, 1), split)
    sizes = [sum(weight.nbytes for weight in weights_of(model)) for model in (*parts, whole)]
    embeddings = sum(w.nbytes for module in (whole.model.embed_tokens, whole.lm_head) for w in weights_of(module))
    assert embeddings <= sizes[0] + sizes[1] - sizes[2] <= 1.2 * embeddings
    slots = [sum(cache.keys.nbytes for cache in _read(model)) for model in (*parts, whole)]
    assert slots[0] + slots[1] == slots[2]
    assert all(part_of(model) is None for model in parts)


def _read(model: Any) -> list[Any]:
    caches = make_prompt_cache(model)
    model(mx.array([[0]]), cache=caches)
    return caches


def test_a_part_answers_as_the_whole_did() -> None:
    asked: list[int] = []

    @cached_per_model
    def layers(model: Any) -> int:
        asked.append(len(model.layers))
        return asked[-1]

    whole, part = (model_from_config(QWEN, mx.float32) for _ in range(2))
    copy_results(part, whole, layers)
    cut(part, PlannedRank(0, 2), "layers")
    assert len(part.layers) == 2
    assert layers(part) == layers(whole) == 3
    assert asked == [3]
