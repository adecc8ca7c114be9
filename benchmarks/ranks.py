"""What ranks tell each other for a token, what a compaction of all of them takes, and how fast they are here.

    python benchmarks/ranks.py [--rounds 5] [--tokens 64] [--model build/smollm2]

Ranks are processes of this machine that share its cores (one BLAS thread each), so tokens per second are overhead and
nothing else: more ranks cannot be faster here. What counts is what they tell each other, by which `cluster_table.py`
says what several machines would give.

Sides, in turn, in one process for each rank: mlx-lm's own loop over the model that mlx-lm has split, with its caches,
and `stream_generate(group=...)` with ours, which agrees on each token. Counted are the collectives that a step makes
and the bytes that they are about, as MLX's functions are called; `formula` is what `cluster_table.py` assumes where
heads are split. With a budget, all layers of all ranks agree on what they keep: `compaction_seconds` is what one
compaction takes, `budget_calls` and `budget_bytes` what it adds to a token's, over all tokens.

The models: the reference model (4 layers, 2 KV heads), a random qwen2 of 6 layers whose layers can be split, and with
--model SmolLM2 (3 KV heads) on three ranks. Ratios are mlx-lm / ours in seconds. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

# Ours first: importing the package loads a tuned BLAS ahead of MLX.
from mlx_kv import CachePolicy, join_ranks, model_path, stream_generate
from mlx_kv.generation.statistics import cache_statistics
from mlx_kv.mlxlm.loading import load, model_from_config
from mlx_kv.mlxlm.traverse import is_ours
from mlx_kv.ranks.splitting import split_model

# isort: split
import mlx.core as mx
from cluster_table import told_by_heads
from common import take_turns
from mlx_lm.generate import generation_stream
from mlx_lm.generate import stream_generate as stock_stream_generate

PROMPT = 256
BUDGET = CachePolicy(budget=128, margin=32)
QWEN2 = {
    "model_type": "qwen2",
    "hidden_size": 256,
    "num_hidden_layers": 6,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "vocab_size": 4096,
    "max_position_embeddings": 4096,
}
COLLECTIVES = ("all_sum", "all_gather", "all_max", "all_min", "sum_scatter", "send", "recv", "recv_like")


# --- a rank -----------------------------------------------------------------------------------------------------------


class Counts:
    """Collectives and bytes, as they are called."""

    def __init__(self) -> None:
        self.calls, self.bytes = 0, 0
        for name in COLLECTIVES:
            if hasattr(mx.distributed, name):
                setattr(mx.distributed, name, self._counted(getattr(mx.distributed, name)))

    def _counted(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def counted(what: Any, *rest: Any, **named: Any) -> Any:
            self.calls += 1
            self.bytes += what.nbytes if isinstance(what, mx.array) else 0
            return function(what, *rest, **named)

        return counted


def model_of(name: str) -> tuple[Any, Any]:
    if name != "qwen2":
        return load(model_path(name))
    mx.random.seed(0)
    model = model_from_config(QWEN2, mx.float32)
    mx.eval(model.parameters())
    return model, load(model_path("reference"))[1]


def work(name: str, split: str, tokens: int, rounds: int) -> None:
    """What one rank does, or one process alone; the first one says what came of it."""
    counts = Counts()
    group = join_ranks(split) if os.environ.get("MLX_RANK") else None  # type: ignore[arg-type]
    model, tokenizer = model_of(name)
    ids = mx.random.randint(1, 4096, (PROMPT,), key=mx.random.key(1)).tolist()
    if group is not None:
        split_model(model, group)

    def measured(responses: Iterator[Any]) -> dict[str, Any]:
        said, seen = [next(responses).token], (counts.calls, counts.bytes)
        started = time.perf_counter()
        said += [response.token for response in responses]
        steps = len(said) - 1
        return {
            "token": (time.perf_counter() - started) / steps,
            "calls": (counts.calls - seen[0]) / steps,
            "bytes": (counts.bytes - seen[1]) / steps,
            "said": said,
        }

    def stock() -> dict[str, Any]:
        return measured(stock_stream_generate(model, tokenizer, ids, max_tokens=tokens))

    def ours(policy: CachePolicy | None = None) -> dict[str, Any]:
        from mlx_kv.communicator import LOCAL
        from mlx_kv.generation.decode_batch import make_distributed_caches

        caches = make_distributed_caches(model, policy or CachePolicy(), group or LOCAL)
        got = measured(stream_generate(model, tokenizer, ids, max_tokens=tokens, prompt_cache=caches, group=group))
        held = cache_statistics([cache for cache in caches if is_ours(cache)])
        return got | {"compactions": held.compactions, "compaction": held.compaction_seconds}

    tokenizer._eos_token_ids = set()  # both sides say as many tokens as they may
    sides = {"mlx-lm": stock, "ours": ours, "budget": lambda: ours(BUDGET)}
    runs = take_turns(rounds, sides)
    told = {
        side: {key: statistics.median(run[key] for run in each) for key in each[0] if key != "said"}
        | {"said": each[0]["said"]}
        for side, each in runs.items()
    }
    if group is None or group.leads:
        print(json.dumps(told), flush=True)
    if group is not None:
        mx.synchronize(generation_stream)
        group.close()


# --- all of them ------------------------------------------------------------------------------------------------------


@contextmanager
def _hosts(ranks: int) -> Iterator[str]:
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file, ExitStack() as held:
        probes = [held.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(ranks)]
        json.dump([[f"127.0.0.1:{probe.getsockname()[1]}"] for probe in probes], file)
        file.flush()
        held.close()
        yield file.name


def run(ranks: int, name: str, split: str, tokens: int, rounds: int) -> dict[str, Any]:
    command = [sys.executable, __file__, "--work", name, split, "--tokens", str(tokens), "--rounds", str(rounds)]
    with _hosts(ranks) as hosts:
        threads = {"MKL_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
        processes = [
            subprocess.Popen(
                command,
                stdout=subprocess.PIPE,
                text=True,
                env=os.environ | threads | ({"MLX_RANK": str(rank), "MLX_HOSTFILE": hosts} if ranks > 1 else {}),
            )
            for rank in range(ranks)
        ]
        try:
            said = [process.communicate(timeout=900)[0] for process in processes]
        finally:
            for process in processes:
                process.kill()
    told: dict[str, Any] = json.loads(said[0].splitlines()[-1])
    return told


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="how often each side is measured")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--model", help="a model with three KV heads, such as SmolLM2, for three ranks")
    parser.add_argument("--work", nargs=2, metavar=("MODEL", "SPLIT"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.work:
        work(*given.work, given.tokens, given.rounds)
        return
    cases = [("reference", "heads", (1, 2)), ("qwen2", "layers", (1, 2, 3)), ("qwen2", "heads", (2,))]
    if given.model:
        cases.append((given.model, "heads", (1, 3)))
    line: dict[str, Any] = {"benchmark": "ranks", "device": str(mx.default_device())}
    alone: dict[str, Any] = {}
    for name, split, sizes in cases:
        for ranks in sizes:
            told = run(ranks, name, split, given.tokens, given.rounds)
            short = Path(name).name
            if ranks == 1:
                alone[name] = told
            one, stock, ours, budget = alone[name], told["mlx-lm"], told["ours"], told["budget"]
            line[f"{short}_{split}_{ranks}"] = figures = {
                "tokens_per_second": round(1 / ours["token"], 1),
                "ratio": round(stock["token"] / ours["token"], 3),
                "collectives": [round(stock["calls"], 2), round(ours["calls"], 2)],
                "bytes": [round(stock["bytes"]), round(ours["bytes"])],
                "compaction_seconds": round(budget["compaction"] / budget["compactions"], 5),
                "budget_calls": round(budget["calls"] - ours["calls"], 2),
                "budget_bytes": round(budget["bytes"] - ours["bytes"]),
                "same": all(told[side]["said"] == one[side]["said"] for side in ("ours", "budget")),
            }
            print(f"{short}, {split}, {ranks} ranks: {figures}", file=sys.stderr, flush=True)
    layers, hidden = 4, 256
    line["formula_reference_heads"] = told_by_heads(layers, hidden * 4)
    print(json.dumps(line))


if __name__ == "__main__":
    main()
