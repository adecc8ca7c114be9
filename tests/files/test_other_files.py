"""Files that are not ours: nothing of this library deletes or replaces one without being told to."""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models import cache as stock

import mlx_kv
from mlx_kv import KVCache, load_prompt_cache, save_prompt_cache
from mlx_kv.cli.batch import OutputFile

FOREIGN: dict[str, bytes] = {
    "text": b"precious\n",
    "json": b'{"a": 1}',
    "weights": (Path(mlx_kv.model_path("draft")) / "model.safetensors").read_bytes(),
    "half a header": b"\x40\x00\x00\x00\x00\x00\x00\x00" + b'{"__metadata__": ',
}


def filled(tokens: int = 5) -> list[KVCache]:
    cache = KVCache()
    cache.update_and_fetch(*[mx.ones((1, 2, tokens, 32))] * 2)
    return [cache]


@pytest.mark.parametrize("kind", FOREIGN)
def test_a_file_of_others_is_replaced_only_when_told(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    path.write_bytes(FOREIGN[kind])
    with pytest.raises(ValueError, match=r"exists and is not a prompt cache: give another name, or force=True") as info:
        save_prompt_cache(path, filled())
    assert "\n" not in str(info.value)
    assert path.read_bytes() == FOREIGN[kind]
    assert os.listdir(tmp_path) == ["a.safetensors"]
    save_prompt_cache(path, filled(), force=True)
    assert load_prompt_cache(path)[0].offset == 5
    save_prompt_cache(path, filled(7))  # and now it is ours
    assert load_prompt_cache(path)[0].offset == 7


def test_prompt_caches_are_replaced_whoever_wrote_them(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    path.touch()  # as mktemp leaves it
    save_prompt_cache(path, filled())
    path.write_bytes(path.read_bytes()[:-100])  # damaged, and to be made again
    save_prompt_cache(path, filled())
    cache = stock.KVCache()
    cache.update_and_fetch(*[mx.ones((1, 2, 3, 32))] * 2)
    stock.save_prompt_cache(str(path), [cache], {"model": "m"})
    save_prompt_cache(path, filled())
    assert load_prompt_cache(path)[0].offset == 5


def devices(folder: Path) -> dict[str, str]:
    os.mkfifo(folder / "pipe.safetensors")
    (folder / "folder.safetensors").mkdir()
    here = socket.socket(socket.AF_UNIX)
    here.bind(str(folder / "socket.safetensors"))
    here.close()
    (folder / "link.safetensors").symlink_to(folder / "pipe.safetensors")
    return {
        "pipe.safetensors": "is a pipe",
        "link.safetensors": "is a pipe",
        "folder.safetensors": "is a folder",
        "socket.safetensors": "is a socket",
        "/dev/null": "is a device",
        "/dev/full": "is a device",
    }


def test_what_is_no_regular_file_is_never_replaced_nor_read(tmp_path: Path) -> None:
    for name, message in devices(tmp_path).items():
        path = tmp_path / name
        before = os.lstat(path)
        for force in (False, True):
            with pytest.raises(ValueError, match=message):
                save_prompt_cache(path, filled(), force=force)
        with pytest.raises(ValueError, match=message):
            load_prompt_cache(path)
        after = os.lstat(path)
        assert (before.st_ino, before.st_mode) == (after.st_ino, after.st_mode)


def test_a_private_file_stays_private(tmp_path: Path) -> None:
    """While it is written, too: the new bytes are never in a file that others can read."""
    path = tmp_path / "a.safetensors"
    seen: list[int] = []
    replace = os.replace

    def look(source: Any, target: Any) -> None:
        seen.append(stat.S_IMODE(os.stat(source).st_mode))
        replace(source, target)

    before = os.umask(0o027)
    try:
        save_prompt_cache(path, filled())
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        for mode in (0o600, 0o664):
            path.chmod(mode)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(os, "replace", look)
                save_prompt_cache(path, filled())
            assert stat.S_IMODE(path.stat().st_mode) == seen[-1] == mode
    finally:
        os.umask(before)


def test_a_write_protected_file_is_replaced_only_when_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.safetensors"
    save_prompt_cache(path, filled())
    monkeypatch.setattr(os, "access", lambda where, mode: False)  # who runs this may be root
    with pytest.raises(ValueError, match="is write-protected"):
        save_prompt_cache(path, filled(7))
    save_prompt_cache(path, filled(7), force=True)


def test_the_command_refuses_before_it_reads_anything(
    command: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    notes = tmp_path / "precious.txt"
    notes.write_text("precious")
    with monkeypatch.context() as patch:
        patch.setattr("mlx_kv.mlxlm.loading.load", None)
        for name, message in {**devices(tmp_path), "precious.txt": "or --force to replace it"}.items():
            done = command("cache", "--prompt", "import os", "--output", tmp_path / name)
            assert (done.code, done.out, done.err.count("\n")) == (2, "", 1), done.err
            assert message in done.err
        patch.chdir(tmp_path)
        done = command("cache", "--prompt", "import os", "--output", "-")
        assert (done.code, "a prompt cache cannot go to stdout" in done.err) == (2, True)
        assert not Path("-").exists()
    assert notes.read_text() == "precious"
    assert command("cache", "--prompt", "import os", "--output", notes, "--force").code == 0
    assert load_prompt_cache(notes)


PICTURE = ("inspect", "--prompt", "import os\n" * 40, "--kv-budget", "80")


def test_json_replaces_nothing_but_such_json(
    command: Callable[..., Any], reference: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "kept.json"
    foreign = {**FOREIGN, "much the same": b'{"model": "m", "budget": 3}', "deep": b'{"model": ' + b"[" * 9000}
    with monkeypatch.context() as patch:
        patch.setattr("mlx_kv.mlxlm.loading.load", None)  # refused before anything is read
        for content in foreign.values():
            path.write_bytes(content)
            done = command(*PICTURE, "--json", path)
            assert (done.code, done.out, done.err.count("\n")) == (2, "", 1), done.err
            assert f"{path} exists and is not a JSON file of this command: give another name, or --force" in done.err
            assert path.read_bytes() == content
        for name, message in devices(tmp_path).items():
            before = os.lstat(tmp_path / name)
            for more in ((), ("--force",)):
                done = command(*PICTURE, "--json", tmp_path / name, *more)
                assert (done.code, done.err.count("\n")) == (2, 1), done.err
                assert message in done.err or "is a directory" in done.err
            after = os.lstat(tmp_path / name)
            assert (before.st_ino, before.st_mode, before.st_size) == (after.st_ino, after.st_mode, after.st_size)
    monkeypatch.setattr("mlx_kv.mlxlm.loading.load", lambda path, **options: reference)
    path.chmod(0o600)
    assert command(*PICTURE, "--json", path, "--force").code == 0
    written = path.read_bytes()
    assert command(*PICTURE, "--json", path).code == 0  # and now it is ours
    assert path.read_bytes() == written
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    (tmp_path / "empty.json").touch()
    assert command(*PICTURE, "--json", tmp_path / "empty.json").code == 0


def test_json_that_came_meanwhile_stays(
    command: Callable[..., Any], reference: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "kept.json"

    def load(model: str, **options: Any) -> Any:
        path.write_text("precious")
        return reference

    monkeypatch.setattr("mlx_kv.mlxlm.loading.load", load)
    done = command(*PICTURE, "--json", path)
    assert (done.code, path.read_text()) == (2, "precious")
    assert "is not a JSON file of this command" in done.err


FIGURES: dict[str, tuple[str, ...]] = {
    "inspect": PICTURE,
    "plan": ("plan", "--model", "reference"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", FIGURES)
def test_a_figure_that_cannot_be_written_leaves_the_old_one(
    name: str, command: Callable[..., Any], reference: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mlx_kv.mlxlm.loading.load", None)
    os.mkfifo(tmp_path / "pipe.png")
    before = os.lstat(tmp_path / "pipe.png")
    done = command(*FIGURES[name], "--plot", tmp_path / "pipe.png")
    assert (done.code, done.err.count("\n")) == (2, 1), done.err
    assert "is a pipe: give the name of a file" in done.err
    assert os.lstat(tmp_path / "pipe.png").st_ino == before.st_ino
    (tmp_path / "pipe.png").unlink()

    def half(figure: Any, file: Any, **options: Any) -> None:
        file.write(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("mlx_kv.mlxlm.loading.load", lambda path, **options: reference)
    path = tmp_path / "a.png"
    path.write_text("somebody's")
    path.chmod(0o600)
    with monkeypatch.context() as patch:
        patch.setattr("matplotlib.figure.Figure.savefig", half)
        done = command(*FIGURES[name], "--plot", path)
    assert (done.code, path.read_text(), os.listdir(tmp_path)) == (2, "somebody's", ["a.png"])
    assert done.err == f"mlx-kv: error: cannot write {path}: No space left on device\n"
    for suffix, beginning in {".png": b"\x89PNG", ".svg": b"<?xml", ".PDF": b"%PDF"}.items():
        drawn = path.with_suffix(suffix)
        assert command(*FIGURES[name], "--plot", drawn).code == 0
        assert drawn.read_bytes().startswith(beginning)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_answers_are_done_again_beside_files_of_any_name(tmp_path: Path) -> None:
    line = '{"id": 1, "line": 1, "digest": "0"}\n'
    path, other = tmp_path / "answers.jsonl", tmp_path / "answers.jsonl.kept"
    path.write_text(line)
    path.chmod(0o600)
    other.write_text("somebody's")
    with OutputFile(str(path)) as answers:
        answers.drop({1})
    assert (path.read_text(), other.read_text()) == ("", "somebody's")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert sorted(os.listdir(tmp_path)) == ["answers.jsonl", "answers.jsonl.kept"]
