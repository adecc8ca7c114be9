"""The server process: its socket, uvicorn, signals, and the order of start and end.

A taken port is an error before the model is loaded, and clients can connect only once it is. A signal first stops new
connections, then waits for the responses in progress, then ends the worker. If the worker ends, the server ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import NoReturn

import uvicorn

from mlx_kv.ranks.link import leave
from mlx_kv.server.api import Api, Certificates, HttpSettings, configure_logging
from mlx_kv.server.worker import Worker

BACKLOG = 2048
FLUSH_SECONDS = 1.0  # for clients to receive an error before their connections are closed
POLL_SECONDS = 0.1  # between two checks of whether responses have to end
WORKER_SECONDS = 10.0  # for the worker to end after the last response
THREAD_SECONDS = 1.0  # for other threads to end after the worker
LEAVE_SECONDS = 1.0  # for other ranks to be notified before this process ends


class WorkerError(Exception):
    """The server has ended because its worker failed."""


def serve(
    worker: Worker,
    settings: HttpSettings,
    ready: Callable[[str], None] = lambda url: None,
    say: Callable[[str], None] = lambda line: None,
) -> int:
    """Serves until SIGTERM or SIGINT, then finishes the responses in progress within `settings.drain_seconds`.

    With a group of ranks, of which this is the first, clients get an error and the process ends when a rank is gone.

    Args:
        worker: not started yet.
        ready: called with the URL once requests are accepted.
        say: called with one line for each signal that has an effect.

    Returns:
        The exit code: 0, or 130 after SIGINT.

    Raises:
        ValueError: the address can't be used, or the model or policy is refused.
        WorkerError: the worker failed.
    """
    if not logging.getLogger().handlers:  # no --log-level
        configure_logging("WARNING")
    host, group = settings.host, worker.group
    with bound(host, settings.port) as listening:
        signals = ShutdownSignals(say, settings.drain_seconds, None if group is None else group.close)
        worker.start()
        server = Server(Api(worker, settings), settings.drain_seconds, settings.certificates)
        listening.listen(BACKLOG)
        signals.attach(server)
        if group is not None:
            group.when_gone(server.end)
        scheme, shown = "http" if settings.certificates is None else "https", f"[{host}]" if ":" in host else host
        ready(f"{scheme}://{shown}:{listening.getsockname()[1]}")
        server.run([listening])
        if server.broken is not None:
            leave(f"the server has ended: {server.broken}")  # the worker may wait in a collective for good
        if group is not None:
            group.when_gone(None)
        signals.attach(None)
        if worker.failure is not None:
            raise WorkerError(f"the server has ended: {worker.failure}")
        if not worker.stop(1.0 if signals.hurried else settings.drain_seconds + WORKER_SECONDS):
            signals.leave("stopped before the last step, or the last write to the prompt store, was done")
        if not _join_threads():
            signals.leave("stopped before the last grammar was compiled")
        return signals.code


def bound(host: str, port: int) -> socket.socket:
    """A socket with an address, not listening yet.

    Raises:
        ValueError: the address is taken, or not one of this machine.
    """
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        # asyncio disables Nagle's algorithm only if the protocol is explicitly TCP; otherwise each response would wait
        # 40 ms for the client to acknowledge its headers.
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


def _join_threads() -> bool:
    """Whether the server's executors have ended, for which Python would wait at its exit; they have a second."""
    deadline = time.monotonic() + THREAD_SECONDS
    for thread in [t for t in threading.enumerate() if t.name.startswith("mlx-kv ") and not t.daemon]:
        thread.join(max(0.0, deadline - time.monotonic()))
        if thread.is_alive():
            return False
    return True


