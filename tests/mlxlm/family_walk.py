"""A walk over model families: every column of each, and a verdict where it raises, too. Knows nothing about tables."""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from pathlib import Path

from family_columns import COLUMNS, is_refusal
from family_model import Family, Verdict, WrongError
from mlx_lm.models import cache as stock

from mlx_kv import make_prompt_cache
from mlx_kv.mlxlm.traverse import leaves

KINDS = {
    stock.KVCache: "full",
    stock.RotatingKVCache: "sliding",
    stock.ChunkedKVCache: "chunked",
    stock.ArraysCache: "recurrent",
}


def in_short(error: BaseException) -> str:
    where = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__} in {Path(where.filename).name}: {str(error).splitlines()[0] if str(error) else ''}"


def _said_of_failure(family: Family) -> str | None:
    """What we say of a model that mlx-lm's own caches cannot serve."""
    try:
        make_prompt_cache(family.model)
    except ValueError as error:
        return str(error) if is_refusal(error) else None
    return None


def judge(family: Family, column: str) -> Verdict:
    """The verdict of one column; never an exception."""
    try:
        _ = family.truth, family.own
    except Exception as error:
        return Verdict("mlx-lm fails", _said_of_failure(family) or f"with its own caches: {in_short(error)}")
    try:
        return COLUMNS[column](family)
    except WrongError as error:
        return Verdict("WRONG", str(error))
    except Exception as error:
        return Verdict("refused", str(error)) if is_refusal(error) else Verdict("WRONG", in_short(error))


def walk(name: str, columns: Sequence[str] = tuple(COLUMNS)) -> dict[str, Verdict]:
    """All verdicts of one family."""
    family = Family(name)
    return {column: judge(family, column) for column in columns}


def layers(family: Family) -> str:
    """What the layers' own caches are for, in words."""
    own = leaves(stock.make_prompt_cache(family.model))
    found = [KINDS.get(type(cache), type(cache).__name__) for cache in own]
    return " + ".join(dict.fromkeys(found))
