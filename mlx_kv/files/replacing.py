"""Files that are written whole or not at all, what they may replace, and locks on them.

A new file is written beside the old one, synchronised to the disk, and then renamed. A name may stand for nothing yet,
or for a regular file that the caller recognises as its own. Locks are those of the operating system on open files: they
end with their process. They are taken with filelock's `lock_descriptor` and not its `FileLock`, which (before version
4) empties a foreign file of that name and falls back to locks that outlive their process where a drive has none.
"""

from __future__ import annotations

import contextlib
import os
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


def regular(path: str | Path) -> os.stat_result:
    """What a name stands for, links followed: a regular file.

    Raises:
        FileNotFoundError: there is nothing.
        ValueError: it is anything else.
    """
    found = os.stat(path)
    if not stat.S_ISREG(found.st_mode):
        kind = KINDS.get(stat.S_IFMT(found.st_mode), "no regular file")
        raise ValueError(f"{path} is {kind}: give the name of a file")
    return found


def existing(path: str | Path) -> os.stat_result | None:
    """As `regular`; None if there is nothing yet, but a folder for it.

    Raises:
        ValueError: it is anything else, or there is no such folder.
    """
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        return regular(path)
    if not Path(os.path.realpath(path)).parent.is_dir():
        raise ValueError(f"there is no folder {Path(path).parent}: make it first")
    return None


def check_replaceable(
    path: str | Path, ours: Callable[[Path], bool], what: str, force: bool = False, mend: str = "force=True"
) -> None:
    """Refuses to take the place of what is not ours. An empty file is anybody's.

    Args:
        ours: whether a regular file is what this program writes.
        what: the name of that.
        force: any regular file may be replaced.
        mend: how the caller says so; "" where it cannot be said.

    Raises:
        ValueError: the name stands for a folder, a device, a pipe, a socket, or without force for somebody else's file
            or one that is write-protected.
    """
    found = existing(path)
    if found is None or force:
        return
    other = f"give another name, or {mend} to replace it" if mend else "give another name, or remove it first"
    if found.st_size and not ours(Path(path)):
        raise ValueError(f"{path} is there and is no {what}: {other}")
    if not os.access(path, os.W_OK):
        raise ValueError(f"{path} is write-protected: {other}")


@contextlib.contextmanager
def replacing(path: str | Path) -> Iterator[IO[bytes]]:
    """A temporary file that takes the place of `path` in the end, unless something fails; then the old one stays.

    It keeps the old one's mode, and its owner where that is allowed. A new file is as others are (umask).

    Raises:
        ValueError: what `existing` refuses.
        OSError: it cannot be written.
    """
    old = existing(path)
    target = Path(os.path.realpath(path))  # a link stays a link
    _remove_left_behind(target)
    temporary, file = claim(target, 0o666 if old is None else 0o600)
    with file:
        try:
            yield file
            settle(file, old)
            os.replace(temporary, target)
        except BaseException:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise
    sync_folder(target.parent)


def settle(file: IO[bytes], old: os.stat_result | None) -> None:
    """All of it on the disk, with the mode and the owner of the one whose place it takes."""
    file.flush()
    if old is not None:
        with contextlib.suppress(OSError):  # only root may give files away
            os.fchown(file.fileno(), old.st_uid, old.st_gid)
        os.fchmod(file.fileno(), stat.S_IMODE(old.st_mode))
    os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """The names in it, on the disk."""
    opened = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def claim(target: Path, mode: int) -> tuple[Path, IO[bytes]]:
    """A new file beside the target, locked as long as it is open: a killed writer holds no lock."""
    while True:
        temporary = target.with_name(f".{target.name}.{secrets.token_hex(8)}.tmp")
        opened = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
        try:
            with contextlib.suppress(OSError):  # some network drives have no locks: what is left there stays
                lock(opened)
            if os.fstat(opened).st_nlink:
                return temporary, os.fdopen(opened, "w+b")
        except BaseException:
            os.close(opened)
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise
        os.close(opened)  # another writer took it for one left behind, before it was locked


def _remove_left_behind(target: Path) -> None:
    """Removes what killed writers of this file left: nobody else gives files such names."""
    for name in os.listdir(target.parent):
        middle = name.removeprefix(f".{target.name}.").removesuffix(".tmp")
        if name != f".{target.name}.{middle}.tmp" or len(middle) != 16 or set(middle) - set("0123456789abcdef"):
            continue
        left = target.with_name(name)
        with contextlib.suppress(OSError), open(left, "rb") as file:
            if lock_at_once(file.fileno()):
                left.unlink()


# --- locks ------------------------------------------------------------------------------------------------------------


def lock(file: int) -> None:
    """Waits until no other process has a lock on the file open under this descriptor; it ends when that is closed.

    Raises:
        OSError: its drive has no locks.
    """
    from filelock import lock_descriptor  # here, as it takes longer than the start of a command

    lock_descriptor(file, poll_interval=POLL_SECONDS)


def lock_at_once(file: int) -> bool:
    """As `lock`, without waiting; returns whether it is locked.

    Raises:
        OSError: its drive has no locks.
    """
    from filelock import lock_descriptor

    return lock_descriptor(file, blocking=False)


@contextlib.contextmanager
def locked(path: str | Path) -> Iterator[None]:
    """Holds a lock on this file, which is made if it is not there, and stays.

    Raises:
        OSError: it cannot be written, or its drive has no locks.
    """
    with open(path, "a") as file:
        lock(file.fileno())
        yield
