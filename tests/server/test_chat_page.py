"""The chat page in a browser: streaming, stop, regenerate, errors, API keys, and its looks."""

from __future__ import annotations

import time
from typing import Any

import pytest
from reasoning_server import changed_tokenizer
from serving import Running, running
from test_page import dress, luminance, picture

from mlx_kv.server.api import CHAT_PAGE, PAGE
from mlx_kv.server.output import Choice, Delta

ANSWER = """Rows that end are **removed**; the `offset` of the others stays:

```python
def trim(rows: list[Row], ended: set[int]) -> list[Row]:
    return [row for number, row in enumerate(rows) if number not in ended]  # a long comment that needs to scroll
```

Then <b>nothing</b> is copied."""


class Page:
    """The chat page in a browser."""

    def __init__(self, browser: Any, server: Running, mode: str = "light", width: int = 1200) -> None:
        self.browser, self.server = browser, server
        browser.get("about:blank")
        dress(browser, mode, width)
        browser.get(f"{server.url}/chat")
        browser.execute_script("sessionStorage.clear()")
        browser.get(f"{server.url}/chat")

    def script(self, code: str) -> Any:
        return self.browser.execute_script(f"return {code}")

    def wait(self, code: str) -> None:
        """Until an expression is true."""
        self.server.wait_until(lambda: bool(self.script(code)))

    def type(self, text: str, where: str = "question") -> None:
        from selenium.webdriver.common.by import By

        if where in ("system", "temperature", "max_tokens"):
            self.browser.execute_script("document.getElementById('settings').open = true")
        self.browser.find_element(By.ID, where).send_keys(text)

    def click(self, text: str) -> None:
        """Clicks a visible button by its text."""
        buttons = "[...document.querySelectorAll('button')].filter((each) => each.offsetParent)"
        assert self.script(f"({buttons}.findLast((each) => each.textContent === '{text}')?.click(), true)")

    def ask(self, question: str) -> str:
        """Sends a question; the answer, once it is complete."""
        count = self.script("turns.length")
        self.type(question + "\n")
        self.wait(f"running === null && turns.length === {count + 2}")
        return str(self.script("turns.at(-1).content"))

    def drop(self, name: str, kind: str) -> None:
        """Drops a file on the page."""
        self.browser.execute_script(f"""
            const dataTransfer = new DataTransfer();
            dataTransfer.items.add(new File(["x"], "{name}", {{ type: "{kind}" }}));
            document.body.dispatchEvent(new DragEvent("drop", {{ dataTransfer, bubbles: true, cancelable: true }}));
        """)

    @property
    def problem(self) -> str:
        return str(self.script("document.getElementById('problem').textContent"))

    def end(self, expected: int = 0) -> None:
        """The browser has logged no errors beyond the expected number of refused requests."""
        logged = [entry for entry in self.browser.get_log("browser") if entry["level"] == "SEVERE"]
        assert len(logged) == expected, logged
        self.browser.execute_script("sessionStorage.clear()")
        self.browser.get("about:blank")


