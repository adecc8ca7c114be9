"""Shells complete commands, options and choices."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest
from click.testing import CliRunner

from mlx_kv.cli.main import command as group


def completed(words: str, shell: str = "zsh") -> str:
    """What a shell is given for the last of some words."""
    asked = {"_MLX_KV_COMPLETE": f"{shell}_complete", "COMP_WORDS": words, "COMP_CWORD": str(len(words.split()) - 1)}
    code = "import sys; sys.argv = ['mlx-kv']; from mlx_kv.cli.main import main; main()"
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-c", code], env=os.environ | asked, capture_output=True, text=True
    )
    assert "mlx.core" not in done.stderr
    return done.stdout


def test_commands_options_and_choices_are_completed() -> None:
    assert "generate" in completed("mlx-kv gen")
    options = completed("mlx-kv serve --kv-s")
    assert "--kv-score" in options
    assert "--kv-sinks" in options  # rare ones, too
    assert "--kv-bits" not in options


def test_choices_of_an_option_are_completed() -> None:
    asked = {"_MLX_KV_COMPLETE": "bash_complete", "COMP_WORDS": "mlx-kv serve --kv-share ", "COMP_CWORD": "3"}
    done = CliRunner().invoke(group, [], prog_name="mlx-kv", env=asked, complete_var="_MLX_KV_COMPLETE")
    assert [line.partition(",")[2] for line in done.output.split()] == ["layers", "layer", "head", "adaptive"]


@pytest.mark.parametrize("shell", ["zsh", "bash", "fish"])
def test_the_script_and_how_to_install_it(shell: str) -> None:
    done = CliRunner().invoke(group, ["completion", shell])
    assert done.exit_code == 0
    lines = done.output.splitlines()
    assert f"_MLX_KV_COMPLETE={shell}_complete" in done.output
    assert lines[-1].startswith(f"# Install: mlx-kv completion {shell} > ")
    if shell == "zsh":
        assert lines[0] == "#compdef mlx-kv"  # zsh reads it from the first line of a file
    if shutil.which(shell):
        assert subprocess.run([shell, "-n"], input=done.output, text=True).returncode == 0


def test_another_shell_is_refused() -> None:
    done = CliRunner().invoke(group, ["completion", "csh"])
    assert done.exit_code == 2
    assert "zsh" in done.output
