"""What several scores keep of one prompt, for `mlx-kv inspect --scores`: a row for each, JSON, or a figure.

Decides how they are put side by side. Knows nothing about how tokens are chosen.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlx_kv.cli.output import save_figure
from mlx_kv.cli.tables import aligned

if TYPE_CHECKING:
    from mlx_kv.evaluation.inspection import Inspection, KeptLayer
    from mlx_kv.policy import CachePolicy

TENTHS = 10
BLOCKS = "▁▂▃▄▅▆▇█"
NONE = "·"


def tenths(layers: Sequence[KeptLayer], tokens: int) -> list[float]:
    """Tokens that layers kept of each tenth of the text, the mean of them and of their heads."""
    counts = [0.0] * TENTHS
    heads = [head for layer in layers for head in layer.heads]
    for head in heads:
        for position in head.positions:
            counts[position * TENTHS // tokens] += 1 / len(heads)
    return counts


def blocks(counts: Sequence[float], tokens: int) -> str:
    """A block for each tenth, full where all of its tokens were kept, a dot where none was."""
    sizes = [0] * TENTHS
    for position in range(tokens):
        sizes[position * TENTHS // tokens] += 1
    levels = [-(-count * len(BLOCKS) // size) if size else 0 for count, size in zip(counts, sizes, strict=True)]
    return "".join(BLOCKS[min(int(level), len(BLOCKS)) - 1] if level else NONE for level in levels)


def scores_table(found: Mapping[str, Inspection]) -> list[str]:
    """A row for each score."""
    shares = {score: one.attention_kept for score, one in found.items()}
    seen = any(share is not None for share in shares.values())
    lines = [["score", *(["attention"] if seen else []), "tenths", "tokens kept of each tenth of the text"]]
    for score, one in found.items():
        counts = tenths(one.layers, one.tokens)
        share = shares[score]
        told = [] if share is None else [f"{100 * share:.1f}%"]
        lines.append([score, *told, blocks(counts, one.tokens), " ".join(f"{count:4,.0f}" for count in counts)])
    return [line.rstrip() for line in aligned(lines, left=(0, 2, 3) if seen else (0, 1, 2))]


def scores_json(settings: Mapping[str, Any], found: Mapping[str, Inspection]) -> str:
    return json.dumps({**settings, "scores": {score: asdict(one) for score, one in found.items()}}, allow_nan=False)


def draw_scores(title: str, policy: CachePolicy, found: Mapping[str, Inspection], file: Path) -> None:
    from mlx_kv.plots.kept_by_score import kept_by_score

    kept = {score: [1 - share for share in one.share_evicted()] for score, one in found.items()}
    received = next(iter(found.values())).attention
    shares = None if received is None else [one.attention_kept for one in found.values()]
    save_figure(kept_by_score(title, kept, policy.sinks, policy.keep_recent, received, shares), file)
