"""Control messages between the leader and the other ranks, and how a group of ranks ends.

Followers receive the leader's messages in the order in which they were sent. Waiting for a message uses no CPU time,
unlike waiting in one of MLX's collectives.

A frame is a JSON list:

    ["tell", ...]             the leader's messages, for all followers
    ["answer", value]         a follower's answer, for which the leader waits
    ["bye", code, reason]     this rank ends; code 0 without a reason is a normal end, which waits for pending messages
    ["broken", reason, code]  the group is broken

Framing and authentication (an HMAC challenge in both directions) are those of `multiprocessing.connection`. Nothing is
pickled. MLX is not imported.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import socket
import struct
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from socketserver import BaseRequestHandler, ThreadingTCPServer
from typing import Any, NoReturn

# --- connections ------------------------------------------------------------------------------------------------------


HELLO_SECONDS = 10.0  # within which a new connection must authenticate itself
MAX_HELLO_BYTES = 64
# A machine that is switched off sends nothing. After 2 s of silence it is probed three times, one second apart.
IDLE_SECONDS, PROBES, PROBE_SECONDS = 2, 3, 1
GIVE_UP_SECONDS = IDLE_SECONDS + PROBES * PROBE_SECONDS
_MACOS = sys.platform == "darwin"
_TCP_RXT_CONNDROPTIME = 0x80  # macOS's TCP_USER_TIMEOUT, in seconds; Python has no name for it
_TCP_OPTIONS = {
    "TCP_KEEPALIVE" if _MACOS else "TCP_KEEPIDLE": IDLE_SECONDS,
    "TCP_KEEPINTVL": PROBE_SECONDS,
    "TCP_KEEPCNT": PROBES,
    "TCP_USER_TIMEOUT": 1000 * GIVE_UP_SECONDS,  # milliseconds without an acknowledgement of sent data
    "TCP_NODELAY": 1,
}


def encode(message: Any) -> bytes:
    """A message as `Channel.write` takes it.

    Raises:
        TypeError: JSON cannot express it.
    """
    return json.dumps(message, separators=(",", ":")).encode()


class Channel:
    """A connection that one thread reads, and to which one thread at a time writes.

    Attributes:
        bytes_sent: without the overhead of TCP.
    """

    def __init__(self, sock: socket.socket) -> None:
        if sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for name, value in _TCP_OPTIONS.items():
                if hasattr(socket, name):
                    sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
            if _MACOS:
                sock.setsockopt(socket.IPPROTO_TCP, _TCP_RXT_CONNDROPTIME, GIVE_UP_SECONDS)
        self._socket = sock
        self._connection = Connection(os.dup(sock.fileno()))
        self.bytes_sent = 0

    def authenticate(self, key: bytes, first: bool) -> None:
        """Proves that this side has the key and verifies that the other side has it; exactly one side is `first`.

        Raises:
            AuthenticationError: the other side has another key.
            OSError: the other side has closed the connection, sent something else, or sent nothing in time.
        """
        challenges = (deliver_challenge, answer_challenge)
        try:
            for challenge in challenges if first else challenges[::-1]:
                challenge(self._connection, key)
        except AssertionError as error:  # Python 3.11 asserts that the other side speaks this protocol
            raise ConnectionError("the other side is not a rank") from error
        except EOFError as error:
            raise ConnectionError("the other side has closed the connection") from error

    def write(self, data: bytes) -> None:
        """Sends an encoded message. Raises OSError if the connection is closed."""
        self._connection.send_bytes(data)
        self.bytes_sent += len(data) + 4

    def read(self, max_bytes: int | None = None) -> Any:
        """Waits for the next message.

        Raises:
            OSError: the connection is closed, or the data is not a message of at most this size.
        """
        try:
            return json.loads(self._connection.recv_bytes(max_bytes))
        except (EOFError, ValueError) as error:
            raise ConnectionError("the other side has closed the connection") from error

    def set_timeout(self, seconds: float) -> None:
        """Reads and writes fail after this many seconds; 0 is no limit."""
        whole, fraction = divmod(seconds, 1)
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            self._socket.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", int(whole), int(fraction * 1e6)))

    def close(self) -> None:
        """The other side still reads what was sent before, then the end of the connection."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)


def connect(address: tuple[str, int], key: bytes, rank: int) -> Channel:
    """A connection from this rank to the leader's `Reception`.

    Raises:
        AuthenticationError: the leader has another key.
        OSError: the leader cannot be reached.
    """
    sock = socket.create_connection(address, HELLO_SECONDS)
    sock.settimeout(None)
    channel = Channel(sock)
    channel.set_timeout(HELLO_SECONDS)
    channel.authenticate(key, first=False)
    channel.write(encode(rank))
    channel.set_timeout(0)
    return channel


