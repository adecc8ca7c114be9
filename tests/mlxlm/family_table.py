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
{version}. The family is usually the `model_type` in the model's config.json.

Each family was tested as a tiny model with random weights and every layer type of its file. Its results with the
caches of mlx-kv were compared with a slow and simple reference. `make families` writes this page, and tests compare
it with the code.

| column | what was tested |
| --- | --- |
| layers | caches of the model: full attention, sliding or chunked windows, recurrent state |
| alone | a prompt in chunks and decoding, past the window: same logits as one pass over all tokens |
| 16-bit | in bfloat16 and in float16, each query gets the keys and values that the model wrote, bit for bit |
| 8 and 4 bits | each query gets them as quantised once, bit for bit; attention on packed planes gives the same result |
| budget | with a budget, and with max_kv_size: same logits as the whole text with the evicted tokens masked |
| ragged batch | prompts of 5, 19, 19 and 30 tokens in one batch: each row has the log-probabilities that it has alone |
| draft model | speculative decoding in such a batch: same tokens as greedy decoding |
| trim | 7 tokens read, trimmed, and replaced by others: same logits as without them |
| files | saved, loaded and continued: bit for bit; also in mlx-lm's format, in both directions |
| attention | whether a hook of a cache (`attention_hook`) receives every call of attention over it |

| result | meaning |
| --- | --- |
| exact | as described for the column |
| refused | raises a ValueError before anything is read or changed; the note quotes it |
| nothing to do | no layer uses a cache of mlx-kv |
| as mlx-lm | same result as mlx-lm's caches, which differs from that of one pass |
| mlx-lm fails | mlx-lm's caches raise an error |
| seen | attention: the hook receives the keys that the cache returned |
| derived | attention: the hook receives as many keys, which the layer computes from them (latent attention) |
| hidden | attention: the layer calls its own function, selects tokens, or does not identify the cache |

In short: {counts}.
"""


def render(verdicts: Mapping[str, Mapping[str, Verdict]], kinds: Mapping[str, str]) -> str:
    """The page, of verdicts by family and column."""
    notes: dict[str, int] = {}

    def cell(verdict: Verdict) -> str:
        if not verdict.reason:
            return verdict.kind
        return f"{verdict.kind} ({notes.setdefault(verdict.reason, len(notes) + 1)})"

    lines = [f"| family | layers | {' | '.join(COLUMNS)} |", "| --- " * (len(COLUMNS) + 2) + "|"]
    for name in sorted(verdicts, key=str.lower):
        cells = [cell(verdicts[name][column]) for column in COLUMNS]
        lines.append(f"| {name} | {kinds[name]} | {' | '.join(cells)} |")
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
    for line in page[page.index("| family |") :].splitlines()[2:]:
        if not line.startswith("|"):
            break
        name, layered, *cells = [cell.strip() for cell in line.strip("|").split("|")]
        kinds[name] = layered
        found[name] = {}
        for column, cell in zip(COLUMNS, cells, strict=True):
            kind, number = re.fullmatch(r"(.*?)(?: \((\d+)\))?", cell).groups()
            found[name][column] = Verdict(kind, notes[number] if number else "")
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
