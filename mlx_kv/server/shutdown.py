"""What SIGTERM and SIGINT (Ctrl-C) do to a server.

Decides what each of them ends, and what is said of it. Knows nothing about how answers are ended.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable
from typing import NoReturn, Protocol

PART_WITHIN = 1.0  # seconds in which others hear that this process ends


class Stoppable(Protocol):
    """A server at work.

    Attributes:
        should_exit: set, it takes nothing more, and ends when all is answered.
    """

    should_exit: bool

    @property
    def unanswered(self) -> int:
        """Requests that are not answered yet."""

    def hurry(self) -> None:
        """Ends all answers with an error, now."""


class ShutdownSignals:
    """What SIGTERM and SIGINT (Ctrl-C) ask for, from the first moment to the last.

    The first lets answers finish, a SIGINT after it ends them at once; a SIGTERM more changes nothing, for there are
    supervisors that send several. Where nobody is being served, the process ends.

    Args:
        say: called with one line, for the terminal.
        part: called with the exit code and the line before the process ends in the middle of something, for whoever
            else must end then; it has a second.

    Attributes:
        code: for the process to end with: 130 if there was a SIGINT, else 0.
        hurried: whether all is to end at once.
    """

    def __init__(
        self, say: Callable[[str], None], drain_seconds: float, part: Callable[[int, str], None] | None = None
    ) -> None:
        self._say, self._drain_seconds = say, drain_seconds
        self._part = part
        self._server: Stoppable | None = None
        self._stopping, self.code, self.hurried = False, 0, False
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._signal)

    def attach(self, server: Stoppable | None) -> None:
        self._server = server

    def _signal(self, number: int, frame: object) -> None:
        self.code = 130 if number == signal.SIGINT else self.code
        if self._server is None:
            if not self._stopping or number == signal.SIGINT:
                self.leave("stopped")
        elif not self._stopping:
            self._stopping, self._server.should_exit = True, True
            self._print_line(
                f"stopping: {self._left} to be finished within {self._drain_seconds:g} s; "
                "another Ctrl-C (SIGINT) ends at once"
            )
        elif number == signal.SIGINT and not self.hurried:
            self.hurried = True
            self._print_line(f"stopping at once: {self._left} to be ended with an error")
            self._server.hurry()

    @property
    def _left(self) -> str:
        count = 0 if self._server is None else self._server.unanswered
        return f"{count} request{'' if count == 1 else 's'}"

    def leave(self, why: str) -> NoReturn:
        """Ends the process now, whatever its threads are doing: a model that is loaded, a disk that is written to."""
        self._print_line(why)
        if self._part is not None:  # in a thread: this one may hold, in what the signal has interrupted, what it needs
            parting = threading.Thread(target=self._part, args=(self.code, why), daemon=True)
            parting.start()
            parting.join(PART_WITHIN)
        os._exit(self.code)

    def _print_line(self, line: str) -> None:
        """What cannot be said is left out: the terminal may be gone, or a signal have come in the middle of a line."""
        with contextlib.suppress(OSError, RuntimeError, ValueError):
            self._say(line)
            sys.stdout.flush()
            sys.stderr.flush()
