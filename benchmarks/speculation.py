"""What drafting gains: speculation against plain decoding, by task and drafter, all in one process.

    python tools/smollm2.py build/smollm2
    python benchmarks/speculation.py [--model build/smollm2] [--tokens 96] [--rounds 3] [--rows 1,4] [--figure FILE.svg]
    python benchmarks/speculation.py --model build/smollm2 --head build/smollm2.kvdraft.safetensors --rows 1,4,16

The physics. Decoding reads all weights for each pass, of one token or of nine: on a machine whose memory is the limit a
pass of several tokens costs little more than one, and each drafted token that is right saves a pass. Arithmetic grows
with tokens, so how much more it costs is the machine's affair, and is measured here first.

With a head (--head, or the one beside the model), that drafts, too: alone (`mtp`), and with suffixes (`auto`), the
better one for each row.

Six tasks, each a text of this file's own and a question about it, for a chat model: to edit code, to repeat a text, to
summarise it, to take facts out of it as JSON, an open question about nothing that stands there, and to write code.
Plain decoding and the drafters take turns, greedy, with the length that is chosen while it runs; an answer has at most
--tokens tokens. With 4 rows, four variants of the task decode together, and all tokens count.

Without --model there is the bundled pair alone: the reference model with its draft model, on source code, against plain
decoding and against mlx-lm's own loop with the same draft model (K = 3, its caches). And a tiny random model with
recurrent layers (qwen3_next), whose drafter is told the answer: what going back leaves of the gain. --parts rollback
has one in the shapes of Qwen3-Next's layers (four of them, 32 experts), of whose drafts half is right: the time of a
round that applies the right tokens to the recorded state, over that of one that reads them again.

Then a text that changes: the reference model, whose logits are made to say a script, repeats some tokens, goes on with
random ones, and repeats again: the length that is chosen, and the gain, over time; --figure draws it.

Ratios are plain / speculation in seconds: more than 1, speculation is faster. `same` says that the texts are equal.
The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

# Ours first: importing the package loads a tuned BLAS ahead of MLX.
from mlx_kv import CachePolicy, SpeculationStatistics, batch_generate, load_draft_head, model_path
from mlx_kv.generation import decode_batch
from mlx_kv.generation.speculation.drafters import Drafter
from mlx_kv.mlxlm.head_files import find_draft_head
from mlx_kv.mlxlm.loading import load

# isort: split
import mlx.core as mx
from common import medians, take_turns
from mlx_lm.generate import speculative_generate_step
from mlx_lm.models import qwen3_next

CODE = """import json


def load_books(path):
    with open(path) as file:
        return json.load(file)


def save_books(path, books):
    with open(path, "w") as file:
        json.dump(books, file)


def add_book(books, title, author, year):
    books.append({"title": title, "author": author, "year": year})
    return books


def remove_book(books, title):
    return [book for book in books if book["title"] != title]


def find_book(books, title):
    for book in books:
        if book["title"] == title:
            return book
    return None
