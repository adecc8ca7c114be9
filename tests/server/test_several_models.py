"""Several models in one server, under one memory limit: each answers as alone, and weights come and go as needed."""

from __future__ import annotations

import contextlib
import itertools
import random
import re
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import click
import mlx.core as mx
import pytest
from serving import PLENTY, SOURCE, Running, cached, check_error, running_models

from mlx_kv import CachePolicy, PromptStore
from mlx_kv.bundled import model_path
from mlx_kv.cli import serve
from mlx_kv.cli.main import command
from mlx_kv.mlxlm.loading import load, release_weights
from mlx_kv.server.json_http import ApiError
from mlx_kv.server.rows import Models, WorkerSettings
from mlx_kv.server.served import ModelTable, Served
from mlx_kv.server.worker import Worker

SIZES = {"reference": 16_000_000, "other": 16_000_000, "draft": 3_475_968}  # bytes
OTHER: dict[str, Any] = {"bundled": "reference", "policy": CachePolicy(budget=64)}
LIMIT = SIZES["reference"] + SIZES["draft"] + 10_000_000
PROMPT = SOURCE[:600]


def model(
    name: str,
    limit: int | None = None,
    policy: CachePolicy | None = None,
    bundled: str = "",
    networks: dict[str, Any] | None = None,
    open_store: Callable[[Models], PromptStore] | None = None,
    draft: bool = False,
    **options: Any,
) -> Served:
    """A bundled model whose weights are read with its first request."""
    path, known = model_path(bundled or name), {} if networks is None else networks

    def models() -> Models:
        if path not in known:
            known[path] = load(path, lazy=True)
        return Models(*known[path], load(model_path("draft"), lazy=True)[0] if draft else None)

    settings = WorkerSettings(policy or CachePolicy(), 4, prompt_memory_bytes=PLENTY, memory_limit=limit)
    settings = WorkerSettings(**{**vars(settings), "open_store": open_store})

    def release(network: Any) -> None:
        own = path if known and network is known[path][0] else model_path("draft")
        release_weights(network, lambda: load(own, lazy=True)[0])

    return Served(name, models, settings, release=release, lazy=True, **options)


def ask(server: Running, name: str, prompt: str = PROMPT, tokens: int = 12, **more: Any) -> str:
    return server.complete(prompt, tokens, model=name, **more)


def states(server: Running) -> dict[str, str]:
    return {each["name"]: each["state"] for each in server.http.get("/memory").json()["models"]}


@pytest.fixture(scope="module")
def alone() -> dict[str, str]:
    """What each model says without others."""
    said = {}
    for name in SIZES:
        with running_models([model(name, **(OTHER if name == "other" else {}))]) as server:
            said[name] = ask(server, name)
    return said


def three() -> list[Served]:
    return [model("reference", LIMIT), model("other", LIMIT, default=False, **OTHER), model("draft", LIMIT)]


@pytest.fixture
def several() -> Iterator[Running]:
    """Three models, of which the limit holds the largest and one of the others beside some rows."""
    with running_models(three()) as one:
        yield one


def test_names_choose_and_each_says_what_it_says_alone(several: Running, alone: dict[str, str]) -> None:
    assert len(set(alone.values())) == 3
    for name in (*SIZES, *reversed(SIZES)):
        assert ask(several, name) == alone[name]
    assert ask(several, "default_model") == several.complete(PROMPT, 12) == alone["reference"]
    error = check_error(several.post(model="gpt-9", prompt="x"), 404)
    assert "use 'reference', 'other', 'draft'" in error["message"]
    listed = {each["id"]: each for each in several.http.get("/v1/models").json()["data"]}
    assert listed.keys() >= SIZES.keys()
    assert {name: listed[name]["bytes"] for name in SIZES} == SIZES
    tags = [each["name"] for each in several.http.get("/api/tags").json()["models"]]
    assert set(SIZES) <= set(tags)
    assert several.http.get("/v1/models/draft").json()["display_name"] == "draft"
    shown = several.post("/api/show", model="draft").json()["details"]["parameter_size"]
    assert shown != several.post("/api/show", model="reference").json()["details"]["parameter_size"]


