"""All of mlx-lm's model families, tiny and random: which there are, what each can do, and what the docs say of it."""

from __future__ import annotations

import re
from typing import Any

import family_columns
import family_references
import mlx.core as mx
import pytest
from families import HELPERS, WALKED, model_files, shared_family
from family_configurations import CONFIGURATIONS
from family_model import Family, distance, read, tokens
from family_parts import VOCAB
from family_table import PAGE, parse, render
from family_walk import judge, walk
from mlx_lm.models import cache as stock

from mlx_kv import CachePolicy, KVCache, load_prompt_cache, trim_prompt_cache
from mlx_kv.cache.eviction import evictor


def test_every_model_file_of_mlx_lm_is_a_family_or_known_to_be_none() -> None:
    files = set(model_files())
    assert files - set(CONFIGURATIONS) - set(HELPERS) == set(), "new in mlx-lm: give each a tiny configuration"
    assert (set(CONFIGURATIONS) | set(HELPERS)) - files == set(), "no longer in mlx-lm"
    assert not set(CONFIGURATIONS) & set(HELPERS)


@pytest.mark.parametrize("name", WALKED)
@pytest.mark.slow
def test_no_column_is_wrong_and_the_docs_say_what_was_found(name: str) -> None:
    found = walk(name)
    wrong = {column: verdict.reason for column, verdict in found.items() if verdict.kind == "WRONG"}
    assert not wrong
    assert parse(PAGE.read_text())[0][name] == found, f"docs/families.md says otherwise: family_table.py --write {name}"


def test_the_docs_have_every_family_and_were_not_edited_by_hand() -> None:
    page = PAGE.read_text()
    verdicts, kinds = parse(page)
    assert set(verdicts) == set(CONFIGURATIONS)
    again = render(verdicts, kinds)
    assert again[again.index("In short") :] == page[page.index("In short") :]


@pytest.mark.parametrize("name", [name for name in WALKED if name != "olmo"])  # no model that can be read
def test_answers_hang_on_early_tokens(name: str) -> None:
    """Else a cache that lost them would not be seen."""
    model = shared_family(name)
    prompt = tokens()
    other = mx.concatenate([(prompt[:, :1] + 1) % VOCAB, prompt[:, 1:]], axis=1)
    last = [read(model, stock.make_prompt_cache(model), each, [40, 8])[:, -1] for each in (prompt, other)]
    assert distance(*last) > 1e-3


def one_less(monkeypatch: pytest.MonkeyPatch) -> None:
    right = CachePolicy.layout
    monkeypatch.setattr(
        CachePolicy, "layout", lambda self, window=None, *args, **kw: right(self, window and window - 1)
    )


def imprecise(monkeypatch: pytest.MonkeyPatch) -> None:
    right = KVCache.update_and_fetch
    monkeypatch.setattr(KVCache, "update_and_fetch", lambda self, keys, values: right(self, keys * 1.01, values))


def unquantised(monkeypatch: pytest.MonkeyPatch) -> None:
    right = family_references.make_prompt_cache
    monkeypatch.setattr(family_references, "make_prompt_cache", lambda model, policy: right(model, CachePolicy()))


def unmoved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evictor, "move_slots", lambda buffers, source, target: None)


def padded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KVCache, "prepare", lambda self, **announced: None)


def untrimmed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KVCache, "trim_per_sequence", lambda self, counts: None)


def shortened(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(path: Any) -> list[Any]:
        caches = load_prompt_cache(path)
        trim_prompt_cache(caches, 1, strict=True)
        return caches

    monkeypatch.setattr(family_columns, "load_prompt_cache", load)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("column", "fault"),
    [
        ("alone", one_less),
        ("16-bit", imprecise),
        ("8 and 4 bits", unquantised),
        ("budget", unmoved),
        ("ragged batch", padded),
        ("draft model", untrimmed),
        ("trim", untrimmed),
        ("files", shortened),
    ],
)
def test_each_column_finds_a_planted_fault(column: str, fault: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    family = Family("llama")
    assert judge(family, column).kind == "exact"
    fault(monkeypatch)
    verdict = judge(family, column)
    assert verdict.kind == "WRONG"
    assert re.search("off by|sees other tokens|not continued", verdict.reason)