"""
STORY = (
    "The lighthouse of Port Elin was built in 1887 by Marta Grune, an engineer from the mainland, who was paid 14,000 "
    "crowns for it. It is 41 metres tall and was lit with whale oil until 1903, when a petroleum lamp took its place. "
    "In the winter of 1911 a storm broke the upper windows, and the keeper, Olaf Hansen, kept the lamp burning for six "
    "nights with sails nailed over the frames. Two ships found the harbour by that light. The town gave him a silver "
    "watch, which his granddaughter still has. Since 1974 the lamp is electric, and nobody lives in the tower."
)
TASKS: dict[str, tuple[str, Sequence[str]]] = {
    "edit": (
        "Replace the name {what} in this code, and write the whole code again.\n\n{text}",
        ("title by name", "books by shelf", "path by place", "year by published"),
    ),
    "repeat": ("{text}\n\nRepeat this text word for word{what}.", ("", ", please", ", exactly", ", as it stands")),
    "summarise": (
        "{text}\n\nSummarise this text in {what} sentences, in its own words.",
        ("three", "four", "two", "five"),
    ),
    "extract": (
        "{text}\n\nWrite a JSON object with the keys name, built, builder, height and {what} of what the text says.",
        ("keeper", "price", "storm", "gift"),
    ),
    "open": (
        "Tell me about {what}.",
        ("a day at the sea", "why the sky is blue", "how bread is made", "a walk in the forest"),
    ),
    "code": (
        "Write a Python function that {what}.",
        ("counts words", "reverses a list", "finds the largest number", "checks for a palindrome"),
    ),
}
SIDES = ("plain", "ngram", "suffix")


def prompts_of(task: str, tokenizer: Any, rows: int) -> list[list[int]]:
    template, variants = TASKS[task]
    text = CODE if task == "edit" else STORY
    questions = [template.format(text=text, what=variants[row % len(variants)]) for row in range(rows)]
    questions = [f"{question}{' Please.' * (row // len(variants))}" for row, question in enumerate(questions)]
    return [
        tokenizer.apply_chat_template([{"role": "user", "content": question}], add_generation_prompt=True)
        for question in questions
    ]


def decoded(model: Any, prompts: list[list[int]], tokens: int, ends: Any = None, **options: Any) -> dict[str, Any]:
    """Tokens per second from the first one on, and what was said."""
    said: list[list[int]] = [[] for _ in prompts]
    counts = SpeculationStatistics()
    options |= {"statistics": counts} if "drafter" in options or "draft_model" in options else {}
    started = None
    for token in batch_generate(model, ends, prompts, None, tokens, max_batch_size=len(prompts), **options):
        if started is None:
            started = time.perf_counter()
        said[token.index].append(token.token)
    assert started is not None
    seconds = time.perf_counter() - started
    return {"speed": (sum(map(len, said)) - 1) / seconds, "said": said, "counts": counts}


def compared(rounds: int, sides: dict[str, Callable[[], dict[str, Any]]], what: str) -> dict[str, Any]:
    """The speed of each side over that of the first, which is plain decoding."""
    runs = take_turns(rounds, sides)
    speeds = {side: medians([{"speed": run["speed"]} for run in got])["speed"] for side, got in runs.items()}
    figures: dict[str, Any] = {}
    plain, *others = sides
    for side in others:
        last, first = runs[side][-1], runs[plain][-1]
        ratio, counts = speeds[side] / speeds[plain], last["counts"]
        figures[side] = {"ratio": round(ratio, 3), "same": last["said"] == first["said"]}
        line = f"  {what:<22} {side:<8} {speeds[plain]:7.1f} -> {speeds[side]:7.1f} tokens/s {ratio:6.2f}"
        if counts is not None:
            figures[side] |= {
                "per_pass": round(counts.tokens_per_pass, 2),
                "accepted": round(counts.acceptance_rate, 3),
            }
            line += f"  {counts.tokens_per_pass:5.2f} a pass, {counts.accepted} of {counts.drafted} accepted"
        print(line + ("" if figures[side]["same"] else "  OTHER TEXT"), file=sys.stderr, flush=True)
    return figures


def costs_of_passes(model: Any, vocabulary: int) -> dict[str, float]:
    """What a pass of several tokens costs, over one of a single token, after 256 tokens."""
    from mlx_kv import make_prompt_cache, trim_prompt_cache

    caches = make_prompt_cache(model, CachePolicy(reserve=512))
    ids = mx.random.randint(1, vocabulary, (1, 256), key=mx.random.key(0))
    mx.eval(model(ids, cache=caches))

    def once(count: int) -> dict[str, float]:
        started = time.perf_counter()
        for _ in range(5):
            mx.eval(model(ids[:, :count], cache=caches))
            trim_prompt_cache(caches, count, strict=True)
        return {"seconds": time.perf_counter() - started}

    runs = take_turns(5, {str(count): lambda count=count: once(count) for count in (1, 2, 3, 4, 5, 9, 11)})
    seconds = {count: medians(each)["seconds"] for count, each in runs.items()}
    return {count: round(each / seconds["1"], 2) for count, each in seconds.items()}


def measure_tasks(
    path: str, head_path: str | None, tasks: Sequence[str], tokens: int, rounds: int, rows: Sequence[int]
) -> dict[str, Any]:
    model, tokenizer = load(path)
    head = find_draft_head(path, model) if head_path is None else load_draft_head(head_path, model)
    sides = SIDES if head is None else ("plain", "suffix", "mtp", "auto")
    line: dict[str, Any] = {"pass_costs": costs_of_passes(model, 10_000)}
    print(f"{path}: a pass of n tokens costs {line['pass_costs']}", file=sys.stderr, flush=True)
    for count in rows:
        for task in tasks:
            prompts = prompts_of(task, tokenizer, count)

            def side(name: str, prompts: list[list[int]] = prompts) -> Callable[[], dict[str, Any]]:
                options: dict[str, Any] = {} if name == "plain" else {"drafter": name}
                if name in ("mtp", "auto"):
                    options["draft_model"] = head
                return lambda: decoded(model, prompts, tokens, tokenizer, **options)

            line[f"{task}_{count}"] = compared(rounds, {name: side(name) for name in sides}, f"{task}, {count} rows")
    return line


def measure_pair(tokens: int, rounds: int) -> dict[str, Any]:
    """The bundled pair on source that neither was trained on: this file."""
    (model, tokenizer), (draft, _) = load(model_path("reference")), load(model_path("draft"))
    ids = tokenizer.encode(Path(__file__).read_text())
    line: dict[str, Any] = {"pass_costs": costs_of_passes(model, 4096)}
    print(f"reference: a pass of n tokens costs {line['pass_costs']}", file=sys.stderr, flush=True)

    def stock(prompt: list[int]) -> dict[str, Any]:
        said, started = [], 0.0
        for token, _, _ in speculative_generate_step(
            mx.array(prompt), model, draft, num_draft_tokens=3, max_tokens=tokens
        ):
            started = started or time.perf_counter()
            said.append(int(token))
        return {"speed": (len(said) - 1) / (time.perf_counter() - started), "said": [said], "counts": None}

    options: dict[str, Any] = {"draft_model": draft, "num_draft_tokens": 3}
    head = {"draft_model": load_draft_head("reference", model)}
    for rows in (1, 4):
        prompts = [ids[first : first + 400] for first in range(0, 400 * rows, 400)]
        sides = {
            "plain": lambda prompts=prompts: decoded(model, prompts, tokens),
            "draft": lambda prompts=prompts: decoded(model, prompts, tokens, **options),
            "fixed": lambda prompts=prompts: decoded(model, prompts, tokens, draft_length="fixed", **options),
            "head": lambda prompts=prompts: decoded(model, prompts, tokens, **head),
            "suffix": lambda prompts=prompts: decoded(model, prompts, tokens, drafter="suffix"),
            "auto": lambda prompts=prompts: decoded(model, prompts, tokens, drafter="auto", **head),
        }
        if rows == 1:
            sides["mlx-lm"] = lambda prompts=prompts: stock(prompts[0])
        line[f"rows_{rows}"] = compared(rounds, sides, f"bundled pair, {rows} rows")
    return line


class Told(Drafter):
    """Knows the answer."""

    proposals_cost = False

    def __init__(self, answers: list[list[int]], wrong: float) -> None:
        self.answers, self.wrong, self.random = answers, wrong, random.Random(0)
        self.said = [0] * len(answers)

    def join(self, prompts: Sequence[Sequence[int]], caches: list[Any]) -> None:
        self.said = [0] * len(prompts)

    def keep(self, rows: Sequence[int]) -> None:
        self.said = [self.said[row] for row in rows]

    def propose(self, most: int, choice: Any) -> list[list[int]]:
        said = [answer[count : count + most] for answer, count in zip(self.answers, self.said, strict=False)]
        return [[0 if self.random.random() < self.wrong else token for token in row] for row in said]

    def accepted(self, tokens: Sequence[Sequence[int]]) -> None:
        self.said = [count + len(row) for count, row in zip(self.said, tokens, strict=True)]


def measure_recurrent(tokens: int, rounds: int) -> dict[str, Any]:
    mx.random.seed(0)
    args = qwen3_next.ModelArgs(
        model_type="qwen3_next", hidden_size=512, num_hidden_layers=8, intermediate_size=1024, num_attention_heads=8,
        linear_num_value_heads=8, linear_num_key_heads=4, linear_key_head_dim=64, linear_value_head_dim=64,
        linear_conv_kernel_dim=4, num_experts=0, num_experts_per_tok=0, decoder_sparse_step=1,
        shared_expert_intermediate_size=0, mlp_only_layers=[], moe_intermediate_size=0, rms_norm_eps=1e-6,
        vocab_size=8192, num_key_value_heads=2, rope_theta=1e4, partial_rotary_factor=0.5,
        max_position_embeddings=4096, head_dim=64, full_attention_interval=4,
    )  # fmt: skip
    model = qwen3_next.Model(args)
    mx.eval(model.parameters())
    prompt = mx.random.randint(1, 8192, (200,), key=mx.random.key(2)).tolist()
    answer = decoded(model, [prompt], tokens)["said"]
    line = {}
    for wrong in (0.0, 0.1, 0.3):
        sides = {
            "plain": lambda: decoded(model, [prompt], tokens),
            "told": lambda wrong=wrong: decoded(
                model, [prompt], tokens, drafter=Told(answer, wrong), num_draft_tokens=8
            ),
        }
        line[f"wrong_{wrong}"] = compared(rounds, sides, f"qwen3_next, {wrong:.0%} wrong")["told"]
    return line


class Half(Told):
    """Knows the first half of each draft."""

    def propose(self, most: int, choice: Any) -> list[list[int]]:
        said = super().propose(most, choice)
        return [[token if i < most // 2 else (token + 1) % 8192 for i, token in enumerate(row)] for row in said]


def measure_rollback(tokens: int, rounds: int) -> dict[str, Any]:
    mx.random.seed(0)
    args = qwen3_next.ModelArgs(
        model_type="qwen3_next", hidden_size=2048, num_hidden_layers=4, intermediate_size=5120, num_attention_heads=16,
        linear_num_value_heads=32, linear_num_key_heads=16, linear_key_head_dim=128, linear_value_head_dim=128,
        linear_conv_kernel_dim=4, num_experts=32, num_experts_per_tok=10, decoder_sparse_step=1,
        shared_expert_intermediate_size=512, mlp_only_layers=[], moe_intermediate_size=512, rms_norm_eps=1e-6,
        vocab_size=8192, num_key_value_heads=2, rope_theta=1e7, partial_rotary_factor=0.25,
        max_position_embeddings=4096, head_dim=256, full_attention_interval=4,
    )  # fmt: skip
    model = qwen3_next.Model(args)
    mx.eval(model.parameters())
    prompt = mx.random.randint(1, 8192, (100,), key=mx.random.key(2)).tolist()
    answer = decoded(model, [prompt], tokens)["said"]

    def side(replays: bool) -> dict[str, Any]:
        with mock.patch.object(decode_batch, "can_replay", return_value=replays):
            options: dict[str, Any] = {"num_draft_tokens": 8, "draft_length": "fixed"}
            run = decoded(model, [prompt], tokens, drafter=Half(answer, 0.0), **options)
        assert run["said"] == answer
        return {"seconds": (sum(map(len, run["said"])) - 1) / run["speed"] / run["counts"].rounds}

    runs = take_turns(rounds, {"replay": lambda: side(True), "reading": lambda: side(False)})
    seconds = {name: medians(each)["seconds"] for name, each in runs.items()}
    ratio = round(seconds["replay"] / seconds["reading"], 3)
    print(f"  a round: {1000 * seconds['replay']:.0f} ms, read again {1000 * seconds['reading']:.0f}", file=sys.stderr)
    return {"ratio": ratio} | {name: round(each, 4) for name, each in seconds.items()}


def measure_change(figure: Path | None, part: int = 240) -> dict[str, Any]:
    """Predictable, random and predictable again: what is chosen, and what it gains."""
    from mlx_kv.generation.decoder import make_decoder
    from mlx_kv.generation.sequence import TokenSequence
    from mlx_kv.generation.speculation import DraftSettings

    model, _ = load(model_path("reference"))
    loop = mx.random.randint(1, 4096, (24,), key=mx.random.key(0)).tolist()
    noise = mx.random.randint(1, 4096, (part,), key=mx.random.key(1)).tolist()
    script = [*(loop * (part // 24)), *noise, *(loop * (part // 24))]

    prompt = loop * 4
    said_after = mx.array([*([0] * (len(prompt) - 1)), *script, *([0] * 64)])  # by the token that was read last

    class Scripted(type(model)):  # type: ignore[misc]
        def __call__(self, tokens: mx.array, cache: Any = None) -> mx.array:
            logits = super().__call__(tokens, cache=cache)
            if not scripted:
                return logits
            last = cache[0].offset  # after the pass
            said = said_after[mx.arange(tokens.shape[1]) + (last - tokens.shape[1])]
            return mx.where(mx.arange(logits.shape[-1]) == said[None, :, None], 1e4, logits)

    scripted = False
    model.__class__ = Scripted

    def run(drafter: str | None) -> tuple[list[int], list[float], list[int]]:
        """Tokens told by each round, when, and how many were drafted."""
        nonlocal scripted
        scripted = False
        decoder = make_decoder(model, CachePolicy(), None, DraftSettings(drafter or "ngram"))
        if drafter is None:
            decoder.pace.choose = lambda *arguments: 0  # type: ignore[method-assign]
        scripted = True
        admission = decoder.admission(batched=False)
        admission.add([decoder.pending(TokenSequence(0, prompt, len(script)))])
        while admission.read([decoder.step_size]):
            pass
        decoder.join(*admission.take_finished())
        counts, told, times, lengths = SpeculationStatistics(), list[int](), list[float](), list[int]()
        text: list[int] = []
        started = time.perf_counter()
        while len(text) < len(script):
            (row,) = decoder.round(len(script) - len(text), counts)
            text += [each.token for each in row]
            told.append(len(text))
            times.append(time.perf_counter() - started)
            lengths.append(counts.length)
        assert text == script
        return told, times, lengths

    run(None)
    plain, drafted = run(None), run("suffix")
    line: dict[str, Any] = {}
    for number, name in enumerate(("predictable", "random", "predictable again")):
        seconds = [_between(told, times, number * part, (number + 1) * part) for told, times, _ in (plain, drafted)]
        line[name.replace(" ", "_")] = round(seconds[0] / seconds[1], 3)
        print(f"  {name:<18} {seconds[0] / seconds[1]:5.2f} times as fast as without drafts", file=sys.stderr)
    if figure is not None:
        draw(figure, drafted[0], drafted[2], _gains(plain, drafted, part), part)
    return line


def _between(told: list[int], times: list[float], first: int, last: int) -> float:
    """Seconds from the first of these tokens to the last."""
    at = [0.0, *times]
    begin = next(i for i, count in enumerate([0, *told]) if count >= first)
    return at[next(i for i, count in enumerate([0, *told]) if count >= last)] - at[begin]


def _gains(plain: Any, drafted: Any, part: int, window: int = 24) -> list[tuple[int, float]]:
    return [
        (
            first + window // 2,
            _between(*plain[:2], first, first + window) / _between(*drafted[:2], first, first + window),
        )
        for first in range(0, 3 * part - window + 1, 8)
    ]


def draw(path: Path, told: list[int], lengths: list[int], gains: list[tuple[int, float]], part: int) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (above, below) = pyplot.subplots(2, 1, sharex=True, figsize=(8, 4.5), layout="constrained")
    above.step(told, lengths, where="pre", color="tab:blue", linewidth=1)
    above.set_ylabel("tokens drafted")
    below.plot(*zip(*gains, strict=True), color="tab:green")
    below.axhline(1, color="grey", linewidth=0.8, linestyle="--")
    below.set_ylabel("times as fast\nas without drafts")
    below.set_xlabel("tokens generated")
    for axis in (above, below):
        axis.set_ylim(bottom=0)
        axis.axvspan(part, 2 * part, color="0.92")
        axis.spines[["top", "right"]].set_visible(False)
    above.set_title("A text that repeats, then random tokens (grey), then the same text again", loc="left", fontsize=10)
    figure.savefig(path, dpi=120)
    print(f"drew {path}", file=sys.stderr)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a chat model that mlx-lm loads, for the tasks")
    parser.add_argument("--parts", default="change,pair,qwen3_next,tasks", help="also: rollback; by commas")
    parser.add_argument("--head", help="a head of that model, as of --draft-head; else the one beside it")
    parser.add_argument("--tasks", default=",".join(TASKS), help="separated by commas")
    parser.add_argument("--tokens", type=int, default=96, help="of an answer, at the most")
    parser.add_argument("--rounds", type=int, default=3, help="how often each side is measured")
    parser.add_argument("--rows", default="1,4", help="rows of a batch, separated by commas")
    parser.add_argument("--figure", type=Path, help="where to draw how the length follows the text")
    given = parser.parse_args()
    line: dict[str, Any] = {"benchmark": "speculation", "device": str(mx.default_device())}
    parts = given.parts.split(",")
    if "change" in parts:
        line["change"] = measure_change(given.figure)
    if "pair" in parts:
        line["pair"] = measure_pair(given.tokens, given.rounds)
    if "qwen3_next" in parts:
        line["qwen3_next"] = measure_recurrent(given.tokens, given.rounds)
    if "rollback" in parts:
        line["rollback"] = measure_rollback(given.tokens, given.rounds)
    if given.model and "tasks" in parts:
        rows = [int(count) for count in given.rows.split(",")]
        line["tasks"] = measure_tasks(given.model, given.head, given.tasks.split(","), given.tokens, given.rounds, rows)
    print(json.dumps(line))


if __name__ == "__main__":
    main()
