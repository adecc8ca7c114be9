"""What operators ask of a server: TLS, keys, a log, and the options of mlx_lm.server."""

from __future__ import annotations

import logging
import re
import shutil
import ssl
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import click
import httpx
import pytest
from serving import Running, check_error, running

import mlx_kv
from mlx_kv.cli.options import read_bytes
from mlx_kv.cli.serve import ServerSettings
from mlx_kv.server.api import Certificates, _without_query, configure_logging
from mlx_kv.server.monitor import Metrics
from mlx_kv.server.requests import Limits
from mlx_kv.server.run import Server, bound

NEEDS_OPENSSL = pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl to make certificates with")
DAY = ("-days", "1", "-nodes", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1")


# --- certificates -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pem(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a certificate for 127.0.0.1, its key, and the key with a password."""
    folder = tmp_path_factory.mktemp("pem")
    names = ("-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1")
    run = ["openssl", "req", "-x509", *DAY, *names, "-keyout", "key.pem", "-out", "cert.pem"]
    subprocess.run(run, cwd=folder, check=True, capture_output=True)
    closed = ["openssl", "pkey", "-in", "key.pem", "-aes256", "-passout", "pass:word", "-out", "closed.pem"]
    subprocess.run(closed, cwd=folder, check=True, capture_output=True)
    (folder / "both.pem").write_text((folder / "key.pem").read_text() + (folder / "cert.pem").read_text())
    return folder


@pytest.fixture
def encrypted(server: Running, pem: Path, request: pytest.FixtureRequest) -> Iterator[str]:
    """The server's application once more, over TLS, on a port of its own."""
    clients = {"ssl_ca_certs": pem / "cert.pem"} if request.param else {}
    certificates = Certificates(pem / "cert.pem", pem / "closed.pem", "word", **clients)
    over_tls = Server(server.api, drain_seconds=1, certificates=certificates)
    over_tls.config.lifespan = "off"  # the application runs already
    with bound("127.0.0.1", 0) as listening:
        listening.listen()
        thread = threading.Thread(target=over_tls.run, args=([listening],))
        thread.start()
        try:
            yield f"https://127.0.0.1:{listening.getsockname()[1]}"
        finally:
            over_tls.should_exit = True
            thread.join()


@NEEDS_OPENSSL
@pytest.mark.parametrize("encrypted", [False], indirect=True)
def test_it_speaks_tls_and_nothing_else(encrypted: str, pem: Path) -> None:
    known = ssl.create_default_context(cafile=str(pem / "cert.pem"))
    body = {"prompt": "import os", "max_tokens": 3}
    answer = httpx.post(f"{encrypted}/v1/completions", json=body, verify=known, timeout=30)
    assert answer.status_code == 200
    assert answer.json()["usage"]["completion_tokens"] == 3
    with pytest.raises(httpx.ConnectError, match="certificate"):
        httpx.get(f"{encrypted}/health")
    with pytest.raises(httpx.HTTPError):
        httpx.get(f"{encrypted.replace('https', 'http')}/health")


@NEEDS_OPENSSL
@pytest.mark.parametrize("encrypted", [True], indirect=True)
def test_clients_must_show_a_certificate(encrypted: str, pem: Path) -> None:
    known = ssl.create_default_context(cafile=str(pem / "cert.pem"))
    with pytest.raises(httpx.HTTPError):
        httpx.get(f"{encrypted}/health", verify=known)
    known.load_cert_chain(pem / "cert.pem", pem / "key.pem")
    assert httpx.get(f"{encrypted}/health", verify=known).status_code == 200


@NEEDS_OPENSSL
def test_certificates_that_cannot_be_used_are_refused_before_anything(pem: Path, tmp_path: Path) -> None:
    no_pem = tmp_path / "no.pem"
    no_pem.write_text("nothing")
    assert Certificates(pem / "both.pem").uvicorn_options == {"ssl_certfile": str(pem / "both.pem")}
    for files in (
        (pem / "cert.pem",),
        (pem / "cert.pem", pem / "closed.pem"),
        (pem / "cert.pem", pem / "closed.pem", "wrong"),
        (no_pem, pem / "key.pem"),
        (pem / "cert.pem", tmp_path / "nowhere.pem"),
    ):
        with pytest.raises(ValueError, match="cannot use the certificate"):
            Certificates(*files)
    with pytest.raises(ValueError, match="they are not a PEM file"):
        Certificates(pem / "both.pem", ssl_ca_certs=no_pem)
    with pytest.raises(click.UsageError, match="--ssl-keyfile needs --ssl-certfile"):
        ServerSettings(ssl_keyfile=pem / "key.pem")


# --- keys and words ---------------------------------------------------------------------------------------------------


def test_keys_come_from_everywhere(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("one\n\ntwo\n")
    assert ServerSettings(api_key=("three", "four"), api_key_file=file).keys == ["three", "four", "one", "two"]
    assert ServerSettings().keys == []
    for bad in ("with space", "", "umlaut-ä"):
        with pytest.raises(click.UsageError, match=r"key 1 in --api-key or MLX_KV_API_KEY is not plain ASCII"):
            _ = ServerSettings(api_key=(bad,)).keys


@pytest.mark.parametrize(
    ("said", "bytes_"),
    [("0", 0), ("1073741824", 2**30), ("512MB", 512_000_000), ("1.5 g", 1_500_000_000), ("2M", 2 * 10**6)],
)
def test_bytes_are_said_as_in_mlx_lm(said: str, bytes_: int) -> None:
    assert read_bytes(said) == bytes_


@pytest.mark.parametrize("said", ["", "-1", "1.5", "12KB", "1e9", "GB", "\u0661"])
def test_what_is_no_number_of_bytes(said: str) -> None:
    with pytest.raises(ValueError, match="is not a number of bytes"):
        read_bytes(said)


# --- the log ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Iterator[list[str]]:
    """What is logged of requests."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("uvicorn.access")
    before = log.level, list(log.filters)
    log.addHandler(handler)
    log.setLevel("INFO")
    log.addFilter(_without_query)
    yield said
    log.removeHandler(handler)
    log.level, log.filters = before


def test_each_request_is_a_line(server: Running, lines: list[str]) -> None:
    server.complete("import os", 5)
    list(server.client.completions.create(model="reference", prompt="import os", max_tokens=4, stream=True))
    server.http.get("/health?key=secret")
    server.http.get("/nowhere%0a")
    server.post(prompt="secret", max_tokens="many")
    server.wait_until(lambda: len(lines) == 5)
    requests = [
        ("POST /v1/completions", 200),
        ("POST /v1/completions", 200),
        ("GET /health", 200),
        ("GET /nowhere%0A", 404),
        ("POST /v1/completions", 400),
    ]
    for line, (request, status) in zip(lines, requests, strict=True):
        assert line.startswith("127.0.0.1:")
        assert line.endswith(f' - "{request} HTTP/1.1" {status}')
    assert "secret" not in "".join(lines)


def test_all_libraries_have_one_form_of_log_and_ours_has_levels(capsys: pytest.CaptureFixture[str]) -> None:
    before = {
        log: (log.handlers, log.level) for log in map(logging.getLogger, (None, "mlx_kv", "uvicorn", "uvicorn.access"))
    }
    try:
        configure_logging("INFO")
        logging.getLogger("mlx_kv.server").info("seen")
        logging.getLogger("mlx_kv.server").debug("unseen")
        logging.getLogger("somebody").info("unseen")
        logging.warning("a function of the module")
        logging.getLogger("mlx_kv").warning("once")
    finally:
        for log, (handlers, level) in before.items():
            log.handlers = handlers
            log.setLevel(level)
    lines = capsys.readouterr().err.splitlines()
    assert [line[24:] for line in lines] == ["INFO seen", "WARNING a function of the module", "WARNING once"]


def test_an_answered_request_has_an_id_in_its_header_and_in_the_log(
    server: Running, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "mlx_kv.server"):
        own = server.http.post("/v1/completions", json=PLAIN, headers={"X-Request-Id": "client-7.a"})
        drawn = server.http.post(
            "/v1/completions", json={**PLAIN, "stream": True}, headers={"X-Request-Id": "two\twords"}
        )
        server.wait_until(lambda: caplog.text.count(" prompt tokens cached, ") == 2)
    assert own.headers["x-request-id"] == "client-7.a"
    assert re.fullmatch(r"[0-9a-f]{32}", drawn.headers["x-request-id"])
    prompt = own.json()["usage"]["prompt_tokens"]
    said = [record.message for record in caplog.records if " prompt tokens cached, " in record.message]
    whole = rf"request client-7\.a: /v1/completions 200, \d+ of {prompt} prompt tokens cached, 3 tokens, \d+\.\d\d s"
    assert re.fullmatch(whole, said[0])
    assert said[1].startswith(f"request {drawn.headers['x-request-id']}: ")


PLAIN = {"prompt": "import os\nimport sys", "max_tokens": 3}


def test_waits_and_gaps_are_measured(server: Running) -> None:
    def counted(name: str) -> float:
        return server.metrics.registry.get_sample_value(f"mlx_kv_{name}_seconds_count") or 0

    names = ("request_queue", "time_to_first_token", "inter_token_latency")
    before = [counted(name) for name in names]
    server.complete("def main():", 9)
    assert [counted(name) - old for name, old in zip(names, before, strict=True)] == [1, 1, 8]
    (build,) = re.findall(r"^mlx_kv_build_info\{(.*)\} 1\.0$", server.http.get("/metrics").text, re.M)
    assert f'version="{mlx_kv.__version__}"' in build


def test_limits_of_answers() -> None:
    """A larger max_tokens is cut, as clients send it to be safe; more answers than are allowed are refused."""
    with running(limits=Limits(answer_tokens=5, answers=2, max_tokens=3)) as server:
        answer = server.post(prompt="import os", max_tokens=32_000).json()
        assert (answer["usage"]["completion_tokens"], answer["choices"][0]["finish_reason"]) == (5, "length")
        assert server.post(prompt="import os").json()["usage"]["completion_tokens"] == 3
        assert server.post(prompt="import os", n=2, max_tokens=2).status_code == 200
        refused = server.post(prompt="import os", n=3, max_tokens=2)
        assert "asks for 3 answers, and this server accepts at most 2" in check_error(refused, 400)["message"]


DOCS = Path(__file__).parent.parent.parent / "docs"


@pytest.mark.parametrize("page", ["operate.md", "server-monitoring.md"])
def test_metrics_that_a_page_names_exist(page: str) -> None:
    registry = Metrics().registry
    there = {name for family in registry.collect() for name in (family.name, *_samples_of(family.type, family.name))}
    named = set(re.findall(r"\bmlx_kv_\w+", (DOCS / page).read_text(encoding="utf-8")))
    assert len(named) > 8
    assert named - there == set()
    if page == "server-monitoring.md":
        assert {family.name for family in registry.collect()} - {name.removesuffix("_total") for name in named} == set()


def _samples_of(kind: str, name: str) -> list[str]:
    ends = {"counter": ["total"], "histogram": ["bucket", "count", "sum"]}.get(kind, [])
    return [f"{name}_{end}" for end in ends]


def test_paths_that_the_operators_proxy_names_exist(server: Running) -> None:
    paths = {getattr(route, "path", "") for route in server.api.app.routes}
    page = (DOCS / "operate.md").read_text(encoding="utf-8")
    (pages, figures), (prefix,) = re.findall(r"location ~ (\S+) ", page), re.findall(r"location (/\S+) ", page)
    assert {path for path in paths if re.search(pages, path)} == {"/", "/chat", "/ready"}
    assert {path for path in paths if re.search(figures, path)} == {"/memory", "/metrics"}
    assert {path for path in paths if path.startswith(prefix)} == {"/models/load", "/models/unload"}
