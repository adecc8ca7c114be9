"""What codecs cost: bytes of a token against the loss of a model on a text, and answers that are not found any more.

    python -m benchmarks.eval.codecs                             the reference model, on source it never saw
    python -m benchmarks.eval.codecs --model build/smollm2 --tokens 2048 --output build/codecs.jsonl
    python -m benchmarks.eval.codecs --codecs K8V4,K4V4-rotated,K4V4-channel --group-sizes 32,64 --needles 4

Names: keys in 4 bits and values in 2 are K4V2, a scale and a bias for each group of channels of a token; K4V2-rotated,
the same after an orthogonal rotation; K4V2-centred, keys less the centre of their channels before, which is measured
on other parts of the text; K4V2-recent and K4V2-rotated-recent, the first two where as many of the newest tokens as a
group has elements are seen as they came; mxfp8, mxfp4, nvfp4, floats that share a scale of 8 bits. Others are
simulated, as nothing here stores them: K4V2-channel, keys in groups of as many tokens that follow each other, each
channel with a scale and a bias of its own, as KIVI has them (Liu et al. 2024), values as ever; and
K4V2-channel-recent, the same with keys and values of the group that is not full yet as they are, which is all of KIVI.

The physics. Each element is rounded to steps of (largest - smallest) / (2^bits - 1) of its group: one bit less doubles
the error. Keys have a few channels that are far larger than all others, in every token alike. In a group of one
token's channels these set the step for all others; rotated, they are spread over all channels; and in a group of one
channel's tokens they are alone with themselves, and only their change from token to token is rounded. An error of a
key moves the logits of a softmax, which answers exponentially, and the products of a query add it up over the head
dim; errors of values are averaged by the weights. So keys want the bits, and so do tokens that get most of the weight,
which are the newest. A group of g elements takes 32 / g bits more
of each (two numbers of 16 bits), mx formats 8 / g: that is counted. The loss is of every token of a text, each after
what really came before; all of it is read through caches that hold codes, also a query's own token. The difference to
plain caches is taken token by token: texts differ far more than codecs do, which `error`, its standard error, is free
of.

What was measured is a line of --output at once; called again with it, a run goes on with what is missing. To stderr
a line for each codec: bytes (of a layer, in a model of 16 bits), nats added, the ratio of perplexities, needles found,
seconds. One JSON line last.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

# Ours first: importing the package loads a tuned BLAS ahead of MLX.
from mlx_kv import CachePolicy, load

# isort: split
import mlx.core as mx
import numpy as np

from mlx_kv.bundled import model_path
from mlx_kv.cache.codecs import Affine, CentredByLayer
from mlx_kv.calibration.loss import losses, mean_and_error, measure_centres, read
from mlx_kv.mlxlm.attention import AttentionCall, AttentionPatch
from mlx_kv.mlxlm.convert import make_prompt_cache
from mlx_kv.planning import Planner

from .measure import right_answers, right_without_context
from .questions import Room, Talk, case_of, python_texts, trial_of
from .tasks import Trial

PAIRS = ("K8V8", "K8V4", "K6V4", "K4V4", "K4V2", "K3V3")
FORMATS = ("mxfp8", "mxfp4", "nvfp4")
PER_CHANNEL = ("K4V4", "K4V2", "K3V4", "K3V2", "K2V4", "K2V2")
CODECS = (
    *PAIRS,
    *(f"{pair}-{kind}" for kind in ("rotated", "centred") for pair in PAIRS),
    *FORMATS,
    *(f"{pair}{kind}" for kind in ("-channel", "-channel-recent") for pair in PER_CHANNEL),
    *(f"{pair}-rotated-recent" for pair in PAIRS),
)
NAME = re.compile(r"K([234568])V([234568])(-rotated|-centred|-channel|(?:-channel|-rotated)?-recent)?")
CENTRE_TOKENS = 1024  # on which centres are measured
HALF_BYTES = 2  # of a scale or a bias in a model of 16 bits
READ_AT_ONCE = 128  # tokens, where nothing else is said; a multiple of each group size
Rounded = Callable[[mx.array], mx.array]


def usual_text() -> list[str]:
    """The default text: English prose and code, the reference and the library of this Python.

    Raises:
        ValueError: this Python comes without them.
    """
    texts = python_texts()
    return ["\n\n".join(texts.prose), "\n\n".join(function.source for function in texts.functions)]


def tokens_of(tokenizer: Any, parts: Sequence[str], count: int = 2048) -> list[int]:
    """At most `count` tokens of a text, equally many of each of its parts; special tokens only at the beginning.

    Args:
        tokenizer: as from `mlx_kv.load`.
    """
    share = count // len(parts)
    beginnings = enumerate(part[: 16 * share] for part in parts)
    each = [tokenizer.encode(text, add_special_tokens=not number)[:share] for number, text in beginnings]
    return [int(token) for part in each for token in part]


class Simulated:
    """Plain caches' attention, as if tokens were stored otherwise.

    Args:
        keys, values: (B, H, n, D) as they are when they are read again, of n tokens that follow each other.
        group: tokens that are stored together.
        recent: whether what does not fill a group yet is seen as it is. Right while writes are groups.
    """

    def __init__(self, keys: Rounded, values: Rounded, group: int, recent: bool) -> None:
        self._keys, self._values, self._group, self._recent = keys, values, group, recent
        self._held: dict[int, tuple[mx.array, mx.array]] = {}  # by cache: full groups, rounded

    def attend(self, call: AttentionCall) -> mx.array:
        """(B, Hq, S, D)."""
        held = self._held.get(id(call.cache))
        done = 0 if held is None else held[0].shape[2]
        keys, values = call.keys[:, :, done:], call.values[:, :, done:]
        rounded = self._keys(keys), self._values(values)
        seen = (keys, values) if self._recent else rounded
        full = keys.shape[2] // self._group * self._group
        now = tuple(each[:, :, :full] for each in rounded)
        if held is not None:
            seen = tuple(mx.concatenate(pair, axis=2) for pair in zip(held, seen, strict=True))
            now = tuple(mx.concatenate(pair, axis=2) for pair in zip(held, now, strict=True))
        mx.eval(now)
        self._held[id(call.cache)] = now
        return call.forward(keys=seen[0], values=seen[1])


def each_token(codec: Affine) -> Rounded:
    """Tokens each by itself, as codecs store them."""
    return lambda x: codec.decode(codec.encode(x), x.dtype)


def groups_of_tokens(codec: Affine) -> Rounded:
    """Channels each by itself, in groups of tokens; the last is filled up with its last token: no new extreme."""
    rounded = each_token(codec)

    def by_channel(x: mx.array) -> mx.array:
        count = x.shape[2]
        filling = mx.repeat(x[:, :, -1:], -count % codec.group_size, axis=2)
        return rounded(mx.concatenate([x, filling], axis=2).swapaxes(2, 3)).swapaxes(2, 3)[:, :, :count]

    return by_channel


@dataclass(frozen=True)
class Configuration:
    """A codec of the table.

    Raises:
        ValueError: a name that is none.
    """

    name: str
    group_size: int | None  # None where the format says it

    @property
    def parts(self) -> tuple[int, int, str]:
        """Bits of keys and of values, and what follows the first hyphen."""
        found = NAME.fullmatch(self.name)
        if found is None:
            raise ValueError(f"no codec is called {self.name!r}: give some of {', '.join(CODECS)}")
        return int(found[1]), int(found[2]), (found[3] or "").removeprefix("-")

    @property
    def simulated(self) -> bool:
        return "-channel" in self.name

    @property
    def policy(self) -> CachePolicy:
        """Of the caches, but for centres; plain ones where the rest is simulated."""
        if self.name == "plain" or self.simulated:
            return CachePolicy()
        if self.name in FORMATS:
            return CachePolicy(codec=self.name)
        keys, values, kind = self.parts
        turned, recent = kind.startswith(("rotated", "centred")), kind.endswith("recent")
        group = self.group_size or 64
        policy = CachePolicy(bits=(keys, values), group_size=group, codec="rotated" if turned else None)
        return replace(policy, residual_length=group) if recent else policy

    def policy_for(self, measuring: Measuring) -> CachePolicy:
        """Of the caches, with centres of this model's keys where they are centred."""
        if not self.name.endswith("centred"):
            return self.policy
        keys, values = self.policy.codecs
        return CachePolicy(codec=(replace(measuring.centres, codec=keys), values))

    @property
    def step(self) -> int:
        """Tokens to be read at once."""
        return self.group_size if self.name.endswith("channel-recent") and self.group_size else READ_AT_ONCE

    @contextlib.contextmanager
    def used(self, model: Any) -> Iterator[None]:
        """While the block runs, caches of `policy` hold what this codec holds."""
        if not self.simulated:
            yield
            return
        keys, values, kind = self.parts
        group = self.group_size or 64
        of_keys, of_values = groups_of_tokens(Affine(keys, group)), each_token(Affine(values, group))
        hook = Simulated(of_keys, of_values, group, kind.endswith("recent"))
        with AttentionPatch(model, default_hook=hook):
            yield

    def bytes_per_token(self, heads: int, dims: tuple[int, int]) -> float:
        """Of one layer of a model of 16 bits; what is kept as it is of a few is left out."""
        if self.simulated:
            bits, group = self.parts[:2], self.group_size or 64
            each = [dim * (b / 8 + 2 * HALF_BYTES / group) for b, dim in zip(bits, dims, strict=True)]
        else:
            planes = [c.planes(dim, mx.bfloat16) for c, dim in zip(self.policy.codecs, dims, strict=True)]
            each = [sum(plane.width * plane.dtype.size for plane in tensor) for tensor in planes]
        return heads * sum(each)


