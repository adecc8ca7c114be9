"""Control messages between the leader and the other ranks, and how a group of ranks ends.

Followers receive the leader's messages in the order in which they were sent. Waiting for a message uses no CPU time,
unlike waiting in one of MLX's collectives.

A frame is a JSON list:

    ["tell", ...]             the leader's messages, for all followers
    ["answer", value]         a follower's answer, for which the leader waits
    ["report", value]         a follower's message that nothing waits for
    ["bye", code, reason]     this rank ends; code 0 without a reason is a normal end, which waits for pending messages
    ["broken", reason, code]  the group is broken
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from mlx_kv.ranks.channel import Channel, encode

EXIT_CODE = 70  # of a rank whose group is broken
REFUSED = 2  # exit code of a rank that cannot do what was requested
GRACE = 0.4  # seconds in which a rank may find by itself what another one has refused, and report it in its own words
FLUSH_SECONDS = 1.0  # for which the last frame of a rank may wait for others that are being written
START_AGAIN, ALIKE = "start all ranks again", "start all ranks alike"
_END = object()  # in an inbox: no more messages will come

Gone = Callable[[str], None]
OnReport = Callable[[Any], None]


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

    def _on_report(self, value: Any) -> None:
        """Called with each report of a follower."""

    def _read(self, rank: int, channel: Channel) -> None:
        name = f"rank {rank}" if rank else "the leader"
        try:
            while (frame := channel.read())[0] not in ("bye", "broken"):
                kind, *content = frame
                if kind == "report":
                    self._on_report(content[0])
                else:
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
        self._listeners: list[OnReport] = []
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
        found = []
        for rank in self._channels:
            found.append(self._receive(rank))
            if found[-1] is _END:
                self._check_all()
                raise RanksError(f"rank {rank} is gone: {START_AGAIN}")
        return found

    def listen(self, on_report: OnReport) -> None:
        """Adds a callback for the reports of followers, which is called in threads of the link."""
        self._listeners.append(on_report)

    def _check_all(self) -> None:
        if self._ended is not None:
            self.break_up(f"rank {self._ended} has ended before the leader: {START_AGAIN}")
        self._check_open()

    def _on_report(self, value: Any) -> None:
        for listener in self._listeners:
            listener(value)

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

    def report(self, value: Any) -> None:
        """Sends the result of work in another thread, which the leader does not wait for."""
        self._send(["report", value])
