"""MLX's cache limit: how it follows from the memory limit, that it holds, and that it is restored."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import mlx.core as mx
import pytest
from serving import LONG, running

from mlx_kv.mlxlm.traverse import mapped
from mlx_kv.server.memory import FREED_SHARE, MIN_FREED, FreedMemory

OWN = 10**9  # of MLX, as if on a Mac


def limit_now() -> int:
    limit = mx.set_cache_limit(0)
    mx.set_cache_limit(limit)
    return limit


@pytest.fixture(autouse=True)
def own_limit() -> Iterator[None]:
    before = mx.set_cache_limit(OWN)
    yield
    assert mx.set_cache_limit(before) == OWN
    mx.clear_cache()


def test_the_limit_is_a_share_with_a_floor_and_never_above_that_of_mlx() -> None:
    memory = FreedMemory()
    for for_rows, expected in ((10**9, int(FREED_SHARE * 10**9)), (10**6, MIN_FREED), (10**12, OWN)):
        assert memory.begin("a server", for_rows) == limit_now() == expected
        memory.end("a server")
        assert limit_now() == OWN


def test_without_a_memory_limit_it_stays() -> None:
    memory = FreedMemory()
    assert memory.begin("a server", None) is None
    assert limit_now() == OWN
    memory.end("a server")
    assert limit_now() == OWN


def test_the_lowest_limit_of_several_servers_holds() -> None:
    memory = FreedMemory()
    assert [memory.begin(number, n * 10**9) for number, n in enumerate((4, 2, 6))] == [
        500_000_000,
        250_000_000,
        750_000_000,
    ]
    assert limit_now() == 250_000_000
    memory.end(1)
    assert limit_now() == 500_000_000
    memory.end(1)
    memory.end(0)
    assert limit_now() == 750_000_000
    memory.end(2)


def test_a_server_sets_reports_and_restores_it() -> None:
    with running(memory_limit=10**9) as server:
        weights = server.worker.limit.weights
        expected = int(FREED_SHARE * (10**9 - weights))
        assert limit_now() == expected
        assert server.complete(LONG, 8)
        report = server.http.get("/memory").json()
        assert report["freed_memory_limit"] == expected
        assert 0 <= report["freed_memory"] <= expected
        assert "mlx_kv_freed_memory_bytes" in server.http.get("/metrics").text
    assert limit_now() == OWN
    with running() as server:
        assert server.http.get("/memory").json()["freed_memory_limit"] is None
        assert limit_now() == OWN


@pytest.mark.slow
def test_freed_buffers_stay_within_it() -> None:
    with running(memory_limit=10**8) as server:
        for number in range(6):
            assert server.complete(LONG[: 800 * (number + 1)], 24)
            assert mx.get_cache_memory() <= MIN_FREED


def test_a_start_that_fails_restores_it() -> None:
    with pytest.raises(ValueError, match="leaves nothing for rows"), running(memory_limit=1):
        pass
    assert limit_now() == OWN


def test_mapped_caches_are_freed_with_their_last_reference() -> None:
    """Not only when Python collects garbage: a prefix hit would hold its row's caches until then."""

    class Cache:
        pass

    gc.disable()
    try:
        cache = Cache()
        freed = weakref.ref(cache)
        found = mapped([object()], lambda old, new=cache: new)
        assert found == [cache]
        del cache, found
        assert freed() is None
    finally:
        gc.enable()
