"""How ranks find each other: MLX's own group, and through it where the leader's link listens.

Decides where that is, what one must know to come in, and for how long ranks wait for each other. Knows nothing about
what they compare or do then.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing import AuthenticationError
from typing import Any

import mlx.core as mx

from mlx_kv.ranks.channel import Channel, Reception, connect, framed
from mlx_kv.ranks.environment import Launch, is_loopback
from mlx_kv.ranks.link import ALIKE, START_AGAIN, Follower, Gone, Leader

AFTER_WRONG = 3.0  # seconds for which ranks are waited for when one, or a stranger, has shown another secret
TOLD = 1024  # bytes of the first message, which goes through a collective
# MLX waits for the other ranks with the interpreter locked: only another process can end that.
_GUARD = """import os, select, signal, sys
if not select.select([0], [], [], float(sys.argv[1]))[0]:
    os.write(2, sys.argv[2].encode())
    os.kill(os.getppid(), signal.SIGKILL)
"""


@contextlib.contextmanager
def guarded(seconds: float) -> Iterator[None]:
    """Ends this process, with one line, if MLX waits longer than that for a rank that never comes."""
    line = f"mlx-kv: error: not all ranks have come within {seconds:g} s: {START_AGAIN}\n"
    command = [sys.executable, "-I", "-S", "-c", _GUARD, str(seconds), line]
    guard = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True)
    main = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGINT, signal.SIG_DFL) if main else None  # nor would Python hear a Ctrl-C
    try:
        yield
    finally:
        if before is not None:
            signal.signal(signal.SIGINT, before)
        # Not by the end of its input alone: a process that another thread has started meanwhile may hold that open.
        guard.communicate(b".")


def connected(launch: Launch) -> mx.distributed.Group:
    try:
        return mx.distributed.init(strict=True, backend=launch.backend)
    except (RuntimeError, ValueError) as error:
        said = " ".join(str(error).split())
        raise ValueError(f"MLX's backend {launch.backend} cannot connect the ranks: {said}") from error


@dataclass(frozen=True)
class Meeting:
    """Where the leader waits for the others, as all ranks know it; the reception is the leader's own."""

    host: str
    port: int
    salt: bytes
    reception: Reception | None


def announced(raw: mx.distributed.Group, launch: Launch, address: str | None, secret: str | bytes | None) -> Meeting:
    """What the leader says of that, in a collective.

    Raises:
        ValueError: it cannot listen; all ranks say the same line.
    """
    salt, reception, told = secrets.token_bytes(16), None, b""
    if raw.rank() == 0:
        try:
            host = _listens_on(launch, address, secret)
            reception = Reception(host, _key(salt, secret))
            told = json.dumps({"host": host, "port": reception.port, "salt": salt.hex()}).encode()
        except (OSError, ValueError) as error:
            reason = str(getattr(error, "strerror", error)).partition(" (while")[0]  # Python adds what it did
            message = reason if isinstance(error, ValueError) else f"cannot listen on {host}: {reason}"
            told = json.dumps({"error": message}).encode()
    where = _told_by_first(raw, told)
    if "error" in where:
        raise ValueError(where["error"])
    return Meeting(where["host"], where["port"], bytes.fromhex(where["salt"]), reception)


def linked(
    raw: mx.distributed.Group, meeting: Meeting, secret: str | bytes | None, seconds: float, gone: Gone | None
) -> Leader | Follower:
    """The link of this rank, when all have come."""
    if meeting.reception is not None:
        return received(meeting.reception, raw.size(), seconds, gone)
    try:
        channel = connect((meeting.host, meeting.port), _key(meeting.salt, secret))
        channel.write(framed({"rank": raw.rank()}))
    except AuthenticationError:
        raise ValueError(f"rank {raw.rank()} has another secret than the leader: {ALIKE}") from None
    except OSError as error:
        there = f"{meeting.host}:{meeting.port}"
        raise ValueError(
            f"rank {raw.rank()} cannot reach the leader at {there}: {error.strerror or error}; "
            "give --link-address, an address of the leader that all ranks reach"
        ) from error
    return Follower(channel, gone)


def _listens_on(launch: Launch, address: str | None, secret: str | bytes | None) -> str:
    """The address at which the leader waits for the others.

    Raises:
        ValueError: nobody says, or there is no secret where others could come.
    """
    host = address or launch.leader
    if host is None:
        raise ValueError("nothing here says where the leader can be reached: give --link-address, its address")
    if not is_loopback(host) and not secret:
        raise ValueError(
            f"the leader listens on {host}, where others could come: give all ranks the same secret (--secret-file)"
        )
    return host


def _key(salt: bytes, secret: str | bytes | None) -> bytes:
    """Of this run alone. Without a secret it is as good as the first collective, which stays on this machine then."""
    own = secret.encode() if isinstance(secret, str) else secret or b""
    return hashlib.blake2b(own, key=salt, digest_size=32).digest()


def _told_by_first(raw: mx.distributed.Group, told: bytes) -> dict[str, Any]:
    """What rank 0 says, on every rank; the others say nothing."""
    from mlx_lm.generate import generation_stream

    assert len(told) <= TOLD
    with mx.stream(generation_stream):
        spread = mx.distributed.all_sum(mx.array(list(told.ljust(TOLD, b" ")) if told else [0] * TOLD), group=raw)
        letters: Any = spread.tolist()
    return dict(json.loads(bytes(letters)))


def received(reception: Reception, size: int, seconds: float, gone: Gone | None) -> Leader:
    """The leader's link, when all others have come.

    Raises:
        ValueError: one has another secret, or never came; those who came are told.
    """
    channels: dict[int, Channel] = {}
    wrong = False
    deadline = time.monotonic() + seconds
    try:
        while len(channels) < size - 1:
            try:
                channel, said = reception.next(deadline - time.monotonic())
                channels[int(said["rank"])] = channel
            except AuthenticationError:  # a rank, or any stranger: those who know the secret still come
                if not wrong:
                    wrong, deadline = True, min(deadline, time.monotonic() + AFTER_WRONG)
            except TimeoutError:
                break
    finally:
        reception.close()
    leader = Leader(channels, gone)
    missing = ", ".join(str(rank) for rank in range(1, size) if rank not in channels)
    if not missing:
        return leader
    message = (
        f"rank {missing} has another secret than the leader: {ALIKE}"
        if wrong
        else f"rank {missing} has not come within {seconds:g} s: {START_AGAIN}"
    )
    leader.close(2, message)
    raise ValueError(message)