class Server(uvicorn.Server):
    """uvicorn with the application; whatever the reason for its end, clients that wait for a response get an error.

    Args:
        drain_seconds: from a signal until responses in progress are ended with an error.
        certificates: for TLS; None is without.
    """

    def __init__(self, api: Api, drain_seconds: float = 30.0, certificates: Certificates | None = None) -> None:
        self.api, self._drain_seconds, self._hurries = api, drain_seconds, False
        self.broken: str | None = None  # why the group of ranks is broken
        config = uvicorn.Config(
            api.app,
            log_config=None,
            server_header=False,
            http="h11",
            ws="none",
            lifespan="on",
            **({} if certificates is None else certificates.uvicorn_options),
        )
        super().__init__(config)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Does nothing: `ShutdownSignals` handles signals. uvicorn would drop all connections at a second Ctrl-C."""
        yield

    def hurry(self) -> None:
        """Ends all responses with an error soon. Called from any thread, or in a signal handler."""
        self._hurries = True

    def end(self, reason: str) -> None:
        """Ends all responses with an error soon, then the server. Called from any thread."""
        self.broken = reason

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        """Serves until `should_exit` and the last response, or until responses had to end with an error."""
        serving, ending = asyncio.create_task(super().serve(sockets)), asyncio.create_task(self._end_responses())
        await asyncio.wait((serving, ending), return_when=asyncio.FIRST_COMPLETED)
        if not serving.done():  # clients that do not read or still send: their connections end with the event loop
            logging.getLogger("uvicorn.error").setLevel("CRITICAL")  # as of each request that is cancelled
            serving.cancel()
            await asyncio.wait((serving,))
            await self.lifespan.shutdown()
        ending.cancel()

    async def _end_responses(self) -> None:
        """Ends all responses with an error once they have to end, and waits until clients can have received it."""
        deadline, worker, admission = math.inf, self.api.worker, self.api.admission
        while self.broken is None and not self._hurries and worker.alive and time.monotonic() < deadline:
            if self.should_exit and deadline == math.inf:
                deadline = time.monotonic() + self._drain_seconds
            await asyncio.sleep(POLL_SECONDS)
        if self.broken is not None or not worker.alive:  # with a broken group, the worker may wait for good
            admission.give_up(f"the server ends: {self.broken or worker.failure or 'its worker has ended'}")
        else:
            admission.give_up()
        await asyncio.sleep(FLUSH_SECONDS)


# --- signals ----------------------------------------------------------------------------------------------------------


class ShutdownSignals:
    """Handles SIGTERM and SIGINT (Ctrl-C) from start to end of the process.

    The first lets responses finish; a later SIGINT ends them at once. A later SIGTERM has no effect, since some
    supervisors send several. Before the server runs, and after it, a signal ends the process.

    Args:
        say: called with one line for the terminal.
        before_leaving: called with the exit code and a reason before the process ends while threads still work, to
            notify other ranks; it has a second.

    Attributes:
        code: exit code: 130 after SIGINT, else 0.
        hurried: whether responses were ended at once.
    """

    def __init__(
        self,
        say: Callable[[str], None],
        drain_seconds: float,
        before_leaving: Callable[[int, str], None] | None = None,
    ) -> None:
        self._say, self._drain_seconds, self._before_leaving = say, drain_seconds, before_leaving
        self._server: Server | None = None
        self._stopping, self.code, self.hurried = False, 0, False
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._handle)

    def attach(self, server: Server | None) -> None:
        """Sets the server that signals stop; None is for before and after."""
        self._server = server

    def _handle(self, number: int, frame: object) -> None:
        self.code = 130 if number == signal.SIGINT else self.code
        if self._server is None:
            if not self._stopping or number == signal.SIGINT:
                self.leave("stopped")
        elif not self._stopping:
            self._stopping, self._server.should_exit = True, True
            self._print(
                f"stopping: {_requests(self._server)} to be finished within {self._drain_seconds:g} s; "
                "another Ctrl-C (SIGINT) ends at once"
            )
        elif number == signal.SIGINT and not self.hurried:
            self.hurried = True
            self._print(f"stopping at once: {_requests(self._server)} to be ended with an error")
            self._server.hurry()

    def leave(self, reason: str) -> NoReturn:
        """Ends the process now, whatever its threads are doing, such as loading a model or writing to a disk."""
        self._print(reason)
        if self._before_leaving is not None:  # in a thread: the signal may have interrupted a holder of its locks
            thread = threading.Thread(target=self._before_leaving, args=(self.code, reason), daemon=True)
            thread.start()
            thread.join(LEAVE_SECONDS)
        os._exit(self.code)

    def _print(self, line: str) -> None:
        """Errors are ignored: the terminal may be gone, or the signal have come in the middle of a write."""
        with contextlib.suppress(OSError, RuntimeError, ValueError):
            self._say(line)
            sys.stdout.flush()
            sys.stderr.flush()


def _requests(server: Server) -> str:
    count = server.api.admission.admitted
    return f"{count} request{'' if count == 1 else 's'}"
