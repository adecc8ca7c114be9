"""All of mlx-lm's model families, tiny and random: which there are, what each can do, and what the docs say of it."""

from __future__ import annotations

import os

import mlx.core as mx
import pytest
from families import CONFIGURATIONS, HELPERS, VOCAB, family_names, make_family, model_files
from family_table import PAGE, parse
from family_walk import distance, read, tokens, walk
from mlx_lm.models import cache as stock

THOROUGH = os.environ.get("HYPOTHESIS_PROFILE") == "thorough"
# One of each kind of attention that there is; all of them in the long suite.
SAMPLE = ["llama", "gemma3n", "plamo3", "llama4", "deepseek_v32", "afm7", "nemotron-nas", "jamba", "recurrent_gemma"]
WALKED = family_names() if THOROUGH else SAMPLE


def test_every_model_file_of_mlx_lm_is_a_family_or_known_to_be_none() -> None:
    files = set(model_files())
    assert files - set(CONFIGURATIONS) - set(HELPERS) == set(), "new in mlx-lm: give each a tiny configuration"
    assert (set(CONFIGURATIONS) | set(HELPERS)) - files == set(), "no longer in mlx-lm"
    assert not set(CONFIGURATIONS) & set(HELPERS)


@pytest.mark.parametrize("name", WALKED)
def test_no_column_is_wrong_and_the_docs_say_what_was_found(name: str) -> None:
    found = walk(name)
    wrong = {column: verdict.reason for column, verdict in found.items() if verdict.kind == "WRONG"}
    assert not wrong
    assert parse(PAGE.read_text())[name] == found


def test_the_docs_have_every_family() -> None:
    assert set(parse(PAGE.read_text())) == set(CONFIGURATIONS)


@pytest.mark.parametrize("name", [name for name in WALKED if name != "olmo"])  # no model that can be read
def test_answers_hang_on_early_tokens(name: str) -> None:
    """Else a cache that lost them would not be seen."""
    model = make_family(name)
    prompt = tokens()
    other = mx.concatenate([(prompt[:, :1] + 1) % VOCAB, prompt[:, 1:]], axis=1)
    last = [read(model, stock.make_prompt_cache(model), each, [40, 8])[:, -1] for each in (prompt, other)]
    assert distance(*last) > 1e-3
