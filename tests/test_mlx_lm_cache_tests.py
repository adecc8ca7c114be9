"""What `tools/mlx_lm_cache_tests.py` says of tests: here of made-up ones, in files like mlx-lm's."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import mlx_kv

sys.path.append(str(Path(__file__).parent.parent / "tools"))

import mlx_lm_cache_tests as tool

HEAD = """
import unittest
import mlx.core as mx
from mlx_lm.models.cache import ArraysCache, KVCache, RotatingKVCache, make_prompt_cache
from mlx_lm.utils import load


class TestPromptCache(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.model, cls.tokenizer = load("somebody/elses")

"""


def said(body: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, list[str]]:
    """The exit code, and what is said beside which names are ours and how many tests there were."""
    file = folder / "test_prompt_cache.py"
    lines = body.strip().split("\n")
    file.write_text(HEAD + "\n".join(f"    {line}" for line in lines))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["tool", str(file)])
        with pytest.raises(SystemExit) as ended:
            tool.main()
    first, *rest, _ = capsys.readouterr().out.strip().split("\n")
    assert first == "ours: KVCache, RotatingKVCache, make_prompt_cache"
    return int(ended.value.code or 0), [line for line in rest if line.startswith("test_")]


@pytest.fixture
def lists(monkeypatch: pytest.MonkeyPatch) -> tuple[dict[tuple[str, int], str], dict[str, tuple[str, str]]]:
    """Of differences, and of tests that are refused: empty ones."""
    differences: dict[tuple[str, int], str] = {}
    refused: dict[str, tuple[str, str]] = {}
    monkeypatch.setattr(tool, "DIFFERENCES", differences)
    monkeypatch.setattr(tool, "REFUSED", refused)
    return differences, refused


SLOTS = """
def test_slots(self):
    cache = KVCache()
    x = mx.zeros((1, 2, 3, 8))
    self.assertEqual(cache.update_and_fetch(x, x)[0].shape, (1, 2, 3, 8))
    for _ in range(2):
        self.assertEqual(cache.keys.shape[2], 3)
    self.assertTrue(cache.nothing_like_it)
    self.assertEqual(cache.offset, 3)
"""
OURS = """
def test_ours(self):
    self.assertEqual(type(RotatingKVCache(8)).__module__, "mlx_kv.cache.kv_cache")
    self.assertEqual(type(ArraysCache(1)).__module__, "mlx_lm.models.cache")
    x = mx.zeros((1, 2, 3, 8))
    cache = KVCache()
    cache.update_and_fetch(x, x)
    self.assertTrue(mx.array_equal(cache.state[0], cache.state[0]))
    self.assertFalse(mx.array_equal(cache.state[0], ()))
    self.assertTrue(mx.array_equal(x, x))
    tokens = self.tokenizer.encode("this", return_tensors="mlx")[0]
    self.assertTrue(tokens.size > 0)
    self.assertEqual(self.model(tokens[None], cache=make_prompt_cache(self.model)).shape[1], tokens.size)
"""


def test_ours_stand_in_the_place_of_names(tmp_path: Path, lists: object, capsys: pytest.CaptureFixture[str]) -> None:
    assert said(OURS, tmp_path, capsys) == (0, ["test_ours: passed"])


def test_what_fails_and_is_not_listed_is_wrong(
    tmp_path: Path, lists: object, capsys: pytest.CaptureFixture[str]
) -> None:
    code, lines = said(SLOTS, tmp_path, capsys)
    assert (code, lines) == (1, ["test_slots: failed"])


def test_what_is_listed_may_fail_and_the_test_goes_on(
    tmp_path: Path, lists: tuple[dict[tuple[str, int], str], object], capsys: pytest.CaptureFixture[str]
) -> None:
    lists[0].update({("test_slots", 2): "longer", ("test_slots", 3): "none"})
    wanted = ["test_slots: differs in assertion 2: longer", "test_slots: differs in assertion 3: none"]
    assert said(SLOTS, tmp_path, capsys) == (0, wanted)
    code, lines = said(SLOTS.replace("offset, 3", "offset, 4"), tmp_path, capsys)
    assert (code, lines[0]) == (1, "test_slots: failed")


def test_what_is_listed_and_does_not_differ_is_wrong(
    tmp_path: Path, lists: tuple[dict[tuple[str, int], str], object], capsys: pytest.CaptureFixture[str]
) -> None:
    lists[0].update({("test_ours", 1): "no", ("test_ours", 99): "no"})
    code, lines = said(OURS, tmp_path, capsys)
    assert code == 1
    assert lines == [
        "test_ours: assertion 1 is listed as differing, and holds: take it out of DIFFERENCES",
        "test_ours: assertion 99 is listed as differing, and did not come: take it out of DIFFERENCES",
    ]
    lists[0].clear()
    lists[0]["test_gone", 1] = "no"
    wanted = ["test_gone: is listed, and there is no such test: take it out", "test_ours: passed"]
    assert said(OURS, tmp_path, capsys) == (1, wanted)


def test_a_refusal_has_its_words(
    tmp_path: Path, lists: tuple[object, dict[str, tuple[str, str]]], capsys: pytest.CaptureFixture[str]
) -> None:
    body = "def test_rows(self):\n    KVCache(bits=7)"
    lists[1]["test_rows"] = ("bits is 7", "there are no such planes")
    assert said(body, tmp_path, capsys) == (0, ["test_rows: differs: there are no such planes"])
    code, lines = said("def test_rows(self):\n    KVCache(bits=8)", tmp_path, capsys)
    assert (code, lines) == (1, ["test_rows: is listed as one that is refused, and passes: take it out of REFUSED"])
    lists[1]["test_rows"] = ("other words", "there are no such planes")
    assert said(body, tmp_path, capsys) == (1, ["test_rows: failed"])


def test_what_is_no_file_of_python_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["tool", "nowhere.py"])
    with pytest.raises(SystemExit):
        tool.main()
    assert "nowhere.py is no file of Python" in capsys.readouterr().err


def test_every_name_of_mlx_lms_caches_that_is_a_class_is_one_here() -> None:
    from mlx_lm.models import cache as stock

    both = [name for name in mlx_kv.__all__ if isinstance(getattr(stock, name, None), type)]
    assert len(both) > 5
    assert all(isinstance(getattr(mlx_kv, name), type) for name in both)
