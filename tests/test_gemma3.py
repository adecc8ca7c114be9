"""What `tools/gemma3.py` makes of a GGUF file's arrays and pieces. Nothing is downloaded."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

sys.path.append(str(Path(__file__).parent.parent / "tools"))

import gemma3

from mlx_kv.mlxlm.loading import model_from_config

PIECES = ["<pad>", "<eos>", "<bos>", "<unk>", "<0x41>", "▁", "a", "b", "ab", "▁ab", "▁a", "\n\n", "<0xC3>", "<0xA9>"]
KINDS = [3, 3, 3, 3, 6, 1, 1, 1, 1, 1, 1, 4, 6, 6]
SCORES = [0.0, 0.0, 0.0, 0.0, 0.0, -9.0, -9.0, -9.0, -1.0, -2.0, -3.0, 0.0, 0.0, 0.0]


def test_each_weight_of_the_model_has_a_name() -> None:
    model = model_from_config({**gemma3.CONFIG, "vocab_size": 64}, mx.float32)
    names = {name.removesuffix(".weight") for name, _ in tree_flatten(model.parameters())}
    made = {
        gemma3.mlx_weight(name, np.zeros(1, np.float32))[0].removesuffix(".weight")
        for name in [
            *(f"{name}.weight" for name in gemma3.OUTSIDE),
            *(f"blk.{layer}.{name}.weight" for layer in range(18) for name in gemma3.IN_LAYER),
        ]
    }
    assert made == {name for name in names if name != "lm_head"}


def test_norms_are_one_less() -> None:
    array = np.array([1.0, 1.5], np.float64)
    for name, wanted in (("blk.3.attn_q_norm.weight", [0.0, 0.5]), ("blk.3.attn_q.weight", [1.0, 1.5])):
        _, made = gemma3.mlx_weight(name, array)
        assert made.dtype == mx.float32
        assert made.tolist() == wanted


def test_merges_come_by_score() -> None:
    assert gemma3.merges(PIECES, KINDS, SCORES) == [("a", "b"), ("▁", "ab"), ("▁a", "b"), ("▁", "a")]


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("ab a", ["<bos>", "ab", "▁a"]),
        ("a ab", ["<bos>", "a", "▁ab"]),
        ("a\n\nb", ["<bos>", "a", "\n\n", "b"]),
        ("é<eos>A", ["<bos>", "<0xC3>", "<0xA9>", "<eos>", "<0x41>"]),
    ],
)
def test_texts_become_pieces_and_texts_again(text: str, pieces: list[str]) -> None:
    tokenizer = gemma3.make_tokenizer(PIECES, KINDS, SCORES)
    encoded = tokenizer.encode(text)
    assert [PIECES[number] for number in encoded.ids] == pieces
    assert tokenizer.decode(encoded.ids[1:], skip_special_tokens=False) == text


def test_what_is_not_its_own_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gemma3, "write", lambda work, written: pytest.fail("it was written"))
    (tmp_path / "config.json").write_text(json.dumps({**gemma3.CONFIG, "hidden_size": 1}))
    monkeypatch.setattr(sys, "argv", ["gemma3.py", str(tmp_path)])
    with pytest.raises(SystemExit, match="holds something other than this checkpoint"):
        gemma3.main()


def test_all_files_are_moved_into_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def write(work: Path, written: Path) -> None:
        for name in gemma3_files:
            (written / name).write_text(json.dumps(gemma3.CONFIG))

    gemma3_files = ("config.json", "tokenizer_config.json", "tokenizer.json", "model.safetensors")
    monkeypatch.setattr(gemma3, "write", write)
    monkeypatch.setattr(sys, "argv", ["gemma3.py", str(tmp_path / "out")])
    for _ in range(2):  # also over its own
        gemma3.main()
        assert {path.name for path in (tmp_path / "out").iterdir()} == set(gemma3_files)
    assert {path.name for path in tmp_path.iterdir()} == {"out"}
