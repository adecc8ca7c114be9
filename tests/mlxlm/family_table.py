"""docs/families.md, made by the walk over all families: `python tests/mlxlm/family_table.py --write`, some minutes.

Formats verdicts as a table of words, with numbered notes for their reasons.
"""

from __future__ import annotations

from mlx_kv import blas

blas.preload()  # before anything below imports MLX

import argparse  # noqa: E402
import os  # noqa: E402
import re  # noqa: E402
import sys  # noqa: E402
from collections import Counter  # noqa: E402
from collections.abc import Mapping  # noqa: E402
from concurrent.futures import ProcessPoolExecutor  # noqa: E402
from importlib.metadata import version  # noqa: E402
from multiprocessing import get_context  # noqa: E402
from pathlib import Path  # noqa: E402

sys.path.append(str(Path(__file__).parent.parent))  # what all tests share

from families import HELPERS, family_names  # noqa: E402
from family_columns import COLUMNS  # noqa: E402
from family_model import Family, Verdict  # noqa: E402
from family_walk import layers, walk  # noqa: E402

PAGE = Path(__file__).parent.parent.parent / "docs" / "families.md"
HEAD = """# Model families

Use this page to check which features work with a model. It lists all {families} model files (families) of mlx-lm
{version}. The family is usually the `model_type` in the model's config.json. Families whose
models read images are in [images](images.md).

Each family was tested as a tiny model with random weights and every layer type of its file. Its results with the
caches of mlx-kv were compared with a slow and simple reference. `make families` writes this page, and tests compare
it with the code.

| column | what was tested |
| --- | --- |
| layers | caches: full attention, sliding or chunked windows, recurrent state, or a class of mlx-lm by its name |
| alone | a prompt in chunks, then decoding, longer than the window: same logits as one pass over all tokens |
| 16-bit | bfloat16 and float16: attention reads the keys and values that the model stored, bit for bit |
| 8 and 4 bits | keys and values are quantised only once, bit for bit; packed and dequantised attention agree |
| budget | `budget` and `max_kv_size`: same logits as from a cache of all tokens with the evicted ones masked |
| ragged batch | prompts of 5, 19, 19 and 30 tokens in one batch: same log-probabilities for each as alone |
| draft model | speculative decoding in such a batch: same tokens as greedy decoding |
| trim | 7 tokens are read and trimmed, then others are read: same logits as without the first 7 |
| files | saved, loaded and continued: bit for bit |
| attention | whether a cache can compute the attention over its tokens itself (its `attention_hook` gets every call) |

| result | meaning |
| --- | --- |
| exact | as described for the column |
| refused | raises a ValueError before anything is read or changed; the note quotes it |
| nothing to do | no layer uses a cache of mlx-kv |
| as mlx-lm | same result as with mlx-lm's caches; the note states why it differs from one pass |
| mlx-lm fails | mlx-lm's caches raise an error |
| seen | attention: yes, over the keys that the cache returned |
| derived | attention: no. The hook gets other keys, computed from the returned ones, one for each (latent attention) |
| hidden | attention: no. The layer calls its own function, attends to selected tokens, or passes no cache to the call |

`budget` and `max_kv_size` limit the number of tokens of a cache: a budget evicts tokens with low scores,
`max_kv_size` the oldest. [Scores of attention](budgets.md#scores-of-attention), `share="adaptive"`,
tables of budgets and `residual_length` need layers whose attention is *seen*. For other layers they raise an error.
Some families read or decode rows of different lengths [apart](batches.md#limits).

In short: {counts}.

## Families without exceptions

Every column but the last is exact.
"""
EVERY = "every column"
USUAL = {column: Verdict("seen" if column == "attention" else "exact", "") for column in COLUMNS}
NOTES = """A note on a refusal quotes the error (terms: [glossary](glossary.md)):

- "leave it out" refers to the setting that the message names.
- "read them anew" means to process the tokens again with new caches.
- "counts slots" and "tells positions by the number of slots": the model computes positions of tokens from the number of
  keys that it gets, so all earlier tokens must stay.
- A recurrent state "does not have the length of its last write": its layer does not report how many tokens it read."""


