"""Locks on open files, of the operating system: a holder that is killed holds them no longer, and leaves nothing.

Decides that no lock opens, empties or removes a file: its caller does. So it is filelock's `lock_descriptor`, not its
`FileLock`, which (before version 4) empties somebody else's file of that name, and falls back to locks that outlive
their holder where a drive has none. Knows nothing about what a lock is for.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

POLL_SECONDS = 0.01  # between two looks of one that waits


def lock(file: int) -> None:
    """Waits until nobody else has a lock on the file that is open under this number; it ends when that is closed.

    Raises:
        OSError: its drive has no locks.
    """
    from filelock import lock_descriptor  # here, as it takes longer than the start of a command

    lock_descriptor(file, poll_interval=POLL_SECONDS)


def lock_at_once(file: int) -> bool:
    """As `lock`, without waiting; says whether it is locked.

    Raises:
        OSError: its drive has no locks.
    """
    from filelock import lock_descriptor

    return lock_descriptor(file, blocking=False)


@contextlib.contextmanager
def locked(path: str | Path) -> Iterator[None]:
    """Has a lock on this file meanwhile, which is made if not there, and stays.

    Raises:
        OSError: it cannot be written, or its drive has no locks.
    """
    with open(path, "a") as file:
        lock(file.fileno())
        yield
