"""The largest wait between two tokens of others while a long prompt is read: `mlx-kv serve` and `mlx_lm.server`.

    python benchmarks/token_waits.py [--rounds 3] [--prompt-tokens 4000] [--clients 3]
    python benchmarks/token_waits.py --model build/smollm2 --rounds 2

Some clients stream long answers to short prompts. When all of them have got tokens, another one sends a prompt that
nobody has read before, for one token. Measured are the largest time between two pieces of text of any stream, from then
until that token has come, and how long that took; `undisturbed` is the largest wait in the second before. Models, BLAS
and servers are those of `server.py`.

The physics. A pass of the model over a chunk of a prompt takes as long as the chunk has tokens (on a CPU; a GPU needs
some hundreds before it does), and whoever decodes waits for it. Both servers read one chunk, then decode one token of
all others. mlx_lm.server reads 2,048 tokens at once; ours as many on a GPU, and 512 to 64 on a CPU, but while others
decode no more than take --max-token-wait seconds (0.5), as far as 64 tokens do. --prefill-step-size sets the most on
both sides.

The last line is one JSON object; `ratio` is the largest wait of mlx-lm over ours.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path
from typing import Any

# mlx_kv before mlx: importing the package loads a tuned BLAS ahead of MLX.
from server import MLX_LM, OURS, SOURCE, in_float32, process

# isort: split
import httpx
import mlx.core as mx
from common import medians, take_turns
from mlx_lm.utils import load_tokenizer

BEFORE = 1.0  # seconds in which streams are watched before the long prompt comes
_starts = count(0, 40_009)


class Stream:
    """A client that streams an answer for as long as it is asked to, and knows when each piece came."""

    def __init__(self, url: str, prompt: str, ended: threading.Event) -> None:
        self._url, self._prompt, self._ended = url, prompt, ended
        self.times: list[float] = []

    def run(self) -> None:
        body = {"prompt": self._prompt, "max_tokens": 1500, "temperature": 1.0, "stream": True}
        with httpx.stream("POST", f"{self._url}/v1/completions", json=body, timeout=600) as answer:
            answer.raise_for_status()
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    self.times.append(time.perf_counter())
                if self._ended.is_set():
                    return


def largest(streams: list[Stream], since: float, until: float) -> float:
    """Seconds between two pieces of one stream, one of which came in this time."""
    waits = [
        after - before
        for stream in streams
        for before, after in zip(stream.times, stream.times[1:], strict=False)
        if after >= since and before <= until
    ]
    return max(waits)


def measure(url: str, long: str, clients: int) -> dict[str, float]:
    ended = threading.Event()
    streams = [Stream(url, f"def function_{number}(", ended) for number in range(clients)]
    with ThreadPoolExecutor(clients) as pool:
        work = [pool.submit(stream.run) for stream in streams]
        while min(len(stream.times) for stream in streams) < 5:
            time.sleep(0.01)
        time.sleep(BEFORE)
        since = time.perf_counter()
        body = {"prompt": long, "max_tokens": 1, "temperature": 0}
        httpx.post(f"{url}/v1/completions", json=body, timeout=600).raise_for_status()
        until = time.perf_counter()
        time.sleep(0.5)
        ended.set()
        for each in work:
            each.result()
    return {
        "largest_wait": largest(streams, since, until),
        "undisturbed": largest(streams, since - BEFORE, since - 0.1),
        "prompt_seconds": until - since,
    }


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a directory; without it, the bundled reference model")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--prompt-tokens", type=int, default=4000)
    parser.add_argument("--clients", type=int, default=3, help="that decode meanwhile")
    parser.add_argument("--prefill-step-size", type=int, help="of both sides")
    return parser.parse_args()


def main() -> None:
    asked = options()
    step = [] if asked.prefill_step_size is None else ["--prefill-step-size", str(asked.prefill_step_size)]
    with tempfile.TemporaryDirectory() as folder:
        model = asked.model or in_float32(Path(folder))
        tokenizer: Any = load_tokenizer(Path(model))

        def long() -> str:
            begin = next(_starts)
            tokens = tokenizer.encode(SOURCE[begin : begin + 6 * asked.prompt_tokens])
            return str(tokenizer.decode(tokens[: asked.prompt_tokens]))

        own = [] if asked.model is None else ["--model", asked.model]
        with process([*MLX_LM, "--model", model, *step]) as (theirs, _), process([*OURS, *own, *step]) as (ours, _):
            sides = {
                side: lambda url=url: measure(url, long(), asked.clients)
                for side, url in (("mlx-lm", theirs), ("ours", ours))
            }
            got = {side: medians(runs) for side, runs in take_turns(asked.rounds, sides).items()}
    for side, figures in got.items():
        print(
            f"{side:<7} largest wait {figures['largest_wait'] * 1e3:8.1f} ms, undisturbed "
            f"{figures['undisturbed'] * 1e3:8.1f} ms, the prompt took {figures['prompt_seconds']:.2f} s",
            file=sys.stderr,
        )
    line: dict[str, Any] = {"benchmark": "token_waits", "device": str(mx.default_device()), "rounds": asked.rounds}
    line |= {f"{name}_{side.replace('-', '_')}": round(x, 4) for side, each in got.items() for name, x in each.items()}
    line["ratio"] = round(got["mlx-lm"]["largest_wait"] / got["ours"]["largest_wait"], 3)
    print(json.dumps(line))


if __name__ == "__main__":
    main()
