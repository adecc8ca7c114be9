"""Locks: who waits, what a killed holder leaves, and that a lock changes nothing but who may go on."""

from __future__ import annotations

import errno
import fcntl
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from mlx_kv import PromptStore
from mlx_kv.files.atomic_write import atomic_write, lock, locked

HOLDER = (
    "import fcntl, sys; f = open(sys.argv[1], 'a'); fcntl.flock(f, fcntl.LOCK_EX); print('held', flush=True); input()"
)


def test_one_waits_until_the_other_is_done(tmp_path: Path) -> None:
    said: list[str] = []

    def second() -> None:
        with locked(tmp_path / "lock"):
            said.append("second")

    with locked(tmp_path / "lock"):
        waiting = threading.Thread(target=second)
        waiting.start()
        waiting.join(0.1)
        assert waiting.is_alive()
        said.append("first")
    waiting.join(10)
    assert said == ["first", "second"]
    with pytest.raises(KeyError), locked(tmp_path / "lock"):
        raise KeyError
    with open(tmp_path / "lock") as file:
        assert lock(file.fileno(), wait=False)  # released after an error, too


def test_a_killed_holder_holds_nothing(tmp_path: Path) -> None:
    """And a plain flock, as earlier versions took it, is the same lock."""
    (tmp_path / "lock").touch()
    holder = subprocess.Popen(
        [sys.executable, "-S", "-c", HOLDER, str(tmp_path / "lock")], stdout=subprocess.PIPE, stdin=subprocess.PIPE
    )
    assert holder.stdout is not None
    assert holder.stdin is not None
    assert holder.stdout.readline() == b"held\n"
    with open(tmp_path / "lock") as file:
        assert not lock(file.fileno(), wait=False)
        holder.kill()
        holder.wait()
        lock(file.fileno())
    holder.stdout.close()
    holder.stdin.close()


def test_a_lock_changes_nothing_in_its_file(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    path.write_text("somebody's")
    path.chmod(0o640)
    (tmp_path / "link").symlink_to(path)
    for name in (path, tmp_path / "link"):
        with locked(name), open(path) as file:
            assert not lock(file.fileno(), wait=False)
        assert path.read_text() == "somebody's"
        assert path.stat().st_mode & 0o777 == 0o640
    with pytest.raises(IsADirectoryError), locked(tmp_path):
        pass
    with pytest.raises(FileNotFoundError), locked(tmp_path / "none" / "lock"):
        pass


def test_a_drive_without_locks_is_said_to_be_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And is none for files, whose writers then only leave behind what they left when they were killed."""

    def none(file: int, operation: int) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    (tmp_path / ".a.0123456789abcdef.tmp").touch()
    monkeypatch.setattr(fcntl, "flock", none)
    with pytest.raises(OSError, match="not implemented"), locked(tmp_path / "lock"):
        pass
    with atomic_write(tmp_path / "a") as file:
        file.write(b"written")
    assert {path.name for path in tmp_path.iterdir()} == {"a", "lock", ".a.0123456789abcdef.tmp"}


def test_only_what_nobody_writes_any_more_is_removed(tmp_path: Path) -> None:
    left, writing, other = (tmp_path / f".a.{digit * 16}.tmp" for digit in "01x")
    for path in (left, writing, other):
        path.touch()
    with open(writing) as file:
        lock(file.fileno())
        with atomic_write(tmp_path / "a") as new:
            new.write(b"2")
            (temporary,) = set(tmp_path.glob(".a.*")) - {writing, other}
            with atomic_write(tmp_path / "a") as newer:
                newer.write(b"3")
            assert temporary.exists()
            assert not left.exists()
    assert {path.name for path in tmp_path.iterdir()} == {"a", writing.name, other.name}
    assert (tmp_path / "a").read_bytes() == b"2"


def test_a_store_is_locked_where_its_drive_has_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = PromptStore(tmp_path / "store")
    with store._locked(), open(tmp_path / "store" / "lock") as file:
        assert not lock(file.fileno(), wait=False)

    def none(file: int, operation: int) -> None:
        raise OSError(errno.ENOTSUP, "Operation not supported")

    monkeypatch.setattr(fcntl, "flock", none)
    with store._locked():
        pass
