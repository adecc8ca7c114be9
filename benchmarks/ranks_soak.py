"""`mlx-kv serve` on several ranks: many clients, those that hang up among them, and ranks that are killed.

    python benchmarks/ranks_soak.py [--ranks 3] [--requests 500] [--kills 50] [--clients 6] [--split heads]

The ranks are processes of this machine, so nothing here is about speed. The model is random and tiny, with as many
heads of keys and values as divide (or layers); its tokenizer is the reference model's.

First the requests, from a set of prompts that begin alike and are kept in 4 MiB, so that kept prompts come and go:
whole answers and streams, greedy and with a seed, clients that hang up in the middle of a stream, those that give up
before their answer has begun, and malformed requests. Answers are compared with those of one process, which got the
same prompts one after the other: `different` counts those that are not the same. In the end SIGTERM ends all.

Then the kills: so often, ranks are started, clients ask, and one rank after the other gets a SIGKILL at a random moment
of the next two seconds. Each client must get an answer or an error (an end of the connection where the first rank was
killed), and all processes must be gone soon: `gone_seconds` is from the kill until the last one has ended. A client
that has heard nothing for a minute counts as left hanging. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / "tests" / "ranks")]

from launching import MLX_KV, Ranks, started_ranks  # noqa: E402

SOURCE = (ROOT / "mlx_kv" / "cache" / "kv_cache.py").read_text()
BEGINNINGS = [SOURCE[start : start + 900] for start in (0, 3000, 6000)]
PROMPTS = [beginning[:length] + SOURCE[length * 7 :][:40] for beginning in BEGINNINGS for length in range(60, 900, 105)]
HANGS = 60.0  # seconds after which a client has been left hanging
OPTIONS = ("--kv-bits", 8, "--max-batch-size", 4, "--prompt-memory-bytes", 4 * 2**20, "--drain-seconds", 5)


def make_model(folder: Path, heads: int, layers: int, family: str) -> None:
    """A model with random weights that speaks the reference model's tokens, so made that it decides."""
    from mlx_kv import model_path

    # isort: split
    import mlx.core as mx
    from mlx.utils import tree_flatten

    from mlx_kv.mlxlm.loading import model_from_config

    reference = Path(model_path("reference"))
    config = json.loads((reference / "config.json").read_text())
    config |= {"model_type": family, "num_key_value_heads": heads, "num_attention_heads": heads, "head_dim": 64}
    config |= {"hidden_size": 64 * heads, "num_hidden_layers": layers, "intermediate_size": 64 * heads}
    shutil.copytree(reference, folder)
    (folder / "config.json").write_text(json.dumps(config))
    mx.random.seed(7)
    model = model_from_config(config, mx.float32)
    weights: Any = {name: value * (3 if value.ndim == 2 else 1) for name, value in tree_flatten(model.parameters())}
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})


# --- clients ----------------------------------------------------------------------------------------------------------


def body_of(number: int, kinds: int) -> dict[str, Any]:
    """What is asked; the same number asks the same."""
    chance = random.Random(number % kinds)
    seeded = {"temperature": 0.9, "seed": number % kinds} if chance.random() < 0.3 else {"temperature": 0}
    prompt = PROMPTS[chance.randrange(len(PROMPTS))]
    return {"prompt": prompt, "max_tokens": chance.randrange(4, 24), **seeded}


def text_of(answer: httpx.Response) -> str | None:
    """The text of an answer, whole or streamed; None where it ended with an error."""
    if answer.status_code != 200 or '"error"' in answer.text:
        return None
    if not answer.headers["content-type"].startswith("text/event-stream"):
        return str(answer.json()["choices"][0]["text"])
    events = [json.loads(line[6:]) for line in answer.text.split("\n\n") if line.startswith("data: {")]
    assert answer.text.endswith("data: [DONE]\n\n")
    return "".join(event["choices"][0]["text"] for event in events if event["choices"])


def request(client: httpx.Client, number: int, kinds: int, expected: dict[int, str | None]) -> str:
    """One request, and how it ended."""
    chance, body = random.Random(-number - 1), body_of(number, kinds)
    kind = chance.random()
    try:
        if kind < 0.05:
            answer = client.post("/v1/completions", json=body | {"max_tokens": "many"})
            return "refused" if answer.status_code == 400 else "unexpected"
        if kind < 0.2:
            with client.stream("POST", "/v1/completions", json=body | {"stream": True, "max_tokens": 300}) as answer:
                next(answer.iter_bytes())
            return "hung up"
        if kind < 0.3:
            try:
                client.post("/v1/completions", json=body | {"max_tokens": 300}, timeout=chance.random())
            except httpx.TimeoutException:
                return "given up"
            return "answered"
        answer = client.post("/v1/completions", json=body | {"stream": chance.random() < 0.5})
    except httpx.TimeoutException:
        return "left hanging"
    except httpx.HTTPError:
        return "unexpected"
    text = text_of(answer)
    if text is None:
        print(f"request {number}: {answer.status_code} {answer.text[-300:]}", file=sys.stderr)
        return "unexpected"
    return "same" if text == expected.setdefault(number % kinds, text) else "different"


