"""An object store on this machine, which counts what it is asked, and hangs or goes away at will: moto's S3."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import fsspec
import pytest

pytest.importorskip("moto", reason="in the extra dev: make test-all")

from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import BaseWSGIServer, make_server

BUCKET = "prompts"
# Of requests by whoever has no other credentials, and by no proxy of the machine's.
ENVIRONMENT = {
    "AWS_ACCESS_KEY_ID": "testing",
    "AWS_SECRET_ACCESS_KEY": "testing",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
    "NO_PROXY": "127.0.0.1",
}


class ObjectStore:
    """Listens on a free port of this machine, until `stop`.

    Attributes:
        asked: how many requests there were of each kind: `GET list`, `GET json`, `PUT block`, …
        refused: kinds that get an error.
    """

    def __init__(self) -> None:
        self._app: Any = DomainDispatcherApplication(create_backend_app)
        self._answers = threading.Event()
        self._answers.set()
        self.asked: Counter[str] = Counter()
        self.refused: set[str] = set()
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port: int = free.getsockname()[1]
        self._server: BaseWSGIServer | None = None
        self.start()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def environment(self) -> dict[str, str]:
        """With which a process finds it."""
        return {**ENVIRONMENT, "AWS_ENDPOINT_URL": self.endpoint}

    def _answer(self, told: dict[str, Any], begin: Callable[..., Any]) -> Iterable[bytes]:
        path, query = told["PATH_INFO"], told.get("QUERY_STRING", "")
        what = "list" if "list-type" in query else path.rpartition("/")[2].rpartition(".")[2]
        kind = f"{told['REQUEST_METHOD']} {what}"
        self.asked[kind] += 1
        self._answers.wait()
        if kind in self.refused:
            begin("403 Forbidden", [("Content-Type", "application/xml")])
            return [b"<Error><Code>AccessDenied</Code><Message>not now</Message></Error>"]
        found: Iterable[bytes] = self._app(told, begin)
        return found

    def start(self) -> None:
        """Also again."""
        logging.getLogger("werkzeug").setLevel(logging.ERROR)
        server = self._server = make_server("127.0.0.1", self.port, self._answer, threaded=True)
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()

    def hang(self) -> None:
        """Takes requests, and answers none, before `go_on`."""
        self._answers.clear()

    def go_on(self) -> None:
        self._answers.set()

    def stop(self) -> None:
        """Nobody listens there any more."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None

    def count(self, what: Callable[[], Any]) -> Counter[str]:
        """What it is asked for meanwhile."""
        before = Counter(self.asked)
        what()
        return self.asked - before


@contextlib.contextmanager
def object_store() -> Iterator[ObjectStore]:
    """With an empty bucket; this process and those that it starts find it."""
    store = ObjectStore()
    before = dict(os.environ)
    os.environ.update(store.environment)
    try:
        fsspec.filesystem("s3").clear_instance_cache()
        # What moto holds belongs to the process, not to one of its servers.
        urllib.request.urlopen(f"{store.endpoint}/moto-api/reset", b"").close()
        fsspec.filesystem("s3").mkdir(BUCKET)
        yield store
    finally:
        store.go_on()
        store.stop()
        os.environ.clear()
        os.environ.update(before)
        fsspec.filesystem("s3").clear_instance_cache()
