"""Quality lost when each query reads only a part of the cache: a simulation, after Quest (arXiv 2406.10774).

    python tools/smollm2.py build/smollm2
    python -m benchmarks.eval.partial_reads --model build/smollm2 --out build/partial_reads.jsonl
    python -m benchmarks.eval.partial_reads --out build/partial_reads.jsonl --plot build/reads.png   the report alone
    python -m benchmarks.eval.partial_reads --model build/smollm2 --out build/quick.jsonl --quick    some minutes

A query reads the first 4 tokens, the newest 32 (and those of a block that is not full yet), and as many of the best
blocks between them as fit into a share of the tokens before it. Blocks are chosen for each step, row and KV head, by

    bound    Quest: the highest product with the query that the minimum and maximum of a block's keys allow, by channel
    mean     the product with the mean key of a block
    moments  the same plus half the variance of the products, from the variance of each channel
    oracle   the attention that a block really receives: not possible in practice, the best that blocks can do
    random   any blocks: the control

Bounds and means become shares of attention by a softmax over the blocks; shares are summed over the query heads of a
KV head. Contexts are prefilled with full attention. The tokens that follow are then computed in one call, with a mask
for each query and head: this is the same as decoding them one by one from the selected blocks
(tests/quality/test_partial_reads.py). Tasks are those of `benchmarks.eval`: questions are prompts and read everything,
the tokens of replies select. In texts each of 128 tokens selects. Attention mass is measured on the queries of the full
cache, so errors do not accumulate over layers.

Physics: decoding moves the keys and values of all tokens once per step, 46 kB a token for SmolLM2 in float32. Reading
a share s from blocks of b tokens moves s of that, and the bounds: two vectors (one for mean) for b keys and b values,
1/b of it. Time
is not measured.

Each case is a line of --out when it is done; another run continues from there. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

# mlx_kv before mlx: importing the package loads a tuned BLAS ahead of MLX.
from mlx_kv.mlxlm.loading import load

# isort: split
import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlx_kv.calibration.loss import log_likelihoods, read
from mlx_kv.calibration.texts import Tokens
from mlx_kv.cli.output import aligned, check_plot, duration, save_figure
from mlx_kv.inspection import attention_weights
from mlx_kv.mlxlm.attention import AttentionCall, attention_hooked
from mlx_kv.mlxlm.convert import make_prompt_cache
from mlx_kv.policy import SINKS

from .measure import right_answers, right_without_context
from .questions import Ask, Room, Talk, case_of, python_texts, trial_of

NEWEST = 32  # newest tokens that are always read; those of a block that is not full come on top
JUDGED = 128  # tokens of a text that are predicted after each length of context
OBSERVED = 4  # every fourth of them is a query whose attention mass is measured
SELECTIONS = ("bound", "mean", "moments", "oracle", "random")
PRACTICAL = SELECTIONS[:3]
BLOCKS, DIVISORS = (16, 32, 64), (4, 8, 16)
TEXT = "text"
TASKS = ("needles", "many_needles", "tracking", "passages", "code", "chat")
STEP = 512
ALLOWED = 0.02  # loss of accuracy at a quarter, below which selection would be built


@dataclass(frozen=True)
class Reading:
    """Which tokens a query reads.

    Attributes:
        select: how blocks are chosen, one of SELECTIONS; None reads everything.
        block: tokens of a block.
        divisor: 1/divisor of the tokens before a query are read.
        whole: first layers that read everything.
    """

    select: str | None = None
    block: int = 32
    divisor: int = 4
    whole: int = 0

    @property
    def name(self) -> str:
        if self.select is None:
            return "everything"
        more = [f"first {self.whole} layers whole"] * (self.whole > 0)
        return ", ".join([f"{self.select}, 1/{self.divisor}, blocks of {self.block}", *more])


FULL, QUEST = Reading(), Reading("bound")
TASK_READINGS = (
    FULL,
    QUEST,
    *(replace(QUEST, select=select) for select in SELECTIONS[1:]),
    *(replace(QUEST, block=block) for block in BLOCKS if block != QUEST.block),
    replace(QUEST, whole=2),
)
TEXT_READINGS = (*TASK_READINGS, *(replace(QUEST, divisor=divisor) for divisor in DIVISORS[1:]))


# --- choosing blocks --------------------------------------------------------------------------------------------------
# H KV heads, G query heads of each, S queries, N tokens, D head dim, J blocks.


@dataclass(frozen=True)
class Plan:
    """The tokens that queries at some positions always read, and the number of blocks that they select besides.

    Attributes:
        positions: (S,) of the queries.
        newest: (S,) the first of the newest tokens, where a block begins.
        counts: (S,) blocks to select.
    """

    positions: np.ndarray
    newest: np.ndarray
    counts: np.ndarray

    @classmethod
    def of(cls, positions: np.ndarray, block: int, divisor: int) -> Plan:
        newest = SINKS + np.maximum(0, positions + 1 - NEWEST - SINKS) // block * block
        always = SINKS + positions + 1 - newest
        counts = np.maximum(1, ((positions + 1) // divisor - always) // block)
        return cls(positions, newest, np.minimum(counts, (newest - SINKS) // block))

    def tokens_read(self, block: int) -> np.ndarray:
        """(S,)"""
        read: np.ndarray = SINKS + self.positions + 1 - self.newest + self.counts * block
        return read


def block_mass(weights: np.ndarray, block: int) -> np.ndarray:
    """(H, G, S, J): attention weights (H, G, S, N) of each block."""
    blocks = (weights.shape[-1] - SINKS) // block
    return weights[..., SINKS : SINKS + blocks * block].reshape(*weights.shape[:-1], blocks, block).sum(axis=-1)


def estimates(select: str, queries: np.ndarray, keys: np.ndarray, scale: float, block: int) -> np.ndarray:
    """(H, G, S, J): logarithms of the attention that blocks may get; queries (H, G, S, D), keys (H, N, D)."""
    heads, tokens, dim = keys.shape
    blocks = (tokens - SINKS) // block
    parts = keys[:, SINKS : SINKS + blocks * block].reshape(heads, blocks, block, dim)

    def products(queries: np.ndarray, planes: np.ndarray) -> np.ndarray:  # (H, J, D)
        return queries @ planes.swapaxes(1, 2)[:, None]

    queries = queries * scale
    if select == "bound":
        above, below = np.maximum(queries, 0), np.minimum(queries, 0)
        return products(above, parts.max(axis=2)) + products(below, parts.min(axis=2))
    found = products(queries, parts.mean(axis=2))
    return found if select == "mean" else found + products(queries**2, parts.var(axis=2)) / 2


def block_scores(
    select: str, queries: np.ndarray, keys: np.ndarray, scale: float, weights: np.ndarray | None, plan: Plan, block: int
) -> np.ndarray:
    """(H, S, J): higher is better; -inf for blocks with tokens that are read anyway or are not complete yet.

    Args:
        weights: (H, G, S, N), for the oracle.
    """
    heads, _, size, _ = queries.shape
    blocks = (keys.shape[1] - SINKS) // block
    old = SINKS + block * np.arange(1, blocks + 1) <= plan.newest[:, None]  # (S, J)
    if select == "random":
        rng = np.random.default_rng([keys.shape[1], *np.abs(keys[:, -1, 0] * 1e4).astype(int).tolist()])
        scores = rng.random((heads, size, blocks))
    elif select == "oracle":
        assert weights is not None
        scores = block_mass(weights, block).sum(axis=1)
    else:
        logits = np.where(old, estimates(select, queries, keys, scale, block), -np.inf)
        highest = logits.max(axis=-1, keepdims=True, initial=-1e30)
        shares = np.exp(logits - highest)
        scores = (shares / np.maximum(shares.sum(axis=-1, keepdims=True), 1e-30)).sum(axis=1)
    return np.where(old, scores, -np.inf)


def chosen_blocks(scores: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """(H, S, J) bool: the best blocks of each query and KV head."""
    ranks = np.argsort(np.argsort(-scores, axis=-1, kind="stable"), axis=-1)
    chosen: np.ndarray = ranks < counts[:, None]
    return chosen


def grouped(call: AttentionCall) -> tuple[np.ndarray, np.ndarray]:
    """Queries (H, G, S, D) and keys (H, N, D) of a call with one row."""
    keys, queries = np.array(call.keys[0]), np.array(call.queries[0])
    return queries.reshape(len(keys), -1, *queries.shape[1:]), keys


def true_weights(call: AttentionCall, heads: int, every: int = 1) -> np.ndarray:
    """(H, G, S, N): the attention of every n-th query with the full cache."""
    size, tokens = call.queries.shape[2], call.keys.shape[2]
    mask = mx.arange(tokens) <= mx.arange(tokens - size, tokens)[:, None]
    weights = np.array(attention_weights(call.queries[:, :, ::every], call.keys, call.scale, mask[::every])[0])
    return weights.reshape(heads, -1, *weights.shape[1:])


class PartialReads:
    """An attention hook that restricts attention to the tokens that a reading selects.

    Args:
        selecting: (S,) bool: which of the queries of a call select; others read everything.

    Attributes:
        tokens: tokens read and tokens available, summed over layers and selecting queries.
    """

    def __init__(self, caches: Sequence[Any], reading: Reading, selecting: np.ndarray) -> None:
        self._layers = {id(cache): layer for layer, cache in enumerate(caches)}
        self._reading, self._selecting = reading, selecting
        self.tokens = [0, 0]

    def attend(self, call: AttentionCall) -> mx.array:
        reading, selecting = self._reading, self._selecting
        size, tokens = call.queries.shape[2], call.keys.shape[2]
        assert call.mask is None or isinstance(call.mask, str)
        positions = np.arange(tokens - size, tokens)
        available = int((positions + 1)[selecting].sum())
        if reading.select is None or self._layers[id(call.cache)] < reading.whole:
            self._count(available, available)
            return call.forward()
        queries, keys = grouped(call)
        plan = Plan.of(positions, reading.block, reading.divisor)
        weights = true_weights(call, len(keys)) if reading.select == "oracle" else None
        scores = block_scores(reading.select, queries, keys, call.scale, weights, plan, reading.block)
        chosen = chosen_blocks(scores, plan.counts)
        at = np.arange(tokens)
        mask = np.broadcast_to((at < SINKS) | (at >= plan.newest[:, None]), (len(keys), size, tokens)).copy()
        mask[..., SINKS : SINKS + chosen.shape[-1] * reading.block] |= np.repeat(chosen, reading.block, axis=-1)
        mask = (mask | ~selecting[:, None]) & (at <= positions[:, None])
        self._count(int(plan.tokens_read(reading.block)[selecting].sum()), available)
        return call.forward(mask=mx.array(np.repeat(mask, queries.shape[1], axis=0)[None]))

    def _count(self, read: int, available: int) -> None:
        self.tokens = [self.tokens[0] + read, self.tokens[1] + available]


class MassObserver:
    """An attention hook that measures the share of attention mass that each selection would read.

    Attributes:
        mass: a value for each layer, by selection, block and divisor.
    """

    def __init__(self) -> None:
        self.mass: dict[tuple[str, int, int], list[float]] = {}

    def attend(self, call: AttentionCall) -> mx.array:
        queries, keys = grouped(call)
        queries = queries[:, :, ::OBSERVED]
        weights = true_weights(call, len(keys), OBSERVED)
        tokens, size = len(keys[0]), call.queries.shape[2]
        positions = np.arange(tokens - size, tokens)[::OBSERVED]
        for block in BLOCKS:
            masses = block_mass(weights, block).mean(axis=1)  # (H, S, J)
            for select in SELECTIONS:
                plan = Plan.of(positions, block, 1)
                scores = block_scores(select, queries, keys, call.scale, weights, plan, block)
                always = 1 - np.where(np.isinf(scores), 0, masses).sum(axis=-1)  # (H, S)
                ranked = np.take_along_axis(masses, np.argsort(-scores, axis=-1, kind="stable"), axis=-1)
                summed = np.cumsum(ranked, axis=-1)
                for divisor in DIVISORS:
                    counts = Plan.of(positions, block, divisor).counts
                    found = always + np.take_along_axis(summed, counts[None, :, None] - 1, axis=-1)[..., 0]
                    self.mass.setdefault((select, block, divisor), []).append(float(found.mean()))
        return call.forward()


# --- cases ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Place:
    """A case: a task (or "text") with its tokens of context."""

    task: str
    context: int
    seed: int
    row: int


class MarkedTalk(Talk):
    """Records for each encoded turn whether it is a reply, and its number of tokens."""

    def __init__(self, tokenizer: Any) -> None:
        super().__init__(tokenizer)
        self.turns: list[tuple[bool, int]] = []

    def question(self, text: str, first: bool) -> Tokens:
        tokens = super().question(text, first)
        self.turns.append((False, len(tokens)))
        return tokens

    def reply(self, ask: Ask, last: int, before: str = "") -> tuple[Tokens, Tokens]:
        tokens, answers = super().reply(ask, last, before)
        self.turns.append((True, len(tokens)))
        return tokens, answers


def filled(model: nn.Module, tokens: Sequence[int]) -> list[Any]:
    caches = make_prompt_cache(model)
    read(model, caches, mx.array([tokens]), STEP)
    return caches


def task_case(
    model: nn.Module, talk: MarkedTalk, place: Place, readings: Sequence[Reading]
) -> Iterator[dict[str, Any]]:
    """The right answers of a case under each reading."""
    talk.turns.clear()
    case = case_of(place.task, talk, python_texts(), Room(place.context, 64), place.seed, place.row)
    marks = np.repeat(*map(np.array, zip(*talk.turns, strict=True)))
    trial = trial_of(talk, case, seen=False)
    counts = ~right_without_context(model, trial)
    caches = filled(model, trial.context[0].tolist())
    for reading in readings:
        hook = PartialReads(caches, reading, marks)
        with attention_hooked(model, caches, hook):
            right = right_answers(model, trial, caches)
        for cache in caches:
            cache.trim(len(marks))
        yield asdict(reading) | {
            "right": right[counts].astype(int).tolist(),
            "tokens": hook.tokens,
        }


def text_cases(
    model: nn.Module, tokenizer: Any, places: Sequence[Place], readings: Sequence[Reading]
) -> Iterator[list[dict[str, Any]]]:
    """Nats of the tokens after each length of context, and the attention mass read.

    Args:
        places: of one seed and row, contexts rising: the text is read once.
    """
    rng = np.random.default_rng([places[0].seed, places[0].row])
    prose = python_texts().prose
    first, tokens = int(rng.integers(len(prose))), list[int]()
    while len(tokens) <= places[-1].context + JUDGED:
        tokens += tokenizer.encode(prose[first % len(prose)] + "\n", add_special_tokens=False)
        first += 1
    text, caches, done = mx.array([tokens]), make_prompt_cache(model), 0
    for place in places:
        read(model, caches, text[:, done : place.context], STEP)
        done = place.context
        judged, targets = text[:, done : done + JUDGED], text[:, done + 1 : done + JUDGED + 1]

        def nats(hook: PartialReads | MassObserver, judged: mx.array = judged, targets: mx.array = targets) -> Any:
            with attention_hooked(model, caches, hook):
                found = -np.array(log_likelihoods(model(judged, cache=caches), targets))[0]
            for cache in caches:
                cache.trim(JUDGED)
            return found.round(4).tolist()

        lines = []
        for reading in readings:
            hook = PartialReads(caches, reading, np.ones(JUDGED, bool))
            lines.append(asdict(reading) | {"nats": nats(hook), "tokens": hook.tokens})
        observer = MassObserver()
        nats(observer)
        for (select, block, divisor), mass in observer.mass.items():
            values = [round(value, 5) for value in mass]
            lines.append({"select": select, "block": block, "divisor": divisor, "mass": values})
        yield lines


def measure(model_path: Path, out: Path, places: Sequence[Place]) -> None:
    """Appends the missing cases to a file."""
    done = {case.place for case in cases_of(out)}
    missing = [place for place in places if place not in done]
    if not missing:
        return
    model, tokenizer = load(model_path)
    talk = MarkedTalk(tokenizer)
    total, begun, through = sum(place.context for place in missing), time.monotonic(), 0
    texts: dict[tuple[int, int], Iterator[list[dict[str, Any]]]] = {}
    for number, place in enumerate(missing, start=1):
        if place.task == TEXT:
            text = (place.seed, place.row)
            same = [each for each in missing if each.task == TEXT and (each.seed, each.row) == text]
            lines = next(texts.setdefault(text, text_cases(model, tokenizer, same, TEXT_READINGS)))
        else:
            lines = list(task_case(model, talk, place, TASK_READINGS))
        with out.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"place": asdict(place), "lines": lines}) + "\n")
        through += place.context
        left = duration((time.monotonic() - begun) * (total - through) / through)
        print(f"{number} of {len(missing)}: {place}, {left} left", file=sys.stderr, flush=True)


@dataclass(frozen=True)
class Measured:
    """A finished case: its place and its measurements."""

    place: Place
    lines: list[dict[str, Any]]


def cases_of(file: Path) -> list[Measured]:
    """The finished cases of a file; a last line that was cut off is left out."""
    text = file.read_text(encoding="utf-8") if file.exists() else ""
    cases = [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]
    return [Measured(Place(**case["place"]), case["lines"]) for case in cases]


# --- the report -------------------------------------------------------------------------------------------------------


def reading_of(line: dict[str, Any]) -> Reading:
    return Reading(line["select"], line["block"], line["divisor"], line["whole"])


def mean_and_error(values: Sequence[float]) -> tuple[float, float | None]:
    """The mean and its standard error, which one value does not have."""
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None
    return statistics.fmean(values), error


@dataclass(frozen=True)
class Accuracy:
    """The answers of all tasks of one context under one reading.

    Attributes:
        by_task: share of right answers of each task.
        lost: mean over tasks of the accuracy of everything read, minus this one.
        error: standard error of `lost`, from its values for each case; tasks differ, so this is an upper estimate.
        changed: answers that became wrong, and that became right.
        share: tokens read of those available.
    """

    by_task: dict[str, float]
    lost: float
    error: float | None
    answers: int
    changed: tuple[int, int]
    share: float


def accuracy(cases: Sequence[Measured], reading: Reading) -> Accuracy | None:
    """Of cases of one context; None if none of them was measured under this reading."""
    by_task: dict[str, list[tuple[int, int]]] = {}  # everything read, and this reading
    losses: list[float] = []
    read, available = 0, 0
    for case in cases:
        lines = {reading_of(line): line for line in case.lines}
        if reading not in lines or not lines[FULL]["right"]:  # all answers may be known without the context
            continue
        pairs = list(zip(lines[FULL]["right"], lines[reading]["right"], strict=True))
        by_task.setdefault(case.place.task, []).extend(pairs)
        losses.append(statistics.fmean(full - partial for full, partial in pairs))
        read, available = (a + b for a, b in zip((read, available), lines[reading]["tokens"], strict=True))
    if not losses:
        return None
    pairs = [pair for some in by_task.values() for pair in some]
    return Accuracy(
        {task: statistics.fmean(partial for _, partial in some) for task, some in by_task.items()},
        statistics.fmean(statistics.fmean(full - partial for full, partial in some) for some in by_task.values()),
        mean_and_error(losses)[1],
        len(pairs),
        (pairs.count((1, 0)), pairs.count((0, 1))),
        read / available,
    )


def points(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f}"


def table(heads: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    return "\n".join(aligned([list(heads), *map(list, lines)]))


def report_tasks(cases: Sequence[Measured]) -> dict[int, dict[Reading, Accuracy]]:
    """Prints a table for each context."""
    found: dict[int, dict[Reading, Accuracy]] = {}
    for context in sorted({case.place.context for case in cases}):
        some = [case for case in cases if case.place.context == context]
        measured = ((reading, accuracy(some, reading)) for reading in TASK_READINGS)
        found[context] = {reading: each for reading, each in measured if each is not None}
        tasks = list(found[context][FULL].by_task)
        seeds, answers = len({case.place.seed for case in some}), found[context][FULL].answers
        rows = [
            [
                reading.name,
                *(points(each.by_task.get(task)) for task in tasks),
                points(each.lost),
                points(each.error),
                "{} and {}".format(*each.changed),
                points(each.share),
            ]
            for reading, each in found[context].items()
        ]
        print(f"\nRight answers in %, {context:,} tokens, seeds: {seeds}, answers: {answers}")
        heads = [f"read, of {context:,}", *tasks, "points lost", "error", "lost and won", "tokens, %"]
        print(table(heads, rows))
    return found


def report_texts(cases: Sequence[Measured]) -> dict[int, dict[Reading, tuple[float, float | None]]]:
    """Prints the nats that each reading adds, with the standard error over tokens."""
    nats: dict[tuple[int, Reading], list[float]] = {}
    for case in cases:
        for line in case.lines:
            if "nats" in line:
                nats.setdefault((case.place.context, reading_of(line)), []).extend(line["nats"])
    contexts = sorted({at for at, _ in nats})
    found: dict[int, dict[Reading, tuple[float, float | None]]] = {}
    for at in contexts:
        for reading in TEXT_READINGS:
            added = np.subtract(nats[at, reading], nats[at, FULL]).tolist()
            found.setdefault(at, {})[reading] = mean_and_error(added)
    if contexts:
        full = ", ".join(f"{np.mean(nats[at, FULL]):.3f} after {at:,}" for at in contexts)
        print(f"\nNats added to each token of a text, and standard error; everything read: {full}")
        rows = [
            [reading.name, *("{:.3f} ± {:.3f}".format(*found[at][reading]) for at in contexts)]
            for reading in TEXT_READINGS
            if reading != FULL
        ]
        print(table(["read", *(f"{at:,} tokens" for at in contexts)], rows))
    return found


Mass = dict[tuple[int, str, int, int], np.ndarray]  # (layers,) by context, selection, block and divisor


def report_mass(cases: Sequence[Measured]) -> Mass:
    """Prints the attention mass that is read: the mean over layers and the lowest layer."""
    values: dict[tuple[int, str, int, int], list[list[float]]] = {}
    for case in cases:
        for line in case.lines:
            if "mass" in line:
                place = (case.place.context, line["select"], line["block"], line["divisor"])
                values.setdefault(place, []).append(line["mass"])
    found = {place: np.mean(some, axis=0) for place, some in values.items()}
    for at in sorted({at for at, *_ in found}):
        print(f"\nAttention mass in %, {at:,} tokens: mean over layers / lowest layer")
        rows = []
        for select in SELECTIONS:
            for block in BLOCKS:
                masses = [found[at, select, block, divisor] for divisor in DIVISORS]
                cells = [f"{points(mass.mean())} / {points(mass.min())}" for mass in masses]
                rows.append([f"{select}, {block}", *cells])
        print(table(["selection, block", *(f"1/{divisor}" for divisor in DIVISORS)], rows))
    return found


def draw(tasks: dict[int, dict[Reading, Accuracy]], mass: Mass, file: Path) -> None:
    """Attention mass by layer, and accuracy by reading, at the longest context of each."""
    from matplotlib.figure import Figure

    from mlx_kv.plots import COLOURS, GREY, plain_axes

    figure = Figure(figsize=(9.6, 3.6), dpi=110, layout="constrained")
    left, right = figure.subplots(1, 2)
    at = max((at for at, *_ in mass), default=0)
    for colour, select in zip(COLOURS, SELECTIONS, strict=False):
        if at:
            values = 100 * mass[at, select, QUEST.block, QUEST.divisor]
            left.plot(range(1, len(values) + 1), values, color=colour, label=select, marker="o", markersize=3)
    left.set_title(f"attention mass read at 1/4, {at:,} tokens, %", fontsize=10, loc="left")
    left.set_xlabel("layer")
    left.set_ylim(0, 101)
    left.legend(frameon=False, fontsize=8)
    for offset, (colour, (context, found)) in enumerate(zip(COLOURS[1:], tasks.items(), strict=False)):
        height = 0.8 / len(tasks)
        places = [TASK_READINGS.index(reading) + offset * height for reading in found]
        widths = [100 * statistics.fmean(each.by_task.values()) for each in found.values()]
        right.barh(places, widths, height=0.9 * height, color=colour, label=f"{context:,} tokens")
    right.set_yticks(range(len(TASK_READINGS)), [reading.name for reading in TASK_READINGS], fontsize=8)
    right.invert_yaxis()
    right.set_title("right answers, mean over tasks, %", fontsize=10, loc="left")
    right.legend(frameon=False, fontsize=8, loc="lower right", labelcolor=GREY)
    for axes in (left, right):
        plain_axes(axes)
    save_figure(figure, file)


def report(cases: Sequence[Measured], plot: Path | None) -> None:
    tasks = report_tasks([case for case in cases if case.place.task != TEXT])
    texts = [case for case in cases if case.place.task == TEXT]
    nats, mass = report_texts(texts), report_mass(texts)
    if plot is not None:
        draw(tasks, mass, plot)
    lost = {
        reading.name: max(found[reading].lost for found in tasks.values() if reading in found)
        for reading in TASK_READINGS
        if reading.select in PRACTICAL and any(reading in found for found in tasks.values())
    }
    within = [name for name, value in lost.items() if value <= ALLOWED]
    print(f"\nWithin {100 * ALLOWED:.0f} points at every context: {', '.join(within) or 'none'}")
    result = {
        "tasks": {
            context: {reading.name: asdict(each) for reading, each in found.items()} for context, found in tasks.items()
        },
        "nats_added": {at: {reading.name: added for reading, added in found.items()} for at, found in nats.items()},
        "mass": {"{} tokens, {}, blocks of {}, 1/{}".format(*place): mass.mean() for place, mass in mass.items()},
        "within": within,
    }
    print(json.dumps(result))


def numbers(text: str) -> list[int]:
    return sorted(map(int, text.split(",")))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a checkpoint; without one, the report of --out alone")
    parser.add_argument("--out", type=Path, required=True, help="finished cases, as JSON lines")
    parser.add_argument("--tasks", default=",".join((*TASKS, TEXT)), help="NAME,NAME (default %(default)s)")
    parser.add_argument("--contexts", type=numbers, default="1024,2048,4096,8192", help="default %(default)s")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rows", type=int, default=1, help="cases of each task, context and seed")
    parser.add_argument("--quick", action="store_true", help="needles, passages and a text, 1,024 tokens, one seed")
    parser.add_argument("--plot", type=Path, help=".png, .svg or .pdf: mass by layer, right answers")
    options = parser.parse_args()
    if options.quick:
        options.tasks, options.contexts, options.seeds = f"needles,passages,{TEXT}", [1024], 1
    tasks = options.tasks.split(",")
    if unknown := [task for task in tasks if task not in (*TASKS, TEXT)]:
        parser.error(f"there is no task {unknown[0]!r}: choose of {', '.join((*TASKS, TEXT))}")
    if options.contexts[0] < 512:
        parser.error(f"{options.contexts[0]} tokens have too few blocks of 64 to select: give contexts of 512 or more")
    if options.plot is not None:
        check_plot(options.plot)
    if options.model is not None:
        places = [
            Place(task, context, seed, row)
            for row, seed, context, task in product(range(options.rows), range(options.seeds), options.contexts, tasks)
        ]
        measure(options.model, options.out, places)
    cases = cases_of(options.out)
    if not cases:
        parser.error(f"{options.out} has no cases: give --model to measure them")
    report(cases, options.plot)


if __name__ == "__main__":
    main()
