"""From start to end: models, sockets, signals.

Decides the order: a port that is taken is an error before a model is loaded, and nobody can connect before it is; a
signal ends first what is accepted, then waits for what is being answered, then ends the worker; and when the worker
ends, all ends. Knows nothing about requests.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import time
from collections.abc import Callable, Iterator, Sequence

import uvicorn

from mlx_kv.ranks.group import RankGroup
from mlx_kv.ranks.link import leave
from mlx_kv.server.access import AccessRules
from mlx_kv.server.access_log import AccessLog, log_from
from mlx_kv.server.api import Api, Limits
from mlx_kv.server.half_close import HalfCloseProtocol
from mlx_kv.server.metrics import Metrics
from mlx_kv.server.shutdown import ShutdownSignals
from mlx_kv.server.tls import Certificates
from mlx_kv.server.worker import Worker

BACKLOG = 2048
TOLD_WITHIN = 1.0  # seconds in which clients hear why there will be no answer, before they are cut off
LOOKED = 0.1  # seconds between two looks at whether the group of ranks is broken, while answers end
LAST_WORDS = 10.0  # seconds in which the worker ends, when nobody is served any longer


def bound(host: str, port: int) -> socket.socket:
    """A socket with an address, that does not listen yet.

    Raises:
        ValueError: the address is taken, or not one of this machine.
    """
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        # asyncio turns Nagle's algorithm off only where it is told that this is TCP; with it on, every answer waits
        # 40 ms for the client's acknowledgement of its own headers.
        listening = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        try:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind(address)
        except BaseException:
            listening.close()
            raise
    except OSError as error:
        raise ValueError(f"cannot listen on {host}:{port}: {error.strerror or error}") from error
    return listening


class Server(uvicorn.Server):
    """uvicorn around the application. It logs nothing: what went wrong is logged where it is known.

    Args:
        drain_seconds: from a signal until answers that have not ended yet are ended with an error.
        certificates: for TLS; None is without.
    """

    def __init__(self, api: Api, drain_seconds: float = 30.0, certificates: Certificates | None = None) -> None:
        self.api, self._drain_seconds = api, drain_seconds
        self._at_once = asyncio.Event()
        self._died: float | None = None  # when the worker was found to have
        self.broken: str | None = None  # why there is no whole model any longer
        config = uvicorn.Config(
            AccessLog(api.app),
            log_config=None,
            access_log=False,
            server_header=False,
            ws="none",
            lifespan="on",
            http=HalfCloseProtocol,
            **({} if certificates is None else certificates.of_uvicorn),
        )
        super().__init__(config)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """`serve` does that: uvicorn would, at a second Ctrl-C, drop all connections in the middle of a word."""
        yield

    @property
    def unanswered(self) -> int:
        """Requests that were let in and are not answered yet."""
        return self.api.admission.admitted

    def hurry(self) -> None:
        """Ends all answers with an error, now. Called in the thread of the event loop, or in a signal handler there."""
        self._at_once.set()

    def end(self, reason: str) -> None:
        """Ends all answers with an error, soon, and then the server. Called in any thread."""
        self.broken = reason

    async def on_tick(self, counter: int) -> bool:
        if self.broken is not None:  # the worker may be waiting for another rank for good
            self._give_up()
            self.hurry()
        if self._died is None and not self.api.worker.alive:
            self._died = time.monotonic()
        clients_know = self._died is not None and time.monotonic() - self._died > TOLD_WITHIN
        return await super().on_tick(counter) or clients_know or self.broken is not None

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        ending = asyncio.create_task(self._end_answers())
        await super().shutdown(sockets)
        ending.cancel()

    def _give_up(self) -> None:
        self.api.admission.give_up(*(() if self.broken is None else (f"the server ends: {self.broken}",)))

    async def _end_answers(self) -> None:
        deadline = time.monotonic() + self._drain_seconds
        while self.broken is None and not self._at_once.is_set() and time.monotonic() < deadline:
            with contextlib.suppress(TimeoutError):  # in small pieces: `on_tick` looks for a broken group no longer
                await asyncio.wait_for(self._at_once.wait(), min(LOOKED, max(0.0, deadline - time.monotonic())))
        self._give_up()
        await asyncio.sleep(TOLD_WITHIN)
        for connection in list(self.server_state.connections):  # of clients that do not listen, or still send
            connection.transport.abort()


class WorkerError(Exception):
    """The server has ended because its worker had, which nobody had asked it to."""


def serve(
    worker: Worker,
    metrics: Metrics,
    name: str,
    host: str,
    port: int,
    limits: Limits,
    keys: Sequence[str] = (),
    access: AccessRules | None = None,
    drain_seconds: float = 30.0,
    ready: Callable[[str], None] = lambda url: None,
    say: Callable[[str], None] = lambda line: None,
    group: RankGroup | None = None,
    aliases: Sequence[str] = (),
    certificates: Certificates | None = None,
) -> int:
    """Serves until SIGTERM or SIGINT; then finishes what is being answered, for so many seconds at the most.

    Args:
        ready: called with the address as soon as requests are taken.
        aliases: other names of the model; "*" are all.
        certificates: for TLS; None is without.
        say: called with one line for each signal that changes something.
        group: the ranks of which this is the first. When one is gone, clients get an error, and the process ends.

    Returns:
        What the process is to end with: 0, or 130 after SIGINT.

    Raises:
        ValueError: what `bound` or the worker's models refuse.
        WorkerError: why it ended without a signal.
    """
    if not logging.getLogger().handlers:  # no --log-level
        log_from("WARNING")
    listening = bound(host, port)
    with listening:
        signals = ShutdownSignals(say, drain_seconds, None if group is None else group.close)
        worker.start()
        server = Server(Api(worker, metrics, name, limits, keys, access, aliases), drain_seconds, certificates)
        listening.listen(BACKLOG)
        signals.attach(server)
        if group is not None:
            group.when_gone(server.end)
        shown = f"[{host}]" if ":" in host else host
        ready(f"http{'' if certificates is None else 's'}://{shown}:{listening.getsockname()[1]}")
        server.run([listening])
        if server.broken is not None:
            leave(f"the server has ended: {server.broken}")  # whatever its worker waits for
        if group is not None:
            group.when_gone(None)
        signals.attach(None)
        if worker.failure is not None:
            raise WorkerError(f"the server has ended: {worker.failure}")
        if not worker.stop(1.0 if signals.hurried else drain_seconds + LAST_WORDS):
            signals.leave("stopped before the last step, or what the disk was to keep, was done")
        return signals.code
