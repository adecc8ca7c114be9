"""Calls of public names, and what comes of other arguments: taken, refused, or a fault."""

from __future__ import annotations

import itertools
import os
import tempfile
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import mlx_kv

# isort: split
import mlx.core as mx

TAKEN, REFUSED = "taken", "refused"


class EnoughError(Exception):
    """It works, and would go on for long."""


def enough(text: str) -> None:
    raise EnoughError


@cache
def models() -> tuple[Any, Any, Any]:
    """A model, its tokenizer, and its draft model."""
    model, tokenizer = mlx_kv.load(mlx_kv.model_path("reference"))
    return model, tokenizer, mlx_kv.load(mlx_kv.model_path("draft"))[0]


@cache
def folder() -> Path:
    """Where files go, of these calls alone: they write where they are told to, also to a path such as "x"."""
    made = Path(tempfile.mkdtemp())
    mlx_kv.save_prompt_cache(made / "kept.safetensors", filled())
    return made


def filled() -> list[Any]:
    """The caches of the model after a few tokens."""
    model, tokenizer, _ = models()
    caches = mlx_kv.make_prompt_cache(model)
    list(mlx_kv.stream_generate(model, tokenizer, [5, 6, 7], prompt_cache=caches, max_tokens=1))
    return caches


def few(tokens: Iterator[Any]) -> None:
    list(itertools.islice(tokens, 2))


def stored(cache: Any) -> None:
    cache.update_and_fetch(mx.zeros((1, 2, 3, 64)), mx.zeros((1, 2, 3, 64)))


def growing(growth: Any) -> None:
    assert type(growth.capacity(300, 256)) is int


@dataclass(frozen=True)
class Call:
    """A call of something public.

    Attributes:
        function: a class or a function.
        arguments: makes those of a call that works, all that are tried with something else: None leaves one out.
        use: what is done with the result: some arguments are looked at later.
        calls: arguments that are functions: what these raise is their own affair.
        flags: arguments that are true or false.
        raises: errors that it is known to raise beside TypeError and ValueError.
    """

    function: Callable[..., Any]
    arguments: Callable[[], dict[str, Any]] = dict
    use: Callable[[Any], object] = lambda result: None
    calls: frozenset[str] = frozenset()
    flags: frozenset[str] = frozenset()
    raises: tuple[type[Exception], ...] = ()

    def outcome(self, **wrong: Any) -> str:
        """Of a call with other arguments: TAKEN, REFUSED as it should be, or what is wrong with its error."""
        arguments = {name: value for name, value in self.arguments().items() if value is not None} | wrong
        try:
            self.use(self.function(**arguments))
        except EnoughError:
            return TAKEN
        except self.raises:
            return REFUSED
        except Exception as error:
            return fault(error, self.flags & wrong.keys()) or REFUSED
        return TAKEN


def fault(error: Exception, flags: Any = ()) -> str | None:
    """What is wrong with an error: another type than TypeError or ValueError, several lines, or none of ours."""
    frames = traceback.extract_tb(error.__traceback__)
    told = f"{type(error).__name__}: {error} ({frames[-1].filename}:{frames[-1].lineno})"
    if not isinstance(error, (TypeError, ValueError)) or isinstance(error, UnicodeError):
        return told
    ours = f"{os.sep}mlx_kv{os.sep}" in frames[-1].filename and (frames[-1].line or "").startswith("raise ")
    no_flag = bool(flags) and any(words in str(error) for words in ("truth value", "Only length-1 arrays"))
    return None if (ours or no_flag) and len(str(error).splitlines()) == 1 else told