def render(verdicts: Mapping[str, Mapping[str, Verdict]], kinds: Mapping[str, str]) -> str:
    """The page, of verdicts by family and column."""
    notes: dict[str, int] = {}

    def cell(verdict: Verdict) -> str:
        if not verdict.reason:
            return verdict.kind
        return f"{verdict.kind} ({notes.setdefault(verdict.reason, len(notes) + 1)})"

    groups: dict[tuple[str, str], list[str]] = {}
    exceptions = []
    for name in sorted(verdicts, key=str.lower):
        others = {column: verdict for column, verdict in verdicts[name].items() if verdict != USUAL[column]}
        if set(others) <= {"attention"} and not verdicts[name]["attention"].reason:
            groups.setdefault((verdicts[name]["attention"].kind, kinds[name]), []).append(name)
        elif len(set(verdicts[name].values())) == 1:
            exceptions.append(f"| {name} | {kinds[name]} | {EVERY}: {cell(verdicts[name]['alone'])} |")
        else:
            cells = [f"{column}: {cell(verdict)}" for column, verdict in others.items()]
            exceptions.append(f"| {name} | {kinds[name]} | {'; '.join(cells)} |")
    lines = ["| attention | layers | families |", "| --- | --- | --- |"]
    for (attention, layered), names in sorted(groups.items(), key=lambda group: (group[0][0] != "seen", group[0])):
        lines.append(f"| {attention} | {layered} | {', '.join(names)} |")
    lines += ["", "## Exceptions", "", "What is not said is exact, and attention is seen.", ""]
    lines += ["| family | layers | except |", "| --- | --- | --- |", *exceptions]
    found = Counter(verdict.kind for row in verdicts.values() for verdict in row.values())
    counts = ", ".join(f"{count} {kind}" for kind, count in found.most_common())
    head = HEAD.format(families=len(verdicts), version=version("mlx-lm"), counts=counts)
    numbered = [f"{number}. {reason}" for reason, number in notes.items()]
    helpers = ", ".join(f"`{name}`" for name in HELPERS)
    return "\n".join(
        [
            head,
            *lines,
            "",
            "## Notes",
            "",
            NOTES,
            "",
            *numbered,
            "",
            f"Files in mlx-lm's folder of models that are not models: {helpers}.",
            "",
        ]
    )


def parse(page: str) -> tuple[dict[str, dict[str, Verdict]], dict[str, str]]:
    """The verdicts that a page tells, and the layers of each family."""
    notes = dict(re.findall(r"^(\d+)\. (.+)$", page, re.MULTILINE))
    found: dict[str, dict[str, Verdict]] = {}
    kinds: dict[str, str] = {}
    usual, exceptions = page[page.index("In short") :].split("## Exceptions")
    for attention, layered, names in re.findall(r"^\| (\w+) \| ([^|]+) \| ([^|]+) \|$", usual, re.MULTILINE):
        for name in [] if attention == "attention" else names.split(", "):
            kinds[name] = layered
            found[name] = USUAL | {"attention": Verdict(attention, "")}
    for name, layered, others in re.findall(r"^\| ([^| ]+) \| ([^|]+) \| ([^|]+:[^|]+) \|$", exceptions, re.MULTILINE):
        kinds[name] = layered
        found[name] = dict(USUAL)
        for each in others.split("; "):
            column, kind, number = re.fullmatch(r"(.*?): (.*?)(?: \((\d+)\))?", each).groups()
            verdict = Verdict(kind, notes[number] if number else "")
            found[name] |= dict.fromkeys(COLUMNS, verdict) if column == EVERY else {column: verdict}
    return found, kinds


def walked(name: str) -> tuple[dict[str, Verdict], str]:
    """All verdicts of one family, and its layers."""
    return walk(name), layers(Family(name))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("families", nargs="*", help="walk these alone; the others stay as the page tells")
    parser.add_argument("--write", action="store_true", help="replace the page, instead of printing it")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes; by default one for each core")
    options = parser.parse_args()
    names = options.families or family_names()
    verdicts, kinds = parse(PAGE.read_text()) if options.families else ({}, {})
    with ProcessPoolExecutor(options.jobs, get_context("spawn")) as pool:
        for name, (found, layered) in zip(names, pool.map(walked, names), strict=True):
            verdicts[name], kinds[name] = found, layered
            wrong = [f"{column}: {verdict.reason}" for column, verdict in found.items() if verdict.kind == "WRONG"]
            print(name, *wrong, file=sys.stderr)
    page = render(verdicts, kinds)
    if options.write:
        PAGE.write_text(page)
    else:
        print(page, end="")


if __name__ == "__main__":
    main()
