"""Models that a server offers: their names in requests, and their weights, which come and go under one memory limit.

What is known of a model without its weights (tokenizer, context, bytes of rows) is there from the start, so that
requests for it are checked, encoded and queued at once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import combinations
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from mlx_kv.cache.buffers import on_cpu
from mlx_kv.generation.admission import PrefillPace
from mlx_kv.generation.embedding import MOST_TOKENS, Embedder, EmbeddingCard, Pooling
from mlx_kv.mlxlm.loading import context_length, vocabulary_of, weight_bytes
from mlx_kv.mlxlm.vision import feature_bytes, forget_images
from mlx_kv.server.json_http import ApiError
from mlx_kv.server.requests import UnknownFields
from mlx_kv.server.rows import Models, Rows, WorkerSettings

ANY = "*"
LATEST = ":latest"  # the tag that clients of Ollama add to names without one
DEFAULT = "default_model"  # the name that clients of mlx_lm.server send
FOREVER = "2100-01-01T00:00:00Z"


class Weights:
    """Weights of a network, which several models of a server may share.

    Args:
        release: replaces the network's weights by weights that are not read yet.
        held: whether they are in memory.

    Attributes:
        nbytes: of all of them, and what images may hold of a network that reads them.
        held: whether they count as memory in use: they are in memory, or are being read.
    """

    def __init__(self, network: nn.Module, release: Callable[[nn.Module], None], held: bool) -> None:
        self._network, self._release = network, release
        self.nbytes, self.held = weight_bytes(network) + feature_bytes(network), held
        self._unread: Iterator[tuple[str, mx.array]] | None = None

    @property
    def being_read(self) -> bool:
        """Whether some of them are still to be read."""
        return self._unread is not None

    @property
    def loaded(self) -> bool:
        """Whether all of them are in memory."""
        return self.held and not self.being_read

    def begin(self) -> None:
        """From now on they are read; `read` must follow until they are loaded."""
        self.held, self._unread = True, iter(tree_flatten(self._network.parameters()))  # type: ignore

    def read(self, nbytes: int) -> None:
        """Reads about as many bytes of them, and at least one array."""
        some: list[mx.array] = []
        while self._unread is not None and sum(array.nbytes for array in some) < nbytes:
            if (named := next(self._unread, None)) is None:
                self._unread = None
            else:
                some.append(named[1])
        mx.eval(some)

    def free(self) -> None:
        """Frees them."""
        self._unread = None
        self._release(self._network)
        forget_images(self._network)
        self.held = False


class IdleTimer:
    """When a model has had no requests for some time.

    Args:
        seconds: without a request; None is never.
        clock: returns seconds.
    """

    def __init__(self, seconds: float | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self.seconds, self._clock = seconds, clock
        self._idle_since: float | None = None  # None while there are requests
        self._over = True  # before the first request there is nothing to free, or it will be needed soon

    def restart(self) -> None:
        """Begins anew, as after a request."""
        self._idle_since, self._over = self._clock(), False

    def seconds_left(self) -> float | None:
        """Seconds until it is over; None while nothing is scheduled."""
        if self.seconds is None or self._over or self._idle_since is None:
            return None
        return max(0.0, self._idle_since + self.seconds - self._clock())

    def update(self, idle: bool) -> bool:
        """Whether it is over now, once after each request.

        Args:
            idle: whether there are no requests.
        """
        if not idle:
            self._idle_since, self._over = None, False
            return False
        if self._idle_since is None:
            self._idle_since = self._clock()
        if self.seconds_left() != 0.0:
            return False
        self._over = True
        return True


class ModelNames:
    """Names by which requests may refer to a model.

    Args:
        name: of the server's command line: a directory or a name on the hub, of which the last part is a name, too.
        aliases: more names; "*" allows any.
        default: whether clients that name no model mean this one.

    Attributes:
        all: the names, the one that people would type first.
        name: the first of them.
        given: those that no other model may have.
        any: whether it answers requests for all names that no other model has.
    """

    def __init__(self, name: str, aliases: Sequence[str] = (), default: bool = True) -> None:
        self.any, path = ANY in aliases, Path(name)
        if path.is_dir():
            first, others = path.resolve().name or name, [name, str(path.resolve())]
        else:
            first, others = name, [name.rstrip("/").rpartition("/")[2]]
        names = (first, *aliases, *others, *([DEFAULT] if default else []))
        self.all = tuple(dict.fromkeys(each for each in names if each and each != ANY))
        self.name, self.given = first, {first, *aliases} - {ANY}

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and name.removesuffix(LATEST) in self.all


class Served:
    """A model of a server: one object, made and closed as a whole.

    Args:
        name: for clients, as of `ModelNames`.
        load: loads the models; called once, in the worker's thread. Where `lazy`, it reads no weights.
        settings: of its rows; those of the first model are the server's.
        release: frees the weights of a network of these models.
        lazy: whether weights are read with the first request.
        pinned: whether they stay, whatever else needs memory.
        idle_seconds: without requests, after which they are freed; None keeps them until another model needs memory.
        template: settings of the chat template, for requests that leave them out; None is the server's.

    Attributes:
        rows: its engine, jobs and cached prefixes.
        models, policy, plan: of its rows.
        fixed: whether the operator has pinned it.
        context: length in tokens; None if unknown.
        vocabulary: number of token ids.
        weights: of its networks.
        used: when it last had a request; on the clock of `time.monotonic`.
    """

    def __init__(
        self,
        name: str,
        load: Callable[[], Models],
        settings: WorkerSettings | None = None,
        *,
        release: Callable[[nn.Module], None] = lambda network: None,
        aliases: Sequence[str] = (),
        default: bool = True,
        lazy: bool = False,
        pinned: bool = False,
        idle_seconds: float | None = None,
        template: Mapping[str, Any] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.names = ModelNames(name, aliases, default)
        self.settings = settings or WorkerSettings()
        self._load, self._release, self.lazy, self.pinned = load, release, lazy, pinned
        self.idle, self._idle_seconds, self.used = IdleTimer(idle_seconds, clock), idle_seconds, 0.0
        self.template, self.fixed = template, pinned
        self._embedder: Embedder | None = None
        self._pace = PrefillPace(self.settings.max_wait or 1.0, MOST_TOKENS[True])
        self.rows: Rows

    def load(self, known: dict[int, Weights]) -> None:
        """Loads the models.

        Args:
            known: weights of other models, by the network's id; those of this one are added.
        """
        self.models: Models = self._load()
        self.policy = self.models.policy or self.settings.policy
        for network in self.models.networks:
            if id(network) not in known:
                known[id(network)] = Weights(network, self._release, not self.lazy)
        self.weights = [known[id(network)] for network in self.models.networks]

    def open(self, make_rows: Callable[[Served], Rows]) -> None:
        """Makes all that needs the models.

        Raises:
            ValueError: the model does not support the settings.
        """
        self.rows = make_rows(self)
        self.plan = self.rows.plan
        self.context, self.vocabulary = context_length(self.models.model), vocabulary_of(self.models.model)
        for weights in self.weights if self.lazy else ():
            if not weights.held:  # a calibration is compared with weights
                weights.free()

    def embed(
        self, texts: Sequence[Sequence[int]], pooling: Pooling | None, most: Callable[[], int]
    ) -> Generator[None, None, list[mx.array]]:
        """As `Embedder.embed`; the embedder is made with the first texts, in the worker's thread."""
        if self._embedder is None:
            try:
                self._embedder = Embedder(self.models.model, self.card)
            except ValueError as error:
                raise ValueError(f"{self.names.name} has no embeddings: {error}") from None
        return (yield from self._embedder.embed(texts, pooling, most, self._pace.record))

    def embedding_tokens(self, beside: bool) -> int:
        """Tokens to be read in a pass, beside rows that decode or not."""
        return self._pace.chunk(1) if beside else MOST_TOKENS[on_cpu()]

    @cached_property
    def card(self) -> EmbeddingCard:
        """How its embeddings are made. Raises ValueError for a way that is not known."""
        return EmbeddingCard.of(Path(str(self.models.tokenizer.name_or_path)))

    @property
    def nbytes(self) -> int:
        """Bytes of its weights."""
        return sum(each.nbytes for each in self.weights)

    @property
    def state(self) -> str:
        """Of its weights."""
        if all(each.loaded for each in self.weights):
            return "loaded"
        return "loading" if all(each.held for each in self.weights) else "unloaded"

    def keep_alive(self, seconds: float | None) -> None:
        """Frees the weights after so many seconds without requests; negative ones keep them, None is as at the start.

        Does nothing to a model that the operator has pinned.
        """
        if not self.fixed:
            self.pinned = seconds is not None and seconds < 0
            self.idle.seconds = None if self.pinned else self._idle_seconds if seconds is None else seconds

    @property
    def expires_at(self) -> float | None:
        """When its weights will be freed if nothing is asked, in seconds since 1970; None is never."""
        left = self.idle.seconds_left()
        left = self.idle.seconds if left is None else left
        return None if left is None or self.state == "unloaded" else time.time() + left


