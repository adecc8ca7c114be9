"""Whose caches a store keeps: nobody goes on with those of another model or policy, whatever was left out."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from tiny_models import VOCAB, make_model

from mlx_kv import CachePolicy, PromptMemory, PromptReader, PromptStore, make_prompt_cache
from mlx_kv.prefixes.reader import cache_format
from mlx_kv.server.output import Job
from mlx_kv.server.rows import TieredPrefixes

TOKENS: list[int] = mx.random.randint(1, VOCAB, (200,), key=mx.random.key(0)).tolist()  # type: ignore[assignment]
OTHERS: dict[str, tuple[dict[str, Any], CachePolicy]] = {
    "another model": ({"seed": 1}, CachePolicy()),
    "2 bits": ({}, CachePolicy(bits=2, group_size=32)),
    "8 bits later": ({}, CachePolicy(bits=8, group_size=32, quantized_start=1000)),
    "a window": ({}, CachePolicy(max_kv_size=100)),
    "a budget": ({}, CachePolicy(budget=150)),
    "a budget, by head": ({}, CachePolicy(budget=150, share="head")),
    "a budget by another score": ({}, CachePolicy(budget=150, score="recent")),
}


def read(store: Any, settings: dict[str, Any] | None = None, policy: CachePolicy | None = None) -> PromptReader:
    model = make_model("llama", **(settings or {}))
    reader = PromptReader(model, make_prompt_cache(model, policy), TOKENS, store)
    reader.finish()
    return reader


def places(folder: Path, **options: Any) -> list[Any]:
    return [PromptMemory(**options), PromptStore(folder, **options)]


@pytest.mark.parametrize("case", OTHERS)
def test_a_reader_never_gets_what_another_model_or_policy_left(case: str, tmp_path: Path) -> None:
    for place in places(tmp_path):
        read(place)
        assert read(place).reused == 199
        with pytest.raises(ValueError, match=r"caches of another model or policy: give each a Prompt.* of its own"):
            read(place, *OTHERS[case])
    other = PromptStore(tmp_path)  # the next process, on the same directory
    first = read(other, *OTHERS[case])
    assert first.reused == 0
    assert read(PromptStore(tmp_path), *OTHERS[case]).reused > 0
    assert read(PromptStore(tmp_path)).reused == 199
    assert cache_format(read(PromptStore(tmp_path)).caches) == cache_format(read(None).caches)


def test_two_tables_are_two_policies() -> None:
    tables = [((1, 2), (3, 4), (5, 6)), ((2, 1), (3, 4), (5, 6)), ((1,), (2,), (3,)), "uniform"]
    every: list[Any] = [CachePolicy(budget=150, share="adaptive", layers=table) for table in tables]
    formats = [cache_format(make_prompt_cache(make_model("llama"), policy)) for policy in every]
    assert len({str(each) for each in formats}) == len(tables)
    place = PromptMemory()
    read(place, policy=every[0])
    assert read(place, policy=every[0]).reused == 199
    for other in every[1:]:
        with pytest.raises(ValueError, match="caches of another"):
            read(place, policy=other)


def test_two_scores_of_one_name_are_two_policies() -> None:
    def policy(sign: float) -> CachePolicy:
        return CachePolicy(budget=150, score=lambda tokens: sign * mx.abs(tokens.keys).sum(axis=-1))

    first, second = policy(1.0), policy(-1.0)
    place = PromptMemory()
    read(place, policy=first)
    assert read(place, policy=first).reused == 199
    with pytest.raises(ValueError, match="another score of the same name: give each a name of its own"):
        read(place, policy=second)


@pytest.mark.parametrize("case", [case for case in OTHERS if case != "another model"])
def test_a_fingerprint_that_does_not_tell_policies_apart_is_found_out(case: str, tmp_path: Path) -> None:
    for place in places(tmp_path, fingerprint="mine"):
        read(place)
        with pytest.raises(ValueError, match=r"caches of another policy \(append, not .*\): give it a fingerprint"):
            read(place, *OTHERS[case])


def test_who_keeps_and_finds_without_a_reader_says_whose_they_are(tmp_path: Path) -> None:
    caches = read(None).caches
    for place in places(tmp_path):
        for ask in (lambda: place.find(TOKENS), lambda: place.serves(TOKENS), lambda: place.keep(TOKENS[:199], caches)):  # noqa: B023
            with pytest.raises(
                ValueError, match="has no fingerprint of a model and policy: read with a PromptReader, or"
            ):
                ask()
        assert place.fingerprint is None
    for place in places(tmp_path, fingerprint="mine"):
        assert place.keep(TOKENS[:199], caches)
        assert place.find(TOKENS)[1] == 199
    with pytest.raises(ValueError, match="the prompt is read by a function, which has no fingerprint"):
        PromptReader(lambda tokens, cache: None, caches, TOKENS, PromptMemory())


class Breaks:
    """A place whose every method fails."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    other_versions = 0

    def bind(self, find: Callable[[], str]) -> None: ...

    def __getattr__(self, name: str) -> Any:
        def fail(*arguments: Any) -> Any:
            raise self.error

        return fail


@pytest.mark.parametrize(
    "error", [MemoryError(), RuntimeError("[malloc]\nout of memory"), ValueError("x"), OSError(28)]
)
@pytest.mark.parametrize("which", ["memory", "store", "both"])
def test_whatever_fails_in_the_server_costs_a_prompt_its_time_and_no_more(
    which: str, error: Exception, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    broken: Any = Breaks(error)
    memory = broken if which != "store" else PromptMemory()
    store = broken if which != "memory" else PromptStore(tmp_path)
    prompts = TieredPrefixes(memory, store, lambda: None, lambda: "mine")
    prompts.bind()
    caches = read(None).caches
    with caplog.at_level(logging.WARNING):
        prompts.keep(TOKENS[:199], caches)
        prompts.request(Job(TOKENS, 1))
        found = list(prompts.look_up())
        prompts.close()
        prompts.request(Job(TOKENS, 1))
        found += [*prompts.look_up(), *prompts.look_up()]
    ended = [count for _, _, count in found]
    assert ended == {"store": [199, 199], "memory": [199, 0], "both": [0, 0]}[which]  # where one works, it serves
    assert all(write.done() for _, write in prompts._writes)
    assert caplog.records
    assert not any("\n" in record.getMessage() for record in caplog.records)
    with contextlib.suppress(RuntimeError):
        prompts.close()
