"""Clients that shut down their sending side after a request, and wait for its answer.

For TCP such a client looks like one that has closed its connection. But a closed connection answers bytes with a reset,
so single bytes of the answer are sent ahead: of its status line, which begins alike whatever the answer is, or leading
zeros of the size of its next chunk. Over TLS asyncio has no half-closed connections: there the client has hung up.
"""

from __future__ import annotations

from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

STREAMED = "mlx_kv.streamed"  # of a request's scope: its answer is sent in chunks, unless to HTTP/1.0
STATUS_LINE = b"HTTP/1.1 "
FIRST_WAIT = 0.2  # seconds between the first two bytes; it doubles with each, up to 51 seconds after the first


class HalfCloseProtocol(H11Protocol):
    """uvicorn's, but a client that has only shut down its sending side gets its answer."""

    _half_closed = False

    @property
    def _answering(self) -> bool:
        """Whether a request has arrived as a whole, and its answer has not been sent."""
        return self.cycle is not None and not self.cycle.more_body and not self.cycle.response_complete

    def eof_received(self) -> bool:  # type: ignore[override]
        """The client sends nothing more. Returns whether the connection stays open."""
        self._half_closed = self._answering and self.scheme == "http"
        if self._half_closed:
            self._send_ahead(self.cycle, 0)
        return self._half_closed

    def on_response_complete(self) -> None:
        super().on_response_complete()  # which begins the next request, if that has arrived
        if self._half_closed and self._answering:
            self._send_ahead(self.cycle, 0)
        elif self._half_closed:
            self.transport.close()

    def _send_ahead(self, cycle: RequestResponseCycle, sent: int) -> None:
        """Sends one byte of the answer, and the next one after a while; a reset ends the request.

        Args:
            sent: bytes that were sent ahead.
        """
        if cycle.response_complete or self.transport.is_closing():
            return
        if not cycle.response_started:
            self.transport.write(STATUS_LINE[sent : sent + 1])
            cycle.transport = _BegunTransport(self.transport, sent + 1)  # type: ignore[assignment]
        elif cycle.scope.get(STREAMED) and cycle.scope["http_version"] == "1.1":
            self.transport.write(b"0")
        if sent + 1 < len(STATUS_LINE):
            self.loop.call_later(FIRST_WAIT * 2**sent, self._send_ahead, cycle, sent + 1)


class _BegunTransport:
    """A transport to which the first bytes of what comes next have been written already."""

    def __init__(self, transport: Any, sent: int) -> None:
        self._transport, self._sent = transport, sent

    def write(self, data: bytes) -> None:
        self._transport.write(data[self._sent :])
        self._sent = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)
