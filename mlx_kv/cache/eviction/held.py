"""What is asked of a cache whose tokens are scored. Knows nothing about scores."""

from __future__ import annotations

from typing import Protocol

from mlx_kv.cache.buffers import Buffers
from mlx_kv.cache.layout import Row


class Held(Protocol):
    """What is looked at of a cache: where its rows stand, and what holds their tokens. A `CacheView` has both."""

    @property
    def rows(self) -> tuple[Row, ...]: ...

    @property
    def buffers(self) -> Buffers | None: ...


class Cached(Protocol):
    """A cache that says where it stands: the one of an evictor, or of somebody who listens to it."""

    @property
    def view(self) -> Held: ...