class Reception(ThreadingTCPServer):
    """Accepts connections of ranks that have the key.

    Each connection is authenticated in its own thread, so that a silent one delays no other.

    Args:
        host: the address to listen on; the system chooses the port.

    Raises:
        OSError: the address does not belong to this machine.
    """

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, host: str, key: bytes) -> None:
        self.address_family = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][0]
        self._key = key
        self._results: queue.SimpleQueue[tuple[int, Channel] | AuthenticationError] = queue.SimpleQueue()
        super().__init__((host, 0), BaseRequestHandler)
        self.port: int = self.socket.getsockname()[1]
        threading.Thread(target=self.serve_forever, args=(0.05,), name="mlx-kv reception", daemon=True).start()

    def next(self, seconds: float) -> tuple[int, Channel]:
        """The next rank that has connected.

        Raises:
            TimeoutError: no connection in this time.
            AuthenticationError: a connection with another key.
        """
        try:
            result = self._results.get(timeout=max(0.0, seconds))
        except queue.Empty:
            raise TimeoutError from None
        if isinstance(result, AuthenticationError):
            raise result
        return result

    def close(self) -> None:
        self.shutdown()
        self.server_close()

    def finish_request(self, request: Any, client_address: Any) -> None:
        """Authenticates a connection. Called in its own thread, for each connection."""
        try:
            channel = Channel(request)
            channel.set_timeout(HELLO_SECONDS)
            channel.authenticate(self._key, first=True)
            rank = int(channel.read(MAX_HELLO_BYTES))
            channel.set_timeout(0)
        except AuthenticationError as error:
            self._results.put(error)
            request.close()
        except (OSError, TypeError):  # not a rank
            request.close()
        else:
            self._results.put((rank, channel))

    def shutdown_request(self, request: Any) -> None:
        """Connections outlast the request: their `Channel` closes them."""


# --- messages, and the end --------------------------------------------------------------------------------------------


EXIT_CODE = 70  # of a rank whose group is broken
REFUSED = 2  # exit code of a rank that cannot do what was requested
GRACE = 0.4  # seconds in which a rank may find by itself what another one has refused, and report it in its own words
FLUSH_SECONDS = 1.0  # for which the last frame of a rank may wait for others that are being written
START_AGAIN, ALIKE = "start all ranks again", "start all ranks alike"
_END = object()  # in an inbox: no more messages will come

Gone = Callable[[str], None]


class RanksError(RuntimeError):
    """The group of ranks is broken, or has been closed."""


class LeaderEndedError(RanksError):
    """The leader has ended normally while this rank waited for a message."""


def leave(reason: str, code: int = EXIT_CODE) -> NoReturn:
    """Prints one line and ends the process at once: the main thread may be waiting in a collective forever."""
    with contextlib.suppress(OSError):  # stderr is closed
        # Not by sys.stderr: the main thread may hold its lock, and it may be redirected on this rank.
        os.write(2, f"mlx-kv: {'error: ' if code else ''}{' '.join(reason.split())}\n".encode())
    os._exit(code)


