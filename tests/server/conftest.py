"""A server that tests share: each begins and ends with nothing in it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from reasoning_server import claude as claude
from reasoning_server import reasoner as reasoner
from reasoning_server import says as says
from serving import Running, running

from mlx_kv.server.api import Limits


@pytest.fixture(scope="session")
def server() -> Iterator[Running]:
    with running(limits=Limits(body_bytes=50_000, prompt_tokens=1000, queue=16, max_tokens=32)) as one:
        yield one
