"""What an accelerator shows: ours beside mlx-lm's, and beside what the device could do at best.

    python benchmarks/accelerator.py                          # a GPU: under six minutes
    python benchmarks/accelerator.py --sections step,prefill --weights 4
    python benchmarks/accelerator.py --shape tiny             # some minutes on a CPU, to try it

The physics. A decode step reads all weights and the keys and values of its rows once: `limit` is these bytes over the
bandwidth that this device shows for a copy. But a host needs microseconds to launch each operation: `calls` is how many
a step launches, counted in its graph. A step near its limit is bound by bytes, one near calls x the time of a call by
the host. Models have random weights, a Qwen3 of 28 layers by default, in bfloat16 and as most people run them, in 4
bits; so texts mean nothing, and no draft is right.

Sections run as processes of their own, a minute each: what hangs or crashes costs its own lines only.

    device    bandwidth of a copy; describing and launching an operation; a round trip
    step      a decode step of 1, 4, 16 and 64 rows of about 300 tokens
    events    the steps after a row left, also with 10,000 slots expected, and after a prompt of 300 came
    loop      closed loop in this process: 16 clients, prompts of 300, or of 250 to 350, answers of 32 to 64; stalls
    prefill   1 x 2,000, 1 x 8,000, 16 x 300 and 16 x 2,000 tokens
    segments  64 x 2,000 and 16 x 8,000 shared tokens: held once, against a copy in each row
    bits      8 and 4 bits against plain caches: the first token after 500 tokens, a step after 4,000
    server    `mlx-kv serve` against `mlx_lm.server`: 1 and 16 clients in step, and 16 with answers of 24 to 72
    tests     the quick tests of caches and of attention, on this device

Ratios are in our favour above 1. Times are medians. One JSON line last; `tools/performance.py --add accelerator FILE`
puts it on the page of the benchmarks. On a Mac, please paste the whole output into an issue.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

# Ours first: importing the package loads a tuned BLAS ahead of MLX.
from mlx_kv import CachePolicy
from mlx_kv.bundled import model_path

# isort: split
import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.generate import BatchGenerator
from mlx_lm.models import qwen3
from operations import has_gpu, of_a_step, words
from shared_prefix import without_sharing

from mlx_kv.cache import row_classes
from mlx_kv.generation.engine import Engine, EngineSettings, make_engine
from mlx_kv.generation.sequence import TokenSequence

ROOT = Path(__file__).parent.parent
SHAPES = {
    "small": {"num_hidden_layers": 28, "hidden_size": 1024, "intermediate_size": 3072, "num_attention_heads": 16},
    "4b": {"num_hidden_layers": 36, "hidden_size": 2560, "intermediate_size": 9728, "num_attention_heads": 32},
    "tiny": {"num_hidden_layers": 2, "hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4},
}
VOCABULARY = 4096  # of the bundled tokenizer
SECONDS = 100  # of a section, before it is given up
SECTIONS = ("device", "step", "events", "loop", "prefill", "segments", "bits", "server", "tests")
OF_WEIGHTS = ("step", "loop")  # sections that run with each kind of weights


class Scale:
    """How much is run: all of it on a GPU, a tenth elsewhere.

    Attributes:
        tokens: turns a number of tokens into that of this device.
        rows: numbers of rows.
        repeats: of a step.
    """

    def __init__(self, full: bool) -> None:
        self.part = 1 if full else 10
        self.rows = (1, 4, 16, 64) if full else (1, 4)
        self.repeats = 32 if full else 4

    def tokens(self, count: int) -> int:
        return max(8, count // self.part)

    def count(self, rows: int) -> int:
        return min(rows, self.rows[-1])


class Report:
    """The lines of a section, each printed as it comes."""

    def __init__(self, bandwidth: float | None = None) -> None:
        self._bandwidth = bandwidth

    def add(
        self,
        what: str,
        ours: float,
        other: float | None = None,
        unit: str = "ms",
        size: int | None = None,
        calls: int | None = None,
    ) -> None:
        """Adds a line.

        Args:
            ours, other: milliseconds, or more is better where the unit says `/s`.
            size: bytes that must move.
            calls: operations that are launched.
        """
        line: dict[str, float] = {"ours": round(ours, 4)}
        if other is not None:
            line |= {"other": round(other, 4), "ratio": round(ours / other if "/s" in unit else other / ours, 3)}
        if size is not None and self._bandwidth:
            line["limit"] = round(size / self._bandwidth * 1e3, 3)
        if calls is not None:
            line["calls"] = calls
        print(f"{what:66} {unit:10}" + "  ".join(f"{name} {x:,.2f}" for name, x in line.items()))
        named = f"{what} ({unit.replace('/s', ' per second')})"
        print(json.dumps({named: line}), flush=True)  # for the process that started this one


class Case(NamedTuple):
    """What a section is measured with.

    Attributes:
        model: None for sections without one.
        named: its weights, in words.
        shape: its name.
    """

    report: Report
    model: Any
    scale: Scale
    named: str
    shape: str


# --- models, prompts, and both sides ----------------------------------------------------------------------------------


def model_of(shape: str, bits: int) -> Any:
    """A Qwen3 with random weights: in bfloat16 (float32 on a CPU), or in 4 bits."""
    model = qwen3.Model(qwen3.ModelArgs.from_dict(config_of(shape)))
    dtype = mx.bfloat16 if has_gpu() else mx.float32
    mx.random.seed(0)
    for name, value in tree_flatten(model.parameters()):
        drawn = mx.random.normal(value.shape, dtype) * 0.02 if value.ndim > 1 else mx.ones(value.shape, dtype)
        model.load_weights([(name, drawn)], strict=False)
    if bits < 16:
        nn.quantize(model, group_size=64, bits=bits)
    mx.eval(model.parameters())
    return model


def config_of(shape: str) -> dict[str, Any]:
    more = {"model_type": "qwen3", "num_key_value_heads": 8 if shape != "tiny" else 2, "rms_norm_eps": 1e-6}
    more |= {"head_dim": 128 if shape != "tiny" else 64, "max_position_embeddings": 40960, "rope_theta": 1e6}
    return {**SHAPES[shape], **more, "vocab_size": VOCABULARY, "tie_word_embeddings": True}


def ours(model: Any, rows: int, policy: CachePolicy | None = None) -> Engine:
    return make_engine(model, set(), policy, EngineSettings(max_batch_size=rows, max_wait=0.5))


def fill(engine: Engine, prompts: Sequence[list[int]], most: int = 400, room: int = 0) -> None:
    """Lets all prompts become rows."""
    for number, tokens in enumerate(prompts):
        engine.submit(TokenSequence(number, list(tokens), most, room=room))
    while len(engine.rows) < len(prompts):
        engine.step()


def theirs(model: Any, prompts: Sequence[list[int]], most: int = 400) -> BatchGenerator:
    """mlx-lm's batch of rows with these prompts."""
    batch = BatchGenerator(model, completion_batch_size=max(1, len(prompts)), stop_tokens=[])
    if prompts:
        batch.insert([list(tokens) for tokens in prompts], max_tokens=[most] * len(prompts))
    answering = set[int]()
    while len(answering) < len(prompts):
        _, answers = batch.next()
        answering |= {answer.uid for answer in answers}
    return batch