class Link:
    """The connections of a rank: of the leader to all others, of any other rank to the leader.

    Args:
        channels: by rank.
        gone: called once, in any thread, with the first reason for which the group is broken; None ends the process.
    """

    farewell: float | None  # seconds for which a normal end waits for the other ranks; None is no limit

    def __init__(self, channels: Mapping[int, Channel], gone: Gone | None) -> None:
        self._channels = dict(sorted(channels.items()))
        self._gone = gone
        self._lock = threading.Lock()
        self._code = EXIT_CODE
        self._closing = False
        self._reason: str | None = None
        self._broken = threading.Event()
        self._outbox: deque[bytes] = deque()
        self._writing = threading.Lock()
        self._inboxes: dict[int, queue.SimpleQueue[Any]] = {rank: queue.SimpleQueue() for rank in self._channels}
        self._readers = [
            threading.Thread(target=self._read, args=item, name=f"mlx-kv rank {item[0]}", daemon=True)
            for item in self._channels.items()
        ]
        for reader in self._readers:
            reader.start()

    @property
    def bytes_sent(self) -> int:
        return sum(channel.bytes_sent for channel in self._channels.values())

    # --- ends -------------------------------------------------------------------------------------------------------

    def when_gone(self, gone: Gone | None) -> None:
        """Replaces `gone`; the new one is called at once if the group is broken already."""
        with self._lock:
            self._gone = gone
        if self._reason is not None:
            self._report_broken()

    def gone_within(self, seconds: float) -> str | None:
        """The reason for which the group is broken, if it becomes known within this time."""
        self._broken.wait(seconds)
        return self._reason

    def break_up(self, reason: str, code: int = EXIT_CODE) -> None:
        """Breaks the group: all ranks end with this reason and exit code."""
        with self._lock:
            if self._closing or self._reason is not None:
                return
            self._reason, self._code = reason, code
        self._broken.set()
        self._send(["broken", reason, code])
        self._flush()
        for inbox in self._inboxes.values():
            inbox.put(_END)
        self._report_broken()

    def close(self, code: int = 0, reason: str = "") -> None:
        """Ends the link of this rank. A normal end waits for the other side; an end with a reason ends it, too."""
        with self._lock:
            if self._closing:
                return
            self._closing = True
        self._send(["bye", code, reason])
        self._flush()
        if not code and not reason:
            deadline = None if self.farewell is None else time.monotonic() + self.farewell
            for reader in self._readers:
                if reader is not threading.current_thread():
                    reader.join(None if deadline is None else max(0.0, deadline - time.monotonic()))
        for channel in self._channels.values():
            channel.close()

    def _report_broken(self) -> None:
        assert self._reason is not None
        if self._gone is None:
            leave(self._reason, self._code)
        self._gone(self._reason)

    def _check_open(self) -> None:
        if self._reason is not None:
            raise RanksError(self._reason)
        if self._closing:
            raise RanksError("the group of ranks has been closed")

    def _has_ended(self, rank: int) -> None:
        """Called when a rank has ended normally."""

    # --- messages ---------------------------------------------------------------------------------------------------

    def _send(self, frame: Any) -> None:
        # A destructor or a signal handler may send during this, in the same thread: its frame then waits in the outbox
        # until the current one is written.
        self._outbox.append(encode(frame))
        while self._outbox and self._writing.acquire(blocking=False):
            try:
                while self._outbox:
                    data = self._outbox.popleft()
                    for channel in self._channels.values():
                        with contextlib.suppress(OSError):  # the thread that reads this channel finds out why
                            channel.write(data)
            finally:
                self._writing.release()

    def _flush(self) -> None:
        """Waits, but not for long, until the outbox is written: the other side may not read."""
        if self._writing.acquire(timeout=FLUSH_SECONDS):
            self._writing.release()

    def _receive(self, rank: int) -> Any:
        """The next message of a rank, or _END."""
        message = self._inboxes[rank].get()
        if message is _END:
            self._inboxes[rank].put(_END)
            self._check_open()
        return message

    def _read(self, rank: int, channel: Channel) -> None:
        name = f"rank {rank}" if rank else "the leader"
        try:
            while (frame := channel.read())[0] not in ("bye", "broken"):
                kind, *content = frame
                self._inboxes[rank].put(content if kind == "tell" else content[0])
            if frame[0] == "broken":
                self.break_up(*frame[1:])
                return
            _, code, reason = frame
            if not code and not reason:
                self._has_ended(rank)
                return
            if code == REFUSED:  # with any other code the collectives fail, and this rank would end with that error
                time.sleep(GRACE)
            self.break_up(f"{name} has ended: {reason}", code)
        except OSError:
            self.break_up(f"{name} is gone: {START_AGAIN}")
        except Exception as error:
            self.break_up(f"{name} sent what is no message ({type(error).__name__}: {error}): {START_AGAIN}")
        finally:
            self._inboxes[rank].put(_END)


class Leader(Link):
    """The link of rank 0. `tell` can be called in any thread.

    Args:
        channels: to each of the others, by rank.
        gone: as for `Link`.

    Attributes:
        frames: number of messages sent.
    """

    farewell = 5.0

    def __init__(self, channels: Mapping[int, Channel], gone: Gone | None = None) -> None:
        self._ended: int | None = None  # a rank that has ended normally
        self.frames = 0
        super().__init__(channels, gone)

    def tell(self, *message: Any) -> None:
        """Sends a message to all followers, in the order of the calls.

        Raises:
            RanksError: the group is broken, or has been closed.
            TypeError: JSON cannot express the message; it was not sent.
        """
        self._check_all()
        self.frames += 1
        self._send(["tell", *message])

    def answers(self) -> list[Any]:
        """The next answer of each follower, in the order of ranks. Waits for them.

        Raises:
            RanksError: the group is broken, or has been closed.
        """
        answers = []
        for rank in self._channels:
            answers.append(self._receive(rank))
            if answers[-1] is _END:
                self._check_all()
                raise RanksError(f"rank {rank} is gone: {START_AGAIN}")
        return answers

    def _check_all(self) -> None:
        if self._ended is not None:
            self.break_up(f"rank {self._ended} has ended before the leader: {START_AGAIN}")
        self._check_open()

    def _has_ended(self, rank: int) -> None:
        self._ended = rank  # an error only if the leader needs it again


