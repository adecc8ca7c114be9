"""All ranks of one run: joining them, comparing how they were started, their totals, and ending together."""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import importlib.metadata
import json
import secrets
import signal
import subprocess
import sys
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from fractions import Fraction
from multiprocessing import AuthenticationError
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn, Self, TypeVar, get_args

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache

from mlx_kv.communicator import CacheCommunicator, Communicator, Steps
from mlx_kv.generation.statistics import CacheStatistics
from mlx_kv.mlxlm.traverse import leaves
from mlx_kv.ranks.communicator import cache_communicator_of
from mlx_kv.ranks.environment import Launch, is_loopback, launched
from mlx_kv.ranks.link import (
    ALIKE,
    REFUSED,
    START_AGAIN,
    STEP_SECONDS,
    Channel,
    Follower,
    Gone,
    Leader,
    LeaderEndedError,
    RanksError,
    Reception,
    Watchdog,
    connect,
)
from mlx_kv.ranks.splitting import Split

T = TypeVar("T")

# --- how ranks find each other ----------------------------------------------------------------------------------------


WRONG_SECRET_SECONDS = 3.0  # for which ranks are awaited after a connection with another secret, perhaps a stranger's
ANNOUNCEMENT_BYTES = 1024
# MLX waits for the other ranks with the interpreter locked: only another process can end that.
_GUARD = """import os, select, signal, sys
if not select.select([0], [], [], float(sys.argv[1]))[0]:
    os.write(2, sys.argv[2].encode())
    os.kill(os.getppid(), signal.SIGKILL)
"""


@contextlib.contextmanager
def limit_wait(seconds: float) -> Iterator[None]:
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


def connect_ranks(launch: Launch) -> mx.distributed.Group:
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


def announce(raw: mx.distributed.Group, launch: Launch, address: str | None, secret: str | bytes | None) -> Meeting:
    """The leader listens, and announces where in a collective.

    Raises:
        ValueError: the leader cannot listen: the same line on all ranks.
    """
    salt, reception, announcement = secrets.token_bytes(16), None, b""
    if raw.rank() == 0:
        try:
            host = address or launch.leader
            if host is None:
                raise ValueError("the address of the leader is unknown: give --link-address")
            if not is_loopback(host) and not secret:
                problem = f"the leader listens on {host}, where others could connect"
                raise ValueError(f"{problem}: give all ranks the same secret (--secret-file)")
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


def link_ranks(raw: mx.distributed.Group, meeting: Meeting, seconds: float, gone: Gone | None) -> Leader | Follower:
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


# --- the group --------------------------------------------------------------------------------------------------------


JOIN_SECONDS = 60.0
SAMPLE_BYTES = 2**16  # of the start, the middle and the end of a file; smaller files are read as a whole
MODEL_FILES = {".json", ".safetensors", ".jinja", ".txt", ".model"}  # suffixes of the files that mlx-lm reads


class Parts(dict[int, Any]):
    """Caches of which each rank has its part: those of a follower, by numbers that are the same on all ranks.

    Each rank counts what it adds, and all add the same in the same order.

    Attributes:
        count: of all so far.
        unused: numbers that the leader no longer needs.
    """

    def __init__(self) -> None:
        self.count, self.unused = 0, deque[int]()

    def add(self, part: Any) -> None:
        """On a follower: adds its part."""
        self.count += 1
        self[self.count] = part


