"""JSON schemas at random, of all that is enforced, with an end: no text, list or number goes on for ever."""

from __future__ import annotations

import random
from typing import Any

WORDS = ("alpha", "b", "no", "été", 'q"u', "x y", "z\\n", "日")
PATTERNS = ("^[a-z]{1,5}$", "^(red|green|blue)$", "^[0-9]{3}-[0-9]{2}$", "^[A-Z][a-z]{0,4}( [A-Z][a-z]{0,4})?$")
FORMATS = ("ipv4", "uuid")  # dates are followed by their form, not by the calendar; times have digits without an end


def random_schema(chance: random.Random, depth: int = 3) -> dict[str, Any]:
    """A schema that has answers, and that llguidance takes."""
    if depth == 3 and chance.random() < 0.2:  # what is said elsewhere
        named = {f"d{n}": random_schema(chance, 1) for n in range(2)}
        both = {"a": {"$ref": "#/$defs/d0"}, "b": {"type": "array", "items": {"$ref": "#/$defs/d1"}, "maxItems": 2}}
        return _object(both, list(both)) | {"$defs": named}
    kinds = [_string, _integer, _number, _simple, _enumeration]
    if depth > 0:
        kinds = [*kinds, _array, _array, _tuple, _properties, _properties, _properties, _any_of, _all_of]
    return chance.choice(kinds)(chance, depth - 1)


def _string(chance: random.Random, depth: int) -> dict[str, Any]:
    kind = chance.randrange(3)
    if kind == 0:
        return {"type": "string", "pattern": chance.choice(PATTERNS)}
    if kind == 1:
        return {"type": "string", "format": chance.choice(FORMATS)}
    least = chance.randrange(4)
    return {"type": "string", "minLength": least, "maxLength": least + chance.randrange(8)}


def _integer(chance: random.Random, depth: int) -> dict[str, Any]:
    least = chance.randint(-1000, 1000)
    most = least + chance.randrange(1, 2000)
    names = ("minimum", "maximum") if chance.random() < 0.7 else ("exclusiveMinimum", "exclusiveMaximum")
    schema = {"type": "integer", names[0]: least, names[1]: most + 1}
    return schema | ({"multipleOf": chance.choice((2, 5, 7))} if chance.random() < 0.2 and most - least > 20 else {})


def _number(chance: random.Random, depth: int) -> dict[str, Any]:
    return {"enum": [round(chance.uniform(-5, 5), 2) for _ in range(3)]}


def _simple(chance: random.Random, depth: int) -> dict[str, Any]:
    return chance.choice(({"type": "boolean"}, {"type": "null"}, {"type": ["boolean", "null"]}))


def _enumeration(chance: random.Random, depth: int) -> dict[str, Any]:
    if chance.random() < 0.3:
        return {"const": chance.choice((1, "one", None, [1, "a"], {"k": 2}))}
    return {"enum": chance.sample([*WORDS, 3, True, None], k=chance.randrange(1, 5))}


def _array(chance: random.Random, depth: int) -> dict[str, Any]:
    least = chance.randrange(3)
    return {
        "type": "array",
        "items": random_schema(chance, depth),
        "minItems": least,
        "maxItems": least + chance.randrange(3),
    }


def _tuple(chance: random.Random, depth: int) -> dict[str, Any]:
    items = [random_schema(chance, depth) for _ in range(chance.randrange(1, 3))]
    return {"type": "array", "prefixItems": items, "items": False, "minItems": len(items)}


def _properties(chance: random.Random, depth: int) -> dict[str, Any]:
    names = chance.sample(WORDS, k=chance.randrange(1, 5))
    properties = {name: random_schema(chance, depth) for name in names}
    return _object(properties, [name for name in names if chance.random() < 0.6])


def _object(properties: dict[str, Any], required: list[str]) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def _any_of(chance: random.Random, depth: int) -> dict[str, Any]:
    return {"anyOf": [random_schema(chance, depth) for _ in range(2)]}


def _all_of(chance: random.Random, depth: int) -> dict[str, Any]:
    """Two halves of what an object is."""
    name, other = chance.sample(WORDS[:3], k=2)
    properties = {name: random_schema(chance, 0), other: random_schema(chance, 0)}
    return {"allOf": [_object(properties, [name]), {"required": [other]}]}
