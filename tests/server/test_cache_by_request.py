"""The request field `cache`, and how the cache policy of a server is reported."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import mlx.nn as nn
import pytest
from calibrations import centred
from serving import LONG, cached, check_error, running

from mlx_kv import CachePolicy
from mlx_kv.cache.codecs import Affine


@pytest.mark.parametrize("policy", [CachePolicy(), CachePolicy(budget=300)], ids=["full", "budget"])
def test_a_private_prompt_is_not_cached(policy: CachePolicy) -> None:
    prompt, private = LONG[700:2700], {"keep": False}
    with running(policy, prompt_memory_bytes=2**28) as server:
        for _ in range(2):
            answer = server.post(prompt=prompt, max_tokens=2, cache=private).json()
            assert cached(answer) == 0
        server.complete(prompt, 2)
        assert cached(server.post(prompt=prompt, max_tokens=2, cache=private).json()) > 0


@pytest.mark.parametrize(
    ("cache", "param", "message"),
    [
        ({"budget": 64}, "cache.budget", "is no longer a setting of requests: start a server with --kv-budget"),
        ({"bits": [8, 4]}, "cache.bits", "is no longer a setting of requests: start a server with --kv-bits"),
        ({"score": "recent"}, "cache.score", "is no longer a setting of requests: start a server with --kv-score"),
        ({"keep": 1}, "cache.keep", "true or false"),
        ({"slots": 1}, "cache.slots", "is unknown: leave it out"),
        ([], "cache", "send an object"),
    ],
)
def test_other_settings_are_refused(cache: Any, param: str, message: str, plain: Any) -> None:
    error = check_error(plain.post(prompt="import", cache=cache), 400)
    assert error["param"] == param
    assert message in error["message"]


@pytest.fixture(scope="module")
def plain() -> Any:
    with running() as server:
        yield server


# Bytes of a token of the reference model: 4 layers of 2 heads, keys and values of 64 elements.
STORED: list[tuple[CachePolicy, str, int]] = [
    (CachePolicy(bits=(8, 4)), "bits 8/4", 8 * (72 + 40)),
    (CachePolicy(bits=(4, 8), codec="rotated"), "bits 4/8, codec rotated", 8 * (40 + 72)),
    (CachePolicy(codec=("mxfp8", "nvfp4")), "codec mxfp8/nvfp4", 8 * (66 + 36)),
]


def centred_keys(model: nn.Module) -> CachePolicy:
    return CachePolicy(codec=(centred(model, list(range(3, 103))), Affine(8, 64)))


@pytest.mark.parametrize(("policy", "name", "token_bytes"), STORED, ids=[name for _, name, _ in STORED])
@pytest.mark.slow
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
