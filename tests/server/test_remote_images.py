"""Images by their URLs: what is fetched, from where, how much, and how long."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar

import pytest

from mlx_kv.server.remote_images import fetch_image, is_public

CONTENT = b"an image" * 1000


class Site(BaseHTTPRequestHandler):
    asked: ClassVar[list[tuple[str, str | None]]] = []

    def do_GET(self) -> None:
        at = self.server.server_address[1]
        self.asked.append((self.path, self.headers["Host"]))
        if self.path.startswith("/to/"):
            self.send_response(302)
            places = {"loop": "/to/loop", "image": "/image", "file": "file:///etc/passwd"}
            self.send_header("Location", places.get(self.path[4:], f"http://127.0.0.2:{at}/image"))
            self.end_headers()
        elif self.path == "/endless":
            self.send_response(200)
            self.end_headers()
            try:
                while True:
                    self.wfile.write(bytes(1 << 16))
            except OSError:
                return
        elif self.path == "/slow":
            self.send_response(200)
            self.send_header("Content-Length", "1000")
            self.end_headers()
            try:
                for _ in range(100):
                    self.wfile.write(b"x")
                    time.sleep(0.05)
            except OSError:
                return
        else:
            self.send_response(404 if self.path == "/gone" else 200)
            self.end_headers()
            self.wfile.write(CONTENT)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def site() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Site)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


here: Callable[..., bytes] = partial(fetch_image, may_connect=lambda address: address == "127.0.0.1")


def test_an_image_comes_also_through_a_redirect(site: str) -> None:
    assert here(f"{site}/image?size=2") == here(f"{site}/to/image") == CONTENT
    assert Site.asked[0] == ("/image?size=2", site.removeprefix("http://"))


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("/to/elsewhere", "is on '?127.0.0.2'?, which is not on the public internet"),
        ("/to/loop", "is redirected more than 3 times"),
        ("/to/file", "leads to .*file:///etc/passwd.*, which is not of http or https"),
        ("/gone", "has the status 404"),
        ("/endless", "images have more than .* bytes with "),
    ],
)
def test_what_is_not_fetched(site: str, path: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        here(site + path, 1 << 20)


def test_a_slow_site_has_so_many_seconds(site: str) -> None:
    begin = time.monotonic()
    with pytest.raises(ValueError, match=r"did not come within 0.4 s: send its content"):
        here(f"{site}/slow", seconds=0.4)
    assert time.monotonic() - begin < 3


def test_a_site_that_accepts_and_says_nothing() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent, pytest.raises(ValueError, match="did not come within"):
        here(f"http://127.0.0.1:{silent.getsockname()[1]}/x", seconds=0.3)


def test_a_handshake_that_comes_byte_by_byte_has_so_many_seconds() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def drip() -> None:
            connection, _ = server.accept()
            with connection, contextlib.suppress(OSError):
                connection.sendall(b"\x16\x03\x03\x40\x00")  # a record of 16,384 bytes begins
                for _ in range(60):
                    connection.sendall(b"\x02")
                    time.sleep(0.05)

        thread = threading.Thread(target=drip)
        thread.start()
        begin = time.monotonic()
        with pytest.raises(ValueError, match="did not come within"):
            here(f"https://127.0.0.1:{server.getsockname()[1]}/x", seconds=0.4)
        assert time.monotonic() - begin < 2
        thread.join()


@pytest.mark.parametrize("url", ["http://localhost:{}/image", "http://127.0.0.1:{}/image", "http://[::1]:{}/image"])
def test_this_machine_is_not_asked(site: str, url: str) -> None:
    before = len(Site.asked)
    with pytest.raises(ValueError, match="not on the public internet"):
        fetch_image(url.format(site.rpartition(":")[2]))
    assert len(Site.asked) == before


def test_the_address_that_was_checked_is_the_one_that_is_asked(site: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A name that has another address the second time it is looked up."""
    real, answers = socket.getaddrinfo, iter(["127.0.0.1", "127.0.0.2"])

    def look_up(host: str, *rest: object, **more: object) -> object:
        return real(next(answers) if host == "rebinds.example" else host, *rest, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    port = site.rpartition(":")[2]
    assert here(f"http://rebinds.example:{port}/image") == CONTENT
    assert Site.asked[-1] == ("/image", f"rebinds.example:{port}")


def test_a_name_with_one_private_address_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    both = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 80)) for address in ("8.8.8.8", "10.0.0.1")]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: both)
    with pytest.raises(ValueError, match="not on the public internet"):
        fetch_image("http://both.example/image")


PRIVATE = """
127.0.0.1 10.1.2.3 172.16.0.1 192.168.1.1 169.254.169.254 100.64.0.1 0.0.0.0 224.0.0.1 255.255.255.255
::1 fe80::1%eth0 fc00::1 ff02::1 ::ffff:127.0.0.1 ::ffff:10.0.0.1 2002:7f00:1:: 64:ff9b::a00:1
"""


@pytest.mark.parametrize("address", PRIVATE.split())
def test_addresses_that_are_not_public(address: str) -> None:
    assert not is_public(address)


def test_addresses_that_are() -> None:
    assert all(map(is_public, ["8.8.8.8", "1.1.1.1", "2606:4700:4700::1111"]))
