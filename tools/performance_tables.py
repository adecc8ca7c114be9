"""The rows of the tables and pictures of docs/performance.md: which stored values belong to which ratio.

Each `Measurement` matches numbers of a benchmark's JSON object by their path and gives the row its words, unit, and the
paths of both values. Ratios that none of them matches have rows with a ratio alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

FASTER = ("tokens/s", "tokens a pass")  # units of which more is better; of all others less is
WORDS = {
    "one_by_one": "one by one",
    "chunks_of_512": "in chunks of 512",
    "8_bits": "8 bits",
    "_one_index": " with one index",
    "one_shot": "8,192 to 4,096",
    "steady_state": "4,161 to 4,096",
    "first_token_99th": "time to first token, 99th percentile",
    "first_token": "time to first token",
    "throughput": "throughput",
    "one_buffer": "one buffer",
    "two_batches": "two batches",
    "attention": "one layer of attention",
    "prefill": "prefill, writes alone",
    "model_prefill": "prefill, whole model",
    "model_decode": "decoding, whole model",
    "decode_update": "one-token write",
    "decode_step": "one-token write and attention",
    "predictable_again": "predictable again",
    "ours": "default growth",
    "fixed": "draft model, fixed length",
    "draft": "draft model",
    "head": "head, chosen length",
    "auto": "head and suffixes",
    "mlx-lm": "mlx-lm's loop, draft model",
}


@dataclass(frozen=True)
class Row:
    """A line of a table, and a bar of a picture.

    Attributes:
        ours, other: values of both sides; None where the benchmark reports the ratio alone.
        ratio: above 1 is in our favour; None where there is nothing to compare with.
        drawn: whether it is in the picture.
    """

    what: str
    ours: float | None
    other: float | None
    unit: str
    ratio: float | None
    drawn: bool


@dataclass(frozen=True)
class Measurement:
    """How some numbers of a JSON object become rows.

    Args:
        path: pattern of a whole path, whose names are joined by `/`. If it contains "ratio", or `ratio` is true, that
            number is the ratio; else the ratio is made of the values, and there is no bar.
        what: words; `{1}` is the first group of the path, in words.
        unit: of both values.
        ours, other: paths of the values, with `\\1` for a group; empty for none, a number for itself.
        scale: factor of both values.
    """

    path: str
    what: str
    unit: str = ""
    ours: str = ""
    other: str = ""
    scale: float = 1
    ratio: bool = False


def _server(kind: str, unit: str, value: str) -> Measurement:
    path = rf"(own|shared|sampled)_(\d+)_({kind})_ratio"
    return Measurement(path, "{1} prompts, clients: {2}, {3}", unit, rf"\1_\2_{value}_ours", rf"\1_\2_{value}_mlx_lm")


MEASUREMENTS: dict[str, tuple[Measurement, ...]] = {
    "growth": (
        Measurement(
            "(one_by_one|chunks_of_512)_time_ratio_(ours|reserved)",
            "32,768 tokens {1}, {2}",
            "s",
            r"\1_seconds_\2",
            r"\1_seconds_mlx_lm",
        ),
        Measurement(
            "decode_ratio",
            "decoding",
            "tokens/s",
            "decode_tokens_per_second_ours",
            "decode_tokens_per_second_mlx_lm",
        ),
        Measurement(
            "(one_by_one|chunks_of_512)_longest_update_ms_(ours|reserved)",
            "slowest write, {1}, {2}",
            "ms",
            r"\1_longest_update_ms_\2",
            r"\1_longest_update_ms_mlx_lm",
        ),
        Measurement(
            "(one_by_one|chunks_of_512)_growths_(ours)",
            "number of growths, {1}, {2}",
            "",
            r"\1_growths_\2",
            r"\1_growths_mlx_lm",
        ),
        Measurement(
            "prefill_peak_memory_(ours|reserved)_of_mlx_lm",
            "peak memory of a prefill, {1}",
            "of mlx-lm's",
            r"prefill_peak_memory_\1_of_mlx_lm",
            "1",
        ),
    ),
    "host": (
        Measurement("(budget)_ratio", "budget, against mlx-lm's plain cache", "µs a layer", "budget", "mlx_lm_plain"),
        Measurement("(plain|8_bits|window)_ratio", "{1}", "µs a layer", r"\1", r"mlx_lm_\1"),
    ),
    "accelerator": (
        Measurement(
            r"([^/]+) \(tokens per second\)/ratio",
            "{1}",
            "tokens/s",
            r"\1 (tokens per second)/ours",
            r"\1 (tokens per second)/other",
        ),
        *(
            Measurement(rf"([^/]+) \({unit}\)/ratio", "{1}", unit, rf"\1 ({unit})/ours", rf"\1 ({unit})/other")
            for unit in ("ms", "steps", "MB")
        ),
    ),
    "operations": (Measurement(r"([^/]+)/ratio", "{1}", "", r"\1/ours", r"\1/mlx_lm"),),
    "ring": (
        Measurement(
            r"window_(\d+)_chunk_(\d+)/(\w+)_ratio",
            "window {1}, chunks of {2}: {3}",
        ),
        Measurement(
            r"window_(\d+)_chunk_(\d+)/peak_bytes_ours",
            "window {1}, chunks of {2}: peak memory of the cache",
            "MB",
            r"window_\1_chunk_\2/peak_bytes_ours",
            r"window_\1_chunk_\2/peak_bytes_mlx_lm",
            1e-6,
        ),
        Measurement(
            r"window_(\d+)_chunk_(\d+)/bytes_copied_per_chunk_ours",
            "window {1}, chunks of {2}: copied for each chunk",
            "MB",
            r"window_\1_chunk_\2/bytes_copied_per_chunk_ours",
            r"window_\1_chunk_\2/bytes_copied_per_chunk_mlx_lm",
            1e-6,
        ),
    ),
    "compaction": (
        Measurement(
            "one_shot_ratio(_one_index|)",
            "8,192 tokens cut to 4,096, against a gather{1}",
            "ms",
            "one_shot_ms_ours",
            r"one_shot_ms_textbook\1",
        ),
        Measurement(
            "steady_state_ratio(_one_index|)",
            "4,161 tokens cut to 4,096, against a gather{1}",
            "ms",
            "steady_state_ms_ours",
            r"steady_state_ms_textbook\1",
        ),
        Measurement(
            "decode_ratio",
            "decoding after 16,384 tokens, budget of 1,024, against all",
            "tokens/s",
            "decode_tokens_per_second_budget",
            "decode_tokens_per_second_full",
        ),
        Measurement(
            "budget_of_512_over_plain_(model|attention)", "budget of 512 against a plain cache: {1}", ratio=True
        ),
        Measurement(
            "(one_shot|steady_state)_mb_moved",
            "bytes moved, {1}",
            "MB",
            r"\1_mb_moved",
            r"\1_mb_moved_textbook",
        ),
        Measurement(
            "(one_shot|steady_state)_extra_peak_of_cache",
            "peak memory beyond the caches, {1}",
            "of the caches",
            r"\1_extra_peak_of_cache",
            r"\1_extra_peak_of_cache_textbook",
        ),
    ),
    "batch": (
        Measurement("trim_ratio", "trim 8 rows by different counts", "ms", "trim_us_ours", "trim_us_mlx_lm", 1e-3),
        Measurement("step_ratio", "decode step, 4 layers, 8 rows", "ms", "step_ms_ours", "step_ms_mlx_lm"),
        Measurement(
            r"ratio_(\d+)",
            "generation, batch size {1}",
            "tokens/s",
            r"tokens_per_second_\1_ours",
            r"tokens_per_second_\1_mlx_lm",
        ),
        Measurement(
            r"speculation_ratio_(\d+)",
            "speculation, batch size {1}, against our plain batch",
            "tokens/s",
            r"tokens_per_second_\1_speculative",
            r"tokens_per_second_\1_ours",
        ),
    ),
    "ragged": (
        Measurement(
            "(attention|model)_ratio_to_(one_buffer|two_batches)",
            "{1}, against {2}",
            "ms",
            r"\1_ms_by_class",
            r"\1_ms_\2",
        ),
        Measurement(
            "(attention|model)_bytes_over_live_(one_buffer)",
            "{1}: bytes allocated / bytes of tokens, against {2}",
            "",
            r"\1_bytes_over_live_by_class",
            r"\1_bytes_over_live_\2",
        ),
    ),
    "speculation": (
        Measurement(
            r"tasks/(\w+)_(\d+)/(\w+)/ratio",
            "{1}, rows: {2}, {3}",
            "tokens a pass",
            r"tasks/\1_\2/\3/per_pass",
            "1",
        ),
        Measurement(
            r"pair/rows_(\d+)/([\w-]+)/ratio",
            "bundled pair, rows: {1}, {2}",
            "tokens a pass",
            r"pair/rows_\1/\2/per_pass",
            "1",
        ),
        Measurement(
            r"qwen3_next/wrong_([\d.]+)/ratio",
            "recurrent layers, share of wrong drafts {1}",
            "tokens a pass",
            r"qwen3_next/wrong_\1/per_pass",
            "1",
        ),
        Measurement(r"change/(\w+)", "a text that changes: {1}", ratio=True),
    ),
    "cpu_attention": (
        Measurement(r"read_(\d+)_ratio", "read a prompt of {1} tokens", "s", r"read_\1/ours", r"read_\1/mlx"),
        Measurement(r"decode_(\d+)_ratio", "decode after {1} tokens", "s a token", r"decode_\1/ours", r"decode_\1/mlx"),
    ),
    "packed_attention": (
        Measurement(
            r"decode_(\d+)/((?!plain)[^/]+)/tokens_per_second",
            "{2}, model, against plain",
            "tokens/s",
            r"decode_\1/\2/tokens_per_second",
            r"decode_\1/plain/tokens_per_second",
        ),
        Measurement(
            r"decode_(\d+)/((?!plain)[^/]+)/bytes_per_token",
            "{2}, memory of a token, against plain",
            "bytes",
            r"decode_\1/\2/bytes_per_token",
            r"decode_\1/plain/bytes_per_token",
        ),
        Measurement(
            r"layer_(\d+)/([^,/]+), decoded",
            "{2}, one layer, against dequantising first",
            "ms",
            r"layer_\1/\2, ours",
            r"layer_\1/\2, decoded",
        ),
        Measurement(
            r"layer_(\d+)/([^,/]+), mlx-lm",
            "{2}, one layer, against mlx-lm",
            "ms",
            r"layer_\1/\2, ours",
            r"layer_\1/\2, mlx-lm",
        ),
    ),
    "server": (
        _server("throughput", "tokens/s", "tokens_per_second"),
        _server("first_token", "s", "first_token"),
        _server("first_token_99th", "s", "first_token_99th"),
    ),
    "token_waits": (
        Measurement(
            "ratio",
            "longest wait of a stream while the prompt is read",
            "s",
            "largest_wait_ours",
            "largest_wait_mlx_lm",
        ),
        Measurement(
            "undisturbed_ours", "longest wait of a stream before", "s", "undisturbed_ours", "undisturbed_mlx_lm"
        ),
        Measurement(
            "prompt_seconds_ours", "time to read the prompt", "s", "prompt_seconds_ours", "prompt_seconds_mlx_lm"
        ),
    ),
    "structured": (
        Measurement(r"rows_(\d+)/ratio", "decoding, rows: {1}", "tokens/s", r"rows_\1/kept", r"rows_\1/free"),
        Measurement("vocabulary_seconds", "prepare the vocabulary, once", "s", "vocabulary_seconds"),
        Measurement("compile_milliseconds", "compile the schema", "ms", "compile_milliseconds"),
        Measurement("mask_microseconds", "one token mask, median", "µs", "mask_microseconds"),
        Measurement("mask_microseconds_99th", "one token mask, 99th percentile", "µs", "mask_microseconds_99th"),
    ),
}


def leaves_of(found: Mapping[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], float]]:
    """All numbers of a JSON object, with the names on the way to them."""
    for name, value in found.items():
        if isinstance(value, Mapping):
            yield from leaves_of(value, (*path, name))
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            yield (*path, name), float(value)


def ratios_of(name: str, result: Mapping[str, Any]) -> dict[str, float]:
    """The ratios of a benchmark, by their paths in words: what its pictures must show."""
    if name == "packed_attention":  # has speeds of each codec instead
        return {
            f"{path[0].replace('_', ' ')}, {path[1]}": value / result[path[0]]["plain"]["tokens_per_second"]
            for path, value in leaves_of(result)
            if path[-1] == "tokens_per_second" and path[1] != "plain"
        }
    return {in_words(path): value for path, value in leaves_of(result) if "ratio" in path[-1] and value > 0}


def in_words(path: tuple[str, ...]) -> str:
    words = " ".join(path).replace("_", " ").split()
    left = " ".join(word for word in words if word != "ratio") or "all"
    return f"tokens a second, {left} rows" if left.isdigit() else left


def rows_of(name: str, result: Mapping[str, Any]) -> list[Row]:
    """The table of a benchmark: rows of its measurements in their order, then ratios that none of them matches."""
    values = {"/".join(path): value for path, value in leaves_of(result)}
    rows, seen = [], set[str]()
    for measurement in MEASUREMENTS.get(name, ()):
        for path, value in values.items():
            if path not in seen and (match := re.fullmatch(measurement.path, path)):
                seen.add(path)
                rows.append(_row(measurement, match, value, values))
    for path, value in values.items():
        if path not in seen and "ratio" in path.rpartition("/")[2] and value > 0:
            rows.append(Row(in_words(tuple(path.split("/"))), None, None, "", value, True))
    return rows


def _row(measurement: Measurement, match: re.Match[str], value: float, values: Mapping[str, float]) -> Row:
    def side(path: str) -> float | None:
        path = match.expand(path)
        found = values.get(path, float(path) if path.isdecimal() else None)
        return None if found is None else found * measurement.scale

    words = measurement.what
    for number, group in enumerate(match.groups(), 1):
        words = words.replace(f"{{{number}}}", WORDS.get(group, group.replace("_", " ")))
    ours, other, unit = side(measurement.ours), side(measurement.other), measurement.unit
    if ours is None:
        other, unit = None, ""
    reported = measurement.ratio or "ratio" in measurement.path.rpartition("/")[2]
    faster = measurement.unit in FASTER
    ratio: float | None = value if reported else None
    if not reported and ours and other:
        ratio = ours / other if faster else other / ours
    return Row(words, ours, other, unit, ratio, reported or measurement.unit == "tokens/s")


def table(rows: list[Row], other: str) -> str:
    """Markdown with a line for each row; columns of sides and units only where there are any."""
    sides = any(row.ours is not None for row in rows)
    lines = [f"| | ours | {other} | unit | ratio |" if sides else "| | ratio |"]
    lines.append("| --- | ---: | ---: | --- | ---: |" if sides else "| --- | ---: |")
    for row in rows:
        ratio = number(row.ratio, 2)
        own = f" {number(row.ours)} | {number(row.other)} | {row.unit} |" if sides else ""
        lines.append(f"| {row.what} |{own} {ratio} |")
    return "\n".join(lines)


def number(value: float | None, decimals: int | None = None) -> str:
    """With so many decimals below 100, or three significant digits."""
    if value is None:
        return ""
    if abs(value) >= 100 or value == 0:
        return f"{value:,.0f}"
    return f"{value:.{decimals}f}" if decimals is not None else f"{value:.3g}"
