"""Options follow from the fields of dataclasses, and errors name options on the command line."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import mlx.nn as nn
import pytest
from click.testing import CliRunner
from mlx_lm.models import cache as stock

from mlx_kv import CachePolicy, make_prompt_cache
from mlx_kv.cli.generate import FormatOptions
from mlx_kv.cli.main import command as group
from mlx_kv.cli.model import ChatOptions, DraftOptions, ModelOptions, PromptOptions
from mlx_kv.cli.options import given_options, message_of, option_names, options
from mlx_kv.cli.policy import PolicyOptions
from mlx_kv.cli.ranks import UNSUPPORTED, RankOptions, check_supported
from mlx_kv.cli.serve import SamplingDefaults, ServerSettings
from mlx_kv.generation.settings import SamplingSettings
from mlx_kv.settings import SettingError, setting, settings_of


@dataclass(frozen=True)
class Group:
    source: str | None = setting(None, option="source", metavar="[-]", help="A place.")
    port: int = setting(8080, option=("--port", "-p"), minimum=1, maximum=9999, metavar="N", help="Port.")
    wait: float | None = setting(None, option="--wait", above=0, default_text="for ever", help="Wait.")
    growth: tuple[int, ...] = setting((1,), option="--growth", words={"one": (1,), "two": (2, 2)}, help="Growth.")
    level: str = setting("low", option="--level", choices=("low", "high"), help="Level.")
    quiet: bool = setting(False, option="--quiet", help="Print less.")
    names: tuple[str, ...] = setting((), option="--name", multiple=True, help="Names.")
    path: Path | None = setting(None, option="--path", kind=Path, help="A path.")
    depth: int = setting(5, option="--depth", minimum=1, default_text="5, or less", help="Depth.")
    inner: int = setting(3, help="Not an option.")


@pytest.fixture
def run() -> Any:
    seen: list[Any] = []

    @click.command()
    @options(Group, "group")
    def one(group: Group) -> None:
        seen[:] = [group, given_options(Group)]

    def call(*arguments: str) -> Any:
        done = CliRunner().invoke(one, arguments)
        return seen if done.exit_code == 0 else done.output

    call.help = CliRunner().invoke(one, ["--help"]).output  # type: ignore[attr-defined]
    return call


def test_a_command_receives_an_instance(run: Any) -> None:
    assert run() == [Group(), {}]
    given = ("-p", "7", "--wait", "1.5", "--growth", "two", "--level", "high", "--quiet", "--name", "a", "--name", "b")
    group, named = run(*given, "--path", "x", "-")
    assert group == Group("-", 7, 1.5, (2, 2), "high", True, ("a", "b"), Path("x"))
    assert named == {
        **{"port": "--port", "wait": "--wait", "growth": "--growth", "level": "--level", "quiet": "--quiet"},
        **{"names": "--name", "path": "--path"},
    }


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (("--port", "0"), "Error: --port 0: give a whole number from 1 to 9,999\n"),
        (("-p", "x"), "Error: --port x: give a whole number from 1 to 9,999\n"),
        (("--port", "1.5"), "Error: --port 1.5: give a whole number from 1 to 9,999\n"),
        (("--wait", "nan"), "Error: --wait nan: give a number above 0\n"),
        (("--growth", "three"), "'three' is not one of 'one', 'two'"),
        (("--level", "mid"), "'mid' is not one of 'low', 'high'"),
    ],
)
def test_bad_values_are_refused_by_the_description(run: Any, given: tuple[str, ...], message: str) -> None:
    assert message in run(*given)


def test_help_follows_from_the_descriptions(run: Any) -> None:
    shown = " ".join(run.help.split())
    assert "[OPTIONS] [-]" in shown
    assert "-p, --port N Port. [default: 8080]" in shown
    assert "Wait. [default: for ever]" in shown
    assert "--growth [one|two] Growth. [default: one]" in shown
    assert "inner" not in shown


def test_some_fields_with_changes() -> None:
    @click.command()
    @options(Group, "group", "level", "port", port={"maximum": 5})
    def one(group: Group) -> None:
        click.echo(f"{group.port} {group.level}")

    assert [param.opts[0] for param in one.params] == ["--level", "--port"]
    assert CliRunner().invoke(one, ["--port", "5"]).output == "5 low\n"
    assert "--port 6: give a whole number from 1 to 5" in CliRunner().invoke(one, ["--port", "6"]).output


# --- names of settings ------------------------------------------------------------------------------------------------


class Recurrent(nn.Module):
    """No layer of it has a budget."""

    def make_cache(self) -> list[Any]:
        return [stock.ArraysCache(2)]


REFUSED: dict[str, tuple[Any, str]] = {
    "bits": (lambda: CachePolicy(bits=7), "--kv-bits 7: a quantised cache has 2, 3"),
    "group": (lambda: CachePolicy(group_size=48), "--kv-group-size 48: choose one of"),
    "both": (
        lambda: CachePolicy(bits=8, codec="mxfp8"),
        "got --kv-bits 8 and --kv-codec mxfp8, which both describe how tensors are stored: give one of them, or "
        "--kv-codec rotated beside --kv-bits",
    ),
    "start": (lambda: CachePolicy(quantized_start=9), "--quantized-kv-start 9, but --kv-bits is not given: give"),
    "window": (lambda: CachePolicy(budget=9, max_kv_size=9), "got a --kv-budget and --max-kv-size, which both"),
    "margin": (lambda: CachePolicy(budget=99, margin=-1), "--kv-margin -1: give a whole number of tokens from 0 up"),
    "share": (
        lambda: CachePolicy(budget=99, layers=[[1], [2]], share="layers"),
        "--kv-layers is a table, but --kv-share layers keeps the same tokens in all of them: use --kv-share layer",
    ),
    "no option": (lambda: CachePolicy(max_rollback=-1), "max_rollback is -1: give"),
    "for budgets": (lambda: CachePolicy(margin=3), "--kv-margin is for a budget, but --kv-budget is not given: give"),
    "no layer": (
        lambda: make_prompt_cache(Recurrent(), CachePolicy(budget=100)),
        "no layer of this model can honour --kv-budget: its caches",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_settings_become_options(case: str) -> None:
    make, message = REFUSED[case]
    with pytest.raises(SettingError) as refused:
        make()
    assert message in message_of(refused.value, group.commands["generate"])


def test_a_command_names_its_own_options() -> None:
    error = SettingError("{keep_recent:is}, {bits:is}, {rows:is}", keep_recent=99, bits=7, rows=0)
    assert message_of(error, group.commands["generate"]) == "--kv-keep-recent 99, --kv-bits 7, rows is 0"
    assert message_of(ValueError("bits is 7"), group.commands["generate"]) == "bits is 7"


def test_options_of_a_command_set_different_settings() -> None:
    """Else an error could name the wrong one."""
    for name in ("generate", "chat", "batch", "cache", "serve", "plan", "inspect"):
        command = group.commands[name]
        fields = [param.field for param in command.params if hasattr(param, "field")]
        assert len(fields) == len(set(fields)), name
        assert option_names(command)["layers"] == "--kv-layers"


GROUPS = (
    *(PolicyOptions, DraftOptions, FormatOptions, SamplingDefaults, ModelOptions, ChatOptions, PromptOptions),
    *(RankOptions, ServerSettings, SamplingSettings),
)


OTHER_NAMES = {"name", "source", "calibration_file", "layers_by_rank"}  # of dataclasses of the command line alone


@pytest.mark.parametrize("kind", GROUPS)
def test_an_option_has_the_name_that_python_uses(kind: type) -> None:
    for name, described in settings_of(kind).items():
        dashed = name.replace("_", "-")
        if described.options and name not in OTHER_NAMES:
            assert {f"--{dashed}", f"--kv-{dashed}"} & set(described.options), name


@pytest.mark.parametrize(
    ("option", "value", "field"),
    [
        ("--kv-residual-length", "64", "residual_length"),
        ("--kv-residual", "64", "residual_length"),
        ("--kv-quantized-start", "64", "quantized_start"),
    ],
)
def test_names_of_python_are_options(option: str, value: str, field: str) -> None:
    @click.command()
    @options(PolicyOptions, "policy", field)
    def one(policy: PolicyOptions) -> None:
        click.echo(getattr(policy, field))

    assert CliRunner().invoke(one, [option, value]).output == f"{value}\n"


def test_names_of_options_are_settings_of_python() -> None:
    assert CachePolicy(bits=4, residual=64) == CachePolicy(bits=4, residual_length=64)
    assert CachePolicy(bits=4, residual=64).settings() == {"bits": 4, "residual_length": 64}
    with pytest.raises(ValueError, match="residual"):
        CachePolicy(bits=4, residual=-1)


@pytest.mark.parametrize("kind", GROUPS)
def test_every_option_is_described_in_one_plain_sentence_or_two(kind: type) -> None:
    for name, described in settings_of(kind).items():
        assert described.help[0].isupper(), name
        assert described.help.endswith((".", "…", "]")), name


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_several_ranks_refuse_what_they_do_not_support(name: str) -> None:
    assert any(param.name == name for each in group.commands.values() for param in each.params)
    check_supported(dict.fromkeys(UNSUPPORTED) | {"lazy_load": False})
    with pytest.raises(click.UsageError, match=f"^--{name.replace('_', '-')} .*.*leave it out$"):
        check_supported({name: 0})
