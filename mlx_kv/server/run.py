"""From start to end: models, sockets, signals.

Decides the order: a port that is taken is an error before a model is loaded, and nobody can connect before it is; a
signal ends first what is accepted, then waits for what is being answered, then ends the worker; and when the worker
ends, all ends. Knows nothing about requests.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NoReturn

import uvicorn

from mlx_kv.server.access import AccessRules
from mlx_kv.server.api import Api, Limits
from mlx_kv.server.metrics import Metrics
from mlx_kv.server.worker import Worker

BACKLOG = 2048
TOLD_WITHIN = 1.0  # seconds in which clients hear why there will be no answer, before they are cut off
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
    """

    def __init__(self, api: Api, drain_seconds: float = 30.0) -> None:
        self.api, self._drain_seconds = api, drain_seconds
        self._at_once = asyncio.Event()
        self._died: float | None = None  # when the worker was found to have
        config = uvicorn.Config(
            api.app,
            log_config=None,
            access_log=False,
            server_header=False,
            ws="none",
            lifespan="on",
        )
        super().__init__(config)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """`serve` does that: uvicorn would, at a second Ctrl-C, drop all connections in the middle of a word."""
        yield

    def hurry(self) -> None:
        """Ends all answers with an error, now. Called in the thread of the event loop, or in a signal handler there."""
        self._at_once.set()

    async def on_tick(self, counter: int) -> bool:
        if self._died is None and not self.api.worker.alive:
            self._died = time.monotonic()
        told = self._died is not None and time.monotonic() - self._died > TOLD_WITHIN
        return await super().on_tick(counter) or told

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        ending = asyncio.create_task(self._end_answers())
        await super().shutdown(sockets)
        ending.cancel()

    async def _end_answers(self) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._at_once.wait(), self._drain_seconds)
        self.api.desk.give_up()
        await asyncio.sleep(TOLD_WITHIN)
        for connection in list(self.server_state.connections):  # of clients that do not listen, or still send
            connection.transport.abort()


class ShutdownSignals:
    """What SIGTERM and SIGINT (Ctrl-C) ask for, from the first moment to the last.

    The first lets answers finish, a SIGINT after it ends them at once; a SIGTERM more changes nothing, for there are
    supervisors that send several. Where nobody is being served, the process ends.

    Args:
        say: called with one line, for the terminal.

    Attributes:
        code: for the process to end with: 130 if there was a SIGINT, else 0.
        hurried: whether all is to end at once.
    """

    def __init__(self, say: Callable[[str], None], drain_seconds: float) -> None:
        self._say, self._drain_seconds = say, drain_seconds
        self._server: Server | None = None
        self._asked, self.code, self.hurried = False, 0, False
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._signal)

    def belongs_to(self, server: Server | None) -> None:
        self._server = server

    def _signal(self, number: int, frame: object) -> None:
        self.code = 130 if number == signal.SIGINT else self.code
        if self._server is None:
            if not self._asked or number == signal.SIGINT:
                self.leave("stopped")
        elif not self._asked:
            self._asked, self._server.should_exit = True, True
            self._tell(
                f"stopping: {self._left} to be finished within {self._drain_seconds:g} s; "
                "another Ctrl-C (SIGINT) ends at once"
            )
        elif number == signal.SIGINT and not self.hurried:
            self.hurried = True
            self._tell(f"stopping at once: {self._left} to be ended with an error")
            self._server.hurry()

    @property
    def _left(self) -> str:
        count = 0 if self._server is None else self._server.api.desk.admitted
        return f"{count} request{'' if count == 1 else 's'}"

    def leave(self, why: str) -> NoReturn:
        """Ends the process now, whatever its threads are doing: a model that is loaded, a disk that is written to."""
        self._tell(why)
        os._exit(self.code)

    def _tell(self, line: str) -> None:
        """What cannot be said is left out: the terminal may be gone, or a signal have come in the middle of a line."""
        with contextlib.suppress(OSError, RuntimeError, ValueError):
            self._say(line)
            sys.stdout.flush()
            sys.stderr.flush()


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
    doors: AccessRules | None = None,
    drain_seconds: float = 30.0,
    ready: Callable[[str], None] = lambda url: None,
    say: Callable[[str], None] = lambda line: None,
) -> int:
    """Serves until SIGTERM or SIGINT; then finishes what is being answered, for so many seconds at the most.

    Args:
        ready: called with the address as soon as requests are taken.
        say: called with one line for each signal that changes something.

    Returns:
        What the process is to end with: 0, or 130 after SIGINT.

    Raises:
        ValueError: what `bound` or the worker's models refuse.
        WorkerError: why it ended without a signal.
    """
    listening = bound(host, port)
    with listening:
        ending = ShutdownSignals(say, drain_seconds)
        worker.start()
        server = Server(Api(worker, metrics, name, limits, keys, doors), drain_seconds)
        listening.listen(BACKLOG)
        ending.belongs_to(server)
        shown = f"[{host}]" if ":" in host else host
        ready(f"http://{shown}:{listening.getsockname()[1]}")
        server.run([listening])
        ending.belongs_to(None)
        if worker.failure is not None:
            raise WorkerError(f"the server has ended: {worker.failure}")
        if not worker.stop(1.0 if ending.hurried else drain_seconds + LAST_WORDS):
            ending.leave("stopped before the last step, or what the disk was to keep, was done")
        return ending.code
