"""Signals to a rank that follows: it ends when the leader does, unless the leader never ends.

Decides that whoever asks twice means it: launchers send SIGTERM to all ranks at once, and the leader ends in order
then, which can take long. Knows nothing about what the ranks do.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import TYPE_CHECKING

from mlx_kv.ranks.link import EXIT_CODE, leave

if TYPE_CHECKING:
    from mlx_kv.ranks.group import RankGroup

APART = 1.0  # seconds between two SIGTERMs that are not one: there are supervisors that send several
TOLD_WITHIN = 1.0  # seconds in which the leader is told; it may be stopped, and read nothing


def leave_signals_to_leader(group: RankGroup) -> None:
    """SIGINT ends nothing from now on, and SIGTERM only when it comes once more later. Called in the main thread.

    They are heard in a thread of their own: the main one may be in a collective for good.
    """
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda number, frame: None)
    signal.siginterrupt(signal.SIGTERM, False)  # what MLX waits for goes on
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    threading.Thread(target=_listen, args=(reading, group), name="mlx-kv signals", daemon=True).start()


def _listen(reading: int, group: RankGroup) -> None:
    first: float | None = None
    while numbers := os.read(reading, 64):
        if signal.SIGTERM not in numbers:
            continue
        if first is not None and time.monotonic() - first > APART:
            _end(group)
        first = time.monotonic() if first is None else first


def _end(group: RankGroup) -> None:
    reason = "stopped by a second SIGTERM, while the leader has not ended"
    telling = threading.Thread(target=group.fail, args=(reason,), daemon=True)
    telling.start()
    telling.join(TOLD_WITHIN)
    leave(f"rank {group.rank}: {reason}", EXIT_CODE)