def timed(step: Callable[[], Any], count: int = 1) -> list[float]:
    """Milliseconds of each of so many steps."""
    times = []
    for _ in range(count):
        started = time.perf_counter()
        step()
        times.append((time.perf_counter() - started) * 1e3)
    return times


def submit(engine: Engine, number: int, job: tuple[list[int], int]) -> None:
    engine.submit(TokenSequence(number, list(job[0]), job[1]))


def insert(batch: BatchGenerator, number: int, job: tuple[list[int], int]) -> None:
    batch.insert([job[0]], max_tokens=[job[1]])


def answers_of(batch: BatchGenerator) -> list[Any]:
    return list(batch.next()[1])


def read(engine: Engine, prompts: Sequence[list[int]]) -> None:
    """Lets them become rows that have a token each."""
    fill(engine, prompts, 8)
    engine.step()


def bytes_of(model: Any, engine: Engine) -> int:
    """What a step reads: the weights, and the keys and values of all rows."""
    weights = sum(int(value.nbytes) for _, value in tree_flatten(model.parameters()))
    return weights + sum(int(cache.nbytes_live) for cache in engine.caches)


def calls_of(model: Any, engine: Engine) -> int:
    """Operations of its next step. The engine cannot go on after it."""
    return of_a_step(model, engine.caches, len(engine.rows), 1).total()


# --- sections ---------------------------------------------------------------------------------------------------------


