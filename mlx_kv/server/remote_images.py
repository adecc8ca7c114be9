"""Images that requests name by their URLs, for `--allow-image-urls`: from public addresses alone, in bounds.

The address that was checked is the one that is connected to, at each redirect anew: a name that resolves to another one
a moment later gains nothing. Decides what may be fetched, and how much; knows nothing about images.
"""

from __future__ import annotations

import contextlib
import http.client
import ipaddress
import socket
import ssl
import threading
from collections.abc import Callable
from urllib.parse import SplitResult, urljoin, urlsplit

from mlx_kv.generation.images import MAX_BYTES
from mlx_kv.settings import shown

SECONDS, MAX_REDIRECTS, PIECE = 10.0, 3, 1 << 16  # for one image, all redirects included
MAX_REMOTE, AT_ONCE = 16, 8  # images of one request; of all requests
PUBLIC_IPV6 = ipaddress.IPv6Network("2000::/3")  # others lead to IPv4 addresses, or to no public network
INSTEAD = "send its content, data:image/png;base64,…"


def is_public(address: str) -> bool:
    """Whether an IP address is one of the internet: no machine of this network, and not this one."""
    found = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(found, ipaddress.IPv6Address) and (found not in PUBLIC_IPV6 or found.sixtofour is not None):
        return False
    return found.is_global and not found.is_multicast


class Deadline:
    """Shuts connections down when its time is over. A timeout of a socket would begin anew with each byte."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self._over = seconds, threading.Event()
        self._connections: list[socket.socket] = []
        self._timer = threading.Timer(seconds, self._end)
        self._timer.daemon = True

    def __enter__(self) -> Deadline:
        self._timer.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()
        for each in self._connections:
            each.close()

    def _end(self) -> None:
        self._over.set()
        for each in self._connections:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def watch(self, connection: socket.socket) -> None:
        """Shuts a connection down, too; it is closed in the end. Raises TimeoutError."""
        self._connections.append(connection)
        self.check()

    def check(self) -> None:
        """Raises TimeoutError after the end: what was read then may be a part."""
        if self.over:
            raise TimeoutError

    @property
    def over(self) -> bool:
        return self._over.is_set()


def fetch_image(
    url: str, most: int = MAX_BYTES, may_connect: Callable[[str], bool] = is_public, seconds: float = SECONDS
) -> bytes:
    """The content that a URL has.

    Args:
        most: bytes.
        may_connect: whether a connection to an IP address is allowed.

    Raises:
        ValueError: it cannot be had, within the bounds.
    """
    with Deadline(seconds) as deadline:
        try:
            return _follow(url, most, may_connect, deadline)
        except (OSError, http.client.HTTPException, UnicodeError) as error:
            late = deadline.over or isinstance(error, TimeoutError)
            why = f"did not come within {seconds:g} s" if late else f"cannot be fetched ({error})"
            raise ValueError(f"the image {shown(url)} {why}: {INSTEAD}") from None


def _follow(url: str, most: int, may_connect: Callable[[str], bool], deadline: Deadline) -> bytes:
    for _ in range(MAX_REDIRECTS + 1):
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"an image leads to {shown(url)}, which is not of http or https: {INSTEAD}")
        connection = _connect(parts, may_connect, deadline)
        path = f"{parts.path or '/'}?{parts.query}" if parts.query else parts.path or "/"
        connection.request("GET", path, headers={"User-Agent": "mlx-kv", "Accept": "image/*"})
        answer = connection.getresponse()
        location = answer.getheader("Location")
        if answer.status in (301, 302, 303, 307, 308) and location is not None:
            url = urljoin(url, location)
            continue
        if answer.status != 200:
            raise ValueError(f"the image {shown(url)} has the status {answer.status}: {INSTEAD}")
        content = bytearray()
        while piece := answer.read1(PIECE):
            content += piece
            if len(content) > most:
                raise ValueError(f"images have more than {MAX_BYTES:,} bytes with {shown(url)}: make them smaller")
        deadline.check()
        return bytes(content)
    raise ValueError(f"the image {shown(url)} is redirected more than {MAX_REDIRECTS} times: {INSTEAD}")


def _connect(parts: SplitResult, may_connect: Callable[[str], bool], deadline: Deadline) -> http.client.HTTPConnection:
    """A connection to the server of a URL, at an address that was checked."""
    host, secure = str(parts.hostname), parts.scheme == "https"
    port = parts.port or (443 if secure else 80)
    addresses = list(dict.fromkeys(str(info[4][0]) for info in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)))
    if not addresses or not all(map(may_connect, addresses)):
        raise ValueError(f"an image is on {shown(host)}, which is not on the public internet: {INSTEAD}")
    connected = socket.create_connection((addresses[0], port), timeout=deadline.seconds)
    if secure:  # the whole handshake has the timeout of the socket
        connected = ssl.create_default_context().wrap_socket(connected, server_hostname=host)
    deadline.watch(connected)
    connection = http.client.HTTPConnection(host, port, timeout=deadline.seconds)
    connection.sock = connected
    return connection
