"""Errors that clients get: OpenAI's error objects, Anthropic's or Ollama's, with their HTTP status."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

MESSAGES, OLLAMA = "/v1/messages", "/api/"
T = TypeVar("T")
SHUTTING_DOWN = "the server is shutting down"
ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


class ApiError(Exception):
    """An error that is sent to the client.

    Args:
        param: the field of the request that is wrong.
        code: OpenAI's error code.
    """

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.code, self.headers = status, code, headers or {}
        # They may quote the request, and JSON can have half a surrogate pair, which UTF-8 cannot.
        self.message, self.param = sendable(message), None if param is None else sendable(param)

    @property
    def body(self) -> dict[str, Any]:
        """OpenAI's error object."""
        kinds = {401: "authentication_error", 429: "rate_limit_error"}
        kind = kinds.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def without_panic(task: str, function: Callable[[], T]) -> T:
    """Returns what a function returns, for functions that run in a thread for the event loop.

    Raises:
        ApiError: for an error that is no Exception, such as a panic in Rust: it would end the event loop.
    """
    try:
        return function()
    except Exception:
        raise
    except BaseException as error:
        raise ApiError(500, f"the server failed: {task} ended with {type(error).__name__}: {error}") from error


def error_body(error: ApiError, path: str) -> dict[str, Any]:
    """The error object in the form of the API that a path belongs to."""
    if path == MESSAGES or path.startswith(f"{MESSAGES}/"):
        return anthropic_error(error)
    if path.startswith(OLLAMA):
        return {"error": error.message}
    return error.body


def anthropic_error(error: ApiError) -> dict[str, Any]:
    """Anthropic's error object."""
    kind = ANTHROPIC_TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": error.message}}


def sendable(text: str) -> str:
    """A text with question marks in place of halves of surrogate pairs."""
    return text.encode("utf-8", "replace").decode()
