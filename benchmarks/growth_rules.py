"""By how much a cache should grow: rules side by side up to 131,072 tokens, in integers and measured.

    python benchmarks/growth_rules.py [--rounds 5] [--plot docs/growth.png]

The physics. A growth copies all that is held, and slack is memory that holds nothing. If a cache of n tokens takes I
more slots at a time, each token is copied once for every I that follow, and read by attention once for every one of
them: copies, read and written, are 2/I of attention's traffic, whatever n is. With I = 256 that is 0.8%, with I = 8,192
it is 0.02%: there is nothing left to win, while a factor of two goes on to hold up to as much again as is live. What a
growth costs beside that is a spike (the longest update) and, while a plane is copied, the memory of a second one.

Counted, token by token: growths; slots copied over slots that attention reads; slots allocated over slots that are
live, from 4,096 tokens on, and with the first token after a prompt of 2,048. Measured, one layer of 8 heads x 128 in
float16, 100,352 tokens in chunks of 512: seconds of all updates, the longest of them, and memory at the peak over what
these tokens take. Rules take turns; the last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

# Ours first: importing the package loads a tuned BLAS ahead of MLX.
from mlx_kv import FixedStep, Geometric, Growth, KVCache, Tapered

# isort: split
import mlx.core as mx
from common import medians, take_turns

HEADS, DIM, CHUNK = 8, 128, 512
TOKENS, MEASURED = 131_072, 100_352  # not a power of two: there, doubling would be at its luckiest
SLOT = 2 * HEADS * DIM * 2  # bytes, keys and values
JUDGED_FROM, PROMPT = 4_096, 2_048
RULES: dict[str, Growth] = {
    "mlx-lm: +256": FixedStep(256),
    "x 2": Geometric(2.0),
    "x 1.5": Geometric(1.5),
    "x 1.25": Geometric(1.25),
    "x 2, at most 8,192": Geometric(2.0, max_increment=8192),
    "tapered, at most 4,096": Tapered(4096),
    "tapered, at most 8,192": Tapered(),
    "tapered, at most 16,384": Tapered(16_384),
}
DEFAULT = "tapered, at most 8,192"


def allocated(rule: Growth) -> list[int]:
    """Slots after each of the tokens, one at a time."""
    capacity, slots = 0, []
    for held in range(1, TOKENS + 1):
        if held > capacity:
            capacity = rule.capacity(held, capacity)
        slots.append(capacity)
    return slots


def counted(rule: Growth, slots: list[int]) -> dict[str, float]:
    growths = [i for i in range(1, TOKENS) if slots[i] != slots[i - 1]]
    ratios = [slots[held - 1] / held for held in range(JUDGED_FROM, TOKENS + 1)]
    return {
        "growths_32k": sum(at < 32_768 for at in growths),
        "growths": len(growths),
        "copied_of_read": 2 * sum(slots[at - 1] for at in growths) / (TOKENS * (TOKENS + 1) / 2),
        "most_allocated_of_live": max(ratios),
        "mean_allocated_of_live": sum(ratios) / len(ratios),
        "after_prompt": rule.capacity(PROMPT + 1, PROMPT) / (PROMPT + 1),
    }


def measured(rule: Growth) -> dict[str, float]:
    """Appends all tokens to one layer, evaluating after every update, as a prefill does."""
    cache, longest = KVCache(growth=rule), 0.0
    mx.clear_cache()
    k, v = (mx.random.normal((1, HEADS, CHUNK, DIM)).astype(mx.float16) for _ in range(2))
    mx.eval(k, v)
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    started = time.perf_counter()
    for _ in range(MEASURED // CHUNK):
        begun = time.perf_counter()
        fetched = cache.update_and_fetch(k, v)
        mx.eval(fetched)
        del fetched  # a handle that stays would make the next write copy the buffer
        longest = max(longest, time.perf_counter() - begun)
    seconds = time.perf_counter() - started
    return {"seconds": seconds, "longest": longest, "peak": (mx.get_peak_memory() - before) / (MEASURED * SLOT)}


def figure(slots: dict[str, list[int]], path: Path) -> None:
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    from mlx_kv.plots import GREY, axis_label, new_figure

    shown = [DEFAULT, "x 2", "mlx-lm: +256"]
    drawing, axes = new_figure("Slots that hold nothing", "tokens", "slots allocated over slots that are live")
    axes.set_yscale("linear")
    at = range(1024, TOKENS + 1, 16)
    for name, colour, width in zip(shown, ("#0072B2", "#D55E00", GREY), (1.8, 1.1, 0.8), strict=True):
        axes.plot(at, [slots[name][n - 1] / n for n in at], color=colour, linewidth=width, label=name)
    axes.set_ylim(1, 2.05)
    axes.xaxis.set_major_locator(FixedLocator([2**n for n in range(10, 18)]))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: axis_label(value)))
    axes.legend(frameon=False, loc="lower right", bbox_to_anchor=(1, 1), ncols=3)
    drawing.savefig(path)
    print(f"wrote {path}", file=sys.stderr)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=1, help="how often each rule is measured")
    parser.add_argument("--plot", type=Path, help="also draw slack against length, as PNG, SVG or PDF (matplotlib)")
    options = parser.parse_args()
    slots = {name: allocated(rule) for name, rule in RULES.items()}
    runs = take_turns(options.rounds, {name: lambda rule=rule: measured(rule) for name, rule in RULES.items()})
    line: dict[str, Any] = {"benchmark": "growth_rules", "device": str(mx.default_device()), "default": DEFAULT}
    print(
        "                         growths to     copied  allocated / live  after            longest     peak",
        file=sys.stderr,
    )
    print(
        "                         32k   128k    of read    most    mean  2,048   seconds   update  of cache",
        file=sys.stderr,
    )
    for name in RULES:
        got = counted(RULES[name], slots[name]) | medians(runs[name])
        line[name] = {key: round(value, 5) for key, value in got.items()}
        print(
            f"{name:<24} {got['growths_32k']:3.0f} {got['growths']:6.0f} {got['copied_of_read']:10.3%} "
            f"{got['most_allocated_of_live']:7.2f} {got['mean_allocated_of_live']:7.2f} {got['after_prompt']:6.2f} "
            f"{got['seconds']:9.2f} {got['longest'] * 1e3:6.0f}ms {got['peak']:9.2f}",
            file=sys.stderr,
        )
    if options.plot is not None:
        figure(slots, options.plot)
    print(json.dumps(line))


if __name__ == "__main__":
    main()
