"""Who may use a server: names, sites and keys."""

from __future__ import annotations

import contextlib
import re
import socket
from pathlib import Path

import openai
import pytest
from serving import Running, check_error, running
from starlette.datastructures import Headers
from starlette.routing import Route

from mlx_kv.server.api import CHAT_PAGE, PAGE, AccessRules
from mlx_kv.server.json_http import ApiError


def test_keys() -> None:
    with running(keys=("first-key", "second-key")) as server:
        for key in ("first-key", "second-key"):
            client = openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0)
            assert client.completions.create(model="reference", prompt="import", max_tokens=2).choices[0].text
        for headers in ({}, {"Authorization": "Bearer first"}, {"Authorization": "Basic first-key"},
                        {"Authorization": b"Bearer \xff"}):  # fmt: skip
            for path in ("/v1/models", "/metrics", "/memory"):
                answer = server.http.get(path, headers=headers)  # type: ignore[arg-type]
                assert check_error(answer, 401)["code"] == "invalid_api_key"
        with pytest.raises(openai.AuthenticationError):
            server.client.models.list()
        assert server.http.get("/health").status_code == 200
        assert server.http.get("/").status_code == 200


def test_pages_and_health_need_no_key() -> None:
    with running(keys=("first-key",)) as server:
        answers = {
            (route.path, method): server.http.request(method, re.sub(r"\{.*?\}", "1", route.path)).status_code
            for route in server.api.app.routes
            if isinstance(route, Route)
            for method in route.methods or ()
        }
    assert len(answers) > 20
    assert {path for (path, _), status in answers.items() if status != 401} == {"/", "/chat", "/health", "/ready"}


@pytest.mark.parametrize("page", [PAGE, CHAT_PAGE], ids=lambda page: page.name)
def test_the_pages_name_no_address(page: Path) -> None:
    assert re.findall(r"(?:https?:)?//[\w.-]+|@import|url\(", page.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize("path", ["/", "/chat", "/health", "/memory", "/metrics", "/v1/models"])
def test_it_answers_to_its_own_names_only(server: Running, path: str) -> None:
    port = server.url.rsplit(":", 1)[1]
    for host in ("localhost", f"LocalHost:{port}", f"127.0.0.1:{port}", f"[::1]:{port}", "localhost."):
        answer = server.http.get(path, headers={"Host": host})
        assert answer.status_code == (403 if host.endswith(".") else 200), host
    for host in (
        "evil.example",
        f"evil.example:{port}",
        "localhost.evil.example",
        "10.0.0.5",
        "",
        "[",
        "localhost@evil",
    ):
        error = check_error(server.http.get(path, headers={"Host": host}), 403)
        assert error["code"] == "host_not_allowed"
        assert "--allowed-hosts" in error["message"]


def test_names_that_are_let_in() -> None:
    def has(rules: AccessRules, host: str, origin: str | None = None) -> bool:
        headers = {"host": host} | ({} if origin is None else {"origin": origin})
        with contextlib.suppress(ApiError):
            rules.check(Headers(headers))
            return True
        return False

    wide = AccessRules("0.0.0.0")
    assert all(has(wide, host) for host in ("192.168.1.5:8080", "[fe80::1]:8080", "localhost", socket.gethostname()))
    assert not has(wide, "evil.example")
    assert "any IP address" in wide.allowed_names
    named = AccessRules("mac.lan", ["Box", "*.home.arpa", "[fd00::1]"])
    assert all(has(named, host) for host in ("mac.lan:80", "box", "a.b.home.arpa", "[fd00::1]", "127.0.0.1"))
    assert not any(has(named, host) for host in ("home.arpa", "evilhome.arpa", "192.168.1.5", "x.box"))
    assert has(AccessRules(hosts=["*"]), "evil.example")
    for bad in ("http://mac.lan", "mac.lan:8080", "*lan", "a.*.lan", "a/b", "*."):
        with pytest.raises(ValueError, match="is not a host name"):
            AccessRules(hosts=[bad])
    for bad in ("example.com", "https://example.com/", "https://"):
        with pytest.raises(ValueError, match="is not an origin"):
            AccessRules(origins=[bad])
    for bad in ("http://localhost:80", "https://example.com:443"):
        with pytest.raises(ValueError, match="browsers leave out"):
            AccessRules(origins=[bad])
    sites = AccessRules(
        origins=["http://localhost:*", "https://*.good.example", "vscode-webview://*", "HTTPS://One.example"]
    )
    for origin in (
        "http://localhost:5173",
        "https://a.b.good.example",
        "vscode-webview://1a2b",
        "https://one.example",
    ):
        assert has(sites, "127.0.0.1", origin), origin
    for origin in (
        "https://localhost:5173",
        "http://localhost",
        "https://good.example",
        "https://good.example.evil",
        "https://evilgood.example",
        "http://localhost:1/evil",
        "null",
    ):
        assert not has(sites, "127.0.0.1", origin), origin
    assert has(AccessRules(origins=["*"]), "localhost", "null")


def test_pages_of_other_sites_are_kept_out(server: Running) -> None:
    """What a browser sends unasked for a page of another site: nothing of it is done."""
    before = server.metrics.total("generated_tokens")
    for origin in ("https://evil.example", "null", "http://localhost:1", "http://[", "evil.example"):
        for kind in ("text/plain", "application/json"):
            headers = {"Origin": origin, "Content-Type": kind}
            answer = server.http.post("/v1/completions", content=b'{"prompt": "x"}', headers=headers)
            error = check_error(answer, 403)
            assert error["code"] == "origin_not_allowed"
            assert "--allowed-origins" in error["message"]
            assert not any(name.startswith("access-control") for name in answer.headers)
    asks = {"Origin": "https://evil.example", "Access-Control-Request-Method": "POST"}
    check_error(server.http.options("/v1/completions", headers=asks), 403)
    assert server.metrics.total("generated_tokens") == before
    own = server.http.get("/memory", headers={"Origin": server.url})
    assert own.status_code == 200
    assert not any(name.startswith("access-control") for name in own.headers)


def test_sites_that_are_let_in() -> None:
    with running(keys=("a-key",), access=AccessRules(origins=["https://good.example"])) as server:
        asks = {
            "Origin": "https://good.example",
            "Access-Control-Request-Method": "POST",
            "Access-Control-Request-Headers": "authorization, content-type",
            "Access-Control-Request-Private-Network": "true",
        }
        preflight = server.http.options("/v1/completions", headers=asks)
        assert preflight.status_code == 200
        assert preflight.headers["Access-Control-Allow-Origin"] == "https://good.example"
        assert "authorization" in preflight.headers["Access-Control-Allow-Headers"]
        assert preflight.headers["Access-Control-Allow-Private-Network"] == "true"
        headers = {"Origin": "https://good.example", "Authorization": "Bearer a-key"}
        answer = server.http.post("/v1/completions", json={"prompt": "x", "max_tokens": 1}, headers=headers)
        assert answer.status_code == 200
        assert answer.headers["Access-Control-Allow-Origin"] == "https://good.example"
        refused = server.http.post("/v1/completions", json={}, headers={"Origin": "https://good.example"})
        check_error(refused, 401)  # which the page may read
        assert refused.headers["Access-Control-Allow-Origin"] == "https://good.example"
        check_error(server.http.get("/memory", headers={"Origin": "https://evil.example"}), 403)
