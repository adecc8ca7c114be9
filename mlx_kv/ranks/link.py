"""What the leader tells all other ranks, what they answer, and the news that somebody is gone.

Decides in which order messages arrive (as they were told, on every rank), what an end is: one that was announced, or a
rank that is gone, which ends all. It does no collectives: those belong to the stream of the model, and waiting in one
keeps a core busy, while waiting here costs nothing. Knows nothing about what the messages mean.

A frame is a list: its kind, then its content. From the leader ["tell", …]; from the others ["answer", …], and of what
they do beside that ["report", …]; from both sides ["bye", code, reason] when a rank ends, and from the leader
["gone", reason, code] where another one has. An end with code 0 and no reason is one in peace: who follows does first
what it was told. With a reason it is at once.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, NoReturn

from mlx_kv.ranks.channel import Channel, framed

EXIT_CODE = 70  # of a rank whose group is broken
REFUSED = 2  # exit code of a rank that cannot do what was asked for
GRACE = 0.4  # seconds in which a rank may find out by itself what another one has refused, and say it in its own way
FAREWELL = 5.0  # seconds for which the leader waits for the others' end
START_AGAIN, ALIKE = "start all ranks again", "start all ranks alike"
_END = object()  # in a queue: nothing more will come

Gone = Callable[[str], None]
Heard = Callable[[Any], None]


class RanksError(RuntimeError):
    """The group of ranks is broken, or has been closed."""


def leave(reason: str, code: int = EXIT_CODE) -> NoReturn:
    """One line, and the end of the process: the main thread may be waiting in a collective for good."""
    with contextlib.suppress(OSError):  # whoever read it has gone
        # Past sys.stderr, whose lock that thread may hold, and which may be silent on this rank.
        os.write(2, f"mlx-kv: {'error: ' if code else ''}{' '.join(reason.split())}\n".encode())
    os._exit(code)


class LeaderEndedError(RanksError):
    """The leader has ended in peace, while this rank waited for it."""


class Link:
    """What both ends have: the news that the group is broken, for which the first reason counts, and is told once.

    Args:
        gone: called once with a reason when the group is broken, in any thread; None ends the process.
    """

    def __init__(self, gone: Gone | None) -> None:
        self._gone = gone
        self._lock = threading.Lock()
        self._code = EXIT_CODE
        self._closing = False
        self._reason: str | None = None
        self._news = threading.Event()

    def when_gone(self, gone: Gone | None) -> None:
        """Somebody else is called from now on; at once, if the group is broken already."""
        with self._lock:
            self._gone = gone
        if self._reason is not None:
            self._say()

    def gone_within(self, seconds: float) -> str | None:
        """Why the group is broken, if that is known in so many seconds."""
        self._news.wait(seconds)
        return self._reason

    def _breaks(self, reason: str, code: int) -> bool:
        """Whether this is the first that is heard of it."""
        with self._lock:
            if self._closing or self._reason is not None:
                return False
            self._reason, self._code = reason, code
        self._news.set()
        return True

    def _closes(self) -> bool:
        """Whether this is the first close."""
        with self._lock:
            was, self._closing = self._closing, True
        return not was

    def _say(self) -> None:
        assert self._reason is not None
        if self._gone is None:
            leave(self._reason, self._code)
        self._gone(self._reason)

    def _check(self) -> None:
        if self._reason is not None:
            raise RanksError(self._reason)
        if self._closing:
            raise RanksError("the group of ranks has been closed")


class Leader(Link):
    """The link of rank 0: `tell` can be called from any thread.

    Args:
        channels: to each of the others, by rank.
        gone: as `Link`'s.

    Attributes:
        frames: how many messages were told.
    """

    def __init__(self, channels: dict[int, Channel], gone: Gone | None = None) -> None:
        super().__init__(gone)
        self._channels = dict(sorted(channels.items()))
        self._outbox: deque[bytes] = deque()
        self._writing = threading.Lock()
        self._answers: dict[int, queue.SimpleQueue[Any]] = {rank: queue.SimpleQueue() for rank in self._channels}
        self._listening: list[Heard] = []
        self._left: int | None = None  # a rank that has ended in peace
        self.frames = 0
        self._readers = [
            threading.Thread(target=self._read, args=item, name=f"mlx-kv rank {item[0]}", daemon=True)
            for item in self._channels.items()
        ]
        for reader in self._readers:
            reader.start()

    def tell(self, *message: Any) -> None:
        """All others get this, in the order of the calls.

        Raises:
            RanksError: the group is broken, or has been closed.
            TypeError: JSON has no words for it; nobody was told then.
        """
        self._check_all()
        self.frames += 1
        self._send(["tell", *message])

    def answers(self) -> list[Any]:
        """The next answer of each other rank, in the order of ranks; waits for them.

        Raises:
            RanksError: the group is broken, or has been closed.
        """
        found = []
        for inbox in self._answers.values():
            found.append(inbox.get())
            if found[-1] is _END:
                inbox.put(_END)
                self._check_all()
                raise RanksError(f"a rank is gone: {START_AGAIN}")
        return found

    def listen(self, heard: Heard) -> None:
        """This is called, too, with what other ranks report, in threads of the link."""
        self._listening.append(heard)

    def _check_all(self) -> None:
        if self._left is not None:
            self.break_up(f"rank {self._left} has ended before the leader: {START_AGAIN}")
        self._check()

    @property
    def bytes_sent(self) -> int:
        return sum(channel.sent for channel in self._channels.values())

    def break_up(self, reason: str, code: int = EXIT_CODE) -> None:
        """The group is broken: all others are told why, and end."""
        if self._breaks(reason, code):
            self._send(["gone", reason, code])
            for inbox in self._answers.values():
                inbox.put(_END)
            self._say()

    def close(self, code: int = 0, reason: str = "") -> None:
        """The others end, too, with the same exit code; after an end in peace it waits for them, for a few seconds."""
        if not self._closes():
            return
        self._send(["bye", code, reason])
        deadline = time.monotonic() + (0.0 if code or reason else FAREWELL)
        for reader in self._readers:
            if reader is not threading.current_thread():
                reader.join(max(0.0, deadline - time.monotonic()))
        for channel in self._channels.values():
            channel.close()

    def _send(self, frame: Any) -> None:
        # A destructor or a signal handler may tell something in the middle of this, in this thread: then the frame
        # waits in the outbox until the one before it is out.
        self._outbox.append(framed(frame))
        while self._outbox and self._writing.acquire(blocking=False):
            try:
                while self._outbox:
                    self._write(self._outbox.popleft())
            finally:
                self._writing.release()

    def _write(self, data: bytes) -> None:
        for channel in self._channels.values():
            with contextlib.suppress(OSError):  # who reads from it finds out, and why
                channel.write(data)

    def _read(self, rank: int, channel: Channel) -> None:
        try:
            while True:
                kind, *content = channel.read()
                if kind == "answer":
                    self._answers[rank].put(content[0])
                    continue
                if kind == "report":
                    for heard in self._listening:
                        heard(content[0])
                    continue
                code, reason = content
                if code == 0:
                    self._left = rank  # which is an error only if it is asked for more
                    return
                if code == REFUSED:  # after any other end collectives fail, and this rank would end with that
                    time.sleep(GRACE)
                self.break_up(f"rank {rank} has ended: {reason}", code)
                return
        except OSError:
            self.break_up(f"rank {rank} is gone: {START_AGAIN}")
        except Exception as error:
            self.break_up(f"rank {rank} is not understood ({type(error).__name__}: {error}): {START_AGAIN}")
        finally:
            self._answers[rank].put(_END)


class Follower(Link):
    """The link of any other rank.

    Args:
        gone: as `Link`'s.
    """

    def __init__(self, channel: Channel, gone: Gone | None = None) -> None:
        super().__init__(gone)
        self._channel = channel
        self._inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._writing = threading.Lock()
        self._reader = threading.Thread(target=self._read, name="mlx-kv leader", daemon=True)
        self._reader.start()

    def next(self) -> list[Any] | None:
        """The next message that the leader has told; None when it has ended in peace. Waits for it.

        Raises:
            RanksError: the group is broken, or has been closed.
        """
        message: Any = self._inbox.get()
        if message is not _END:
            return list(message)
        self._inbox.put(_END)
        self._check()
        return None

    def answer(self, message: Any) -> None:
        """One of the answers for which the leader waits.

        Raises:
            RanksError: the group is broken, or has been closed.
        """
        self._check()
        self._send(["answer", message])

    def report(self, message: Any) -> None:
        """What nobody waits for here: of another thread's work, which ends when it ends."""
        self._send(["report", message])

    def break_up(self, reason: str) -> None:
        """The group is broken: the leader is told why, and tells all others."""
        if self._breaks(reason, EXIT_CODE):
            self._send(["bye", EXIT_CODE, reason])
            self._inbox.put(_END)
            self._say()

    def close(self, code: int = 0, reason: str = "") -> None:
        """Says that this rank ends; after a good end it waits for the leader's."""
        if not self._closes():
            return
        self._send(["bye", code, reason])
        if code == 0:
            self._reader.join()
        self._channel.close()

    def _send(self, frame: Any) -> None:
        with self._writing, contextlib.suppress(OSError):  # who reads from it finds out
            self._channel.write(framed(frame))

    def _read(self) -> None:
        try:
            while True:
                kind, *content = self._channel.read()
                if kind == "tell":
                    self._inbox.put(content)
                    continue
                if kind == "gone":
                    self._broken(*content)
                    return
                code, reason = content
                if code == 0 and not reason:
                    return
                if code == REFUSED:  # after any other end collectives fail, and this rank would end with that
                    time.sleep(GRACE)
                self._broken(f"the leader has ended: {reason}", code)
                return
        except OSError:
            self._broken(f"the leader is gone: {START_AGAIN}")
        except Exception as error:
            self._broken(f"the leader is not understood ({type(error).__name__}: {error}): {START_AGAIN}")
        finally:
            self._inbox.put(_END)

    def _broken(self, reason: str, code: int = EXIT_CODE) -> None:
        if self._breaks(reason, code):
            self._inbox.put(_END)
            self._say()