class Follower(Link):
    """The link of any rank but 0.

    Args:
        channel: to the leader.
        gone: as for `Link`.
    """

    farewell = None

    def __init__(self, channel: Channel, gone: Gone | None = None) -> None:
        super().__init__({0: channel}, gone)

    def next(self) -> list[Any] | None:
        """The next message of the leader; None when it has ended normally. Waits for it.

        Raises:
            RanksError: the group is broken, or has been closed.
        """
        message = self._receive(0)
        return None if message is _END else list(message)

    def answer(self, value: Any) -> None:
        """Sends an answer for which the leader waits.

        Raises:
            RanksError: the group is broken, or has been closed.
        """
        self._check_open()
        self._send(["answer", value])


# --- ranks that hang --------------------------------------------------------------------------------------------------


STEP_SECONDS = 120.0  # that any step may take: the first ones read weights, and compile
FACTOR = 20.0  # times the longest step so far, if that is more
CHECK_INTERVAL = 0.25  # of the time that a step may take
SIGTERM_APART = 1.0  # seconds between two SIGTERMs that count as two: some supervisors send several at once
BREAK_UP_SECONDS = 1.0  # for the message to the leader, which may be stopped and read nothing


class Watchdog:
    """Calls `on_late` with a reason when a step takes far longer than any before it.

    Args:
        seconds: that any step may take.
    """

    def __init__(self, on_late: Callable[[str], None], seconds: float = STEP_SECONDS) -> None:
        self._on_late, self._seconds = on_late, seconds
        self._longest: dict[str, float] = {}  # seconds, by the name of the step
        self._started = threading.Condition()
        self._running: tuple[str, float] | None = None  # name and start of the current step
        self._thread: threading.Thread | None = None

    @contextlib.contextmanager
    def watch(self, step: str) -> Iterator[None]:
        """Limits the time of a step with this name. A step within another one is part of it."""
        if self._running is not None:
            yield
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._check, name="mlx-kv watchdog", daemon=True)
            self._thread.start()
        self._running = step, time.monotonic()
        with self._started:
            self._started.notify()
        try:
            yield
        finally:
            self.progress()
            self._running = None

    def progress(self) -> None:
        """A part of the step is done: its time starts again."""
        if self._running is not None:
            step, start = self._running
            now = time.monotonic()
            self._longest[step] = max(self._longest.get(step, 0.0), now - start)
            self._running = step, now

    def limit(self, step: str) -> float:
        """Seconds that a step with this name may take."""
        return max(self._seconds, FACTOR * self._longest.get(step, 0.0))

    def _check(self) -> None:
        while True:
            with self._started:
                while self._running is None:
                    self._started.wait()
                running = self._running
            step, start = running
            left = start + self.limit(step) - time.monotonic()
            if left > 0:
                time.sleep(min(left, CHECK_INTERVAL * self._seconds))
            elif self._running == running:
                self._on_late(
                    f"{step} has taken {time.monotonic() - start:.0f} s: a rank, or the network between them, hangs; "
                    "start all ranks again"
                )
                return


def leave_signals_to_leader(rank: int, fail: Callable[[str], None]) -> None:
    """From now on SIGINT is ignored, and SIGTERM ends this rank only if it comes a second time, a second later or more.

    Launchers send both to all ranks at once, and then the leader ends in order, which can take long. Call this in the
    main thread. Signals are handled in another one: the main thread may be waiting in a collective forever.

    Args:
        fail: ends all ranks, with a reason.
    """
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda number, frame: None)
    signal.siginterrupt(signal.SIGTERM, False)  # system calls of MLX go on
    signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
    threading.Thread(target=_handle_signals, args=(read_end, rank, fail), name="mlx-kv signals", daemon=True).start()


def _handle_signals(read_end: int, rank: int, fail: Callable[[str], None]) -> None:
    first: float | None = None
    while numbers := os.read(read_end, 64):
        if signal.SIGTERM not in numbers:
            continue
        if first is None:
            first = time.monotonic()
        elif time.monotonic() - first > SIGTERM_APART:
            reason = "stopped by a second SIGTERM, while the leader has not ended"
            breaking_up = threading.Thread(target=fail, args=(reason,), daemon=True)
            breaking_up.start()
            breaking_up.join(BREAK_UP_SECONDS)
            leave(f"rank {rank}: {reason}", EXIT_CODE)
