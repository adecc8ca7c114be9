"""What a sliding window costs: mlx-lm's RotatingKVCache against our ring, both in one process.

    python benchmarks/ring.py [--rounds 5]

The physics. One layer of 8 heads x 128 in float32, 8,192 bytes per token; windows of 512, 1,024 and 4,096 tokens, a
prompt of two windows and 2,048 tokens in chunks, then decoding. A chunk of M needs the last window - 1 tokens and
itself, so the least that a cache can hold while it reads is window + M - 1 slots. A ring of that size writes the chunk
in place and copies nothing else; the rotating cache puts what it holds in order and concatenates the chunk, so old and
new buffer exist at once, and it reads and writes all of both for every chunk. In decode both write one token and hand
all slots to attention, without a mask: ours once the ring has given back what the chunks needed, after the 32nd token,
which is one copy of the window. Our ring is made for the chunk that is used (max_write = chunk) and knows how long the
prompt is (reserve), as it does under stream_generate.

The whole model is a random one of mlx-lm's gemma3: 8 layers with that window and one without, 512 wide, 8 heads of 64.
Its decode steps are taken in turns, step by step: whole rounds in turns gave 0.59 to 1.08 for the same code.

Peak memory includes the chunk. Bytes copied are counted from shapes: what is written besides the new tokens.
Sides take turns; times are medians; ratios are mlx-lm / ours (more than 1: ours is faster). One JSON line last.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

# Ours first: importing the package loads a tuned BLAS ahead of MLX.
from mlx_kv import CachePolicy, RingKVCache, make_prompt_cache

# isort: split
import mlx.core as mx
import mlx_lm.models.cache as stock
from common import medians, rounds_from_command_line, take_turns
from mlx_lm.models import gemma3_text

HEADS, QUERY_HEADS, DIM, DECODED, SETTLED, STEPS = 8, 16, 128, 200, 40, 150
CASES = ((512, 512), (1_024, 256), (1_024, 512), (1_024, 2_048), (4_096, 512))  # window, chunk
BYTES_PER_TOKEN = HEADS * DIM * 2 * 4


def prompt_tokens(window: int) -> int:
    return 2 * window + 2_048


def attend(cache: Any, window: int, q: mx.array, k: mx.array, v: mx.array) -> mx.array:
    mask = cache.make_mask(q.shape[2], window_size=window)
    keys, values = cache.update_and_fetch(k, v)
    return mx.fast.scaled_dot_product_attention(q, keys, values, scale=DIM**-0.5, mask=mask)


def tokens(count: int) -> list[mx.array]:
    made = [mx.random.normal((1, heads, count, DIM)).astype(mx.float32) for heads in (QUERY_HEADS, HEADS, HEADS)]
    mx.eval(made)
    return made


def run(make: Callable[[], Any], window: int, chunk: int) -> dict[str, float]:
    """Updates alone for the prompt and its peak memory; then decode steps, with and without their attention."""
    mx.clear_cache()
    before = mx.get_active_memory()
    cache, (_, k, v) = make(), tokens(chunk)
    mx.reset_peak_memory()
    started = time.perf_counter()
    for _ in range(prompt_tokens(window) // chunk):
        fetched = cache.update_and_fetch(k, v)
        mx.eval(fetched)
        del fetched
    prefill, peak = time.perf_counter() - started, mx.get_peak_memory() - before
    q, k, v = tokens(1)
    longest = 0.0
    for _ in range(SETTLED):  # both caches take another form at the beginning of decoding
        begun = time.perf_counter()
        fetched = cache.update_and_fetch(k, v)
        mx.eval(fetched)
        del fetched
        longest = max(longest, time.perf_counter() - begun)
    started = time.perf_counter()
    for _ in range(DECODED):
        fetched = cache.update_and_fetch(k, v)
        mx.eval(fetched)
        del fetched
    update = (time.perf_counter() - started) / DECODED
    started = time.perf_counter()
    for _ in range(DECODED):
        mx.eval(attend(cache, window, q, k, v))
    attention = (time.perf_counter() - started) / DECODED
    live = min(window, cache.offset) * BYTES_PER_TOKEN
    return {
        "prefill": prefill,
        "peak": peak,
        "longest": longest,
        "update": update,
        "step": attention,
        "of_live": cache.nbytes / live,
    }


def model_of(window: int) -> Any:
    """A random model whose layers all have the window, but the last."""
    mx.random.seed(0)
    options = {"hidden_size": 512, "num_hidden_layers": 9, "intermediate_size": 1024, "num_attention_heads": 8}
    options |= {"num_key_value_heads": 4, "head_dim": 64, "vocab_size": 1024, "sliding_window_pattern": 9}
    args = gemma3_text.ModelArgs(model_type="gemma3_text", sliding_window=window, **options)
    model = gemma3_text.Model(args)
    mx.eval(model.parameters())
    return model


def prefill(model: Any, caches: list[Any], ids: mx.array, chunk: int) -> float:
    """Reads a prompt in chunks; seconds a token."""
    started = time.perf_counter()
    for first in range(0, ids.shape[1], chunk):
        model(ids[:, first : first + chunk], cache=caches)
        mx.eval([cache.state for cache in caches])
    return (time.perf_counter() - started) / ids.shape[1]


def step(model: Any, caches: list[Any], token: mx.array) -> tuple[float, mx.array]:
    started = time.perf_counter()
    token = mx.argmax(model(token, cache=caches)[:, -1:], axis=-1)
    mx.eval(token)
    return time.perf_counter() - started, token


def copied_per_chunk(side: str, window: int) -> int:
    """Bytes written besides the new tokens for one chunk of a long prompt."""
    return 0 if side == "ours" else (window - 1) * BYTES_PER_TOKEN


def main() -> None:
    rounds = rounds_from_command_line(__doc__)
    line: dict[str, Any] = {"benchmark": "ring", "device": str(mx.default_device())}
    for window, chunk in CASES:
        prompt = prompt_tokens(window)
        makers: dict[str, Callable[[], Any]] = {
            "mlx-lm": lambda window=window: stock.RotatingKVCache(window),
            "ours": lambda window=window, chunk=chunk, prompt=prompt: RingKVCache(window, chunk, reserve=prompt),
        }
        sides = {side: lambda make=make: run(make, window, chunk) for side, make in makers.items()}  # noqa: B023
        got = {side: medians(runs) for side, runs in take_turns(rounds, sides).items()}
        print(f"window {window:,}, {prompt:,} tokens in chunks of {chunk:,}, then {DECODED:,} steps", file=sys.stderr)
        for side, m in got.items():
            print(
                f"  {side:<7} peak {m['peak'] / 1e6:6.1f} MB  prompt {m['prefill'] * 1e3:7.2f} ms  "
                f"decode update {m['update'] * 1e6:6.1f} us  with attention {m['step'] * 1e6:7.1f} us  "
                f"longest of the first {m['longest'] * 1e3:5.2f} ms  allocated {m['of_live']:.2f} x live  "
                f"copied per chunk {copied_per_chunk(side, window) / 1e6:.1f} MB",
                file=sys.stderr,
            )
        stock_side, ours = got["mlx-lm"], got["ours"]
        figures = {
            "peak_bytes_mlx_lm": int(stock_side["peak"]),
            "peak_bytes_ours": int(ours["peak"]),
            "peak_ours_of_mlx_lm": round(ours["peak"] / stock_side["peak"], 3),
            "least_bytes": (window + 2 * chunk - 1) * BYTES_PER_TOKEN,
            "prefill_ratio": round(stock_side["prefill"] / ours["prefill"], 3),
            "decode_update_ratio": round(stock_side["update"] / ours["update"], 3),
            "decode_step_ratio": round(stock_side["step"] / ours["step"], 3),
            "allocated_of_live_while_decoding": round(ours["of_live"], 3),
            "bytes_copied_per_chunk_mlx_lm": copied_per_chunk("mlx-lm", window),
            "bytes_copied_per_chunk_ours": copied_per_chunk("ours", window),
        }
        if chunk == 512:
            figures |= whole_model(rounds, window, chunk)
        line[f"window_{window}_chunk_{chunk}"] = figures
    print(json.dumps(line))


def whole_model(rounds: int, window: int, chunk: int) -> dict[str, float]:
    """A prompt, each side once a round, and decoding, where the sides take turns step by step."""
    model, prompt = model_of(window), prompt_tokens(window)
    policy = CachePolicy(max_write=chunk, reserve=prompt)
    makers = {"mlx-lm": lambda: stock.make_prompt_cache(model), "ours": lambda: make_prompt_cache(model, policy)}
    ids = mx.random.randint(0, 1024, (1, prompt), key=mx.random.key(1))
    read: dict[str, list[float]] = {side: [] for side in makers}
    steps: dict[str, list[float]] = {side: [] for side in makers}
    for number in range(max(2, rounds - 2)):
        order = list(makers)[:: 1 if number % 2 else -1]
        caches, last = {side: makers[side]() for side in makers}, dict.fromkeys(makers, ids[:, -1:])
        for side in order:
            read[side].append(prefill(model, caches[side], ids, chunk))
        for count in range(SETTLED + STEPS):
            for side in order[:: 1 if count % 2 else -1]:
                seconds, last[side] = step(model, caches[side], last[side])
                if count >= SETTLED:
                    steps[side].append(seconds)
        if not mx.array_equal(last["mlx-lm"], last["ours"]):
            raise RuntimeError("the sides decode different tokens: they are no comparison")
    ratios = {
        f"model_{what}_ratio": round(statistics.median(got["mlx-lm"]) / statistics.median(got["ours"]), 3)
        for what, got in (("prefill", read), ("decode", steps))
    }
    print(f"  whole model, window {window:,}: mlx-lm / ours {ratios}", file=sys.stderr)
    return ratios


if __name__ == "__main__":
    main()