class Measuring:
    """A model, its text, and the needles that are asked for."""

    def __init__(self, model: str, count: int, text: Path | None, needles: int, context: int) -> None:
        self.model, self.tokenizer = load(model)
        parts = own_text(model) if text is None else [text.read_text(encoding="utf-8")]
        self.tokens = tokens_of(self.tokenizer, parts, count)
        self.others = tokens_of(self.tokenizer, [part[len(part) * 3 // 4 :] for part in parts], CENTRE_TOKENS)
        self.needles, self.context = needles, context
        # A layer whose tokens take most: of models whose layers differ, one that all of this is about.
        layer = max(Planner(self.model).layers(CachePolicy()), key=lambda layer: layer.bytes_per_slot)
        self.shape = layer.heads, (layer.key_dim, layer.value_dim)

    @cached_property
    def centres(self) -> CentredByLayer:
        return CentredByLayer(measure_centres(self.model, self.others), Affine(4, 64, rotate=True))

    @cached_property
    def plain(self) -> np.ndarray:
        return losses(self.model, self.tokens, step=READ_AT_ONCE)

    @cached_property
    def trials(self) -> list[tuple[Trial, np.ndarray]]:
        """What is read and asked, and which answers count."""
        talk, room = Talk(self.tokenizer), Room(self.context, keep_recent=64)
        cases = (case_of("needle", talk, python_texts(), room, 0, row) for row in range(self.needles))
        trials = [trial_of(talk, case, seen=False) for case in cases]
        return [(trial, ~right_without_context(self.model, trial)) for trial in trials]

    def right(self, configuration: Configuration) -> int:
        """Answers that are found."""
        total = 0
        for trial, counts in self.trials:
            caches = make_prompt_cache(self.model, configuration.policy_for(self))
            with configuration.used(self.model):
                read(self.model, caches, mx.array(trial.context), configuration.step)
                total += int((right_answers(self.model, trial, caches) & counts).sum())
        return total

    def line(self, configuration: Configuration) -> dict[str, Any]:
        begun = time.monotonic()
        with configuration.used(self.model):
            own = self.plain if configuration.name == "plain" else None
            if own is None:
                own = losses(self.model, self.tokens, configuration.policy_for(self), configuration.step)
        added, error = mean_and_error(own - self.plain)
        found: dict[str, Any] = {
            "bytes": configuration.bytes_per_token(*self.shape),
            "loss": round(float(own.mean(dtype=np.float64)), 5),
            "added": round(added, 5),
            "error": round(error, 5),
            "ratio": round(math.exp(added), 4),
        }
        if self.needles:
            found["needles"] = [self.right(configuration), int(sum(counts.sum() for _, counts in self.trials))]
        return found | {"seconds": round(time.monotonic() - begun, 1)}


def own_text(model: str) -> list[str]:
    """For the reference model, source that it was not trained on; else English and code, half of each."""
    if model == model_path("reference"):
        sys.path.append(str(Path(__file__).parent.parent / "tools"))
        from reference_corpus import read_sources

        return ["".join(read_sources(held_out=True))]
    return usual_text()


def written(file: Path | None) -> list[dict[str, Any]]:
    """What was measured already; a last line that was not written to its end is left out, and cut off."""
    if file is None or not file.exists():
        return []
    text = file.read_text(encoding="utf-8")
    whole = text[: text.rfind("\n") + 1]
    if whole != text:
        file.write_text(whole, encoding="utf-8")
    return [json.loads(line) for line in whole.splitlines()]


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="reference", help="a directory, a hub id, or the model that is bundled")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--text", type=Path, help="UTF-8, in place of texts that come with Python")
    parser.add_argument("--codecs", type=lambda text: tuple(text.split(",")), default=CODECS)
    parser.add_argument("--group-sizes", type=lambda text: tuple(map(int, text.split(","))), default=(64,))
    parser.add_argument("--needles", type=int, default=0, help="contexts in which something is to be found")
    parser.add_argument("--context", type=int, default=1024, help="tokens around a needle")
    parser.add_argument("--output", type=Path, help="JSON lines; what it holds is not measured again")
    return parser.parse_args()


def configurations(chosen: argparse.Namespace) -> list[Configuration]:
    """Plain caches first; a format that says its groups once."""
    made = [Configuration("plain", None)]
    for name in chosen.codecs:
        sizes = (None,) if name in FORMATS else chosen.group_sizes
        made += [Configuration(name, size) for size in sizes]
    for each in made:
        _ = each.policy, each.simulated and each.parts  # refused before anything is measured
    return made


def main() -> None:
    chosen = options()
    wanted = configurations(chosen)
    where = {"model": chosen.model, "tokens": chosen.tokens, "text": chosen.text and str(chosen.text)}
    where |= {"needles_asked": chosen.needles, "context": chosen.context if chosen.needles else None}
    done = {
        (line["codec"], line["group_size"]): line for line in written(chosen.output) if where.items() <= line.items()
    }
    missing = [each for each in wanted if (each.name, each.group_size) not in done]
    begun = time.monotonic()
    if missing:
        measuring = Measuring(model_path(chosen.model), chosen.tokens, chosen.text, chosen.needles, chosen.context)
    for number, each in enumerate(missing, 1):
        line = where | {"codec": each.name, "group_size": each.group_size} | measuring.line(each)
        if chosen.output is not None:
            with chosen.output.open("a", encoding="utf-8") as out:
                out.write(json.dumps(line) + "\n")
        done[each.name, each.group_size] = line
        told = ", {} of {} needles".format(*line["needles"]) if chosen.needles else ""
        print(
            f"{number} of {len(missing)} {each.name} {each.group_size or ''}: {line['bytes']:g} bytes, "
            f"{line['added']:+.4f} ± {line['error']:.4f} nats, x{line['ratio']:.4f}{told}, {line['seconds']} s",
            file=sys.stderr,
        )
    table = [{k: v for k, v in done[each.name, each.group_size].items() if k not in where} for each in wanted]
    print(json.dumps(where | {"seconds": round(time.monotonic() - begun, 1), "codecs": table}))


if __name__ == "__main__":
    main()