class RankGroup(Communicator):
    """All ranks of one run, on one of them. As a context manager it is closed at the end.

    It is their `Communicator`: tokens go by MLX's collectives, at most one for each pass of the model besides the
    model's own, and all else over the link.

    Attributes:
        rank: the number of this rank; 0 is the leader.
        raw: MLX's own group, for collectives, all of which must run on mlx-lm's `generation_stream`.
        split: the part of the model that each rank has: some heads of every layer, or some layers; None while unknown.
        link: a `Leader` on rank 0, a `Follower` on any other rank.
        parts: of the caches that are kept between requests.
    """

    def __init__(self, raw: mx.distributed.Group, split: Split | None, link: Leader | Follower, step: float) -> None:
        self.raw, self.link, self.rank, self.size = raw, link, raw.rank(), raw.size()
        self.split, self.parts = split, Parts()
        self._watchdog = Watchdog(link.break_up, step)

    @property
    def agreement(self) -> Self:
        """The group itself: the name of its communicator until 0.2."""
        return self

    @property
    def leader(self) -> Leader:
        """The link of rank 0."""
        assert isinstance(self.link, Leader), "only rank 0 leads"
        return self.link

    @property
    def follower(self) -> Follower:
        """The link of any other rank."""
        assert isinstance(self.link, Follower), "rank 0 leads"
        return self.link

    def tell(self, *message: Any) -> None:
        """Sends a message of the leader between two steps, when followers also free the parts that it does not need."""
        if unused := self.parts.unused:
            self.leader.tell("free", [unused.popleft() for _ in range(len(unused))])
        self.leader.tell(*message)

    # --- as a communicator ------------------------------------------------------------------------------------------

    @property
    def distributed(self) -> bool:
        return True

    @property
    def leads(self) -> bool:
        return self.rank == 0

    def for_caches(self, model: nn.Module) -> CacheCommunicator:
        return cache_communicator_of(model)

    def broadcast(self, make: Callable[[], T]) -> T:
        if isinstance(self.link, Leader):
            try:
                value = make()
                self.link.tell("value", value)
            except RanksError:
                raise
            except Exception as error:  # of a drafter, or of anything else that the leader alone has
                self.link.tell("refused", str(error) or type(error).__name__)
                raise
            return value
        kind, content = self._next("value", "refused")
        if kind == "refused":
            raise ValueError(content)
        received: T = content
        return received

    def all_min(self, values: Sequence[int]) -> list[int]:
        every = self.gathered([int(value) for value in values])
        if len({len(each) for each in every}) > 1:
            self.abort("it was asked something else than others")
        return [min(each) for each in zip(*every, strict=True)]

    def all_reduce_sum(self, x: mx.array) -> mx.array:
        return mx.distributed.all_sum(x, group=self.raw)

    def sync_steps(self, steps: Steps[T], key: Callable[[T], object]) -> Steps[T]:
        seen = 0
        while True:
            if not self._begins(seen):
                return
            try:
                with self.watch():
                    result = next(steps)
            except StopIteration:  # on all ranks at once
                return
            seen = checksum(key(result))
            try:
                yield result
            except GeneratorExit:
                if self.leads:
                    self._end()
                while not self.leads and self._begins(seen) and (more := next(steps, None)) is not None:
                    seen = checksum(key(more))
                raise

    def _begins(self, seen: int) -> bool:
        """Whether all ranks take another step: the leader does so by calling this.

        Args:
            seen: a checksum of the last step's result, which must be the leader's.
        """
        if isinstance(self.link, Leader):
            self.link.tell("on", seen)
            return True
        kind, content = self._next("on", "end")
        if kind == "on" and content != seen:
            self.abort("it has generated other tokens than the leader")
        return bool(kind == "on")

    def _end(self) -> None:
        """On the leader: no rank takes another step."""
        self.leader.tell("end", None)

    def abort(self, why: str) -> NoReturn:
        """Ends all ranks, since this one no longer does what the leader does: collectives would not match."""
        reason = f"rank {self.rank} is out of step: {why}"
        self.link.break_up(reason)
        raise RanksError(reason)

    def _next(self, *kinds: str) -> list[Any]:
        assert isinstance(self.link, Follower)
        message = self.link.next()
        if message is None:
            raise RanksError("the leader has ended")
        if message[0] not in kinds:
            self.abort(f"the leader says {message[0]!r} where it waits for {' or '.join(map(repr, kinds))}")
        return message

    # --- comparing, and ending --------------------------------------------------------------------------------------

    def gathered(self, value: Any) -> list[Any]:
        """The values of all ranks, in the order of ranks. All ranks must call this, with values that JSON can express.

        Raises:
            RanksError: the group is broken, or has been closed.
        """
        if isinstance(self.link, Leader):
            values = json.loads(json.dumps([value, *self.link.answers()]))
            self.link.tell("gathered", values)
            return list(values)
        self.link.answer(value)
        message = self.link.next()
        if message is None:
            raise LeaderEndedError("the leader has ended")
        if message[0] != "gathered":
            raise RanksError(f"the leader does something else than this rank: {ALIKE}")
        return list(message[1])

    def compare(self, **what: Any) -> None:
        """Checks that the values are the same on all ranks. All ranks must call this.

        Raises:
            ValueError: the first difference: the same line on all ranks.
        """
        first, *others = self.gathered(what)
        for rank, other in enumerate(others, 1):
            for name in [*first, *(name for name in other if name not in first)]:
                expected, value = first.get(name), other.get(name)
                if value != expected:
                    texts = ["none" if each is None else str(each) for each in (value, expected)]
                    short = ", not ".join(text if len(text) <= 60 else f"{text[:57]}…" for text in texts)
                    raise ValueError(f"rank {rank} has another {name.replace('_', ' ')} than rank 0 ({short}): {ALIKE}")

    def watch(self, step: str = "a step") -> contextlib.AbstractContextManager[None]:
        """Limits the time of a step: the group ends with a message if it takes far longer than any before it."""
        return self._watchdog.watch(step)

    def progress(self) -> None:
        """A part of a watched step is done, such as a chunk of a long prompt: its time starts again."""
        self._watchdog.progress()

    def when_gone(self, gone: Gone | None) -> None:
        """Replaces the callback for a broken group (see `join_ranks`); None ends the process with one line."""
        self.link.when_gone(gone)

    def gone_within(self, seconds: float) -> str | None:
        """The reason for which the group is broken, if it is known within this time.

        Collectives fail first, without a reason.
        """
        return self.link.gone_within(seconds)

    def finish(self) -> None:
        """Waits for collectives that still run: generation loops are one step ahead.

        Streams belong to a thread: call this in the one that runs the model.
        """
        from mlx_lm.generate import generation_stream

        with self.watch("the end"):
            mx.synchronize(generation_stream)

    def fail(self, reason: str) -> None:
        """This rank cannot go on: all ranks end, with this reason."""
        self.link.break_up(f"rank {self.rank}: {reason}")

    def close(self, code: int = 0, reason: str = "") -> None:
        """Ends the group. With a code or a reason all others end at once, with that code; else once they are done."""
        atexit.unregister(self._exit)
        self.link.close(code, reason)

    def _exit(self) -> None:
        """Closes the group at the end of a process that has not done so."""
        error = getattr(sys, "last_value", None)
        self.close(0 if error is None else 1, "" if error is None else _message(error))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        code = _exit_code(error)
        if code and not isinstance(error, (KeyboardInterrupt, ValueError)):
            # A collective has failed, perhaps since a rank is gone. Then the link ends this process, with the reason.
            time.sleep(1)
        self.close(code, "" if error is None or not code else _message(error))