def measure_device(case: Case) -> None:
    report = case.report
    size = 2**28 if has_gpu() else 2**24
    large, one = mx.zeros(size, mx.bfloat16), mx.zeros(1)
    mx.eval(large, one)

    def copy() -> None:
        mx.eval(large + 1)

    def chain() -> None:
        x = one
        for _ in range(200):
            x = x + 1
        mx.eval(x)

    def describe() -> None:
        x = one
        for _ in range(200):
            x = x + 1

    def trip() -> None:
        mx.eval(one + 1)

    copied, described, launched, trips = (statistics.median(timed(f, 8)) for f in (copy, describe, chain, trip))
    report.add("bandwidth of a copy", 2 * large.nbytes / copied / 1e6, unit="GB/s")
    report.add("describe an operation", described / 200 * 1e3, unit="us")
    report.add("describe and run an operation", launched / 200 * 1e3, unit="us")
    report.add("evaluate one operation", trips * 1e3, unit="us")
    report.add("read in the time of a call", row_classes.bytes_in_a_call() / 1e6, unit="MB")


def measure_step(case: Case) -> None:
    report, model, scale, *_ = case
    for rows in scale.rows:
        prompts = [words(scale.tokens(300) + 7 * (row % 5), row) for row in range(rows)]
        engine = ours(model, rows)
        fill(engine, prompts)
        batch, here, there = theirs(model, prompts), list[float](), list[float]()
        for _ in range(scale.repeats // 4):
            here += timed(engine.step, 5)[1:]
            there += timed(batch.next, 5)[1:]
        size, calls = bytes_of(model, engine), calls_of(model, engine)
        report.add(
            f"step, {case.named}, rows: {rows}",
            statistics.median(here),
            statistics.median(there),
            size=size,
            calls=calls,
        )
        engine.close()
        batch.close()


def measure_events(case: Case) -> None:
    report, model, scale, *_ = case
    rows, length = scale.count(16), scale.tokens(300)
    prompts = [words(length, row) for row in range(rows)]

    def after(changes: list[Callable[[], Any]], step: Callable[[], Any]) -> tuple[float, float]:
        """The slowest step after a change, and a usual one."""
        slow, usual = list[float](), timed(step, scale.repeats)
        for change in changes[:3]:
            change()
            slow.append(max(timed(step, 4)))
        return statistics.median(slow), statistics.median(usual)

    for what, room in (("a leave", 0), ("a leave, 10,000 slots expected", scale.tokens(10_000))):
        engine, batch = ours(model, rows), theirs(model, prompts)
        fill(engine, prompts, max(400, room), room)
        uids = [answer.uid for answer in answers_of(batch)]
        slow, usual = after([partial(engine.cancel, number) for number in range(3)], engine.step)
        their_slow, their_usual = after([partial(batch.remove, [uid]) for uid in uids], batch.next)
        report.add(f"steps that {what} costs", slow / usual, their_slow / their_usual, unit="steps")
        engine.close()
        batch.close()
    engine, batch = ours(model, rows + 3), theirs(model, prompts)
    fill(engine, prompts)
    jobs = [(number, (words(length, number), 400)) for number in (100, 101, 102)]
    slow, usual = after([partial(submit, engine, *job) for job in jobs], engine.step)
    their_slow, their_usual = after([partial(insert, batch, *job) for job in jobs], batch.next)
    report.add("steps that a prompt of 300 costs", slow / usual, their_slow / their_usual, unit="steps")
    engine.close()
    batch.close()


def measure_loop(case: Case) -> None:
    report, model, scale, *_ = case
    clients, total = scale.count(16), 64 if scale.part == 1 else 8

    def jobs(longest: int) -> list[tuple[list[int], int]]:
        draw = random.Random(longest)
        lengths = [draw.randint(scale.tokens(600 - longest), scale.tokens(longest)) for _ in range(total)]
        return [(words(length, index), draw.randint(32, 64)) for index, length in enumerate(lengths)]

    def loop(work: list[tuple[list[int], int]], send: Callable[..., Any], step: Callable[[], list[Any]]) -> float:
        """Tokens per second; a client sends its next request when its last one ended."""
        coming, tokens, started, left = iter(enumerate(work)), 0, time.perf_counter(), len(work)
        for _ in range(clients):
            send(*next(coming))
        while left:
            answers = step()
            tokens += len(answers)
            for _ in range(sum(answer.finish_reason is not None for answer in answers)):
                left -= 1
                if (job := next(coming, None)) is not None:
                    send(*job)
        return tokens / (time.perf_counter() - started)

    for longest, what in ((300, "prompts of 300"), (350, "prompts of 250 to 350")):
        here, there, stalls = list[float](), list[float](), 0.0
        for _ in range(3):
            engine, batch, work = ours(model, clients), theirs(model, []), jobs(longest)
            here.append(loop(work, partial(submit, engine), engine.step))
            there.append(loop(work, partial(insert, batch), partial(answers_of, batch)))
            stalled, passes = engine.stalls
            stalls = stalled / passes
            engine.close()
            batch.close()
        report.add(  # the first turn makes kernels and plans
            f"closed loop, {case.named}, clients: {clients}, {what}",
            statistics.median(here[1:]),
            statistics.median(there[1:]),
            unit="tokens/s",
        )
        report.add(f"... first turn, {what}, {case.named}", here[0], there[0], unit="tokens/s")
        report.add(f"... stalls, {what}, {case.named}", 100 * stalls, unit="% of steps")


def measure_prefill(case: Case) -> None:
    report, model, scale, *_ = case
    for count, length in ((1, 2000), (1, 8000), (16, 300), (16, 2000)):
        rows, tokens = scale.count(count), scale.tokens(length)
        here, there = list[float](), list[float]()
        engine = ours(model, rows)  # one for all turns: it learns how large passes pay
        for turn in range(4):
            prompts = [words(tokens, 100 * turn + row) for row in range(rows)]

            here += timed(partial(read, engine, prompts))
            while engine.busy:
                engine.step()
            there += timed(partial(theirs, model, prompts))
        report.add(f"prompts, {rows} x {tokens:,}", statistics.median(here[1:]), statistics.median(there[1:]))
        engine.close()


def measure_segments(case: Case) -> None:
    report, model, scale, *_ = case
    before = row_classes.min_saving
    for count, length in ((64, 2000), (16, 8000)):
        rows, shared = scale.count(count), words(scale.tokens(length), 0)
        prompts = [shared + words(20 + row % 5, row + 1) for row in range(rows)]
        times, sizes, calls = list[float](), list[int](), 0
        for copies in (False, True):
            with without_sharing() if copies else contextlib.nullcontext():
                row_classes.min_saving = row_classes.min_saving if copies else lambda: 1
                engine = ours(model, rows)
                fill(engine, prompts)
                engine.step()
                times.append(statistics.median(timed(engine.step, scale.repeats)))
                sizes.append(bytes_of(model, engine))
                calls = calls or calls_of(model, engine)
                engine.close()
                row_classes.min_saving = before
        report.add(f"segments, {rows} x {len(shared):,}, other: copies", *times, size=sizes[0], calls=calls)
        report.add(f"... bytes, {rows} x {len(shared):,}, other: copies", *(size / 1e6 for size in sizes), unit="MB")


def measure_bits(case: Case) -> None:
    report, model, scale, *_ = case
    read(ours(model, 1), [words(scale.tokens(500), 1)])  # all that is not of quantised caches
    first, plain = 0.0, 0.0
    for what, policy in (("plain", None), ("8 bits", CachePolicy(bits=8)), ("4 bits", CachePolicy(bits=4))):
        engine = ours(model, 1, policy)

        (read_first,) = timed(partial(read, engine, [words(scale.tokens(500), 1)]))
        engine.close()
        engine = ours(model, 1, policy)
        fill(engine, [words(scale.tokens(4000), 1)])
        timed(engine.step, 4)
        step = statistics.median(timed(engine.step, scale.repeats))
        first, plain = first or read_first, plain or step
        size, calls = bytes_of(model, engine), calls_of(model, engine)
        report.add(f"{what}: first token, cold, other: plain", read_first, first)
        report.add(f"{what}: a step after {scale.tokens(4000):,}, other: plain", step, plain, size=size, calls=calls)
        engine.close()


def measure_server(case: Case) -> None:
    report, model, scale, *_ = case
    with tempfile.TemporaryDirectory() as folder:
        for name in ("tokenizer.json", "tokenizer_config.json"):
            (Path(folder) / name).write_text((Path(model_path("reference")) / name).read_text())
        (Path(folder) / "config.json").write_text(
            json.dumps(config_of(case.shape) | {"eos_token_id": 0, "bos_token_id": 0})
        )
        weights = dict(tree_flatten(model.parameters()))
        mx.save_safetensors(str(Path(folder) / "model.safetensors"), weights, {"format": "mlx"})
        del weights
        many = str(scale.count(16))
        for what, tokens, clients in (("in step", "48", f"1,{many}"), ("random lengths", "24-72", many)):
            words = [sys.executable, str(ROOT / "benchmarks" / "server.py"), "--model", folder, "--rounds", "1"]
            asked = [*words, "--workloads", "own", "--tokens", tokens if scale.part == 1 else "4", "--clients", clients]
            found = json.loads(
                subprocess.run(asked, capture_output=True, text=True, check=True).stdout.splitlines()[-1]
            )
            for count in clients.split(","):
                sides = [found[f"own_{count}_tokens_per_second_{side}"] for side in ("ours", "mlx_lm")]
                report.add(f"server, {what}, clients: {count}", *sides, unit="tokens/s")
                sides = [1e3 * found[f"own_{count}_first_token_{side}"] for side in ("ours", "mlx_lm")]
                report.add(f"... first token, {what}, clients: {count}", *sides)


def run_tests(case: Case) -> None:
    report = case.report
    words = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", "--quick", "tests/cache"]
    text = subprocess.run(words, capture_output=True, text=True, cwd=ROOT).stdout
    counts = {what: int(number) for number, what in re.findall(r"(\d+) (passed|failed|error)", text)}
    for what in ("passed", "failed"):
        report.add(f"quick tests of caches: {what}", counts.get(what, 0), unit="tests")
    print("\n".join(line for line in text.splitlines() if line.startswith("FAILED")))


MEASURES: dict[str, Callable[[Case], None]] = {
    "device": measure_device,
    "step": measure_step,
    "events": measure_events,
    "loop": measure_loop,
    "prefill": measure_prefill,
    "segments": measure_segments,
    "bits": measure_bits,
    "server": measure_server,
    "tests": run_tests,
}


# --- the whole of it --------------------------------------------------------------------------------------------------


def run_section(name: str, asked: argparse.Namespace, bits: int, bandwidth: float | None) -> dict[str, Any]:
    """The lines of one section, measured in a process of its own; what it printed before it failed counts."""
    words = ["--shape", asked.shape, "--weights", str(bits), "--one", name, "--bandwidth", str(bandwidth or 0)]
    running = subprocess.Popen([sys.executable, __file__, *words], stdout=subprocess.PIPE, text=True)
    assert running.stdout is not None
    started, found = time.perf_counter(), dict[str, Any]()
    timer = threading.Timer(asked.seconds, running.kill)
    timer.start()
    try:
        for line in running.stdout:
            if line.startswith("{"):
                found |= json.loads(line)
            else:
                print(line, end="", flush=True)
    finally:
        timer.cancel()
        running.kill()
    ending = "" if running.wait() == 0 else f", ended with {running.returncode}"
    print(f"[{name}, {bits}-bit weights: {time.perf_counter() - started:.0f} s{ending}]", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    known = ",".join(SECTIONS)
    parser.add_argument("--sections", default=known, help=f"some of {known}")
    parser.add_argument("--shape", choices=SHAPES, default="small" if has_gpu() else "tiny", help="of the model")
    parser.add_argument("--weights", default="16,4", metavar="BITS", help="16, 4 or both, with a comma between")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="of a section, before it is given up")
    parser.add_argument("--one", choices=SECTIONS, help=argparse.SUPPRESS)
    parser.add_argument("--bandwidth", type=float, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if unknown := set(asked.sections.split(",")) - set(SECTIONS):
        parser.error(f"no section is called {', '.join(sorted(unknown))}: give some of {known}")
    if unknown := set(asked.weights.split(",")) - {"16", "4"}:
        parser.error(f"weights of {', '.join(sorted(unknown))} bits: give 16, 4 or both")
    kinds = [int(bits) for bits in asked.weights.split(",")]
    if asked.one is not None:
        report, named = Report(asked.bandwidth), f"{kinds[0]}-bit weights"
        model = None if asked.one in ("device", "tests") else model_of(asked.shape, kinds[0])
        MEASURES[asked.one](Case(report, model, Scale(has_gpu()), named, asked.shape))
        return
    info: dict[str, Any] = mx.device_info()
    print(f"{info.get('device_name', mx.default_device())}, {asked.shape}: {SHAPES[asked.shape]}", flush=True)
    results: dict[str, Any] = {"benchmark": "accelerator", "device": str(mx.default_device()), "shape": asked.shape}
    results["device_name"] = str(info.get("device_name", ""))
    bandwidth: float | None = None
    for name in asked.sections.split(","):
        for bits in kinds if name in OF_WEIGHTS else kinds[:1]:
            found = run_section(name, asked, bits, bandwidth)
            results |= found
            if name == "device":
                bandwidth = found.get("bandwidth of a copy (GB per second)", {}).get("ours", 0) * 1e9
    print(json.dumps(results))


if __name__ == "__main__":
    main()
