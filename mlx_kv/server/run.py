"""From start to end: models, sockets, signals.

Decides the order: a port that is taken is an error before a model is loaded, and nobody can connect before it is; a
signal ends first what is accepted, then waits for what is being answered, then ends the worker. Knows nothing about
requests.
"""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Callable, Sequence

import uvicorn

from mlx_kv.server.api import Api, Limits
from mlx_kv.server.metrics import Metrics
from mlx_kv.server.worker import Worker

BACKLOG = 2048


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
        self._api, self._drain_seconds = api, drain_seconds
        config = uvicorn.Config(
            api.app,
            log_config=None,
            access_log=False,
            server_header=False,
            ws="none",
            lifespan="on",
            timeout_graceful_shutdown=int(drain_seconds) + 5,
        )
        super().__init__(config)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        timer = asyncio.get_running_loop().call_later(self._drain_seconds, self._api.desk.give_up)
        await super().shutdown(sockets)
        timer.cancel()


def serve(
    worker: Worker,
    metrics: Metrics,
    name: str,
    host: str,
    port: int,
    limits: Limits,
    keys: Sequence[str] = (),
    drain_seconds: float = 30.0,
    ready: Callable[[str], None] = lambda url: None,
) -> None:
    """Serves until SIGTERM or SIGINT; then finishes what is being answered, for so many seconds at the most.

    Args:
        ready: called with the address as soon as requests are taken.

    Raises:
        ValueError: what `bound` or the worker's models refuse.
        KeyboardInterrupt: after SIGINT, when all is done.
    """
    listening = bound(host, port)
    with listening:
        worker.start()
        server = Server(Api(worker, metrics, name, limits, keys), drain_seconds)
        # uvicorn raises what ended it once more when it has ended: a SIGTERM is then no error.
        signal.signal(signal.SIGTERM, lambda number, frame: None)
        listening.listen(BACKLOG)
        try:
            shown = f"[{host}]" if ":" in host else host
            ready(f"http://{shown}:{listening.getsockname()[1]}")
            server.run([listening])
        finally:
            worker.stop()
