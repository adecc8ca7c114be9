"""Single fields of a request's JSON: of which type and between which bounds they are.

Decides what is said of one that is not. Knows nothing about which fields there are. A bool is no number here, and null
is a field that is not there.
"""

from __future__ import annotations

from typing import Any

from mlx_kv.server.errors import ApiError


def unicode(value: str, param: str) -> str:
    try:
        value.encode("utf-8")
    except UnicodeError:
        raise ApiError(400, f"{param} is not valid Unicode: it has half of a surrogate pair", param) from None
    return value


def typed(fields: dict[str, Any], name: str, kind: type, default: Any) -> Any:
    value = fields.get(name, default)
    if value is not default and not isinstance(value, kind):
        raise ApiError(400, f"{name} is a JSON {json_kind(value)}: send {_NAMES[kind]}", name)
    return value


def boolean(fields: dict[str, Any], name: str) -> bool:
    return bool(typed(fields, name, bool, False))


def integer(fields: dict[str, Any], name: str, least: int, most: int) -> int | None:
    value = fields.get(name)
    if value is not None and (type(value) is not int or not least <= value <= most):
        raise ApiError(400, f"{name} is no whole number from {least} to {most}", name)
    return value


def number(fields: dict[str, Any], name: str, least: float, most: float, default: float) -> float:
    value = fields.get(name, default)
    if type(value) not in (int, float) or not least <= value <= most:
        raise ApiError(400, f"{name} is no number from {least} to {most}", name)
    return float(value)


_NAMES = {dict: "an object", list: "an array", str: "a string", bool: "true or false"}


def json_kind(value: Any) -> str:
    kinds = {dict: "object", list: "array", str: "string", bool: "boolean", type(None): "null"}
    return kinds.get(type(value), "number")