def asked_while_killed(url: str, until: Callable[[], bool], seed: int) -> list[str]:
    """Requests one after the other until nobody answers; how each ended."""
    ends, chance = [], random.Random(seed)
    with httpx.Client(base_url=url, timeout=HANGS) as client:
        while not until():
            body = {"prompt": chance.choice(PROMPTS), "max_tokens": chance.randrange(1, 300)}
            try:
                answer = client.post("/v1/completions", json=body | {"stream": chance.random() < 0.5})
            except httpx.ConnectError:
                break  # nobody had heard of this one
            except httpx.TimeoutException:
                ends.append("left hanging")
                break
            except httpx.HTTPError:
                ends.append("cut off")
                break
            whole = text_of(answer) if '"error"' not in answer.text else None
            ends.append("answered" if whole is not None else "told of the end")
    return ends


# --- parts ------------------------------------------------------------------------------------------------------------


def address(ranks: Ranks) -> str:
    return ranks.wait_for(" at http://", timeout=120).split(" at ")[1].split("/v1")[0]


def metrics(client: httpx.Client) -> dict[str, float]:
    """Those without labels."""
    lines = client.get("/metrics").text.splitlines()
    pairs = [line.rsplit(" ", 1) for line in lines if not line.startswith("#") and "{" not in line]
    return {name.removeprefix("mlx_kv_"): float(value) for name, value in pairs}


def soak(model: Path, options: argparse.Namespace) -> dict[str, Any]:
    kinds = 40
    program = (*MLX_KV, "serve", "--port", "0", "--model", str(model))
    with started_ranks(1, program, *OPTIONS) as alone, httpx.Client(base_url=address(alone), timeout=HANGS) as client:
        expected = {n: text_of(client.post("/v1/completions", json=body_of(n, kinds))) for n in range(kinds)}
    assert None not in expected.values()
    began = time.perf_counter()
    with started_ranks(options.ranks, (*program, "--split", options.split), *OPTIONS) as ranks:
        url = address(ranks)
        with httpx.Client(base_url=url, timeout=HANGS) as client, ThreadPoolExecutor(options.clients) as pool:
            ends = Counter(pool.map(lambda n: request(client, n, kinds, expected), range(options.requests)))
            deadline = time.monotonic() + 30
            while (found := metrics(client))["rows"] or found["requests_waiting"]:
                assert time.monotonic() < deadline, "a row is left"
                time.sleep(0.1)
        ranks.kill(0, signal.SIGTERM)
        codes = [each.code for each in ranks.wait(30)]
        noise = [each for rank in range(1, options.ranks) for each in (ranks.stdout(rank), ranks.stderr(rank)) if each]
    return {
        **{f"requests_{end.replace(' ', '_')}": ends[end] for end in sorted({"left hanging", "different", *ends})},
        "requests": sum(ends.values()),
        "seconds": round(time.perf_counter() - began, 1),
        "prefix_hits": round(found["prefix_hits_total"]),
        "prompt_memory_bytes": round(found["prompt_memory_bytes"]),
        "exit_codes_after_sigterm": codes,
        "lines_of_followers": len(noise),
    }


def kill(model: Path, options: argparse.Namespace, number: int) -> tuple[Counter[str], float, list[int]]:
    chance, dies = random.Random(number), number % options.ranks
    program = (*MLX_KV, "serve", "--port", "0", "--model", str(model), "--split", options.split)
    killed: list[float] = []
    with started_ranks(options.ranks, program, *OPTIONS) as ranks, ThreadPoolExecutor(options.clients) as pool:
        url = address(ranks)
        asks = [pool.submit(asked_while_killed, url, lambda: bool(killed), seed) for seed in range(options.clients)]
        time.sleep(chance.uniform(0, 2))
        ranks.kill(dies)
        killed.append(time.monotonic())
        codes = [each.code for each in ranks.wait(30)]
        gone = time.monotonic() - killed[0]
        ends = Counter(end for ask in asks for end in ask.result(HANGS))
    assert codes[dies] == -signal.SIGKILL
    return ends, gone, [code for rank, code in enumerate(codes) if rank != dies]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=3)
    parser.add_argument("--requests", type=int, default=500)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--clients", type=int, default=6)
    parser.add_argument("--split", choices=["heads", "layers"], default="heads")
    options = parser.parse_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    line: dict[str, Any] = {"benchmark": "ranks_soak", "ranks": options.ranks, "split": options.split}
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        make_model(model, options.ranks, options.ranks, "llama" if options.split == "heads" else "qwen2")
        if options.requests:
            line |= soak(model, options)
            print(json.dumps(line), file=sys.stderr)
        ends: Counter[str] = Counter()
        seconds, codes = [], Counter[int]()
        for number in range(options.kills):
            ended, gone, left = kill(model, options, number)
            ends, seconds = ends + ended, [*seconds, gone]
            codes.update(left)
            print(f"kill {number + 1}: rank {number % options.ranks}, gone in {gone:.2f} s", file=sys.stderr)
    if options.kills:
        line |= {
            "kills": options.kills,
            **{f"clients_{end.replace(' ', '_')}": ends[end] for end in sorted({"left hanging", *ends})},
            "gone_seconds_median": round(statistics.median(seconds), 2),
            "gone_seconds_most": round(max(seconds), 2),
            "exit_codes": {str(code): count for code, count in sorted(codes.items())},
        }
    print(json.dumps(line))
    wrong = ("requests_left_hanging", "requests_different", "requests_unexpected", "clients_left_hanging")
    sys.exit(1 if any(line.get(name) for name in (*wrong, "lines_of_followers")) or set(codes) - {70} else 0)


if __name__ == "__main__":
    main()
