"""Latency of parsing a chat request: from the bytes of its body to the validated request.

    python benchmarks/parsing.py [--against CHECKOUT] [--rounds 20] [--parses 50]

Three bodies: 100 kB in 100 messages with 8 tools, 100 kB in 2 messages, and 300 bytes. Strict JSON decoding reads every
byte and makes a Python object for each value; validation looks at each message and each field once. Nothing is computed
by MLX. With `--against`, an older checkout of this repository parses the same bytes, and the two take turns, each in a
process of its own. A round counts with its fastest parse. The last line is one JSON object: medians of the rounds in
microseconds, and the older time over the newer one.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
TEXT = "The quick brown fox jumps over the lazy dog, and then writes: \u201cdone\u201d.\n"
SETTINGS = {"model": "default_model", "max_tokens": 256, "temperature": 0.7, "top_p": 0.9, "stop": ["###"], "seed": 7}


def bodies() -> dict[str, bytes]:
    """Request bodies by name."""

    def chat(messages: int, length: int, tools: int) -> bytes:
        text = (TEXT * (1 + length // len(TEXT)))[:length]
        said = [{"role": ("user", "assistant")[number % 2], "content": text} for number in range(messages)]
        schema = {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}
        functions = [{"name": f"tool_{number}", "description": TEXT, "parameters": schema} for number in range(tools)]
        listed = [{"type": "function", "function": function} for function in functions]
        return json.dumps(SETTINGS | {"messages": said} | ({"tools": listed} if tools else {})).encode()

    return {"100 messages": chat(100, 970, 8), "2 messages": chat(2, 49_000, 0), "300 bytes": chat(2, 60, 0)}


def parser() -> Callable[[bytes], Any]:
    """The parser of the checkout on the path."""
    import mlx_kv  # noqa: F401  (first: it chooses the BLAS)
    from mlx_kv.files.tensor_files import read_json
    from mlx_kv.server.requests import RequestRules

    try:
        from mlx_kv.server.dialects.completions import chats
    except ModuleNotFoundError:  # an older checkout
        from mlx_kv.server.response_objects import chats  # type: ignore[import-not-found,no-redef]
    rules = RequestRules()
    return lambda raw: chats(read_json(raw.decode("utf-8-sig")), rules)


def serve_turns(parses: int) -> None:
    """Parses each body for every line of standard input; answers with the microseconds of the fastest parse."""
    parse, given = parser(), bodies()
    for _ in sys.stdin:
        taken = {}
        for name, raw in given.items():
            times = []
            for _ in range(parses):
                started = time.perf_counter()
                parse(raw)
                times.append(time.perf_counter() - started)
            taken[name] = 1e6 * min(times)  # what else the machine does only adds to it
        print(json.dumps(taken), flush=True)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--against", type=Path, help="an older checkout of this repository")
    options.add_argument("--rounds", type=int, default=20, help="how often each side is measured")
    options.add_argument("--parses", type=int, default=50, help="parses of each body in a round")
    options.add_argument("--turns", action="store_true", help=argparse.SUPPRESS)  # in the process of a side
    given = options.parse_args()
    if given.turns:
        serve_turns(given.parses)
        return
    checkouts = {"now": ROOT} | ({} if given.against is None else {"before": given.against.resolve()})
    command = [sys.executable, str(Path(__file__).resolve()), "--turns", "--parses", str(given.parses)]
    sides = {
        name: subprocess.Popen(
            command,
            cwd=path,
            env=os.environ | {"PYTHONPATH": str(path)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for name, path in checkouts.items()
    }
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in sides}
    for number in range(given.rounds + 1):  # the first does not count
        for name in list(sides)[:: 1 if number % 2 else -1]:
            side = sides[name]
            assert side.stdin is not None
            assert side.stdout is not None
            side.stdin.write("\n")
            side.stdin.flush()
            taken = json.loads(side.stdout.readline())
            if number:
                runs[name].append(taken)
    for side in sides.values():
        side.communicate()
    result: dict[str, Any] = {"bytes": {name: len(raw) for name, raw in bodies().items()}}
    for name, rounds in runs.items():
        result[name] = {body: round(statistics.median(each[body] for each in rounds), 1) for body in bodies()}
    if given.against is not None:
        pairs = list(zip(runs["before"], runs["now"], strict=True))
        result["ratios"] = {
            body: round(statistics.median(before[body] / now[body] for before, now in pairs), 3) for body in bodies()
        }
    for body in bodies():
        times = ", ".join(f"{name} {result[name][body]:,.0f} us" for name in sides)
        print(f"{body}: {times}")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
