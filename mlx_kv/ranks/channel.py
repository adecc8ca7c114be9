"""Connections between ranks: JSON in frames, length first, after each side has shown that it knows the key.

Decides who is let in, and when a connection counts as broken. Framing and the challenge (an HMAC, both ways) are those
of Python's `multiprocessing.connection`; nothing is pickled. Knows nothing about what is said.
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
import time
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from typing import Any

HELLO_WITHIN = 10.0  # seconds that a connection has to show who it is
MOST_OF_HELLO = 2**20  # bytes, from somebody who has shown no more than that he knows the key
# A machine that is switched off says nothing: after so many seconds of silence it is asked, so often, at this interval.
QUIET, ASKED, INTERVAL = 2, 3, 1
_IDLE = "TCP_KEEPALIVE" if sys.platform == "darwin" else "TCP_KEEPIDLE"
_TCP_RXT_CONNDROPTIME = 0x80  # macOS's TCP_USER_TIMEOUT, in seconds; Python has no name for it
_OPTIONS = {
    _IDLE: QUIET,
    "TCP_KEEPINTVL": INTERVAL,
    "TCP_KEEPCNT": ASKED,
    "TCP_USER_TIMEOUT": 1000 * (QUIET + ASKED * INTERVAL),  # milliseconds; of what was sent and nobody confirms
    "TCP_NODELAY": 1,
}


def framed(message: Any) -> bytes:
    """A message as it is sent.

    Raises:
        TypeError: JSON has no words for it.
    """
    return json.dumps(message, separators=(",", ":")).encode()


class Channel:
    """One connection, from which one thread reads and to which one thread at a time writes.

    Attributes:
        sent: bytes, without what TCP adds.
    """

    def __init__(self, sock: socket.socket) -> None:
        if sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for name, value in _OPTIONS.items():
                if hasattr(socket, name):
                    sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
            if sys.platform == "darwin":
                sock.setsockopt(socket.IPPROTO_TCP, _TCP_RXT_CONNDROPTIME, QUIET + ASKED * INTERVAL)
        self._socket = sock
        self._connection = Connection(os.dup(sock.fileno()))
        self.sent = 0

    def authenticate(self, key: bytes, first: bool) -> None:
        """Shows that it knows the key, and asks for the same; one of the sides is the first.

        Raises:
            AuthenticationError: the other side knows another one.
            OSError: it has gone, or says nothing.
        """
        sides = (deliver_challenge, answer_challenge)
        try:
            for side in sides if first else sides[::-1]:
                side(self._connection, key)
        except AssertionError as error:  # of Python 3.11, where the other side speaks of something else
            raise ConnectionError("the other side is no rank") from error
        except EOFError as error:
            raise ConnectionError("the other side is gone") from error

    def write(self, data: bytes) -> None:
        """Sends what `framed` has made. Raises OSError: the other side has gone."""
        self._connection.send_bytes(data)
        self.sent += len(data) + 4

    def read(self, most: int | None = None) -> Any:
        """Waits for a message of at most so many bytes.

        Raises:
            OSError: the other side has gone, or what came is no message.
        """
        try:
            return json.loads(self._connection.recv_bytes(most))
        except (EOFError, ValueError) as error:
            raise ConnectionError("the other side is gone") from error

    def limit(self, seconds: float) -> None:
        """Reading and writing fail after so many seconds; 0 is never."""
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            whole, rest = divmod(seconds, 1)
            self._socket.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", int(whole), int(rest * 1e6)))

    def close(self) -> None:
        """The other side reads what was written, and then that nothing more comes."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)


def connect(address: tuple[str, int], key: bytes) -> Channel:
    """A connection to whoever listens there and knows the key.

    Raises:
        AuthenticationError: it knows another one.
        OSError: nobody listens there.
    """
    sock = socket.create_connection(address, HELLO_WITHIN)
    sock.settimeout(None)
    channel = Channel(sock)
    channel.limit(HELLO_WITHIN)
    channel.authenticate(key, first=False)
    channel.limit(0)
    return channel


class Reception:
    """Lets in whoever knows the key. Each is asked in a thread of its own: one that says nothing holds up nobody.

    Args:
        host: the address to listen on; the system chooses the port.

    Raises:
        OSError: it is no address of this machine.
    """

    def __init__(self, host: str, key: bytes) -> None:
        family = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][0]
        self._listening = socket.create_server((host, 0), family=family)
        self._key = key
        self._came: queue.SimpleQueue[tuple[Channel, Any] | str] = queue.SimpleQueue()
        self.port: int = self._listening.getsockname()[1]
        threading.Thread(target=self._accept, name="mlx-kv reception", daemon=True).start()

    def next(self, seconds: float) -> tuple[Channel, Any]:
        """The next connection, and what it said first.

        Raises:
            TimeoutError: nobody came.
            AuthenticationError: somebody came with another key; the message says from where.
        """
        try:
            came = self._came.get(timeout=max(0.0, seconds))
        except queue.Empty:
            raise TimeoutError from None
        if isinstance(came, str):
            raise AuthenticationError(came)
        return came

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()

    def _accept(self) -> None:
        while True:
            try:
                sock, where = self._listening.accept()
            except OSError:
                if self._listening.fileno() < 0:
                    return
                time.sleep(0.05)  # no more files can be had: somebody may close one
                continue
            threading.Thread(target=self._ask, args=(sock, str(where[0])), daemon=True).start()

    def _ask(self, sock: socket.socket, where: str) -> None:
        try:
            channel = Channel(sock)
            channel.limit(HELLO_WITHIN)
            channel.authenticate(self._key, first=True)
            said = channel.read(MOST_OF_HELLO)
            channel.limit(0)
        except AuthenticationError:
            self._came.put(where)
            sock.close()
        except OSError:  # a stranger
            sock.close()
        else:
            self._came.put((channel, said))