def _exit_code(error: BaseException | None) -> int:
    """The exit code of the other ranks where one ends with this error. `sys.exit` is a normal end."""
    if error is None or isinstance(error, SystemExit):
        return 0
    if isinstance(error, KeyboardInterrupt):
        return 130
    return REFUSED if isinstance(error, ValueError) else 1


def _message(error: BaseException) -> str:
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    return " ".join(str(error).split()) or type(error).__name__


def checksum(value: object) -> int:
    """Of plain values, the same in every process."""
    return zlib.crc32(repr(value).encode())


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
    """Joins the ranks that were started with this one, by `mlx.launch`, `mpirun` or environment variables.

    Args:
        split: the part of the model that each rank gets; None leaves it to `load_part`.
        settings: other values that must be the same on all ranks, by name; JSON must be able to express them.
        address: of the leader, where it listens and all others reach it. None is the address in the launcher's
            environment variables: this machine if all ranks run on it.
        secret: the same on all ranks; required if the leader listens on an address that other machines can reach.
        step_seconds: that a step may take before the group ends. It is more once steps have taken long.
        join_seconds: for which ranks wait for each other.
        gone: called once, in another thread, with the reason when a rank is gone; None prints the reason and ends the
            process with exit code 70.

    Returns:
        None if this process is the only one.

    Raises:
        ValueError: the ranks were not started alike, or did not all come.
    """
    launch = launched()
    if launch is None:
        return None
    if split not in (None, *get_args(Split)):
        raise ValueError(f"split is {split!r}: give heads or layers")
    with limit_wait(join_seconds):
        raw = connect_ranks(launch)
        if raw.size() == 1:
            return None
        meeting = announce(raw, launch, address, secret)
    link = link_ranks(raw, meeting, join_seconds, gone)
    group = RankGroup(raw, split, link, step_seconds)
    # Results and control messages depend on versions, and a CPU rounds differently.
    versions = {f"version of {name}": importlib.metadata.version(name) for name in ("mlx-kv", "mlx", "mlx-lm")}
    try:
        group.compare(**versions, **{"kind of device": mx.default_device().type.name}, **(settings or {}), split=split)
    except BaseException as error:
        group.close(_exit_code(error), _message(error))
        raise
    atexit.register(group._exit)
    return group


