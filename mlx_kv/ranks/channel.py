"""TCP connections between ranks: JSON in length-prefixed frames, once both sides have proved that they have the key.

Framing and authentication (an HMAC challenge in both directions) are those of `multiprocessing.connection`. Nothing is
pickled.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import socket
import struct
import sys
import threading
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from socketserver import BaseRequestHandler, ThreadingTCPServer
from typing import Any

HELLO_SECONDS = 10.0  # within which a new connection must authenticate itself
MAX_HELLO_BYTES = 64
# A machine that is switched off sends nothing. After 2 s of silence it is probed three times, one second apart.
IDLE_SECONDS, PROBES, PROBE_SECONDS = 2, 3, 1
GIVE_UP_SECONDS = IDLE_SECONDS + PROBES * PROBE_SECONDS
_MACOS = sys.platform == "darwin"
_TCP_RXT_CONNDROPTIME = 0x80  # macOS's TCP_USER_TIMEOUT, in seconds; Python has no name for it
_TCP_OPTIONS = {
    "TCP_KEEPALIVE" if _MACOS else "TCP_KEEPIDLE": IDLE_SECONDS,
    "TCP_KEEPINTVL": PROBE_SECONDS,
    "TCP_KEEPCNT": PROBES,
    "TCP_USER_TIMEOUT": 1000 * GIVE_UP_SECONDS,  # milliseconds without an acknowledgement of sent data
    "TCP_NODELAY": 1,
}


def encode(message: Any) -> bytes:
    """A message as `Channel.write` takes it.

    Raises:
        TypeError: JSON cannot express it.
    """
    return json.dumps(message, separators=(",", ":")).encode()


class Channel:
    """A connection that one thread reads, and to which one thread at a time writes.

    Attributes:
        bytes_sent: without the overhead of TCP.
    """

    def __init__(self, sock: socket.socket) -> None:
        if sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for name, value in _TCP_OPTIONS.items():
                if hasattr(socket, name):
                    sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
            if _MACOS:
                sock.setsockopt(socket.IPPROTO_TCP, _TCP_RXT_CONNDROPTIME, GIVE_UP_SECONDS)
        self._socket = sock
        self._connection = Connection(os.dup(sock.fileno()))
        self.bytes_sent = 0

    def authenticate(self, key: bytes, first: bool) -> None:
        """Proves that this side has the key and verifies that the other side has it; exactly one side is `first`.

        Raises:
            AuthenticationError: the other side has another key.
            OSError: the other side has closed the connection, sent something else, or sent nothing in time.
        """
        challenges = (deliver_challenge, answer_challenge)
        try:
            for challenge in challenges if first else challenges[::-1]:
                challenge(self._connection, key)
        except AssertionError as error:  # Python 3.11 asserts that the other side speaks this protocol
            raise ConnectionError("the other side is not a rank") from error
        except EOFError as error:
            raise ConnectionError("the other side has closed the connection") from error

    def write(self, data: bytes) -> None:
        """Sends an encoded message. Raises OSError if the connection is closed."""
        self._connection.send_bytes(data)
        self.bytes_sent += len(data) + 4

    def read(self, max_bytes: int | None = None) -> Any:
        """Waits for the next message.

        Raises:
            OSError: the connection is closed, or the data is not a message of at most this size.
        """
        try:
            return json.loads(self._connection.recv_bytes(max_bytes))
        except (EOFError, ValueError) as error:
            raise ConnectionError("the other side has closed the connection") from error

    def set_timeout(self, seconds: float) -> None:
        """Reads and writes fail after this many seconds; 0 is no limit."""
        whole, fraction = divmod(seconds, 1)
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            self._socket.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", int(whole), int(fraction * 1e6)))

    def close(self) -> None:
        """The other side still reads what was sent before, then the end of the connection."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)


def connect(address: tuple[str, int], key: bytes, rank: int) -> Channel:
    """A connection from this rank to the leader's `Reception`.

    Raises:
        AuthenticationError: the leader has another key.
        OSError: the leader cannot be reached.
    """
    sock = socket.create_connection(address, HELLO_SECONDS)
    sock.settimeout(None)
    channel = Channel(sock)
    channel.set_timeout(HELLO_SECONDS)
    channel.authenticate(key, first=False)
    channel.write(encode(rank))
    channel.set_timeout(0)
    return channel


class Reception(ThreadingTCPServer):
    """Accepts connections of ranks that have the key.

    Each connection is authenticated in its own thread, so that a silent one delays no other.

    Args:
        host: the address to listen on; the system chooses the port.

    Raises:
        OSError: the address does not belong to this machine.
    """

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, host: str, key: bytes) -> None:
        self.address_family = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][0]
        self._key = key
        self._results: queue.SimpleQueue[tuple[int, Channel] | AuthenticationError] = queue.SimpleQueue()
        super().__init__((host, 0), BaseRequestHandler)
        self.port: int = self.socket.getsockname()[1]
        threading.Thread(target=self.serve_forever, args=(0.05,), name="mlx-kv reception", daemon=True).start()

    def next(self, seconds: float) -> tuple[int, Channel]:
        """The next rank that has connected.

        Raises:
            TimeoutError: no connection in this time.
            AuthenticationError: a connection with another key.
        """
        try:
            result = self._results.get(timeout=max(0.0, seconds))
        except queue.Empty:
            raise TimeoutError from None
        if isinstance(result, AuthenticationError):
            raise result
        return result

    def close(self) -> None:
        self.shutdown()
        self.server_close()

    def finish_request(self, request: Any, client_address: Any) -> None:
        """Authenticates a connection. Called in its own thread, for each connection."""
        try:
            channel = Channel(request)
            channel.set_timeout(HELLO_SECONDS)
            channel.authenticate(self._key, first=True)
            rank = int(channel.read(MAX_HELLO_BYTES))
            channel.set_timeout(0)
        except AuthenticationError as error:
            self._results.put(error)
            request.close()
        except (OSError, TypeError):  # not a rank
            request.close()
        else:
            self._results.put((rank, channel))

    def shutdown_request(self, request: Any) -> None:
        """Connections outlast the request: their `Channel` closes them."""
