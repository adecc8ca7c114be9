"""Atomic file replacement, the check that a file may be replaced, and file locks.

A new file is written beside the old one, synchronised to the disk, and renamed over it. Locks are those of the
operating system on open files: they end with their process. They are taken with filelock's `lock_descriptor` and not
its `FileLock`, which (before version 4) empties an existing file of that name and falls back to locks that outlive
their process where a drive has none.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

POLL_SECONDS = 0.01  # between two attempts of a process that waits for a lock
KINDS = {
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFDIR: "a folder",
}


# --- what a path refers to --------------------------------------------------------------------------------------------


def regular_file(path: str | Path) -> os.stat_result:
    """The status of a regular file, links followed.

    Raises:
        FileNotFoundError: the path does not exist.
        ValueError: it is a folder, a device, a pipe or a socket.
    """
    status = os.stat(path)
    if not stat.S_ISREG(status.st_mode):
        kind = KINDS.get(stat.S_IFMT(status.st_mode), "no regular file")
        raise ValueError(f"{path} is {kind}: give the name of a file")
    return status


def existing_file(path: str | Path) -> os.stat_result | None:
    """The status of a regular file, or None where a new one can be made.

    Raises:
        ValueError: it is no regular file, or its folder does not exist.
    """
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        return regular_file(path)
    if not Path(os.path.realpath(path)).parent.is_dir():
        raise ValueError(f"there is no folder {Path(path).parent}: make it first")
    return None


def check_replaceable(
    path: str | Path, ours: Callable[[Path], bool], what: str, force: bool = False, fix: str = "force=True"
) -> None:
    """Refuses to replace a file of another kind; an empty file may always be replaced.

    Args:
        ours: whether a regular file is of the kind that is to be written.
        what: the name of that kind, for the message.
        force: replace any regular file.
        fix: how the caller sets `force`, for the message; "" where that is not possible.

    Raises:
        ValueError: the path is a folder, a device, a pipe or a socket; or, without force, a file of another kind or one
            that is write-protected.
    """
    status = existing_file(path)
    if status is None or force:
        return
    fix = f"give another name, or {fix} to replace it" if fix else "give another name, or remove it first"
    if status.st_size and not ours(Path(path)):
        raise ValueError(f"{path} exists and is not a {what}: {fix}")
    if not os.access(path, os.W_OK):
        raise ValueError(f"{path} is write-protected: {fix}")


# --- writing ----------------------------------------------------------------------------------------------------------


PRIVATE = 0o600  # of files that hold prompts


@contextlib.contextmanager
def atomic_write(path: str | Path, mode: int = 0o666) -> Iterator[IO[bytes]]:
    """A temporary file that replaces `path` at the end; if anything fails, the old file stays.

    The new file has the mode of the old one, and its owner where that is permitted. The temporary file is locked as
    long as it is open.

    Args:
        mode: without an old file, as far as the umask allows it.

    Raises:
        ValueError: as `existing_file`.
        OSError: it cannot be written.
    """
    old = existing_file(path)
    target = Path(os.path.realpath(path))  # a link stays a link
    _remove_abandoned(target)
    temporary, file = _open_temporary(target, mode if old is None else PRIVATE)
    with file:
        try:
            yield file
            file.flush()
            if old is not None:
                with contextlib.suppress(OSError):  # only root may change the owner
                    os.fchown(file.fileno(), old.st_uid, old.st_gid)
                os.fchmod(file.fileno(), stat.S_IMODE(old.st_mode))
            os.fsync(file.fileno())
            os.replace(temporary, target)
        except BaseException:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise
    folder = os.open(target.parent, os.O_RDONLY)
    try:
        os.fsync(folder)  # the names in it
    finally:
        os.close(folder)


def _open_temporary(target: Path, mode: int) -> tuple[Path, IO[bytes]]:
    """A new file beside the target, locked as long as it is open: a killed writer holds no lock."""
    while True:
        temporary = target.with_name(f".{target.name}.{secrets.token_hex(8)}.tmp")
        opened = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
        try:
            with contextlib.suppress(OSError):  # some network drives have no locks: abandoned files stay there
                lock(opened)
            if os.fstat(opened).st_nlink:
                return temporary, os.fdopen(opened, "w+b")
        except BaseException:
            os.close(opened)
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise
        os.close(opened)  # another writer removed it as abandoned, before it was locked


def _remove_abandoned(target: Path) -> None:
    """Removes temporary files of this target that no process has locked: their writers were killed."""
    temporary = re.compile(rf"\.{re.escape(target.name)}\.[0-9a-f]{{16}}\.tmp")
    for name in filter(temporary.fullmatch, os.listdir(target.parent)):
        abandoned = target.with_name(name)
        with contextlib.suppress(OSError), open(abandoned, "rb") as file:
            if lock(file.fileno(), wait=False):
                abandoned.unlink()


# --- locks ------------------------------------------------------------------------------------------------------------


def lock(descriptor: int, wait: bool = True) -> bool:
    """Locks an open file against other processes, until it is closed.

    Args:
        wait: until other processes have released it.

    Returns:
        Whether it is locked now: always, if `wait`.

    Raises:
        OSError: its drive has no locks.
    """
    from filelock import lock_descriptor  # here, as it takes longer than the start of a command

    return lock_descriptor(descriptor, blocking=wait, poll_interval=POLL_SECONDS)


@contextlib.contextmanager
def locked(path: str | Path, mode: int = PRIVATE) -> Iterator[None]:
    """Holds a lock on this file, which is made if it does not exist, and stays.

    Args:
        mode: of a new file, whatever the umask.

    Raises:
        OSError: it cannot be written, or its drive has no locks.
    """
    is_new = not os.path.exists(path)
    with open(path, "a") as file:
        if is_new:
            with contextlib.suppress(OSError):  # of a drive without modes, or another user's since
                os.fchmod(file.fileno(), mode)
        lock(file.fileno())
        yield
