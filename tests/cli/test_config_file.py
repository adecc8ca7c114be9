"""`--config FILE`: options from TOML, checked before a command runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from replaced import replace_work

from mlx_kv.cli.main import command as group
from mlx_kv.cli.serve import ServerSettings, serve

EXAMPLE = Path(__file__).parent.parent.parent / "examples" / "serve.toml"


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Calls `mlx-kv serve` with a configuration file; returns its groups, or what it prints."""
    seen: list[Any] = []
    groups = ("model", "server", "sampling", "drafts", "policy")
    replace_work(serve, lambda **values: seen.extend(values[name] for name in groups), monkeypatch)

    def call(text: str, *arguments: str, **environment: str) -> Any:
        seen.clear()
        file = tmp_path / "serve.toml"
        file.write_text(text, encoding="utf-8")
        done = CliRunner().invoke(group, ["serve", "--config", str(file), *arguments], env=environment)
        assert done.exit_code == 0 or not seen
        return list(seen) if done.exit_code == 0 else done.output.replace(f"{file}: ", "FILE: ").splitlines()[-1]

    return call


def test_options_of_all_groups_with_dashes_underscores_and_sections(served: Any) -> None:
    model, server, sampling, drafts, policy = served(
        """
        port = 9000
        max_batch_size = 4
        strict = true
        alias = ["a", "b,c"]
        allowed-hosts = "mac.lan"
        memory-limit = "2GB"
        max-token-wait = 1
        chat-template-args = '{"enable_thinking": false}'

        [model]
        adapter-path = "."
        lazy_load = true

        [cache.storage]
        kv-bits = [8, 4]
        kv_growth = "step"
        temp = 0.5
        draft = "suffix"
        """
    )
    assert server == ServerSettings(
        port=9000,
        max_batch_size=4,
        strict=True,
        alias=("a", "b,c"),
        allowed_hosts=("mac.lan",),
        memory_limit=2 * 10**9,
        max_token_wait=1.0,
        chat_template_args={"enable_thinking": False},
    )
    assert (str(model.adapter_path), model.lazy_load, model.name) == (".", True, "reference")
    assert (policy.bits, type(policy.growth).__name__) == ((8, 4), "FixedStep")
    assert (sampling.temperature, drafts.drafter) == (0.5, "suffix")


def test_the_command_line_wins_then_the_environment_then_the_file(served: Any) -> None:
    text = 'port = 9000\nhost = "10.0.0.1"\napi-key = "from-file"\nmax-queue = 3'
    _, server, *_ = served(text, "--port", "7000")
    assert (server.port, server.host, server.api_key, server.max_queue) == (7000, "10.0.0.1", ("from-file",), 3)
    _, server, *_ = served(text, MLX_KV_API_KEY="from-environment")
    assert server.api_key == ("from-environment",)
    _, server, *_ = served(text, "--api-key", "given", MLX_KV_API_KEY="from-environment")
    assert server.api_key == ("given",)
    assert server.max_body_bytes == ServerSettings().max_body_bytes


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("prot = 1", "FILE: prot is not an option of"),
        ("[network]\nprot = 1", "FILE: prot is not an option of"),
        ("config = 'other.toml'", "FILE: config is not an option of"),
        ("pipeline = true", "FILE: pipeline is not an option of"),
        ("port = 70000", "FILE: port is 70000: give a whole number from 0 to 65,535"),
        ("port = '8080'", "FILE: port is '8080': give a whole number from 0 to 65,535"),
        ("port = 8080.0", "FILE: port is 8080.0: give a whole number"),
        ("port = true", "FILE: port is True: give a whole number"),
        ("max_token_wait = nan", "FILE: max_token_wait is nan: give a number above 0"),
        ("max-queue = -1", "FILE: max-queue is -1: give a whole number from 0 up"),
        ("strict = 'yes'", "FILE: strict is 'yes': give true or false"),
        ("strict = 1", "FILE: strict is 1: give true or false"),
        ("alias = 3", "FILE: alias is 3: give a text, or an array of texts"),
        ("alias = [3]", "FILE: alias is [3]: give a text, or an array of texts"),
        ("host = true", "FILE: host is True: give a text or a number"),
        ("host = 1979-05-27", "give a text or a number"),
        ("log-level = 'LOUD'", "FILE: log-level is 'LOUD': 'LOUD' is not one of"),
        ("memory-limit = '12KB'", "FILE: memory-limit is '12KB': '12KB' is not a number of bytes"),
        ("kv-bits = [8, 4, 2]", "FILE: kv-bits is '8,4,2': '8,4,2': give one, or two with a comma"),
        ("kv-share = 'all'", "FILE: kv-share is 'all': 'all' is not one of"),
        ("api-key-file = '/nowhere'", "FILE: api-key-file is '/nowhere': File '/nowhere' does not exist"),
        ("port = 1\n[more]\nport = 2", "FILE: port is given twice: leave out one of them"),
        ("max-batch-size = 1\ndecode_concurrency = 2", "FILE: decode_concurrency is given twice"),
        ("port = ", "serve.toml is not TOML: "),
    ],
)
def test_mistakes_name_the_file_and_the_key(served: Any, text: str, message: str) -> None:
    found = served(text)
    assert isinstance(found, str)
    assert message in found


def test_what_cannot_be_combined_is_found_as_on_the_command_line(served: Any) -> None:
    assert "--ssl-keyfile needs --ssl-certfile" in served(f"ssl-keyfile = '{Path(__file__)}'")
    assert "--prompt-lookup-min needs --draft ngram" in served("prompt-lookup-min = 2")


def test_a_file_that_is_not_there_or_no_text(tmp_path: Path) -> None:
    binary = tmp_path / "binary.toml"
    binary.write_bytes(b"\xff\xfe")
    for path, message in ((tmp_path / "none.toml", "does not exist"), (binary, "is not TOML")):
        done = CliRunner().invoke(group, ["serve", "--config", str(path)])
        assert (done.exit_code, message in done.output) == (2, True)


def test_other_commands_take_one_too(command: Any, tmp_path: Path) -> None:
    file = tmp_path / "plan.toml"
    file.write_text('model = "reference"\ncontext = [64, 128]\njson = true\nkv-bits = 8\n')
    answer = json.loads(command("plan", "--config", file).out)
    assert answer["contexts"] == [64, 128]
    assert json.loads(command("plan", "--config", file, "--context", "32").out)["contexts"] == [32]
    required = command("batch", "--config", file)
    assert (required.code, "context is not an option of mlx-kv batch" in required.err) == (2, True)


def test_the_example_serves(served: Any) -> None:
    _, server, sampling, _, policy = served(EXAMPLE.read_text(encoding="utf-8"))
    assert (server.max_batch_size, policy.bits, sampling.temperature) == (32, 8, 0.7)
