"""What `tools/smollm2.py` makes of a GGUF file's arrays, and what it refuses to write over. Nothing is downloaded."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

sys.path.append(str(Path(__file__).parent.parent / "tools"))

import smollm2

# --- rotary rows --------------------------------------------------------------------------------------------------


@given(heads=st.integers(1, 5), half=st.integers(1, 8), columns=st.integers(1, 3))
def test_pairs_become_halves_row_by_row(heads: int, half: int, columns: int) -> None:
    stored = np.random.default_rng(0).integers(0, 2**32, (heads * 2 * half, columns), dtype=np.uint32)
    wanted = np.zeros_like(stored)
    for head in range(heads):
        first = head * 2 * half
        for i in range(half):
            wanted[first + i] = stored[first + 2 * i]
            wanted[first + half + i] = stored[first + 2 * i + 1]
    assert np.array_equal(np.array(smollm2.undo_interleaving(mx.array(stored), heads)), wanted)


def test_attention_is_that_of_interleaved_embeddings() -> None:
    """Scores of stored rows with interleaved rotary embeddings are those of the rows undone, with mlx-lm's."""
    heads, size, width, length = 3, 8, 16, 5
    mx.random.seed(0)
    tokens, *stored = (mx.random.normal(shape) for shape in ((length, width), *2 * ((heads * size, width),)))

    def scores(matrices: list[mx.array], interleaved: bool) -> mx.array:
        turned = []
        for matrix in matrices:
            rows = (tokens @ matrix.T).reshape(1, length, heads, size).swapaxes(1, 2)  # (1, heads, length, size)
            turned.append(mx.fast.rope(rows, size, traditional=interleaved, base=100.0, scale=1.0, offset=0))
        return turned[0] @ turned[1].swapaxes(-1, -2)

    undone = [smollm2.undo_interleaving(matrix, heads) for matrix in stored]
    assert mx.allclose(scores(undone, False), scores(stored, True), rtol=1e-4, atol=1e-4)
    assert not mx.allclose(scores(stored, False), scores(stored, True), rtol=1e-1, atol=1e-1)


# --- arrays -------------------------------------------------------------------------------------------------------


def gguf_arrays() -> dict[str, mx.array]:
    """One of each kind: 9 heads of 4, 64 columns; queries in 4 bits, embeddings in 8, a norm as it is."""
    mx.random.seed(1)
    arrays = {"blk.7.attn_norm.weight": mx.random.normal((64,))}
    for name, rows, bits in (("blk.7.attn_q", 36, 4), ("blk.7.ffn_up", 10, 4), ("token_embd", 10, 8)):
        packed = mx.quantize(mx.random.normal((rows, 64)).astype(mx.float16), group_size=32, bits=bits)
        arrays |= {f"{name}.{part}": array for part, array in zip(("weight", "scales", "biases"), packed, strict=True)}
    return arrays


def test_both_formats_are_one_model() -> None:
    full, (packed, quantization) = smollm2.in_float32(gguf_arrays()), smollm2.as_quantised(gguf_arrays())
    names = {
        "model.embed_tokens": 8,
        "model.layers.7.input_layernorm": None,
        "model.layers.7.mlp.up_proj": 4,
        "model.layers.7.self_attn.q_proj": 4,
    }
    assert set(full) == {f"{name}.weight" for name in names}
    for name, bits in names.items():
        weight = packed[f"{name}.weight"]
        if bits is None:
            assert name not in quantization
        else:
            assert quantization[name] == {"group_size": 32, "bits": bits}
            rest = packed[f"{name}.scales"], packed[f"{name}.biases"]
            weight = mx.dequantize(weight, *rest, group_size=32, bits=bits).astype(mx.float32)
        assert full[f"{name}.weight"].dtype == mx.float32
        assert mx.array_equal(full[f"{name}.weight"], weight)


def test_only_rows_of_queries_and_keys_move() -> None:
    given, made = gguf_arrays(), smollm2.as_quantised(gguf_arrays())[0]
    assert mx.array_equal(made["model.layers.7.mlp.up_proj.weight"], given["blk.7.ffn_up.weight"])
    for part in ("weight", "scales", "biases"):
        moved = smollm2.undo_interleaving(given[f"blk.7.attn_q.{part}"], 9)
        assert mx.array_equal(made[f"model.layers.7.self_attn.q_proj.{part}"], moved)
        assert not mx.array_equal(moved, given[f"blk.7.attn_q.{part}"])


# --- where it goes ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", [smollm2.CONFIG, {**smollm2.CONFIG, "quantization": {"bits": 4}}])
def test_writes_over_its_own_result(tmp_path: Path, config: dict[str, object]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    smollm2.check_out(tmp_path)
    (tmp_path / "model.safetensors").touch()
    smollm2.check_out(tmp_path)


def test_writes_where_nothing_is(tmp_path: Path) -> None:
    smollm2.check_out(tmp_path)
    smollm2.check_out(tmp_path / "not" / "there")


@pytest.mark.parametrize(
    "files",
    [
        {"notes.txt": ""},
        {"config.json": json.dumps({**smollm2.CONFIG, "hidden_size": 577})},
        {"config.json": "[]"},
        {"config.json": "no JSON"},
        {"model.safetensors": ""},
        {"config.json": json.dumps(smollm2.CONFIG), "notes.txt": ""},
    ],
)
def test_refuses_what_is_not_its_own(tmp_path: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(SystemExit, match=r"holds something other .*: name a folder that is empty"):
        smollm2.make(tmp_path, None)
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == files


def test_refuses_a_file(tmp_path: Path) -> None:
    (tmp_path / "out").touch()
    with pytest.raises(SystemExit, match=r"is a file: name a folder"):
        smollm2.make(tmp_path / "out", None)