@pytest.fixture
def slowly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each chunk of an answer takes 30 ms."""
    take = Choice.take

    def delayed(self: Choice, chunk: Any) -> Delta:
        time.sleep(0.03)
        return take(self, chunk)

    monkeypatch.setattr(Choice, "take", delayed)


def requests(monkeypatch: pytest.MonkeyPatch, page: Page) -> list[dict[str, Any]]:
    """The bodies that a page sends from now on."""
    seen: list[dict[str, Any]] = []
    handler = page.server.api._handler
    json = handler._json

    async def noted(http: Any) -> Any:
        seen.append(await json(http))
        return seen[-1]

    monkeypatch.setattr(handler, "_json", noted)
    return seen


CONTRASTS = """(() => {
    const behind = (node) => {
        for (let at = node; at; at = at.parentElement) {
            const colour = getComputedStyle(at).backgroundColor;
            if (!colour.endsWith(", 0)") && colour !== "transparent") return colour;
        }
    };
    return [...document.querySelectorAll("body *")].filter((node) => node.offsetParent && !node.disabled
        && [...node.childNodes].some((child) => child.nodeType === 3 && child.data.trim()))
        .map((node) => [getComputedStyle(node).color, behind(node), node.textContent]);
})()"""


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "width"), [("light", 1200), ("dark", 1200), ("light", 390), ("dark", 390)])
def test_pictures(browser: Any, reasoner: Running, says: Any, mode: str, width: int) -> None:
    page = Page(browser, reasoner, mode, width)
    page.wait("document.getElementById('model').textContent === 'reference'")
    picture(browser, f"chat-empty-{mode}-{width}")
    says(f"<think>They ask about rows.</think>{ANSWER}", "Yes.")
    assert page.ask("How are rows removed, and what happens to the offsets of the other rows?") == ANSWER
    page.ask("Is that cheap?")
    picture(browser, f"chat-{mode}-{width}")
    page.type("Answer briefly.", "system")
    page.drop("a.png", "image/png")
    picture(browser, f"chat-settings-{mode}-{width}")
    assert page.script("document.documentElement.scrollWidth <= innerWidth")
    assert page.script("document.querySelector('main').scrollWidth <= document.querySelector('main').clientWidth")
    assert page.script("document.querySelector('pre').scrollWidth > document.querySelector('pre').clientWidth")
    for colour, behind, text in page.script(CONTRASTS):
        light, dark = sorted((luminance(colour), luminance(behind)), reverse=True)
        assert (light + 0.05) / (dark + 0.05) >= 4.5, (colour, behind, text)
    page.end()


@pytest.mark.slow
def test_answers_are_text(browser: Any, reasoner: Running, says: Any) -> None:
    """Markup of answers is shown, never run; code is a block of its own; reasoning is folded away."""
    page = Page(browser, reasoner)
    says(f"<think>Hm.</think>{ANSWER}<img src=x onerror=document.title='run'>")
    page.ask("<i>How</i>?")
    assert page.script("document.querySelector('.user').textContent") == "<i>How</i>?"
    assert page.script("document.querySelectorAll('#log b, #log img, #log i').length") == 0
    assert page.script("document.querySelector('pre').textContent").startswith("def trim(rows")
    assert page.script("document.querySelector('figcaption').firstChild.data") == "python"
    assert page.script(
        "[...document.querySelectorAll('.assistant strong, .assistant .text code')].map((each) => each.textContent)"
    ) == ["removed", "offset"]
    assert page.script(
        "[document.querySelector('.thoughts').open, document.querySelector('.thoughts .text').textContent]"
    ) == [False, "Hm."]
    assert "run" not in page.script("document.title")
    page.end()


@pytest.mark.slow
def test_a_conversation(browser: Any, reasoner: Running, says: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """System prompt and sampling are sent, earlier turns with every question; regenerate and edit replace the last."""
    page = Page(browser, reasoner)
    seen = requests(monkeypatch, page)
    says("One.", "Two.", "Zwei.", "Three.")
    page.click("New chat")
    page.type("Count.", "system")
    page.type("0.5", "temperature")
    page.type("64", "max_tokens")
    assert page.ask("first") == "One."
    assert seen[-1] == {
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": 0.5,
        "max_tokens": 64,
        "messages": [{"role": "system", "content": "Count."}, {"role": "user", "content": "first"}],
    }
    assert page.ask("second") == "Two."
    page.click("Regenerate")
    page.wait("running === null && turns.at(-1).content === 'Zwei.'")
    sent = [(each["role"], each["content"]) for each in seen[-1]["messages"]]
    assert sent == [("system", "Count."), ("user", "first"), ("assistant", "One."), ("user", "second")]
    page.click("Edit question")
    assert page.script("[turns.length, document.getElementById('question').value]") == [2, "second"]
    assert page.ask(" and more") == "Three."
    assert seen[-1]["messages"][-1]["content"] == "second and more"
    note = page.script("document.querySelector('#log > :last-child .note').textContent")
    assert "tokens/s" in note
    assert " cached" in note
    browser.refresh()  # the tab keeps the conversation, and the settings
    page.wait("document.getElementById('model').textContent === 'reference'")
    assert page.script("turns.map((turn) => turn.content)") == ["first", "One.", "second and more", "Three."]
    assert page.script("document.getElementById('system').value") == "Count."
    page.click("New chat")
    assert page.script("[turns.length, document.querySelectorAll('#log > *').length]") == [0, 0]
    page.end()


@pytest.mark.slow
def test_stop(browser: Any, reasoner: Running, slowly: None) -> None:
    """Text appears while it is generated; stop keeps it, and frees the row of the server."""
    page = Page(browser, reasoner)
    page.type("400", "max_tokens")
    page.type("import os\n")
    page.wait("document.querySelector('.assistant.busy')?.textContent.length > 20")
    assert page.script("[document.getElementById('send').hidden, document.getElementById('new').disabled]") == [
        True,
        True,
    ]
    page.type("typed meanwhile\n")  # is neither sent nor lost
    early = page.script("turns.at(-1).content.length")
    page.wait(f"turns.at(-1).content.length > {early}")
    page.click("Stop")
    page.wait("running === null")
    reasoner.wait_until_empty()
    assert page.script("turns.length") == 2
    assert page.script("turns.at(-1).note") == "stopped"
    assert page.script("document.getElementById('question').value").strip() == "typed meanwhile"
    page.end()


@pytest.mark.slow
def test_errors(browser: Any, reasoner: Running, says: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A question without an answer returns to its field; the server's message is shown."""
    page = Page(browser, reasoner)
    says("One.")
    page.drop("a.png", "image/png")
    assert page.problem == "Images cannot be sent: this model reads text only. Describe the image in words."
    page.drop("a.pdf", "application/pdf")
    assert page.problem == "Files cannot be sent: paste their text instead."
    assert page.ask("first") == "One."
    assert page.problem == ""
    page.type("5", "temperature")
    page.type("second\n")
    page.wait("document.getElementById('problem').textContent && running === null")
    assert "temperature" in page.problem
    assert page.script("[turns.length, document.getElementById('question').value]") == [2, "second"]
    page.click("Regenerate")  # fails as well: the answer stays
    page.wait("document.getElementById('problem').textContent && running === null")
    assert page.script("turns.map((turn) => turn.content)") == ["first", "One."]
    page.end(expected=2)


