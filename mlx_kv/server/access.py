"""Who may use the server: by which names it is reached, from pages of which sites, with which keys.

A page of any site can have a browser send requests to this machine: under a name of its own that it has point here
(DNS rebinding), or, where no answer is needed, straight away. So the Host header must be a name of this server, and an
Origin that of its own page or of a site that was let in. Programs send no Origin. Decides that; Starlette answers
preflights (CORS). A key, where any is asked for, is compared in a time that tells nothing. Knows nothing about routes.

Starlette's TrustedHostMiddleware knows fixed names alone: not "any address" for a server that listens on all of them,
no origins, and its refusal is a line of text with status 400, no error object.
"""

from __future__ import annotations

import hmac
import ipaddress
import socket
from collections.abc import Awaitable, Callable, Sequence
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from mlx_kv.server.errors import ApiError

ANY = "*"
LOOPBACK = ("localhost", "127.0.0.1", "::1")
Refused = Callable[[Request, ApiError], Awaitable[Response]]


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach the address."""
    address = _address(host)
    return host == "localhost" if address is None else address.is_loopback


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


class AccessRules:
    """By which names, and from pages of which sites, requests may come.

    Args:
        host: where the server listens. Its name is let in, and where it is all addresses of this machine (0.0.0.0 or
            ::), so is any address (no site can call itself that), and the name of the machine.
        hosts: names that are let in besides that and those of loopback; "*" lets all in, "*.example.com" many.
        origins: of sites whose pages may use the server, as "https://example.com"; "*" lets all in.

    Raises:
        ValueError: a name or origin that no browser could send.
    """

    def __init__(self, host: str = "127.0.0.1", hosts: Sequence[str] = (), origins: Sequence[str] = ()) -> None:
        address = _address(host)
        self._any_address = address is not None and address.is_unspecified
        own = [socket.gethostname(), f"{socket.gethostname()}.local"] if self._any_address else [host]
        names = [name.lower() if _address(name.strip("[]")) is None else name.strip("[]") for name in hosts]
        for name in names:
            plain = name.removeprefix("*.")
            if name != ANY and _address(plain) is None and ("*" in plain or not plain or _name(plain) != plain):
                raise ValueError(f"{name!r} is no host name: write it without scheme and port, as in mac.lan or *.lan")
        for origin in origins:
            if origin not in (ANY, "null") and (not _netloc(origin) or urlsplit(origin).path):
                raise ValueError(f"{origin!r} is no origin: write scheme and host, as in https://example.com")
        self._hosts = list(dict.fromkeys((*LOOPBACK, *[name.lower() for name in own], *names)))
        self._origins = [origin.lower() for origin in origins]

    @property
    def allowed_names(self) -> str:
        """Which names are let in."""
        if ANY in self._hosts:
            return "any name"
        return ", ".join((["any IP address"] if self._any_address else []) + self._hosts)

    def middleware(self, refused: Refused) -> list[Middleware]:
        """For a Starlette application, from outside to inside.

        Args:
            refused: makes the answer for those who may not come in.
        """
        made = [Middleware(AccessMiddleware, rules=self, refused=refused)]
        if self._origins:
            made.append(
                Middleware(
                    CORSMiddleware,
                    allow_origins=self._origins,
                    allow_methods=["GET", "POST", "DELETE"],
                    allow_headers=["*"],
                )
            )
        return made

    def check(self, headers: Headers) -> None:
        """Raises ApiError, 403, for a request that comes under another name or from a page of another site."""
        host, origin = headers.get("host", ""), headers.get("origin")
        name = _name(host)
        if not self._has(name):
            raise ApiError(
                403, f"{host[:200]!r} is no name of this server: start it with --allowed-hosts NAME, or come by one of "
                f"these: {self.allowed_names}", None, "host_not_allowed",
            )  # fmt: skip
        own = origin is not None and _netloc(origin) == host.lower()
        if origin is not None and not own and not {ANY, origin.lower()} & set(self._origins):
            raise ApiError(
                403, f"pages of {origin[:200]!r} may not use this server: start it with --allowed-origins ORIGIN", None,
                "origin_not_allowed",
            )  # fmt: skip

    def _has(self, name: str) -> bool:
        if ANY in self._hosts or name in self._hosts or (self._any_address and _address(name) is not None):
            return True
        return any(host.startswith("*.") and name.endswith(host[1:]) for host in self._hosts)


def _name(host: str) -> str:
    """The name of a Host header, without port and brackets; empty if it has none."""
    try:
        return urlsplit(f"//{host}").hostname or "" if not set(host) & set("/?#@\\ ") else ""
    except ValueError:
        return ""


def _netloc(origin: str) -> str:
    """Host and port of an origin; empty for what is none."""
    try:
        return urlsplit(origin).netloc.lower()
    except ValueError:
        return ""


class AccessMiddleware:
    """Lets requests in that the rules let in; others get an error object."""

    def __init__(self, app: ASGIApp, rules: AccessRules, refused: Refused) -> None:
        self._app, self._rules, self._refused = app, rules, refused

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            try:
                self._rules.check(Headers(scope=scope))
            except ApiError as error:
                answer = await self._refused(Request(scope), error)
                await answer(scope, receive, send)
                return
        await self._app(scope, receive, send)


class ApiKeys:
    """The keys of which a client must send one; where there are none, all are let in."""

    def __init__(self, keys: Sequence[str]) -> None:
        self._keys = [key.encode() for key in keys]

    def check(self, headers: Headers) -> None:
        """Raises ApiError, 401, for a request without a valid key."""
        if not self._keys:
            return
        kind, _, bearer = headers.get("authorization", "").partition(" ")
        given = [bearer if kind.lower() == "bearer" else "", headers.get("x-api-key", "")]  # Anthropic's clients
        sent = [each.strip().encode("latin-1") for each in given]
        found = [hmac.compare_digest(each, key) for each in sent for key in self._keys]
        if not any(found):
            raise ApiError(
                401, "no valid API key: send one as Authorization: Bearer KEY", None, "invalid_api_key",
                {"WWW-Authenticate": "Bearer"},
            )  # fmt: skip
