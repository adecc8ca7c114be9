"""What older revisions wrote is read as they read it, bit for bit, goes on as it did, and their stores serve."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from written_before import make

from mlx_kv import PromptStore, load_prompt_cache
from mlx_kv.files.serialization import load_prompt_file

HERE = Path(make.__file__).parent
REVISIONS = ("150a35e", "372245b")
EXPECTED: dict[str, dict[str, Any]] = {
    revision: json.loads((HERE / revision / "expected.json").read_text()) for revision in REVISIONS
}
CASES = [(revision, name) for revision in REVISIONS for name in EXPECTED[revision]["cases"]]


def test_there_is_a_file_of_every_case() -> None:
    assert {name for revision, name in CASES if revision == "150a35e"} == set(make.CASES)
    assert set(EXPECTED["150a35e"]["models"]) == set(make.MODELS)
    for revision in REVISIONS:
        files = {path.stem for path in (HERE / revision).glob("*.safetensors")}
        assert files == {*EXPECTED[revision]["cases"], *EXPECTED[revision]["models"]}
        assert set(EXPECTED[revision]["store"]) == set(make.STORE)


@pytest.mark.parametrize(("revision", "name"), CASES)
def test_a_file_is_read_as_it_was_and_goes_on(revision: str, name: str) -> None:
    case, path = make.CASES[name], HERE / revision / f"{name}.safetensors"
    file = load_prompt_file(path)
    assert file.metadata == make.METADATA
    assert file.stock == name.startswith("mlx-lm")
    if not file.stock:
        assert (file.tokens, file.fingerprint) == (make.TOKENS[:9], "0123456789abcdef")
    told, first = make.go_on(file.caches, case.rows, case.shape)
    with np.load(HERE / revision / "expected.npz") as arrays:
        wanted = {key.removeprefix(f"{name}/"): arrays[key] for key in arrays.files if key.startswith(f"{name}/")}
    assert first.keys() == wanted.keys()
    for key in wanted:
        np.testing.assert_array_equal(first[key], wanted[key], err_msg=key, strict=True)
    assert told == EXPECTED[revision]["cases"][name]


@pytest.mark.parametrize("family", make.MODELS)
def test_recurrent_state_is_what_it_was(family: str) -> None:
    caches = load_prompt_cache(HERE / "150a35e" / f"{family}.safetensors")
    assert make.digest(dict(make.states(caches))) == EXPECTED["150a35e"]["models"][family]
    logits = make.read_by(make.hybrid(family), caches, [3, 1, 4])
    with np.load(HERE / "150a35e" / "expected.npz") as arrays:
        np.testing.assert_allclose(logits, arrays[f"{family}/logits"], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("fingerprint", make.STORE)
@pytest.mark.parametrize("revision", REVISIONS)
def test_the_entries_of_a_store_are_found(revision: str, fingerprint: str, tmp_path: Path) -> None:
    shutil.copytree(HERE / revision / "store", tmp_path / "store")
    store = PromptStore(tmp_path / "store", fingerprint=fingerprint)
    assert len(store.entries()) == len(make.STORE)
    assert store.serves([*make.TOKENS, 0]) == 100
    found = store.find([*make.TOKENS, 0])
    assert found is not None
    caches, count = found
    told, _ = make.go_on(caches, 1, (1, 32, "float16"))
    assert {"count": count, **told} == EXPECTED[revision]["store"][fingerprint]
    assert store.find([*make.TOKENS[:97], 0])[1] == 97  # type: ignore[index]
    assert PromptStore(tmp_path / "store", fingerprint="another").find([*make.TOKENS, 0]) is None
    assert (store.damaged, store.other_versions) == (0, 0)
    more = [token + 500 for token in make.TOKENS]
    cache = make.STORE[fingerprint]()
    cache.update_and_fetch(*make.tensors(7, 1, 100, 1, 32, "float16"))
    assert store.keep(more, [cache])
    again = PromptStore(tmp_path / "store", fingerprint=fingerprint)
    assert len(again.entries()) == len(make.STORE) + 1
    for tokens in (make.TOKENS, more):
        (loaded,), _ = again.find([*tokens, 0])  # type: ignore[misc]
        mx.eval(loaded.state)
        assert loaded.offset == 100


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("h2o", "score is 'h2o', which was removed in 0.4: use score='snap_kv' or a calibration"),
        ("expected_attention", "score is 'expected_attention', which was removed in 0.4: use score='kvzip'"),
        ("lag_kv", "score is 'lag_kv', which was removed in 0.4: use score='key_diff'"),
        ("pyramid", "layers is 'pyramid', which was removed in 0.4: use layers='calibrated'"),
        ("global", "layers is 'global', which was removed in 0.4: use layers='calibrated'"),
    ],
)
def test_files_of_removed_scores_and_allocations_name_the_way_on(name: str, reason: str) -> None:
    """They cannot go on evicting. `removed/` was written by 0.3: 20 tokens, two layers that keep 12."""
    with pytest.raises(ValueError, match=f"{re.escape(reason)}.*; make it again"):
        load_prompt_cache(HERE / "removed" / f"{name}.safetensors")


def test_a_file_of_0_3_with_observed_queries_goes_on() -> None:
    caches = load_prompt_cache(HERE / "removed" / "snap_kv.safetensors")
    assert [cache.evictor.observation.recent.counts for cache in caches] == [[20], [20]]  # type: ignore[attr-defined]
    assert [cache.offset for cache in caches] == [20, 20]