def files_fingerprint(files: Iterable[Path]) -> str:
    """16 hex digits that identify a model, fast even for large ones.

    They depend on the names and sizes of its files, and on samples of their content: the start, which lists all tensors
    of a file of weights, a part of the middle, and the end.
    """
    digest = hashlib.blake2b(digest_size=8)
    for path in sorted(file for file in files if file.suffix in MODEL_FILES and file.is_file()):
        size = path.stat().st_size
        whole = size <= 3 * SAMPLE_BYTES
        digest.update(f"{path.name} {size} ".encode())
        with path.open("rb") as file:
            for start in (0,) if whole else (0, size // 2, size - SAMPLE_BYTES):
                file.seek(start)
                digest.update(file.read(size if whole else SAMPLE_BYTES))
    return digest.hexdigest()


# --- totals -----------------------------------------------------------------------------------------------------------


def total_statistics(group: RankGroup, statistics: CacheStatistics) -> CacheStatistics:
    """Statistics of the caches of all ranks: sums of bytes, and maxima of all else. All ranks must call this."""
    every = [CacheStatistics(**each) for each in group.gathered(asdict(statistics))]
    return CacheStatistics(
        **{
            field.name: (sum if field.name.startswith("bytes") else max)(getattr(each, field.name) for each in every)
            for field in fields(CacheStatistics)
        }
    )


class TotalMemory:
    """Bytes on all ranks; without a group, on this one.

    Bytes of keys and values follow from those of this rank, as their ratio is the same for all tokens.

    Args:
        model: this rank's part. All ranks must make one of these at once.
    """

    def __init__(self, model: nn.Module | None = None, group: RankGroup | None = None) -> None:
        self._group, self._ratio = group, Fraction(1)
        if group is not None and model is not None:
            sizes = group.gathered(max(1, token_bytes(model)))
            self._ratio = Fraction(sum(sizes), sizes[group.rank])

    def of_caches(self, nbytes: int) -> int:
        """Bytes of keys and values on all ranks, for those of this rank."""
        return round(nbytes * self._ratio)

    def active(self) -> int:
        """Bytes of all arrays on all ranks. The leader requests those of the others."""
        active = mx.get_active_memory()
        if self._group is None:
            return active
        self._group.tell("memory")
        return int(active + sum(self._group.leader.answers()))

    @property
    def handlers(self) -> dict[str, Callable[..., object]]:
        """A follower's handlers of messages, by name."""
        group = self._group
        assert group is not None, "handlers are for the followers of a group"
        return {"memory": lambda: group.follower.answer(mx.get_active_memory())}


def token_bytes(model: nn.Module) -> int:
    """Bytes of keys, values and states after one token, in mlx-lm's caches; nothing is evaluated."""
    caches: list[Any] = make_prompt_cache(model)
    model(mx.array([[0]]), cache=caches)
    arrays = tree_flatten([cache.state for cache in leaves(caches)])
    return sum(array.nbytes for _, array in arrays if isinstance(array, mx.array))  # type: ignore[str-unpack,misc]