@pytest.mark.slow
def test_an_error_in_the_middle(browser: Any, reasoner: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    page = Page(browser, reasoner)
    take, taken = Choice.take, [0]

    def failing(self: Choice, chunk: Any) -> Delta:
        taken[0] += 1
        if taken[0] > 5:
            raise RuntimeError("broken on purpose")
        return take(self, chunk)

    monkeypatch.setattr(Choice, "take", failing)
    text = page.ask("import os")
    assert text
    assert page.problem == "The answer was cut short: the server failed while it answered: see its log"
    page.end()


@pytest.mark.slow
def test_keys(browser: Any) -> None:
    """The page requests an API key, and keeps it in the tab, as the memory page does."""
    with running(keys=("open-sesame",), change=changed_tokenizer) as server:
        page = Page(browser, server, width=390)
        page.wait("!document.getElementById('ask').hidden")
        assert page.script("[document.getElementById('write').hidden, document.activeElement.id]") == [True, "key"]
        picture(browser, "chat-locked")
        page.type("sesame\n", "key")
        page.wait("document.getElementById('refused').textContent")
        page.type("open-sesame\n", "key")
        page.wait("document.getElementById('ask').hidden")
        page.type("8", "max_tokens")
        assert page.ask("import")
        browser.get(server.url)  # the link to the memory page: no key is requested again
        server.wait_until(lambda: page.script("document.getElementById('model').textContent") == "reference")
        page.end(expected=3)  # two without a key, one with a wrong one


@pytest.mark.slow
def test_touch_screens(browser: Any, reasoner: Running, says: Any) -> None:
    """There, Enter starts a new line, and the button sends."""
    browser.execute_cdp_cmd("Emulation.setTouchEmulationEnabled", {"enabled": True})
    try:
        page = Page(browser, reasoner, width=390)
        says("One.")
        page.wait("matchMedia('(pointer: coarse)').matches")
        page.type("first\nline")
        assert page.script("turns.length") == 0
        page.click("Send")
        page.wait("running === null && turns.length === 2")
        assert page.script("turns[0].content") == "first\nline"
        page.end()
    finally:
        browser.execute_cdp_cmd("Emulation.setTouchEmulationEnabled", {"enabled": False})


def test_the_pages_are_static(server: Running) -> None:
    """Both are one file each, with a policy that lets them connect to this server only; they link to each other."""
    pages = {path: server.http.get(path) for path in ("/", "/chat")}
    for path, file in (("/", PAGE), ("/chat", CHAT_PAGE)):
        assert pages[path].content == file.read_bytes()
        assert "default-src 'none'" in pages[path].headers["content-security-policy"]
        assert "connect-src 'self'" in pages[path].headers["content-security-policy"]
        assert pages[path].headers["x-frame-options"] == "DENY"
    assert 'href="chat"' in pages["/"].text
    assert 'href="./"' in pages["/chat"].text