def test_weights_that_were_not_used_for_longest_go_and_prompts_stay(several: Running, alone: dict[str, str]) -> None:
    before = mx.get_active_memory()
    assert set(states(several).values()) == {"unloaded"}
    for name in ("reference", "draft"):
        ask(several, name)
    assert states(several) == {"reference": "loaded", "draft": "loaded", "other": "unloaded"}
    ask(several, "other")
    assert states(several) == {"reference": "unloaded", "draft": "loaded", "other": "loaded"}
    assert several.worker.limit.weights <= several.worker.limit.limit  # type: ignore[operator]
    answer = several.post(model="reference", prompt=PROMPT, max_tokens=12).json()
    assert answer["choices"][0]["text"] == alone["reference"]
    assert cached(answer) > 100
    held = sum(each.nbytes for served in several.worker.served for each in served.weights if each.held)
    assert held == SIZES["reference"]  # both others, the smaller one first
    several.wait_until(lambda: several.worker.monitor.snapshot.active_memory < before + held + 10_000_000)
    loads = several.metrics.registry.get_sample_value("mlx_kv_model_loads_total", {"model": "reference"})
    assert loads == 2


def test_prompts_that_fell_out_of_memory_are_found_on_the_disk(tmp_path: Path) -> None:
    opened = {"open_store": lambda models: PromptStore(tmp_path)}
    models = [model("reference", LIMIT, **opened), model("other", LIMIT, **OTHER, **opened)]
    with running_models(models) as server:
        wanted = ask(server, "reference")
        server.wait_until_kept()
        for served in server.worker.served:
            server.in_worker(lambda served=served: served.rows.prefixes.memory.shrink(0))  # type: ignore[misc]
        ask(server, "other")
        assert states(server) == {"reference": "unloaded", "other": "loaded"}
        answer = server.post(model="reference", prompt=PROMPT, max_tokens=12).json()
        assert (answer["choices"][0]["text"], cached(answer) > 100) == (wanted, True)


def test_a_model_that_is_pinned_stays_and_what_does_not_fit_beside_it_is_refused_in_words() -> None:
    with running_models([model("reference", LIMIT, pinned=True), model("other", LIMIT, **OTHER)]) as server:
        assert states(server)["reference"] == "loaded"  # from the start
        answer = server.post(model="other", prompt="import", max_tokens=3)
        assert answer.headers["retry-after"]
        message = check_error(answer, 503)["message"]
        assert "the weights of other take" in message
        assert "reference (16 MB, pinned)" in message
        assert ask(server, "reference")
        assert check_error(server.post("/models/load", model="other"), 503)["code"] == "model_not_changed"
        assert "is pinned" in server.post("/api/chat", model="reference", messages=[], keep_alive=0).text
        assert check_error(server.post("/models/unload", model="reference"), 503)["code"] == "model_not_changed"
        assert states(server) == {"reference": "loaded", "other": "unloaded"}
        assert server.post("/api/generate", model="other", prompt="", keep_alive=-1).status_code == 503
        assert ask(server, "reference")  # what could not be loaded is not pinned


def test_models_are_loaded_and_unloaded_on_demand() -> None:
    with running_models([model("reference"), model("draft")]) as server:
        assert server.post("/models/load", model="draft").json() == {"success": True}
        server.wait_until(lambda: states(server) == {"reference": "unloaded", "draft": "loaded"})
        assert server.post("/models/unload", model="draft").json() == {"success": True}
        assert states(server)["draft"] == "unloaded"
        for keep_alive, state in ((-1, "loaded"), ("0s", "unloaded"), ("5m", "loaded"), (0, "unloaded")):
            answer = server.post("/api/generate", model="draft", prompt="", keep_alive=keep_alive).json()
            assert answer["done_reason"] == ("unload" if state == "unloaded" else "load")
            server.wait_until(lambda state=state: states(server)["draft"] == state)  # type: ignore[misc]
        answer = server.post(
            "/api/generate", model="draft", prompt="import", keep_alive="1h", options={"num_predict": 2}
        )
        assert answer.status_code == 200
        (running,) = server.http.get("/api/ps").json()["models"]
        assert running["name"] == "draft"
        assert running["expires_at"] < "2100"
        server.post("/api/generate", model="draft", prompt="import", keep_alive=0.2, options={"num_predict": 2})
        server.wait_until(lambda: states(server)["draft"] == "unloaded")
        assert "is not a duration" in server.post("/api/generate", model="draft", prompt="", keep_alive="soon").text


def test_one_model_under_two_policies_has_its_weights_once() -> None:
    networks: dict[str, Any] = {}
    both = [
        model("plain", networks=networks, bundled="reference"),
        model("small", networks=networks, bundled="reference", policy=CachePolicy(budget=64)),
    ]
    with running_models(both) as server:
        said = {ask(server, name, tokens=40) for name in ("plain", "small")}
        assert len(said) == 2
        assert server.worker.limit.weights == server.worker.default.nbytes
        rows = {each["model"]: each["policy"] for each in ask_both(server)}
        assert rows == {"plain": "all tokens as they are", "small": "budget 64"}
        server.wait_until_empty()
        assert server.post("/models/unload", model="small").json() == {"success": True}
        assert set(states(server).values()) == {"unloaded"}


