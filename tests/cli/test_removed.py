"""Commands and options of earlier versions: one line that names the way on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mlx_kv.cli.options import REMOVED_COMMANDS, REMOVED_OPTIONS


@pytest.mark.parametrize("name", REMOVED_COMMANDS)
def test_a_removed_command_names_the_way_on(name: str, command: Callable[..., Any]) -> None:
    done = command(*name.split(), "--model", "reference")
    assert (done.code, done.out) == (2, "")
    assert done.err == f"mlx-kv: error: mlx-kv {name} was removed in 0.4: {REMOVED_COMMANDS[name]}\n"


def test_a_removed_option_names_the_way_on(
    command: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(REMOVED_OPTIONS, "--old-option", "give --model")
    done = command("generate", "--old-option", "3", "--prompt", "a")
    assert (done.code, done.err) == (2, "mlx-kv: error: --old-option was removed in 0.4: give --model\n")
    file = tmp_path / "options.toml"
    file.write_text("old_option = 3\n")
    done = command("generate", "--config", file, "--prompt", "a")
    assert (done.code, done.err) == (2, f"mlx-kv: error: {file}: --old-option was removed in 0.4: give --model\n")
    assert "No such option '--older'" in command("generate", "--older").err
