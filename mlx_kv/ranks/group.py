"""Joining: all ranks of one run, started alike, with a link between the first and each of the others.

Decides where the leader listens and who may come, what must be the same on every rank, and what becomes of the others
when one fails. Knows nothing about models, caches or what the ranks do together.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib.metadata
import json
import sys
import time
from collections.abc import Iterator, Mapping
from functools import cached_property
from types import TracebackType
from typing import Any, Self, get_args

import mlx.core as mx

from mlx_kv.ranks.agreed import Agreed
from mlx_kv.ranks.environment import launched
from mlx_kv.ranks.joining import announced, connected, guarded, linked
from mlx_kv.ranks.link import ALIKE, REFUSED, Follower, Gone, Leader, LeaderEndedError, RanksError
from mlx_kv.ranks.splitting import Split
from mlx_kv.ranks.watchdog import STEP_SECONDS, Watchdog

JOIN_SECONDS = 60.0


class RankGroup:
    """All ranks of one run, seen from one of them. Used as a context, it is closed at its end.

    Attributes:
        raw: MLX's own group, for collectives; all of them belong on mlx-lm's `generation_stream`.
        split: what of the model each rank has: some heads of every layer, or some layers; None until that is known.
        link: the `Leader`, or a `Follower`.
    """

    def __init__(self, raw: mx.distributed.Group, split: Split | None, link: Leader | Follower, step: float) -> None:
        self.raw, self.split, self.link = raw, split, link
        self.rank, self.size = raw.rank(), raw.size()
        self._watchdog = Watchdog(link.break_up, step)

    @property
    def leads(self) -> bool:
        """Whether this is the rank that decides."""
        return self.rank == 0

    @cached_property
    def agreement(self) -> Agreed:
        """How the ranks agree while they generate."""
        return Agreed(self)

    @property
    def leader(self) -> Leader:
        """The link, on the rank that leads."""
        assert isinstance(self.link, Leader), "only rank 0 leads"
        return self.link

    @property
    def follower(self) -> Follower:
        """The link, on any other rank."""
        assert isinstance(self.link, Follower), "rank 0 follows nobody"
        return self.link

    def gathered(self, value: Any) -> list[Any]:
        """What each rank has called this with, in the order of ranks; JSON's terms. All ranks must call it.

        Raises:
            RanksError: somebody is gone.
        """
        if isinstance(self.link, Leader):
            values = json.loads(json.dumps([value, *self.link.answers()]))
            self.link.tell("gathered", values)
            return list(values)
        self.link.answer(value)
        told = self.link.next()
        if told is None:
            raise LeaderEndedError("the leader has ended")
        if told[0] != "gathered":
            raise RanksError(f"the leader does something else than this rank: {ALIKE}")
        return list(told[1])

    def compare(self, **what: Any) -> None:
        """Refuses, on every rank in the same words, what is not the same on all of them. All ranks must call it.

        Raises:
            ValueError: what differs, and where.
        """
        first, *others = self.gathered(what)
        for rank, other in enumerate(others, 1):
            for name in [*first, *(name for name in other if name not in first)]:
                here, there = first.get(name), other.get(name)
                if here != there:
                    words = name.replace("_", " ")
                    raise ValueError(
                        f"rank {rank} has another {words} than rank 0 ({_short(there)}, not {_short(here)}): {ALIKE}"
                    )

    def watch(self, step: str = "a step") -> contextlib.AbstractContextManager[None]:
        """For the time of a step: if that takes far longer than any before it, the group ends with a message."""
        return self._watchdog.watch(step)

    def progress(self) -> None:
        """A part of the step that is watched is done, such as a chunk of a long prompt: the time begins anew."""
        self._watchdog.progress()

    def when_gone(self, gone: Gone | None) -> None:
        """Who is called, once and in another thread, when a rank is gone; None ends the process, with one line."""
        self.link.when_gone(gone)

    def gone_within(self, seconds: float) -> str | None:
        """Why the group is broken, if that is known in so many seconds: collectives fail first, and say no reason."""
        return self.link.gone_within(seconds)

    def finish(self) -> None:
        """Waits for what is on its way between ranks: loops are a step ahead of what they tell.

        Streams are a thread's own: whoever runs the model calls this.
        """
        from mlx_lm.generate import generation_stream

        with self.watch("the end"):
            mx.synchronize(generation_stream)

    def fail(self, reason: str) -> None:
        """This rank cannot go on: all others end, with this reason."""
        self.link.break_up(f"rank {self.rank}: {reason}")

    def close(self, code: int = 0, reason: str = "") -> None:
        """The end: in peace, or with a reason that the others are told, who then end at once with the same code."""
        atexit.unregister(self._exit)
        self.link.close(code, reason)

    def _exit(self) -> None:
        """At the end of a process that has not closed it."""
        error = getattr(sys, "last_value", None)
        self.close(0 if error is None else 1, "" if error is None else _said(error))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        code = _exit_code(error)
        if code and not isinstance(error, (KeyboardInterrupt, ValueError)):
            time.sleep(
                1
            )  # a collective has failed, perhaps since a rank is gone: the link knows which, and ends this one
        self.close(code, "" if error is None or not code else _said(error))


def _exit_code(error: BaseException | None) -> int:
    """What the others end with where one ends with this. Whoever calls `sys.exit` has done what was to be done."""
    if error is None or isinstance(error, SystemExit):
        return 0
    if isinstance(error, KeyboardInterrupt):
        return 130
    return REFUSED if isinstance(error, ValueError) else 1


def _said(error: BaseException) -> str:
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    return " ".join(str(error).split()) or type(error).__name__


def _short(value: Any) -> str:
    text = "none" if value is None else str(value)
    return text if len(text) <= 60 else f"{text[:57]}…"


def join_ranks(
    split: Split | None = None,
    *,
    settings: Mapping[str, Any] | None = None,
    address: str | None = None,
    secret: str | bytes | None = None,
    step_seconds: float = STEP_SECONDS,
    join_seconds: float = JOIN_SECONDS,
    gone: Gone | None = None,
) -> RankGroup | None:
    """Joins the ranks that were started with this one, by `mlx.launch`, `mpirun` or the environment.

    Args:
        split: what of the model each rank gets; None leaves that to what loads it.
        settings: what else must be the same on all ranks, by name, in JSON's terms.
        address: where the leader listens, and all others reach it. None is what the environment says: this machine
            where all ranks are on it, else the leader's address there.
        secret: the same on all ranks; needed where the leader listens to other machines.
        step_seconds: that a step may take before the group ends; later ones get more if steps take long.
        join_seconds: for which ranks wait for each other.
        gone: called once with the reason when a rank is gone, in another thread; None prints it and ends the process
            with exit code 70.

    Returns:
        None where this process is alone.

    Raises:
        ValueError: ranks that were not started alike, or have not come.
    """
    launch = launched()
    if launch is None:
        return None
    if split not in (None, *get_args(Split)):
        raise ValueError(f"split is {split!r}: give heads or layers")
    with guarded(join_seconds):
        raw = connected(launch)
        if raw.size() == 1:
            return None
        meeting = announced(raw, launch, address, secret)
    link = linked(raw, meeting, secret, join_seconds, gone)
    group = RankGroup(raw, split, link, step_seconds)
    with _closed_on_error(group):
        group.compare(**_versions(), **(settings or {}), split=split)
    atexit.register(group._exit)
    return group


def _versions() -> dict[str, str]:
    """Of what decides how a model is computed, and how ranks speak; and on what: a CPU computes in other numbers."""
    installed = {f"version of {name}": importlib.metadata.version(name) for name in ("mlx-kv", "mlx", "mlx-lm")}
    return {**installed, "kind of device": mx.default_device().type.name}


@contextlib.contextmanager
def _closed_on_error(group: RankGroup) -> Iterator[None]:
    try:
        yield
    except BaseException as error:
        group.close(_exit_code(error), _said(error))
        raise
