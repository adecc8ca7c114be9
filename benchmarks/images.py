"""Many clients who ask about one image: the time to the first token, and memory, beside mlx-vlm's server.

    python benchmarks/images.py
    python benchmarks/images.py --model models/qwen3-vl --clients 16 --rounds 3

Servers take turns, each a process of its own: mlx-kv serve, and mlx_vlm.server as it is and with its prefix cache
(APC_ENABLED). All of them multiply with the same BLAS.
After a warm-up with another image, all clients send the same image at once, each with a question of its own, and
stream an answer; then each goes on with a second question, as a chat does. Without --model it is a Qwen3-VL of random
weights, and an image of 1,000 tokens. One JSON line last: medians of the rounds; ratios are of mlx-vlm over mlx-kv, so
that more is better.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import io
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

import mlx_kv

# isort: split
import httpx
import numpy as np
from PIL import Image

PORT, PATIENCE = 9_341, 600
ANSWER = 16  # tokens
SIZES = {
    "hidden_size": 256,
    "num_hidden_layers": 8,
    "intermediate_size": 768,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
}
SERVERS: dict[str, tuple[list[str], dict[str, str]]] = {
    "mlx-kv": (["mlx_kv.cli", "serve"], {}),
    "mlx-vlm": (["mlx_vlm.server"], {}),
    "mlx-vlm, prefix cache": (["mlx_vlm.server"], {"APC_ENABLED": "1"}),
}


def picture(seed: int) -> str:
    """A data URL of 320 x 200 pixels: 1,000 tokens of the model of random weights."""
    pixels = np.random.default_rng(seed).integers(0, 256, (200, 320, 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


@contextlib.contextmanager
def server(module: list[str], settings: dict[str, str], model: str) -> Iterator[subprocess.Popen[bytes]]:
    with tempfile.TemporaryFile() as log:
        command = [sys.executable, "-m", *module, "--model", model, "--port", str(PORT), "--host", "127.0.0.1"]
        blas = mlx_kv.blas.preload()
        environment = os.environ | settings | ({"LD_PRELOAD": str(blas)} if str(blas).startswith("/") else {})
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
        try:
            for _ in range(PATIENCE):
                with contextlib.suppress(httpx.HTTPError):
                    if httpx.get(f"http://127.0.0.1:{PORT}/health", timeout=5).status_code == 200:
                        break
                if process.poll() is not None:
                    log.seek(0)
                    sys.exit(log.read().decode()[-2000:])
                time.sleep(0.5)
            yield process
        finally:
            process.kill()
            process.wait()


def ask(model: str, messages: list[dict[str, Any]]) -> tuple[float, str]:
    """Seconds to the first piece of text, and all of it."""
    body = {"model": model, "messages": messages, "max_tokens": ANSWER, "temperature": 0, "stream": True}
    started, first, said = time.perf_counter(), 0.0, ""
    with httpx.stream("POST", f"http://127.0.0.1:{PORT}/v1/chat/completions", json=body, timeout=PATIENCE) as answer:
        if answer.status_code != 200:
            sys.exit(f"{answer.status_code}: {answer.read()[:500]!r}")
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                choices = json.loads(line[6:]).get("choices") or [{}]
                if text := choices[0].get("delta", {}).get("content"):
                    first = first or time.perf_counter() - started
                    said += text
    return first or time.perf_counter() - started, said


def measure(name: str, model: str, clients: int) -> dict[str, float]:
    """What one server does for these clients."""
    with server(*SERVERS[name], model) as process, ThreadPoolExecutor(clients) as pool:

        def question(seed: int, words: str) -> list[dict[str, Any]]:
            image = {"type": "image_url", "image_url": {"url": picture(seed)}}
            return [{"role": "user", "content": [image, {"type": "text", "text": words}]}]

        ask(model, question(1, "warm up"))
        asked = [question(2, f"question {number} of {clients}?") for number in range(clients)]
        started = time.perf_counter()
        answers = list(pool.map(lambda messages: ask(model, messages), asked))
        whole = time.perf_counter() - started
        for messages, (_, said) in zip(asked, answers, strict=True):
            more = {"role": "user", "content": "and why?"}
            messages += [{"role": "assistant", "content": said}, more]
        again = list(pool.map(lambda messages: ask(model, messages), asked))
        status = Path(f"/proc/{process.pid}/status").read_text()
        peak = int(next(line for line in status.splitlines() if line.startswith("VmHWM")).split()[1]) * 1024
    first, later = [seconds for seconds, _ in answers], [seconds for seconds, _ in again]
    return {
        "first_median": statistics.median(first),
        "first_last": max(first),
        "all": whole,
        "second_turn_median": statistics.median(later),
        "peak_bytes": float(peak),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a model of mlx-vlm; else one of random weights")
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if arguments.model is None:
            import vision_models

            vision_models.save_model("qwen3_vl", Path(folder), max_pixels=1 << 20, **SIZES)
        model = arguments.model or folder
        runs: dict[str, list[dict[str, float]]] = {name: [] for name in SERVERS}
        for number in range(arguments.rounds):
            for name in list(SERVERS)[:: 1 if number % 2 else -1]:
                runs[name].append(measure(name, model, arguments.clients))
                print(f"{name:<8}", {key: round(value, 3) for key, value in runs[name][-1].items()}, flush=True)
    middle = {name: {key: statistics.median(run[key] for run in got) for key in got[0]} for name, got in runs.items()}
    ours = middle["mlx-kv"]
    ratios = {
        name: {key: round(got[key] / ours[key], 2) for key in ours} for name, got in middle.items() if name != "mlx-kv"
    }
    print(json.dumps({"clients": arguments.clients, "ratios": ratios, **middle}))


if __name__ == "__main__":
    main()
