"""How a server samples where a request does not say: what was given goes before what the model brings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from replaced import replace_work

from mlx_kv.cli import serve as command
from mlx_kv.cli.serve import SamplingDefaults
from mlx_kv.generation.settings import SamplingSettings
from mlx_kv.mlxlm.loading import generation_config

OWN = {"do_sample": True, "temperature": 0.7, "top_k": 20, "top_p": 0.8, "bos_token_id": 1}
NOTHING = SamplingDefaults()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "generation_config.json").write_text(json.dumps(OWN))
    return tmp_path


def test_what_is_given_goes_before_what_the_model_brings(folder: Path) -> None:
    own = SamplingSettings(temperature=0.7, top_k=20, top_p=0.8)
    assert NOTHING.of(str(folder)) == own
    assert SamplingDefaults(temperature=0.0, top_k=5, min_p=0.1).of(str(folder)) == SamplingSettings(0.0, 0.8, 5, 0.1)
    assert SamplingDefaults(top_p=0.9, generation_config="none").of(str(folder)) == SamplingSettings(top_p=0.9)
    assert NOTHING.of("reference") == SamplingSettings(), "the bundled model asks for nothing"


@pytest.mark.parametrize(
    "content", [None, "", "[1]", "{", '{"do_sample": "yes"}', '{"top_p": 1e999, "do_sample": true}']
)
def test_a_model_that_says_nothing_of_use(content: str | None, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "generation_config.json").write_text(content)
    assert NOTHING.of(str(tmp_path)).top_p == 1.0
    assert generation_config("nobody/has-this-one") == {}


def test_options_of_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}
    replace_work(command.serve, lambda **values: seen.update(values), monkeypatch)
    runner = CliRunner()
    assert runner.invoke(command.serve, []).exit_code == 0
    assert seen["sampling"] == NOTHING
    told = ["--temp", "0.5", "--top-p", "0.9", "--top-k", "3", "--min-p", "0.1", "--generation-config", "none"]
    assert runner.invoke(command.serve, told).exit_code == 0
    assert seen["sampling"] == SamplingDefaults(0.5, 0.9, 3, 0.1, "none")
    assert runner.invoke(command.serve, ["--temp", "2.5"]).exit_code == 2
