"""What many conversations on one system prompt cost: their bytes, and the time to a first token, in one process.

    python benchmarks/conversations.py [--model PATH] [--conversations 50] [--system 4000] [--rounds 3]

The physics. The bundled model holds 4,096 bytes a token (4 layers x 2 heads x 64 x keys and values in float32), so
4,000 tokens are 16.4 MB, and 50 whole copies of them 819 MB. What conversations do not share are their own tokens: that
is the least, the system prompt once and 50 times a question and an answer. Whoever goes on needs memory of his own to
write into, so a first token costs at least one copy of what was kept, and reading the question. Reading the whole
prompt costs two operations a weight and token, and attention besides, which grows with the square: that is saved.

Each conversation has two turns. A turn finds what was kept, reads the rest and makes a first token, that is the time
told; then it answers, and is kept. Keeping compares what is shared with what is there and copies what is new; what is
told beside it are a copy of all of it, which is what keeping one amounted to before (when it was next written to), and
one step of decoding. In a directory, bytes are those of the files, blocks and headers included, and what is found is
read by a store that has seen nothing yet.

Times are medians, ratios are found / read: 0.1 is a tenth of the time. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

# Ours first: importing the package loads a tuned BLAS ahead of MLX.
from mlx_kv import CachePolicy, PromptMemory, PromptReader, PromptStore, cache_statistics, make_prompt_cache, model_path
from mlx_kv.mlxlm.loading import load

# isort: split
import mlx.core as mx

QUESTION, ANSWER = 40, 40  # tokens of each turn
POLICIES = {"plain": CachePolicy(), "8 bits": CachePolicy(bits=8, group_size=32)}


class ReadOnly:
    """A place that is asked, and shown nothing: a server keeps prompts when it has answered."""

    def __init__(self, place: Any) -> None:
        self.bind, self.find = place.bind, place.find

    def keep(self, tokens: Sequence[int], caches: Sequence[Any]) -> None:
        pass


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    started = time.perf_counter()
    result = work()
    return time.perf_counter() - started, result


class Conversations:
    """So many, on one system prompt."""

    def __init__(self, model: Any, vocabulary: int, policy: CachePolicy, count: int, system: int) -> None:
        self.model, self.policy = model, policy
        turns = mx.random.randint(1, vocabulary, (2 * count, QUESTION), key=mx.random.key(1)).tolist()
        first: list[int] = mx.random.randint(1, vocabulary, (system,), key=mx.random.key(0)).tolist()  # type: ignore[assignment]
        self.texts = [list(first) for _ in range(count)]
        self.questions = iter(turns)  # type: ignore[arg-type]
        self.whole_bytes = [0] * count

    def first_token(self, tokens: list[int], place: Any) -> tuple[list[Any], mx.array, int]:
        reader = PromptReader(self.model, make_prompt_cache(self.model, self.policy), tokens, place)
        caches = reader.finish()
        token = mx.argmax(self.model(mx.array([tokens[-1:]]), cache=caches)[:, -1], axis=-1)
        mx.eval(token)
        return caches, token, reader.reused

    def turn(self, number: int, memory: PromptMemory, stores: list[PromptStore]) -> dict[str, float]:
        """One turn of one conversation: what was found of it, and seconds."""
        text = self.texts[number]
        text += next(self.questions)
        to_first, (caches, token, reused) = timed(lambda: self.first_token(text, ReadOnly(memory)))
        steps = []
        for _ in range(ANSWER):
            text.append(int(token.item()))
            seconds, token = timed(lambda: self.step(caches, text[-1]))
            steps.append(seconds)
        copied, _ = timed(lambda: mx.eval([plane + 0 for cache in caches for plane in (cache.keys, cache.values)]))
        kept, _ = timed(lambda: memory.keep(text, caches))
        self.whole_bytes[number] = cache_statistics(caches).bytes_live
        told = {"reused": reused, "to_first": to_first, "keep": kept, "copy": copied, "step": statistics.median(steps)}
        for store in stores:
            packing, packed = timed(lambda: store.pack(text, caches))  # noqa: B023
            writing, _ = timed(lambda: store.write(packed))  # noqa: B023
            told |= {"pack": packing, "write": writing}
        return told

    def step(self, caches: list[Any], last: int) -> mx.array:
        token = mx.argmax(self.model(mx.array([[last]]), cache=caches)[:, -1], axis=-1)
        mx.eval(token)
        return token


def median(runs: list[dict[str, float]], name: str) -> float:
    return statistics.median(run[name] for run in runs)


def measure(model: Any, vocabulary: int, policy: CachePolicy, arguments: argparse.Namespace) -> dict[str, Any]:
    mx.clear_cache()
    talk = Conversations(model, vocabulary, policy, arguments.conversations, arguments.system)
    memory = PromptMemory(2**62, fingerprint="all")
    with tempfile.TemporaryDirectory() as folder:
        store = PromptStore(folder, 2**62, fingerprint="all")
        turns = [[talk.turn(i, memory, [store]) for i in range(arguments.conversations)] for _ in range(2)]
        cold = [timed(lambda: talk.first_token(talk.texts[0], None))[0] for _ in range(arguments.rounds)]
        from_disk = []
        for text in talk.texts[: arguments.rounds]:
            place = ReadOnly(PromptStore(folder, 2**62, fingerprint="all"))
            from_disk.append(timed(lambda: talk.first_token([*text, 1], place))[0])  # noqa: B023
        files = sum(path.stat().st_size for path in Path(folder).iterdir())
    text, whole = talk.texts[0], sum(talk.whole_bytes)
    least = whole * (arguments.system + sum(len(t) - arguments.system for t in talk.texts)) / sum(map(len, talk.texts))
    found = [*turns[0][1:], *turns[1]]
    read = statistics.median(cold)
    looked, _ = timed(lambda: [memory.serves([*each, 1]) for each in talk.texts])
    deep, _ = timed(lambda: copy.deepcopy(memory.find(text)))
    print(
        f"  {len(talk.texts)} conversations of {len(text):,} tokens: memory {memory.nbytes / 1e6:.1f} MB, files "
        f"{files / 1e6:.1f} MB; the least {least / 1e6:.1f} MB, whole copies {whole / 1e6:.1f} MB\n"
        f"  first token {median(turns[0][1:], 'to_first') * 1e3:.0f} ms (then {median(turns[1], 'to_first') * 1e3:.0f} "
        f"ms, from the disk {statistics.median(from_disk) * 1e3:.0f} ms), all of it read {read * 1e3:.0f} ms\n"
        f"  keep {median(found, 'keep') * 1e3:.1f} ms (first {turns[0][0]['keep'] * 1e3:.1f} ms), a copy "
        f"{median(found, 'copy') * 1e3:.1f} ms, a step {median(found, 'step') * 1e3:.1f} ms; for the disk "
        f"{median(found, 'pack') * 1e3:.1f} ms and {median(found, 'write') * 1e3:.0f} ms in its thread\n"
        f"  lookup {looked / len(talk.texts) * 1e6:.0f} us, find {deep * 1e3:.2f} ms",
        file=sys.stderr,
    )
    return {
        "memory_bytes": memory.nbytes,
        "file_bytes": files,
        "least_bytes": round(least),
        "whole_bytes": whole,
        "memory_of_least": round(memory.nbytes / least, 3),
        "files_of_least": round(files / least, 3),
        "memory_of_whole": round(memory.nbytes / whole, 4),
        "reused": median(turns[0][1:], "reused"),
        "read_seconds": round(read, 3),
        "first_turn_ratio": round(median(turns[0][1:], "to_first") / read, 4),
        "second_turn_ratio": round(median(turns[1], "to_first") / read, 4),
        "from_disk_ratio": round(statistics.median(from_disk) / read, 4),
        "keep_ms": round(median(found, "keep") * 1e3, 2),
        "first_keep_ms": round(turns[0][0]["keep"] * 1e3, 2),
        "copy_ms": round(median(found, "copy") * 1e3, 2),
        "step_ms": round(median(found, "step") * 1e3, 2),
        "pack_ms": round(median(found, "pack") * 1e3, 2),
        "write_ms": round(median(found, "write") * 1e3, 2),
        "lookup_us": round(looked / len(talk.texts) * 1e6, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="reference", help="a path, or the name of a bundled model")
    parser.add_argument("--conversations", type=int, default=50)
    parser.add_argument("--system", type=int, default=4000, help="tokens that all of them begin with")
    parser.add_argument("--rounds", type=int, default=3, help="how often the whole prompt is read")
    parser.add_argument("--policies", default=",".join(POLICIES), help="which of them, separated by commas")
    arguments = parser.parse_args()
    model, tokenizer = load(model_path(arguments.model))
    line: dict[str, Any] = {"benchmark": "conversations", "device": str(mx.default_device()), "model": arguments.model}
    for name in arguments.policies.split(","):
        print(f"{name}, {arguments.system:,} tokens in common", file=sys.stderr)
        line[name] = measure(model, len(tokenizer), POLICIES[name], arguments)
    print(json.dumps(line))


if __name__ == "__main__":
    main()
