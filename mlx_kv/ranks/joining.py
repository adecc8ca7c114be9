"""How ranks find each other: MLX's group first, then, announced in its first collective, the leader's control link."""

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

from mlx_kv.ranks.channel import Channel, Reception, connect
from mlx_kv.ranks.environment import Launch, is_loopback
from mlx_kv.ranks.link import ALIKE, START_AGAIN, Follower, Gone, Leader

WRONG_SECRET_SECONDS = 3.0  # for which ranks are awaited after a connection with another secret, perhaps a stranger's
ANNOUNCEMENT_BYTES = 1024
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
    before = signal.signal(signal.SIGINT, signal.SIG_DFL) if main else None  # Python could not handle Ctrl-C, either
    try:
        yield
    finally:
        if before is not None:
            signal.signal(signal.SIGINT, before)
        # A byte, not only the end of its input: a process started by another thread may hold that open.
        guard.communicate(b".")


def connected(launch: Launch) -> mx.distributed.Group:
    """MLX's group of all ranks."""
    try:
        return mx.distributed.init(strict=True, backend=launch.backend)
    except (RuntimeError, ValueError) as error:
        message = " ".join(str(error).split())
        raise ValueError(f"MLX's backend {launch.backend} cannot connect the ranks: {message}") from error


@dataclass(frozen=True)
class Meeting:
    """Where the leader listens, and the key of this run; only the leader has a reception."""

    host: str
    port: int
    key: bytes
    reception: Reception | None


def announced(raw: mx.distributed.Group, launch: Launch, address: str | None, secret: str | bytes | None) -> Meeting:
    """The leader listens, and announces where in a collective.

    Raises:
        ValueError: the leader cannot listen: the same line on all ranks.
    """
    salt, reception, announcement = secrets.token_bytes(16), None, b""
    if raw.rank() == 0:
        try:
            host = _listening_address(launch, address, secret)
            reception = Reception(host, _key(salt, secret))
            content = {"host": host, "port": reception.port, "salt": salt.hex()}
        except ValueError as error:
            content = {"error": str(error)}
        except OSError as error:
            content = {"error": f"cannot listen on {host}: {error.strerror}"}
        announcement = json.dumps(content).encode()
    where = _from_leader(raw, announcement)
    if "error" in where:
        raise ValueError(where["error"])
    return Meeting(where["host"], where["port"], _key(bytes.fromhex(where["salt"]), secret), reception)


def _listening_address(launch: Launch, address: str | None, secret: str | bytes | None) -> str:
    """The address at which the leader listens.

    Raises:
        ValueError: it is unknown, or other machines could connect and there is no secret.
    """
    host = address or launch.leader
    if host is None:
        raise ValueError("the address of the leader is unknown: give --link-address")
    if not is_loopback(host) and not secret:
        raise ValueError(
            f"the leader listens on {host}, where others could connect: give all ranks the same secret (--secret-file)"
        )
    return host


def _key(salt: bytes, secret: str | bytes | None) -> bytes:
    """The key of this run. Without a secret only loopback is used, and the salt, from a collective, is the key."""
    encoded = secret.encode() if isinstance(secret, str) else secret or b""
    return hashlib.blake2b(encoded, key=salt, digest_size=32).digest()


def _from_leader(raw: mx.distributed.Group, announcement: bytes) -> dict[str, Any]:
    """The announcement of rank 0, on every rank; empty on the others."""
    from mlx_lm.generate import generation_stream

    assert len(announcement) <= ANNOUNCEMENT_BYTES
    padded = announcement.ljust(ANNOUNCEMENT_BYTES, b" ") if announcement else bytes(ANNOUNCEMENT_BYTES)
    with mx.stream(generation_stream):
        numbers: Any = mx.distributed.all_sum(mx.array(list(padded)), group=raw).tolist()
    return dict(json.loads(bytes(numbers)))


def linked(raw: mx.distributed.Group, meeting: Meeting, seconds: float, gone: Gone | None) -> Leader | Follower:
    """The control link of this rank, once all ranks have connected."""
    if meeting.reception is not None:
        return receive_ranks(meeting.reception, raw.size(), seconds, gone)
    try:
        return Follower(connect((meeting.host, meeting.port), meeting.key, raw.rank()), gone)
    except AuthenticationError:
        raise ValueError(f"rank {raw.rank()} has another secret than the leader: {ALIKE}") from None
    except OSError as error:
        raise ValueError(
            f"rank {raw.rank()} cannot reach the leader at {meeting.host}:{meeting.port}: {error.strerror or error}; "
            "give --link-address, an address of the leader that all ranks reach"
        ) from error


def receive_ranks(reception: Reception, size: int, seconds: float, gone: Gone | None) -> Leader:
    """The leader's link, once all other ranks have connected.

    Raises:
        ValueError: a rank has another secret, or did not connect; the ranks that did end with the same line.
    """
    channels: dict[int, Channel] = {}
    wrong_secret = False
    deadline = time.monotonic() + seconds
    with contextlib.closing(reception), contextlib.suppress(TimeoutError):
        while len(channels) < size - 1:
            try:
                rank, channel = reception.next(deadline - time.monotonic())
                channels[rank] = channel
            except AuthenticationError:  # a rank, or a stranger: the other ranks still come
                if not wrong_secret:
                    wrong_secret, deadline = True, min(deadline, time.monotonic() + WRONG_SECRET_SECONDS)
    leader = Leader(channels, gone)
    missing = ", ".join(str(rank) for rank in range(1, size) if rank not in channels)
    if not missing:
        return leader
    message = (
        f"rank {missing} has another secret than the leader: {ALIKE}"
        if wrong_secret
        else f"rank {missing} has not come within {seconds:g} s: {START_AGAIN}"
    )
    leader.close(2, message)
    raise ValueError(message)