class ModelTable:
    """The models of a server by their names in requests.

    Args:
        strict: whether names of other models are refused, also where there is only one.
    """

    def __init__(self, served: Sequence[Served], strict: bool = False) -> None:
        self._served, self._strict = served, strict
        self._unknown = UnknownFields()
        self._other = next((each for each in served if each.names.any), None)
        for one, other in combinations(served, 2):
            for name in sorted(one.names.given & other.names.given):
                raise ValueError(f"two models are called {name!r}: give one of them another name")

    def known(self, name: object) -> Served | None:
        """The model of a name; None if none has it."""
        other = self._other if isinstance(name, str) else None
        return next((each for each in self._served if name in each.names), other)

    def find(self, name: object) -> Served:
        """The model that answers requests for a name; the first one, where a request has none.

        Raises:
            ApiError: 404 for the name of another model. The only model answers those, unless names are strict.
        """
        if name is None or not isinstance(name, str):  # what is no text is refused with its field
            return self._served[0]
        if (known := self.known(name)) is not None:
            return known
        first = self._served[0]
        if self._strict or len(self._served) > 1:
            names = ", ".join(repr(each.names.name) for each in self._served)
            raise ApiError(404, f"there is no model {name[:200]!r} here: use {names}", "model", "model_not_found")
        line = f"{first.names.name!r} answers requests for {name[:200]!r}: --strict-model-name refuses them"
        self._unknown.log_once(name[:200], line)
        return first


def bytes_held(served: Sequence[Served]) -> int:
    """Bytes of weights in memory, each network's once."""
    return sum(each.nbytes for each in {each for one in served for each in one.weights if each.held})


def sharing(served: Sequence[Served], weights: Weights) -> list[Served]:
    """The models that have these weights."""
    return [each for each in served if weights in each.weights]
