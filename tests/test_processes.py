"""The process around the library: closed standard files, forks, and who may read what it writes."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import mlx_kv
from mlx_kv import PromptStore
from mlx_kv.bundled import model_path

COMMAND = [sys.executable, "-c", "from mlx_kv.cli.main import main; main()"]
GENERATE = ["generate", "--model", "reference", "--prompt", "def f(", "--max-tokens", "3", "--json"]
FORK = """
import os, signal, sys
import mlx_kv
model, tokenizer = mlx_kv.load(sys.argv[1])
{before}
child = os.fork()
if child == 0:
    signal.alarm(30)  # it would wait for good
    try:
        if sys.argv[2] == "use":
            mlx_kv.generate(model, tokenizer, [5, 6, 7], max_tokens=2)
        elif sys.argv[2] == "go on":
            next(begun)
        else:
            mlx_kv.load(sys.argv[1])
    except RuntimeError as error:
        print(error)
    sys.stdout.flush()
    os._exit(0)
os.waitpid(child, 0)
"""


@pytest.mark.parametrize("closed", [0, 1, 2, (0, 1, 2)], ids=str)
def test_a_standard_file_may_be_closed(closed: Any, tmp_path: Path) -> None:
    """Files that are opened next get its number."""
    numbers = closed if isinstance(closed, tuple) else (closed,)
    json = tmp_path / "answer"
    with json.open("w") as file:

        def close() -> None:
            for number in numbers:
                os.close(number)

        done = subprocess.run(
            [*COMMAND, *GENERATE], stdin=subprocess.DEVNULL, stdout=file, preexec_fn=close, timeout=100, check=False
        )
    assert done.returncode == 0
    assert ('"tokens"' in json.read_text()) == (1 not in numbers)


def test_a_closed_standard_input_is_empty() -> None:
    def close() -> None:
        os.close(0)

    command = [*COMMAND, "generate", "--model", "reference", "--prompt", "-", "--max-tokens", "3"]
    ways: list[dict[str, Any]] = [{"preexec_fn": close}, {"stdin": subprocess.DEVNULL}]
    closed, empty = (subprocess.run(command, capture_output=True, timeout=100, check=True, **way) for way in ways)
    assert closed.stdout == empty.stdout != b""


@pytest.mark.parametrize("then", ["use", "go on", "load"])
def test_a_fork_that_lacks_the_threads_of_mlx_is_refused(then: str) -> None:
    script = FORK.format(
        before="begun = mlx_kv.stream_generate(model, tokenizer, [5, 6, 7], max_tokens=9); next(begun)"
    )
    command = [sys.executable, "-c", script, str(model_path("reference")), then]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True)
    assert done.stdout.startswith("this process was forked after MLX had been used")


@pytest.fixture
def _open_mask() -> Iterator[None]:
    before = os.umask(0o022)
    yield
    os.umask(before)


def modes(folder: Path) -> dict[bool, set[int]]:
    """Those of the lock, and of all other files, which a umask may have made less."""
    found: dict[bool, set[int]] = {True: set(), False: set()}
    for path in folder.iterdir():
        found[path.name == "lock"].add(stat.S_IMODE(path.stat().st_mode))
    return found


@pytest.mark.usefixtures("_open_mask")
@pytest.mark.parametrize(
    ("folder", "mode", "lock"),
    [(None, 0o600, 0o600), (0o755, 0o600, 0o600), (0o775, 0o640, 0o660), (0o1777, 0o600, 0o600)],
    ids=["new", "of its owner", "of a group", "of everybody"],
)
def test_prompts_on_a_disk_are_their_owners(
    folder: int | None, mode: int, lock: int, reference: Any, tmp_path: Path
) -> None:
    place = tmp_path / "store"
    if folder is not None:
        place.mkdir()
        place.chmod(folder)
    store = PromptStore(place)
    tokens = list(range(1, 400))
    reader = mlx_kv.PromptReader(reference[0], mlx_kv.make_prompt_cache(reference[0]), tokens, store)
    reader.finish()
    store.keep(tokens[: reader.read], reader.caches)
    assert modes(place) == {True: {lock}, False: {mode}}  # who may write there can lock, too
    assert stat.S_IMODE(place.stat().st_mode) == (0o700 if folder is None else folder)
    (tmp_path / "files").mkdir()
    mlx_kv.save_prompt_cache(tmp_path / "files" / "prompt.safetensors", reader.caches)
    assert modes(tmp_path / "files") == {True: set(), False: {0o600}}


@pytest.mark.parametrize("template", ["{{", "{% if %}", "{{ messages[0].content"])
def test_a_template_that_is_no_jinja_is_refused_at_the_start(template: str) -> None:
    with pytest.raises(ValueError, match="the chat template is no Jinja: line 1: "):
        mlx_kv.load(model_path("reference"), chat_template=template)


def test_a_template_may_refuse_some_chats() -> None:
    refuses = "{{ raise_exception('no system message') }}"
    assert mlx_kv.load(model_path("reference"), chat_template=refuses)[1].chat_template == refuses
