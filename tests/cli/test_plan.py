"""`mlx-kv plan`: what a plan says is what caches hold, no weight is made, and bad input is one line."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models import cache as stock
from tiny_models import FAMILIES, VOCAB, make_model

from mlx_kv.cli import generate as generate_command
from mlx_kv.mlxlm.convert import make_prompt_cache
from mlx_kv.mlxlm.loading import model_from_config, parse_config
from mlx_kv.mlxlm.traverse import leaves
from mlx_kv.planning import Planner, Strategy, strategies
from mlx_kv.plots import memory_against_context
from mlx_kv.policy import CachePolicy

# The shape that is published for the model of 31 billion weights: 50 layers of 16 KV heads x 256 with a window of
# 1,024, and 10 of 4 KV heads x 512. mlx-lm looks at the 4 only where keys and values come from one projection.
GEMMA4: dict[str, Any] = {
    "model_type": "gemma4",
    "dtype": "bfloat16",
    "vocab_size": 262144,
    "text_config": {
        "model_type": "gemma4_text",
        "hidden_size": 5376,
        "intermediate_size": 21504,
        "num_hidden_layers": 60,
        "num_attention_heads": 32,
        "num_key_value_heads": 16,
        "head_dim": 256,
        "num_global_key_value_heads": 4,
        "global_head_dim": 512,
        "attention_k_eq_v": True,
        "num_kv_shared_layers": 0,
        "hidden_size_per_layer_input": 0,
        "use_double_wide_mlp": False,
        "sliding_window": 1024,
        "sliding_window_pattern": 6,
    },
}


def write_config(folder: Path, config: dict[str, Any]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


# --- figures that are known ---------------------------------------------------------------------------------------


def test_the_published_figures_of_a_large_model(tmp_path: Path, command: Any) -> None:
    done = command(
        "plan", "--model", write_config(tmp_path / "g4", GEMMA4), "--max-write", "256", "--dtype", "bfloat16"
    )
    assert done.code == 0
    assert done.err == ""
    words = [line.split() for line in done.out.splitlines()]
    for row in (
        "GiB at tokens 4,096 32,768 131,072",
        "full 3.44 27.50 110.00",
        "double window 1.88 4.06 11.56",
        "window + max_write - 1 1.29 3.48 10.98",
        "this policy 1.29 3.48 10.98",
        "50 sliding, window 1,024: 16 heads x 256 + 256, 16,384 bytes a token",
        "10 full: 4 heads x 512 + 512, 8,192 bytes a token",
    ):
        assert row.split() in words


def test_numbers_that_json_has_no_names_for_are_read() -> None:
    config = '{"a": {"__float__": "Infinity"}, "b": [{"__float__": "-Infinity"}], "c": {"__float__": 1, "d": 2}}'
    assert parse_config(config) == {"a": math.inf, "b": [-math.inf], "c": {"__float__": 1, "d": 2}}
    assert math.isnan(parse_config('{"__float__": "NaN"}'))


def test_json_has_exact_bytes(tmp_path: Path, command: Any) -> None:
    folder = write_config(tmp_path / "g4", GEMMA4)
    options = ("--max-write", "256", "--context", "4096,131072", "--batch-size", "3", "--dtype", "bfloat16", "--json")
    answer = json.loads(command("plan", "--model", folder / "config.json", *options).out)
    held = {row["name"]: row["bytes_held"] for row in answer["strategies"]}
    sliding, full = 50 * 16 * 512 * 2, 10 * 4 * 1024 * 2  # bytes of one token
    assert held["full"] == [3 * n * (sliding + full) for n in (4096, 131072)]
    assert held["double window"] == [3 * (2048 * sliding + n * full) for n in (4096, 131072)]
    assert held["window + max_write - 1"] == [3 * (1279 * sliding + n * full) for n in (4096, 131072)]
    packed = held["window + max_write - 1, 8 bits"]  # 8 bits, and 2 x 16 for each group of 64
    assert packed == [3 * (1279 * sliding + n * full) * 17 // 32 for n in (4096, 131072)]
    apart = held["window + max_write - 1, K8V4"]  # 17 and 9 of 32 for keys and values, which are as wide
    assert apart == [3 * (1279 * sliding + n * full) * 13 // 32 for n in (4096, 131072)]
    assert answer["contexts"] == [4096, 131072]
    assert [layer["caches"] for layer in answer["layers"]] == [50, 10]


@pytest.mark.slow
def test_nothing_is_evaluated() -> None:
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    planner = Planner(model_from_config(GEMMA4, mx.bfloat16))
    rows = planner.compare(strategies(CachePolicy(bits=8, max_kv_size=8192)), [4096, 131072])
    assert not any(row.refused for row in rows)
    assert mx.get_peak_memory() - before < 1e6  # the weights would be 60e9


def test_layers_that_share_keys_and_values_are_counted_once() -> None:
    sizes = {"hidden_size": 64, "num_hidden_layers": 10, "intermediate_size": 64, "vocab_size": VOCAB}
    config = {"model_type": "gemma4_text", **sizes, "num_kv_shared_layers": 4, "vocab_size_per_layer_input": VOCAB}
    layers = Planner(model_from_config(config, mx.float32)).layers(CachePolicy())
    assert [layer.kind for layer in layers] == ["sliding"] * 4 + ["full"] + ["sliding"]


# --- a plan is what caches hold -----------------------------------------------------------------------------------


def run_tokens(model: nn.Module, policy: CachePolicy, tokens: int, chunk: int) -> list[Any]:
    """Caches that have read a prompt in chunks, and decoded as many tokens as they can take back."""
    caches = make_prompt_cache(model, policy, strict=False)
    ids = mx.random.randint(0, VOCAB, (1, tokens))
    alone = max(0, tokens - policy.max_rollback)
    for first in (*range(0, alone, chunk), *range(alone, tokens)):
        mx.eval(model(ids[:, first : min(first + chunk, alone) if first < alone else first + 1], cache=caches))
    return caches


def bytes_in_use(caches: list[Any]) -> int:
    """Of all slots that hold something, from the arrays of caches that were really written to."""
    total = 0
    for cache in leaves(caches):
        if isinstance(cache, stock.ArraysCache):
            total += cache.nbytes
            continue
        per_slot, rest = divmod(cache.nbytes - cache.nbytes_residual, cache.capacity)
        assert rest == 0
        written = (cache.keys != 0).any(axis=(0, 1, 3))  # buffers begin as zeros
        total += per_slot * int(written.sum().item()) + cache.nbytes_residual
    return total


CHUNK = 8
POLICIES = {
    "plain": CachePolicy(max_write=CHUNK),
    "8 bits": CachePolicy(max_write=CHUNK, bits=8, group_size=32),
    "bits apart": CachePolicy(max_write=CHUNK, bits=(8, 4), group_size=32),
    "the newest as they came": CachePolicy(max_write=CHUNK, bits=4, group_size=32, residual_length=20),
    "rotated": CachePolicy(max_write=CHUNK, bits=4, group_size=32, codec="rotated"),
    "mxfp8 and plain": CachePolicy(max_write=CHUNK, codec=("mxfp8", "plain")),
    "bounded": CachePolicy(max_write=CHUNK, max_kv_size=20),
    "rollback, 4 bits": CachePolicy(max_write=CHUNK, max_rollback=11, bits=4, group_size=32),
}


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gpt_oss", "llama4", "deepseek_v3", "lfm2", "falcon_h1"])
def test_a_plan_is_what_caches_hold(family: str, name: str) -> None:
    policy, model = POLICIES[name], make_model(family)
    planner = Planner(model_from_config({"model_type": family, **FAMILIES[family]}, mx.float32))
    for tokens in (6, 20, 48)[policy.max_rollback > 0 :]:
        planned = planner.bytes_held(Strategy("this policy", policy), tokens)
        assert planned == bytes_in_use(run_tokens(model, policy, tokens, CHUNK))


@pytest.mark.parametrize("residual_length", [0, 20])
def test_quantisation_that_starts_late_is_planned_late(residual_length: int) -> None:
    policy = CachePolicy(bits=8, group_size=32, quantized_start=16, residual_length=residual_length)
    model = make_model("llama")
    planner, strategy = Planner(model), Strategy("this policy", policy)
    for tokens in (15, 16, 17, 30):
        assert planner.bytes_after(strategy, tokens) == bytes_in_use(run_tokens(model, policy, tokens, 1))
    assert planner.bytes_after(strategy, 17) < planner.bytes_after(strategy, 16)
    assert planner.bytes_held(strategy, 17) > planner.bytes_held(strategy, 16)  # before that, with slots for all


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_has_a_plan(family: str) -> None:
    planner = Planner(model_from_config({"model_type": family, **FAMILIES[family]}, mx.bfloat16))
    rows = planner.compare(strategies(CachePolicy(group_size=32)), [10, 1000])
    held = {row.name: row.bytes_held for row in rows}
    assert all(0 < few < many for few, many in held.values())
    fewer = [held[f"window + max_write - 1, {how}"] for how in ("4 bits", "K8V4", "8 bits")]
    assert fewer[0] < fewer[1] < fewer[2] < held["full"]
    assert not [layer for layer in planner.layers(CachePolicy()) if layer.kind.startswith("not planned")]


def test_what_head_dims_refuse_is_said_in_its_row(tmp_path: Path, command: Any) -> None:
    folder = write_config(tmp_path / "tiny", {"model_type": "llama", **FAMILIES["llama"]})
    done = command("plan", "--model", folder)
    assert done.code == 0
    assert "full, 8 bits" in done.out  # a model without windows has no rows for them
    assert "window" not in done.out
    assert "keys have head dim 32, not a multiple of --kv-group-size 64; use --kv-group-size 32" in done.out


def test_a_cache_that_nobody_knows_is_listed_and_counts_nothing() -> None:
    class Strange(nn.Module):
        def make_cache(self) -> list[Any]:
            return [stock.ConcatenateKVCache(), stock.KVCache()]

        def __call__(self, tokens: mx.array, cache: list[Any]) -> mx.array:
            return tokens

    planner = Planner(Strange())
    kinds = [layer.kind for layer in planner.layers(CachePolicy())]
    assert kinds == ["not planned: ConcatenateKVCache", "not planned: KVCache"]
    assert {row.bytes_held for row in planner.compare(strategies(CachePolicy()), [100])} == {(0,)}


# --- where a config comes from ------------------------------------------------------------------------------------


def test_a_bundled_model_has_a_plan(command: Any) -> None:
    done = command("plan", "--model", "reference", "--kv-bits", "8", "--max-kv-size", "300")
    assert done.code == 0
    assert "reference (llama), keys and values in float32" in done.out
    assert "this policy: CachePolicy(bits=8, max_kv_size=300)" in done.out
    assert "Not included: activations" in done.out


def test_weights_and_what_a_limit_leaves_beside_them(command: Any, reference: Any) -> None:
    parameters: Any = reference[0].parameters
    weights = sum(array.nbytes for _, array in tree_flatten(parameters()))
    of_a_token = 4 * 2 * 2 * 64 * 4  # layers, keys and values, heads, channels, bytes of float32
    said = command("plan", "--model", "reference", "--memory-limit", "100MB").out
    left = 10**8 - weights
    assert f"Weights take {weights / 1e6:.2f} MB; a limit of 100.00 MB leaves {left / 1e6:.2f} MB for requests" in said
    assert f" and cached prompts: {left // of_a_token:,} tokens.\n" in said
    facts = json.loads(command("plan", "--model", "reference", "--memory-limit", "100MB", "--json").out)
    assert f"{facts['tokens_in_limit']:,} tokens" in said
    assert facts["tokens_in_limit"] == (100_000_000 - facts["weights"]) // facts["bytes_per_token"]
    small = command("plan", "--model", "reference", "--memory-limit", "5MB").out
    assert f"Weights take {weights / 1e6:.2f} MB, more than the limit of 5.00 MB.\n" in small


# What is said, and the policy that it is: two words for one thing are one, and codecs are told by their names.
SAID = {
    ("--kv-bits", "8,4"): "bits=(8, 4)",
    ("--kv-bits", "8,8"): "bits=8",
    ("--kv-bits", "8,4", "--kv-rotate"): "bits=(8, 4), codec='rotated'",
    ("--kv-bits", "4", "--kv-codec", "rotated"): "bits=4, codec='rotated'",
    ("--kv-bits", "4", "--kv-residual", "64"): "bits=4, residual_length=64",
    ("--kv-bits", "8,none", "--kv-rotate"): "bits=(8, None), codec=('rotated', 'plain')",
    ("--kv-codec", "mxfp8"): "codec='mxfp8'",
    ("--kv-codec", "mxfp8,mxfp4"): "codec=('mxfp8', 'mxfp4')",
}


@pytest.mark.parametrize("options", SAID, ids=" ".join)
def test_a_plan_says_how_keys_and_values_are_stored(options: tuple[str, ...], command: Any) -> None:
    done = command("plan", *GOOD, "--context", "64", *options)
    assert f"\nthis policy: CachePolicy({SAID[options]})\n" in done.out


def test_of_a_hub_id_only_the_config_is_fetched(tmp_path: Path, command: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    folder, asked = write_config(tmp_path / "hub", GEMMA4), []

    def fetch(repository: str, file: str) -> str:
        asked.append((repository, file))
        return str(folder / file)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", fetch)
    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", lambda url, timeout: None)  # it is there
    assert "org/model (gemma4)" in command("plan", "--model", "org/model").out
    assert asked == [("org/model", "config.json")]


@pytest.mark.parametrize("environment", [{"HF_HUB_OFFLINE": "1"}, {"HF_ENDPOINT": "http://127.0.0.1:9"}])
@pytest.mark.slow
def test_no_network_is_one_line(environment: dict[str, str], tmp_path: Path) -> None:
    """Where nobody answers, too: no line for each of five retries, which take half a minute."""
    arguments = [sys.executable, "-m", "mlx_kv.cli", "plan", "--model", "nobody/nothing"]
    done = subprocess.run(arguments, capture_output=True, text=True, env={"HOME": str(tmp_path), **environment})
    assert done.returncode == 2
    assert done.stderr.startswith("mlx-kv: error: cannot fetch config.json of nobody/nothing from the hub: ")
    assert done.stderr.count("\n") == 1


# --- bad input ----------------------------------------------------------------------------------------------------

GOOD = ["--model", "reference"]
BAD: dict[str, tuple[list[str], str]] = {
    "no model": ([], "Missing option '--model'"),
    "folder without config": (["--model", "{empty}"], "has no config.json"),
    "no such model": (["--model", "nowhere"], "neither a directory, a config.json, nor a hub id"),
    "nowhere on the disk": (["--model", "/nowhere/config.json"], "neither a directory, a config.json, nor a hub id"),
    "malformed": (["--model", "{malformed}"], "is not JSON (Expecting"),
    "binary": (["--model", "{binary}"], "is not JSON"),
    "a list": (["--model", "{list}"], "holds no JSON object"),
    "no type": (["--model", "{untyped}"], 'this config.json has no "model_type"'),
    "unknown type": (["--model", "{unknown}"], "Model type frobnicate not supported"),
    "a module that is no model": (["--model", "{module}"], "mlx-lm cannot build a model from this config.json"),
    "lacking": (["--model", "{lacking}"], "mlx-lm cannot build a model from this config.json: TypeError"),
    "senseless": (["--model", "{senseless}"], "mlx-lm cannot build a model from this config.json: ZeroDivisionError"),
    "code of its own": (["--model", "{custom}"], "needs code of its own (model.py)"),
    "context 0": ([*GOOD, "--context", "0"], "'0' is not a context: give tokens from 1 up"),
    "context negative": ([*GOOD, "--context", "-5"], "'-5' is not a context"),
    "context in words": ([*GOOD, "--context", "4096,abc"], "'abc' is not a context"),
    "context empty": ([*GOOD, "--context", "4096,"], "'' is not a context"),
    "context huge": ([*GOOD, "--context", "9" * 5000], "is not a context"),
    "batch": ([*GOOD, "--batch-size", "0"], "0 is not in the range"),
    "dtype": ([*GOOD, "--dtype", "int8"], "'int8' is not one of"),
    "bits": ([*GOOD, "--kv-bits", "7"], "error: --kv-bits 7: "),
    "group and head dim": ([*GOOD, "--kv-bits", "8", "--kv-group-size", "128"], "head dim 64, not a multiple"),
    "no windows": ([*GOOD, "--max-write", "9"], "no layer of this model can honour --max-write: "),
    "folder of the figure": ([*GOOD, "--plot", "/nowhere/a.png"], "there is no folder /nowhere; make it first"),
    "kind of figure": ([*GOOD, "--plot", "a.xyz"], "give a file that ends in .png, .svg, .pdf"),
    "no kind of figure": ([*GOOD, "--plot", "figure"], "give a file that ends in .png, .svg, .pdf"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_line_and_exit_code_2(case: str, tmp_path: Path, command: Any) -> None:
    llama = {"model_type": "llama", **FAMILIES["llama"]}
    files = {
        "malformed": b'{"model_type": ',
        "binary": b"\xff\xfe\x00",
        "list": b"[]",
        "untyped": b"{}",
        "unknown": b'{"model_type": "frobnicate"}',
        "module": b'{"model_type": "cache"}',
        "lacking": b'{"model_type": "llama"}',
        "senseless": json.dumps({**llama, "num_attention_heads": 0, "head_dim": None}).encode(),
        "custom": json.dumps({**llama, "model_file": "model.py"}).encode(),
    }
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    (tmp_path / "empty").mkdir()
    arguments, message = BAD[case]
    places = {name: str(tmp_path / name) for name in (*files, "empty")}
    done = command("plan", *(a.format(**places) for a in arguments))
    assert done.code == 2, done.err
    assert message in done.err
    assert done.err.startswith("mlx-kv: error: ")
    assert done.err.count("\n") == 1
    assert done.out == ""


def test_without_matplotlib_the_extra_is_named(command: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("mlx_kv.plots",):
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib.axes", None)
    done = command("plan", *GOOD, "--plot", tmp_path / "a.png")
    assert done.code == 2
    assert done.err == 'mlx-kv: error: --plot needs matplotlib: pip install "mlx-kv[plot]"\n'


# --- the figure ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_figure_is_written(command: Any, tmp_path: Path) -> None:
    folder = write_config(tmp_path / "g4", GEMMA4)
    for context in ("4096,32768,131072", "1", "5,6,7,8,4000"):
        done = command("plan", "--model", folder, "--context", context, "--plot", tmp_path / "a.png")
        assert done.code == 0
        assert done.err == f"mlx-kv: wrote {tmp_path / 'a.png'}\n"
        assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    (tmp_path / "b.png").mkdir()
    assert command("plan", *GOOD, "--plot", tmp_path / "b.png").code == 2


def test_lines_that_coincide_are_drawn_once_and_named_together() -> None:
    held = {"full": [1 << 30, 4 << 30], "ring": [1 << 30, 2 << 30], "same": [1 << 30, 2 << 30]}
    figure = memory_against_context("a model", [1000, 4000], held, marked=[1000, 4000])
    (axes,) = figure.axes
    assert {text.get_text() for text in axes.texts} == {"full", "ring,\nsame"}
    assert axes.get_xlabel() == "tokens in the context"
    assert axes.get_ylabel() == "memory, GiB"
    assert "a model" in axes.get_title(loc="left")


def test_help_has_examples(command: Any) -> None:
    done = command("plan", "--help")
    assert done.code == 0
    assert "Examples:" in done.out
    assert "mlx-kv plan --model" in done.out


# --- what the split of the commands mended ------------------------------------------------------------------------


def test_drafted_tokens_without_a_draft_model_are_refused(command: Any) -> None:
    done = command("generate", "--prompt", "x", "--num-draft-tokens", "4")
    assert (done.code, done.out) == (2, "")
    assert done.err == "mlx-kv: error: --num-draft-tokens needs --draft, --draft-head or --draft-model\n"


@pytest.mark.parametrize("draft", [[], ["--draft-model", "reference"], ["--draft", "suffix"]])
def test_the_progress_bar_knows_how_long_a_chunk_is(
    draft: list[str], command: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model with rings reads its prompt in chunks of max_write, not of 2,048 tokens."""
    seen = []
    bar = generate_command.prefill_bar

    def spy(prompt_tokens: int, step: int) -> Any:
        seen.append((prompt_tokens, step))
        return bar(prompt_tokens, step)

    monkeypatch.setattr(generate_command, "prefill_bar", spy)
    prompt = "import os\n" * 30
    options = ("--max-kv-size", "40", "--max-write", "16", "--max-tokens", "2")
    for more in ((), ("--prefill-step-size", "50")):
        assert command("generate", "--prompt", prompt, *options, *draft, *more).code == 0
    assert [step for _, step in seen] == [16, 50]
