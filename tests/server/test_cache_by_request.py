"""Requests that say how their keys and values are kept: engines side by side, each with what it has read before."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import mlx.nn as nn
import pytest
from serving import LONG, Running, cached, check_error, running

from mlx_kv import CachePolicy, PromptStore
from mlx_kv.cache.codecs import Affine
from mlx_kv.evaluation.centres import centred
from mlx_kv.server.api import Limits
from mlx_kv.server.cache_requests import AllowedCache, CacheRequest
from mlx_kv.server.errors import ApiError
from mlx_kv.server.models import Models
from mlx_kv.server.policy_rows import PolicyRows

ALLOWED = AllowedCache.of(["budget=96-512", "bits=8,4,8/4", "score=key_diff,recent"])
POLICIES: list[dict[str, Any]] = [{}, {"bits": 8}, {"budget": 128}, {"budget": 128, "bits": 8, "score": "recent"}]


@pytest.fixture(scope="module")
def server() -> Any:
    with running(
        limits=Limits(cache=ALLOWED, max_tokens=32), prompt_memory_bytes=2**28, max_policies=len(POLICIES)
    ) as one:
        yield one


@pytest.mark.slow
@pytest.mark.parametrize("draft", [False, True], ids=["plain", "draft"])
def test_rows_of_different_policies_are_served_side_by_side_as_each_would_be_alone(draft: bool) -> None:
    prompts = [LONG[start : start + 700] for start in (0, 900)]
    with (
        running(limits=Limits(cache=ALLOWED), max_policies=len(POLICIES), draft=draft) as server,
        ThreadPoolExecutor(8) as pool,
    ):
        asked = [pool.submit(server.complete, prompt, 24, cache=cache) for cache in POLICIES for prompt in prompts]
        told = [each.result() for each in asked]
        server.wait_until(lambda: len(server.worker.snapshot.policies) == len(POLICIES))
    for number, cache in enumerate(POLICIES):
        with running(CachePolicy(**cache), draft=draft) as alone:
            for index, prompt in enumerate(prompts):
                assert told[2 * number + index] == alone.complete(prompt, 24), cache


def test_what_was_read_is_found_under_its_policy_alone(server: Running) -> None:
    for cache in ({}, {"bits": 8}, {"budget": 300}, {"bits": [8, 4]}):
        for again in (False, True):
            answer = server.post(prompt=LONG[:600], max_tokens=2, cache=cache).json()
            assert (cached(answer) > 0) == again, cache


def test_a_prompt_that_is_read_again_for_its_score_is_found_by_the_next_request() -> None:
    cache: dict[str, Any] = {"budget": 128, "score": "kvzip"}
    with running(CachePolicy(**cache)) as own:
        wanted = own.complete(LONG[:900], 6)
    limits = Limits(cache=AllowedCache.of(["budget=96-512", "score=kvzip"]))
    with running(limits=limits, prompt_memory_bytes=2**28, max_policies=2) as server:
        answers = [server.post(prompt=LONG[:900], max_tokens=6, cache=cache).json() for _ in range(2)]
        assert [answer["choices"][0]["text"] for answer in answers] == [wanted, wanted]
        assert [cached(answer) > 0 for answer in answers] == [False, True]
        assert server.metrics.total("engine_failures") == 0


@pytest.mark.parametrize("cache", [{}, {"budget": 300}], ids=["full", "budget"])
def test_what_is_not_to_be_kept_is_not(cache: dict[str, Any], server: Running) -> None:
    prompt = LONG[700:2700]
    for _ in range(2):
        answer = server.post(prompt=prompt, max_tokens=2, cache=cache | {"keep": False}).json()
        assert cached(answer) == 0
    server.complete(prompt, 2, cache=cache)
    assert cached(server.post(prompt=prompt, max_tokens=2, cache=cache | {"keep": False}).json()) > 0


def test_an_engine_that_nobody_needs_makes_room_for_another() -> None:
    with running(limits=Limits(cache=ALLOWED), max_policies=2, prompt_memory_bytes=2**28) as server:
        for budget in (100, 200, 300, 100):
            answer = server.post(prompt=LONG[:500], max_tokens=2, cache={"budget": budget}).json()
            assert len(list(server.worker._policies)) == 2
        assert cached(answer) > 0  # what was read before is still there
        with ThreadPoolExecutor(4) as pool:  # more at once than engines: some wait, and none for ever
            budgets = [100, 200, 300, 400]
            asked = [pool.submit(server.complete, LONG[:400], 20, cache={"budget": budget}) for budget in budgets]
            assert all(each.result() for each in asked)


def test_a_store_that_opens_once_only_is_none_for_other_policies(tmp_path: Path, caplog: Any) -> None:
    opened: list[PromptStore] = []

    def open_store(models: Models) -> PromptStore:
        if opened:
            raise PermissionError("the folder is gone")
        opened.append(PromptStore(tmp_path, fingerprint="reference"))
        return opened[0]

    limits = Limits(cache=ALLOWED)
    with running(limits=limits, max_policies=2, prompt_memory_bytes=2**28, open_store=open_store) as one:
        plain = one.complete(LONG[:500], 4)
        for again in (False, True):
            answer = one.post(prompt=LONG[:500], max_tokens=4, cache={"bits": 8}).json()
            assert (cached(answer) > 0) == again  # in memory they are kept
        assert one.complete(LONG[:500], 4) == plain
    assert caplog.text.count("the folder is gone") == 1


def test_an_engine_that_cannot_be_made_ends_the_request_that_wanted_it_alone(monkeypatch: Any) -> None:
    prompts = [LONG[:400], LONG[900:1300]]
    with (
        running(limits=Limits(cache=ALLOWED), max_policies=2) as server,
        ThreadPoolExecutor(2) as pool,
    ):
        wanted = [server.complete(prompt, 32) for prompt in prompts]
        asked = [pool.submit(server.complete, prompt, 32) for prompt in prompts]
        begin = PolicyRows.begin

        def fails(rows: PolicyRows) -> None:
            raise OSError("no more of that")

        monkeypatch.setattr(PolicyRows, "begin", fails)
        refused = check_error(server.post(prompt=LONG[:300], max_tokens=2, cache={"bits": 8}), 503)
        assert "no more of that" in refused["message"]
        monkeypatch.setattr(PolicyRows, "begin", begin)
        with monkeypatch.context() as broken:
            broken.setattr(PolicyRows, "check", fails)
            refused = check_error(server.post(prompt=LONG[:300], max_tokens=2, cache={"bits": 4}), 503)
            assert "cannot be tried out: OSError: no more of that" in refused["message"]
        assert [each.result() for each in asked] == wanted
        assert server.post(prompt=LONG[:300], max_tokens=2, cache={"bits": 8}).status_code == 200
        assert server.worker.alive


@pytest.mark.parametrize(
    ("cache", "param"),
    [
        ({"budget": 64}, "cache.budget"),
        ({"budget": 2.5}, "cache.budget"),
        ({"bits": 5}, "cache.bits"),
        ({"bits": 9}, "cache.bits"),
        ({"bits": [4, 8]}, "cache.bits"),
        ({"bits": [8, None]}, "cache.bits"),
        ({"bits": [8, 9]}, "cache.bits"),
        ({"bits": [8, 4, 4]}, "cache.bits"),
        ({"bits": [None, None]}, "cache.bits"),
        ({"bits": [[8], 4]}, "cache.bits"),
        ({"bits": "8/4"}, "cache.bits"),
        ({"score": "nobody", "budget": 128}, "cache.score"),
        ({"score": 5}, "cache.score"),
        ({"score": "recent"}, "cache"),  # without a budget
        ({"keep": 1}, "cache.keep"),
        ({"slots": 1}, "cache.slots"),
        ([], "cache"),
    ],
)
def test_what_is_not_allowed_is_said(cache: Any, param: str, server: Running) -> None:
    assert check_error(server.post(prompt="import", cache=cache), 400)["param"] == param


def test_a_server_that_allows_nothing_says_so() -> None:
    own = CachePolicy(budget=128)
    assert AllowedCache().policy(own, CacheRequest(budget=128, keep=False)) == own
    with pytest.raises(ApiError, match="allows its own only"):
        AllowedCache().policy(own, CacheRequest(bits=8))


def test_bits_of_keys_and_of_values_apart() -> None:
    allowed = AllowedCache.of(["bits=8/4, 6,4/4"])
    assert allowed.bits == ((8, 4), 6, 4)
    for sent, stored in (([8, 4], (8, 4)), ([6, 6], 6), (6, 6), ([4, 4], 4)):
        policy = allowed.policy(CachePolicy(codec="rotated", bits=8), CacheRequest(bits=sent))
        assert policy == CachePolicy(codec="rotated", bits=stored)  # type: ignore[arg-type]
        assert hash(policy) is not None
    for sent, told in ((8, "8"), ([4, 8], "4/8"), ([8, None], "8/none")):
        with pytest.raises(ApiError, match=f"cache.bits is {told}: this server allows 8/4, 6, 4$"):
            allowed.policy(CachePolicy(), CacheRequest(bits=sent))
    own = AllowedCache.of(["bits=8/none"]).policy(CachePolicy(), CacheRequest(bits=[8, None]))
    assert own == CachePolicy(bits=(8, None))
    assert AllowedCache().policy(own, CacheRequest(bits=[8, None])) == own
    with pytest.raises(ApiError, match="got bits=6 and codec='mxfp8', which both describe"):
        allowed.policy(CachePolicy(codec="mxfp8"), CacheRequest(bits=6))


# Bytes of a token of the reference model: 4 layers of 2 heads, keys and values of 64 elements.
STORED: list[tuple[CachePolicy, str, int]] = [
    (CachePolicy(bits=(8, 4)), "bits 8/4", 8 * (72 + 40)),
    (CachePolicy(bits=(4, 8), codec="rotated"), "bits 4/8, codec rotated", 8 * (40 + 72)),
    (CachePolicy(codec=("mxfp8", "nvfp4")), "codec mxfp8/nvfp4", 8 * (66 + 36)),
]


def centred_keys(model: nn.Module) -> CachePolicy:
    return CachePolicy(codec=(centred(model, list(range(3, 103))), Affine(8, 64)))


@pytest.mark.parametrize(("policy", "name", "token_bytes"), STORED, ids=[name for _, name, _ in STORED])
def test_what_is_in_memory_is_told_as_it_is_stored(policy: CachePolicy, name: str, token_bytes: int) -> None:
    told_in_memory(name, token_bytes, policy=policy)


def test_a_policy_that_was_measured_on_the_model_is_the_servers() -> None:
    told_in_memory("codec centred 4/affine 8", 8 * (40 + 72), chosen=centred_keys)


def told_in_memory(name: str, token_bytes: int, **how: Any) -> None:
    prompts = [LONG[:300], LONG[400:900]]
    with running(**how) as server, ThreadPoolExecutor(2) as pool:
        seen: list[Any] = []
        asked = [pool.submit(server.complete, prompt, 64) for prompt in prompts]
        while not all(each.done() for each in asked):
            seen.append(server.http.get("/memory").json())
    told = [each for each in seen if each["rows"]]
    assert {row["policy"] for each in told for row in each["rows"]} == {name}
    held = [each for each in told if each["bytes_live"]]
    assert held
    for each in held:
        assert each["bytes_live"] % token_bytes == 0
        assert each["bytes_allocated"] % (256 * token_bytes) == 0


@pytest.mark.parametrize(
    "words",
    ["budget", "budget=5", "bits=", "bits=7", "bits=8/7", "bits=8/", "bits=8/4/4", "score=nobody", "keep=1", ""],
)
def test_words_of_the_operator_that_say_nothing_are_refused(words: str) -> None:
    with pytest.raises(ValueError, match="--allow-cache"):
        AllowedCache.of([words])


def test_one_engine_serves_one_policy() -> None:
    with running(limits=Limits(cache=ALLOWED)) as server:  # which the command never asks for
        check_error(server.post(prompt="import", cache={"bits": 8}), 400)
        assert server.complete("import", 3)


def test_what_is_kept_of_all_policies_has_one_limit() -> None:
    with running(limits=Limits(cache=ALLOWED), max_policies=3, prompt_memory_bytes=2_000_000) as server:
        for cache in ({}, {"bits": 8}, {"budget": 400}):
            for start in range(0, 1500, 500):
                server.complete(LONG[start : start + 1000], 2, cache=cache)
        server.wait_until(lambda: 0 < server.worker.snapshot.prompt_memory <= 2_000_000)
        server.wait_until(lambda: server.worker._kept.nbytes <= 2_000_000)
