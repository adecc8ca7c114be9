"""`--help` fits a screen, `--help-all` has every option, and neither needs MLX."""

from __future__ import annotations

import re
import subprocess
import sys

import click
import pytest
from click.testing import CliRunner

from mlx_kv.cli.main import command as group
from mlx_kv.cli.options import LINE_WIDTH, Option, SectionedCommand

SCREEN = 45  # lines
COMMANDS = sorted(name for name, each in group.commands.items() if isinstance(each, SectionedCommand))


def shown(name: str, option: str) -> list[str]:
    done = CliRunner().invoke(group, [name, option], prog_name="mlx-kv", terminal_width=80)
    assert done.exit_code == 0
    return done.output.splitlines()


def test_commands_with_many_options_have_both() -> None:
    assert len(COMMANDS) >= 8
    assert all(len(each.params) < 3 for name, each in group.commands.items() if name not in COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_help_fits_a_screen_and_has_two_examples(name: str) -> None:
    lines = shown(name, "--help")
    assert len(lines) <= SCREEN
    options = [line for line in lines if re.match(r"  -", line)]
    assert all(len(line) <= 80 for line in options)
    continued = [line for line in lines if line.startswith(" " * 8)]
    assert continued == []  # each option is one line
    epilog = group.commands[name].epilog
    if epilog is not None:
        examples = lines[lines.index("  Examples:") + 1 :]
        assert len(examples) == 2
        assert all(example.strip() in epilog for example in examples)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_is_in_the_full_help(name: str) -> None:
    """Under its section, with its description and all of its names."""
    own = group.commands[name]
    lines = shown(name, "--help-all")
    text = " ".join(" ".join(lines).split())
    for param in own.params:
        if isinstance(param, click.Option) and not param.hidden:
            assert all(option in text for option in param.opts), param.opts
            assert " ".join((param.help or "").split()[:4]) in text.replace("- ", "-"), param.opts
            if isinstance(param, Option):
                assert f"{param.section}:" in lines
    assert all(line in lines for line in shown(name, "--help") if line.startswith("  mlx"))


def test_rare_options_are_in_the_full_help_only() -> None:
    for name in ("serve", "generate"):
        common, full = ("\n".join(shown(name, option)) for option in ("--help", "--help-all"))
        for option in ("--kv-sinks", "--kv-group-size", "--step-timeout", "--prefill-step-size"):
            assert option not in common
            assert option in full
        for option in ("--kv-bits", "--kv-budget", "--draft", "--model", "--help-all"):
            assert option in common


def test_a_line_has_the_default_where_there_is_space() -> None:
    lines = shown("serve", "--help")
    assert any(re.fullmatch(r"  --port N +Port; 0 is a free one\.  \[default: 8080\]", line) for line in lines)
    assert not any("--decode-concurrency" in line for line in lines)  # one long name of several
    assert any("--max-batch-size, --decode-concurrency N" in line for line in shown("serve", "--help-all"))


def test_summaries_are_short() -> None:
    for own in group.commands.values():
        for param in own.params:
            assert len(getattr(param, "summary", "")) <= LINE_WIDTH, param.opts


@pytest.mark.parametrize("option", ["--help", "--help-all"])
def test_help_needs_no_mlx(option: str) -> None:
    code = f"import sys; from mlx_kv.cli.main import main; sys.argv = ['mlx-kv', 'serve', '{option}']; main()"
    done = subprocess.run([sys.executable, "-X", "importtime", "-c", code], capture_output=True, text=True)
    assert "--kv-budget" in done.stdout
    assert "mlx.core" not in done.stderr
