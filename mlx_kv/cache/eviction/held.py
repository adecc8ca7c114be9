"""What an evictor, or a listener of a second reading, needs of the cache that it belongs to."""

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
    """A cache with a view of its rows and buffers: the one of an evictor, or of a listener (`rereading`)."""

    @property
    def view(self) -> Held: ...
