"""Why a prefix was not reused: ways in which agents break prefixes, and what log, /memory, metric and header report."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from serving import PLENTY, SOURCE, Running, running

from mlx_kv import CachePolicy
from mlx_kv.server.api import Api, HttpSettings, Limits
from mlx_kv.server.monitor import Reason

# "<role>: text" for each message, after the tools and what an argument adds.
TEMPLATE = (
    "{% if thinks %}thinking is on\n{% endif %}"
    "{% for tool in tools or [] %}tool: {{ tool.function.name }}\n{% endfor %}"
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
SYSTEM = f"Today is Monday. You help with this file.\n{SOURCE[:400]}"
TOOLS = [{"type": "function", "function": {"name": name, "parameters": {}}} for name in ("read_file", "write", "find")]
TURNS = [("system", SYSTEM), ("user", "What does it do?"), ("assistant", "It draws."), ("user", "And then?")]
LATE = [("system", SYSTEM), ("user", "What does it do?" + SOURCE[400:700]), ("user", "And then?")]


def with_template(tokenizer: Any) -> Any:
    tokenizer._tokenizer.chat_template = TEMPLATE
    tokenizer.has_chat_template = True
    return tokenizer


@pytest.fixture(scope="module")
def chats() -> Iterator[Running]:
    with running(prompt_memory_bytes=PLENTY, change=with_template, limits=Limits(max_tokens=2)) as one:
        yield one


@pytest.fixture
def server(chats: Running, caplog: pytest.LogCaptureFixture) -> Running:
    """With an empty prefix cache, and a log of level INFO."""
    caplog.set_level(logging.INFO, "mlx_kv.server")

    def forget() -> None:
        memory = chats.rows.prefixes.memory
        memory.shrink(0)
        memory.evicted._digests.clear()

    chats.in_worker(forget)
    return chats


def chat(server: Running, turns: list[tuple[str, str]], **fields: Any) -> str:
    """Sends a chat; returns the header."""
    messages = [{"role": role, "content": content} for role, content in turns]
    answer = server.post("/v1/chat/completions", messages=messages, **fields)
    assert answer.status_code == 200, answer.text
    server.wait_until_kept()
    cached = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert answer.headers["x-mlx-kv-prefix"] == f"{cached}/{answer.json()['usage']['prompt_tokens']}"
    return answer.headers["x-mlx-kv-prefix"]


def last(server: Running) -> dict[str, Any]:
    """The newest report."""
    return dict(server.http.get("/memory").json()["prefixes"][-1])


def last_line(caplog: pytest.LogCaptureFixture) -> str:
    """Of the log: why the last prompt was not reused."""
    return [line for each in caplog.records if "tokens reused: " in (line := each.getMessage())][-1]


def evict(server: Running) -> None:
    server.in_worker(lambda: server.rows.prefixes.memory.shrink(0))


DRILL: dict[str, tuple[list[tuple[str, str]], dict[str, Any], list[tuple[str, str]], dict[str, Any], str, str, str]] = {
    # What is sent first, what is sent then, and of the difference: the end of the text before, and both beginnings.
    "a date in the system prompt": (
        TURNS, {}, [("system", SYSTEM.replace("Monday", "Friday")), *TURNS[1:]], {}, "Today is ", "Friday.", "Monday.",
    ),
    "tools in another order": (
        TURNS, {"tools": TOOLS}, TURNS, {"tools": TOOLS[::-1]}, "tool: ", "find", "read_file",
    ),
    "a message injected early": (
        LATE, {}, [LATE[0], ("system", "Note: be brief."), *LATE[1:]], {}, "\n", "system: Note", "user: What",
    ),
    "history trimmed at its beginning": (
        LATE, {}, [LATE[0], LATE[2]], {}, "user: ", "And then?", "What does",
    ),
    "another system prompt": (
        TURNS, {}, [("system", "Be brief. " + SYSTEM), *TURNS[1:]], {}, "system: ", "Be brief.", "Today is",
    ),
    "trailing whitespace": (
        LATE, {}, [(LATE[0][0], SYSTEM + "  "), *LATE[1:]], {}, "", "  \n", "\n",
    ),
    "other arguments for the template": (
        TURNS, {}, TURNS, {"chat_template_kwargs": {"thinks": True}}, "", "thinking", "system:",
    ),
    "an answer that was rewritten": (
        [*LATE[:2], ("assistant", "It draws a line."), LATE[2]], {},
        [*LATE[:2], ("assistant", "It draws a plot."), LATE[2]], {}, "It draws a ", "plot", "line",
    ),
}  # fmt: skip


@pytest.mark.parametrize("way", DRILL)
def test_a_difference_is_located_with_text_on_both_sides(
    server: Running, caplog: pytest.LogCaptureFixture, way: str
) -> None:
    first, options, second, changed, before, here, there = DRILL[way]
    counter = server.metrics.prefix_shortfalls.labels(Reason.DIFFERS)
    chat(server, first, **options)
    counted = counter._value.get()
    reused, _, total = chat(server, second, **changed).partition("/")
    report = last(server)
    assert report["reason"] == "differs"
    assert (report["reused_tokens"], report["prompt_tokens"]) == (int(reused), int(total))
    assert report["reused_tokens"] == (report["offered_tokens"] if report["offered_tokens"] >= 64 else 0)
    texts = report["difference"]
    # A difference begins with the token that has it, so its text may begin with a part of what is in common.
    common = next(i for i, (a, b) in enumerate(zip(texts["prompt"], texts["cached"], strict=False)) if a != b)
    shared = texts["before"] + texts["prompt"][:common]
    assert (texts["before"] + texts["prompt"]).startswith(shared)
    assert max(map(len, texts.values())) <= 40
    whole, other = texts["before"] + texts["prompt"], texts["before"] + texts["cached"]
    assert before + here[:20] in whole
    assert before + there[:20] in other
    line = last_line(caplog)
    assert f"{reused} of {total} prompt tokens reused: differs from a cached prompt at token " in line
    assert repr(texts["prompt"]) in line
    assert repr(texts["cached"]) in line
    assert counter._value.get() == counted + 1


def test_a_short_prompt(server: Running, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        assert chat(server, [("user", "Hello")]).startswith("0/")
        assert last(server)["reason"] == "below_64_tokens"
    assert last_line(caplog).endswith("prompts of up to 64 tokens are not reused")


def test_an_evicted_prompt(server: Running, caplog: pytest.LogCaptureFixture) -> None:
    total = int(chat(server, LATE).partition("/")[2])
    evict(server)
    chat(server, [("user", "Another one " + SOURCE[500:800])])  # begins alike, with few tokens
    assert chat(server, LATE).startswith("0/")
    report = last(server)
    assert report["reason"] == "evicted"
    assert total - 64 < report["offered_tokens"] <= total
    assert "or more were cached and evicted: raise --prompt-memory-bytes" in last_line(caplog)


def test_nothing_kept_and_nothing_lost(server: Running, caplog: pytest.LogCaptureFixture) -> None:
    chat(server, LATE)
    assert last(server)["reason"] == "none_kept"
    assert last_line(caplog).endswith("no prompt is cached")
    caplog.clear()
    total = int(chat(server, LATE).partition("/")[2])
    assert last(server)["reason"] is None
    assert last(server)["reused_tokens"] == total - 1
    assert not [each for each in caplog.records if "tokens reused" in each.getMessage()]


def test_a_stream_has_the_header(server: Running) -> None:
    prompt = SOURCE[:500]
    server.post(prompt=prompt)
    server.wait_until_kept()
    with server.http.stream("POST", "/v1/completions", json={"prompt": prompt, "stream": True}) as answer:
        reused, _, total = answer.headers["x-mlx-kv-prefix"].partition("/")
        answer.read()
    assert int(reused) == int(total) - 1 > 64


@pytest.mark.slow
def test_the_page_lists_what_was_not_reused(server: Running, browser: Any) -> None:
    first, _, second, *_ = DRILL["a date in the system prompt"]
    chat(server, first)
    chat(server, [(second[0][0], "Today is <b>Friday</b>." + SYSTEM[16:]), *second[1:]])
    browser.get(server.url)
    server.wait_until(lambda: "Friday" in browser.find_element("id", "prefixes").text)
    newest = browser.find_element("id", "prefixes").find_elements("tag name", "li")[0].text
    assert f"#{last(server)['number']}: 0 of " in newest
    assert "differs from a cached prompt at token " in newest
    assert "<b>Friday</b>" in newest
    assert "Monday" in newest


# --- privacy ----------------------------------------------------------------------------------------------------------


def test_texts_are_reported_where_all_requests_have_one_key(chats: Running) -> None:
    for keys, allowed in (((), True), (("a",), True), (("a", "b"), False)):
        Api(chats.worker, HttpSettings(keys=keys))
        assert chats.worker.monitor.prefixes.allows_text == allowed
    chats.worker.monitor.prefixes.allows_text = True


@pytest.mark.parametrize("case", ["private", "several keys", "log level WARNING"])
def test_no_text_leaks(server: Running, caplog: pytest.LogCaptureFixture, case: str) -> None:
    reports, private = server.worker.monitor.prefixes, {"cache": {"keep": False}} if case == "private" else {}
    reports.allows_text, allowed = case != "several keys", reports.allows_text
    if case == "log level WARNING":
        caplog.set_level(logging.WARNING, "mlx_kv.server")
    try:
        chat(server, TURNS)
        chat(server, DRILL["a date in the system prompt"][2], **private)
    finally:
        reports.allows_text = allowed
    assert last(server)["reason"] == "differs"
    assert last(server)["offered_tokens"] > 0
    assert last(server)["difference"] is None
    assert "Monday" not in caplog.text
    assert "Friday" not in caplog.text


def test_caches_that_cannot_be_trimmed(caplog: pytest.LogCaptureFixture) -> None:
    """A budget has evicted tokens of the answer, so the caches can't go back into it."""
    caplog.set_level(logging.INFO, "mlx_kv.server")
    with running(CachePolicy(budget=96), prompt_memory_bytes=PLENTY) as server:
        answer = server.post(prompt=SOURCE[:400], max_tokens=200)
        server.wait_until_kept()
        entries = server.rows.prefixes.memory._table.entries().values()
        tokens = np.frombuffer(max(entries, key=len).tokens, ">u4").tolist()
        assert len(tokens) > answer.json()["usage"]["prompt_tokens"] + 150
        server.post(prompt=tokens[:-50], max_tokens=2)
        report = last(server)
    assert report["reason"] == "not_trimmable"
    assert report["offered_tokens"] == len(tokens) - 50 > report["reused_tokens"]
    assert last_line(caplog).endswith("cached, but caches of this policy cannot be trimmed back to them")