def ask_both(server: Running) -> list[dict[str, Any]]:
    """The rows of a moment in which both models answer."""
    with ThreadPoolExecutor(2) as pool:
        asked = [pool.submit(ask, server, name, tokens=300) for name in ("plain", "small")]
        rows: list[dict[str, Any]] = []
        server.wait_until(lambda: len({each["model"] for each in remember(rows, server)}) == 2)
        assert all(each.result() for each in asked)
    return rows


def remember(rows: list[dict[str, Any]], server: Running) -> list[dict[str, Any]]:
    rows[:] = [each for each in server.http.get("/memory").json()["rows"] if each["state"] != "waiting"]
    return rows


def test_weights_that_cannot_be_read_end_their_own_requests_alone(
    several: Running, alone: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(nbytes: int) -> None:
        raise OSError("the file is gone")

    weights = several.worker.served[1].weights[0]
    monkeypatch.setattr(weights, "read", broken)
    assert "the file is gone" in check_error(several.post(model="other", prompt="x", max_tokens=1), 503)["message"]
    assert ask(several, "reference") == alone["reference"]
    monkeypatch.undo()
    assert ask(several, "other") == alone["other"]


def test_who_waits_for_weights_does_not_keep_others_from_a_row(
    several: Running, alone: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ask(several, "reference")
    weights, go_on = several.worker.served[2].weights[0], threading.Event()
    read = weights.read
    monkeypatch.setattr(weights, "read", lambda nbytes: read(1) if go_on.is_set() else None)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(ask, several, "draft")
        several.wait_until(lambda: states(several)["draft"] == "loading")
        assert ask(several, "reference", "import", 3)
        assert not waiting.done()
        go_on.set()
        assert waiting.result() == alone["draft"]


def test_tokens_come_while_another_model_is_read(several: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlx_kv.server.worker.PIECE", 2**18)
    ask(several, "reference", "import", 1)
    weights = several.worker.served[2].weights[0]
    with ThreadPoolExecutor(1) as pool:
        long = pool.submit(ask, several, "reference", tokens=200)
        several.wait_until(lambda: bool(several.rows.decoding))
        before = several.metrics.total("generated_tokens")
        ask(several, "draft", tokens=1)
        assert weights.loaded
        assert several.metrics.total("generated_tokens") > before + 4  # one token for each piece
        assert long.result()


def test_a_model_whose_drafter_alone_is_in_memory_is_loaded_anew(alone: dict[str, str]) -> None:
    """Weights of a draft model are freed by themselves; nothing is being read then."""
    plain, drafted = model("reference", LIMIT), model("drafted", LIMIT, bundled="reference", draft=True)
    with running_models([plain, drafted, model("other", LIMIT, **OTHER)]) as server:
        said = ask(server, "drafted")
        assert ask(server, "other")
        assert [each.held for each in drafted.weights].count(True) <= 1
        assert not server.worker._reading
        assert ask(server, "reference") == alone["reference"]
        assert ask(server, "drafted") == said


def test_timers_begin_with_a_load() -> None:
    seconds = [0.0]
    with running_models([model(name, clock=lambda: seconds[0]) for name in ("reference", "draft")]) as server:

        def wait(more: float) -> str:
            seconds[0] += more
            for _ in range(5):  # turns of its loop, of which some see the time
                server.in_worker(lambda: None)
            return states(server)["draft"]

        for _ in range(2):
            answer = server.post("/api/generate", model="draft", prompt="", keep_alive=60).json()
            assert answer["done_reason"] == "load"
            assert [wait(0), wait(59)] == ["loaded", "loaded"]
            seconds[0] += 2
            server.wait_until(lambda: wait(0) == "unloaded")
            assert wait(70) == "unloaded"
        assert "longer than a year" in server.post("/api/generate", model="draft", prompt="", keep_alive=1e10).text
        assert server.post("/api/generate", model="draft", prompt="", keep_alive="99999999h").status_code == 200
        assert server.http.get("/api/ps").status_code == 200
        assert server.metrics.total("engine_failures") == 0


def test_a_failure_ends_rows_of_its_own_model_alone(
    several: Running, alone: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with ThreadPoolExecutor(2) as pool:
        good = pool.submit(ask, several, "reference", PROMPT, 200)
        several.wait_until(lambda: bool(several.rows.decoding))
        rows = several.worker.served[2].rows

        def broken(*arguments: Any) -> bool:
            monkeypatch.undo()
            raise KeyError("rows")

        monkeypatch.setattr(rows, "outgrow", broken)
        check_error(several.post(model="draft", prompt=PROMPT, max_tokens=20), 500)
        assert ask(several, "draft") == alone["draft"]
        assert good.result().startswith(alone["reference"])


def test_random_requests_for_models_that_do_not_fit_together(alone: dict[str, str]) -> None:
    """Hang-ups, unloads and clients side by side; at the end nothing is left but weights."""
    draw, names, before = random.Random(5), list(SIZES), mx.get_active_memory()
    prompts = [SOURCE[start : start + 300] for start in (0, 200, 400)]
    with running_models(three()) as server:
        wanted = {pair: ask(server, *pair) for pair in itertools.product(names, prompts)}

        def client(seed: int) -> None:
            own = random.Random(seed)
            for _ in range(12):
                name, prompt, chance = own.choice(names), own.choice(prompts), own.random()
                if chance < 0.15:
                    server.post("/models/unload", model=name)  # refused while it answers
                elif chance < 0.3:
                    body = {"model": name, "prompt": prompt, "max_tokens": 200, "stream": True}
                    with server.http.stream("POST", "/v1/completions", json=body) as answer:
                        next(answer.iter_bytes())
                else:
                    assert ask(server, name, prompt) == wanted[name, prompt]

        with ThreadPoolExecutor(4) as pool:
            for each in [pool.submit(client, draw.random()) for _ in range(4)]:
                each.result()
        server.wait_until_empty()
        assert all(not served.rows.active for served in server.worker.served)
        held = sum(served.nbytes for served in server.worker.served if served.state == "loaded")
        kept = sum(served.rows.prefixes.memory.nbytes for served in server.worker.served)
        server.wait_until(lambda: server.worker.monitor.snapshot.active_memory < before + held + kept + 2**20)
        assert server.metrics.total("engine_failures") == 0


def test_names_that_two_models_have() -> None:
    with pytest.raises(ValueError, match="two models are called 'draft'"):
        ModelTable([model("draft"), model("draft")])
    table = ModelTable([model("reference"), model("draft", aliases=["small", "*"])])
    assert [table.find(name).names.name for name in ("small", "small:latest", "anything", None, 5)] == [
        *("draft", "draft", "draft", "reference", "reference")
    ]
    with pytest.raises(ApiError, match="use 'reference', 'draft'"):
        ModelTable([model("reference"), model("draft")]).find("anything")


def test_a_memory_limit_below_a_model_is_refused_at_the_start() -> None:
    worker = Worker([model("draft", 4_000_000), model("reference", 4_000_000)])
    with pytest.raises(ValueError, match=r"a memory limit of 4\.0 MB leaves nothing for rows"):
        worker.start()


def test_arrays_of_weights_come_back_after_they_were_freed() -> None:
    served = model("draft")
    with running_models([served]) as server:
        first = ask(server, "draft")
        before = time.monotonic()
        held = mx.get_active_memory()
        server.in_worker(lambda: server.worker.unload(served) and None)
        assert mx.get_active_memory() < held - SIZES["draft"] + 2**16
        assert ask(server, "draft") == first
        assert served.used >= before


# --- the command ------------------------------------------------------------------------------------------------------


def setups(monkeypatch: pytest.MonkeyPatch, *words: str) -> list[serve.ModelSetup]:
    """The models of `mlx-kv serve` with these words; nothing is loaded."""
    made: list[serve.ModelSetup] = []

    def served(self: serve.ModelSetup, *rest: Any) -> Served:
        made.append(self)
        return Served(self.name, lambda: Models(None, None))  # type: ignore[arg-type]

    monkeypatch.setattr(serve.ModelSetup, "served", served)
    monkeypatch.setattr("mlx_kv.server.run.serve", lambda *arguments: 0)
    with contextlib.suppress(SystemExit):
        command(["serve", *words], standalone_mode=False)
    return made


def test_models_of_the_command_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (only,) = setups(monkeypatch)
    assert (only.name, only.model.name) == ("reference", "reference")
    both = setups(monkeypatch, "--model", "draft", "--model", "reference", "--kv-bits", "8", "--alias", "a,b")
    assert [(each.name, each.policy.bits, each.table.alias) for each in both] == [
        ("draft", 8, ("a,b",)),
        ("reference", 8, ()),
    ]
    for name in ("one", "two", "none"):
        (tmp_path / name).mkdir()
        if name != "none":
            (tmp_path / name / "config.json").write_text("{}")
    names = [each.name for each in setups(monkeypatch, "--models-dir", str(tmp_path))]
    assert names == [str(tmp_path / "one"), str(tmp_path / "two")]
    with pytest.raises(click.UsageError, match=r"has no directory with a config\.json"):
        setups(monkeypatch, "--models-dir", str(tmp_path / "none"))
    for name in ("none/three", "one/draft"):  # a publisher's model; what belongs to a model is none of its own
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
    names = [each.name for each in setups(monkeypatch, "--models-dir", str(tmp_path))]
    assert names == [str(tmp_path / name) for name in ("none/three", "one", "two")]


def test_the_configuration_of_the_operators_page_is_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file, keys = tmp_path / "serve.toml", tmp_path / "keys"
    keys.write_text("one\ntwo\n")
    page = (Path(__file__).parents[2] / "docs" / "operate.md").read_text(encoding="utf-8")
    (text,) = re.findall(r"^```toml\n(.*?)^```$", page.replace("/etc/mlx-kv/keys", str(keys)), re.M | re.S)
    file.write_text(text.replace("/opt/models/qwen3-coder-30b-a3b-4bit", "reference"))
    (coder,) = setups(monkeypatch, "--config", str(file))
    assert (coder.name, coder.table.pin, coder.table.alias) == ("coder", True, ("*",))


def test_models_of_a_configuration_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "serve.toml"
    file.write_text(
        "kv-bits = 8\nunload-after = 60\n[models.coder]\npath = 'reference'\naliases = ['code', 'sonnet']\npin = true\n"
        "kv-budget = 256\ntemp = 0.5\n[models.small]\nmodel = 'draft'\nttl = 5.0\nkv-bits = 4\ndraft = 'ngram'\n"
        "chat-template-args = '{\"enable_thinking\": false}'\n"
    )
    coder, small = setups(monkeypatch, "--config", str(file))
    assert (coder.name, coder.model.name, coder.table.alias) == ("coder", "reference", ("code", "sonnet"))
    assert (coder.table.pin, coder.table.ttl, small.table.pin, small.table.ttl) == (True, 60.0, False, 5.0)
    assert (coder.policy.bits, coder.policy.budget, small.policy.bits, small.policy.budget) == (8, 256, 4, None)
    assert (coder.sampling.temperature, small.sampling.temperature) == (0.5, None)
    assert (coder.drafts.drafter, small.drafts.drafter) == (None, "ngram")
    assert small.table.chat_template_args == {"enable_thinking": False}
    assert all(each.model.lazy_load for each in setups(monkeypatch, "--config", str(file), "--lazy-load"))
    assert [each.name for each in setups(monkeypatch, "--config", str(file), "--model", "recall")] == [
        *("recall", "coder", "small")
    ]


@pytest.mark.parametrize(
    ("content", "error"),
    [
        ("[models.a]\nkv-bits = 8\n", r"\[models.a\] has no path"),
        ("[models.a]\npath = 'draft'\nport = 8\n", r"\[models.a\]: port is not an option"),
        ("[models.a]\npath = 'draft'\nkv-bits = 9\n", "bits"),
        ("models = 3\n", r"models is no table of tables: write \[models.NAME\]"),
        ("[models.a]\npath = 'draft'\n[models.b]\npath = 'draft'\naliases = ['a']\n", "two models are called 'a'"),
    ],
)
def test_tables_that_say_nothing_sensible(
    content: str, error: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "serve.toml"
    file.write_text(content)
    monkeypatch.setattr("mlx_kv.server.run.serve", lambda *arguments: 0)
    with pytest.raises(click.UsageError, match=error):
        command(["serve", "--config", str(file)], standalone_mode=False)


def test_every_field_works_the_same_whichever_model_answers(several: Running) -> None:
    body: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 10, "n": 2, "seed": 3, "temperature": 1, "logprobs": 2}
    bodies = [body, {"prompt": PROMPT, "max_tokens": 10, "regex": "[a-c]{4}"}, {"prompt": [[1, 2, 3]], "max_tokens": 3}]
    with running_models([model("draft")]) as single:
        for each in bodies:
            here = several.post(model="draft", **each).json()["choices"]
            assert here == single.post(model="draft", **each).json()["choices"]
