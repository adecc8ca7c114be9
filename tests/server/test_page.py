"""The page, in a browser: what it shows of rows and of time, in the dark, on a phone, and behind a key."""

from __future__ import annotations

import io
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from serving import LONG, SOURCE, Running, running

from mlx_kv import CachePolicy
from mlx_kv.generation.speculation import DraftSettings
from mlx_kv.server.rows import Rows

PICTURES = os.environ.get("MLX_KV_PICTURES")  # a folder for them; none are left otherwise


def dress(browser: Any, mode: str, width: int) -> None:
    screen = {"width": width, "height": 1400 if width < 500 else 900, "deviceScaleFactor": 1, "mobile": width < 500}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", screen)
    scheme = {"name": "prefers-color-scheme", "value": mode}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})


def asking(browser: Any) -> Callable[[str], Any]:
    return lambda code: browser.execute_script(f"return {code}")


def picture(browser: Any, name: str) -> np.ndarray:
    """What is to be seen, (height, width, 3)."""
    from PIL import Image

    taken = browser.get_screenshot_as_png()
    if PICTURES is not None:
        (Path(PICTURES) / f"{name}.png").write_bytes(taken)
    return np.asarray(Image.open(io.BytesIO(taken)).convert("RGB"))


def has(pixels: np.ndarray, colour: str) -> int:
    """How many pixels have nearly a colour, as CSS says it."""
    wanted = [int(each) for each in colour.removeprefix("rgb(").removesuffix(")").split(",")]
    return int((np.abs(pixels.astype(int) - wanted).max(axis=-1) < 12).sum())


def luminance(colour: str) -> float:
    parts = [int(each) / 255 for each in colour.removeprefix("rgb(").removesuffix(")").split(",")]
    linear = [each / 12.92 if each <= 0.04045 else ((each + 0.055) / 1.055) ** 2.4 for each in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def quiet(browser: Any) -> None:
    """Nothing went wrong, and nothing more is asked of a server that ends."""
    assert [said for said in browser.get_log("browser") if said["level"] == "SEVERE"] == []
    browser.get("about:blank")


CONTRASTS = """(() => {
    const behind = (node) => {
        for (let at = node; at; at = at.parentElement) {
            const colour = getComputedStyle(at).backgroundColor;
            if (!colour.endsWith(", 0)") && colour !== "transparent") return colour;
        }
    };
    return [...document.querySelectorAll("#open *, header *")].filter((node) => node.offsetParent
        && [...node.childNodes].some((child) => child.nodeType === 3 && child.data.trim()))
        .map((node) => [getComputedStyle(node).color, behind(node)]);
})()"""
COLOURS = "Object.fromEntries(['--kept', '--evicted', '--dead', '--paper'].map((name) => [name, resolved(name)]))"


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "width"), [("light", 1200), ("dark", 1200), ("light", 390), ("dark", 390)])
def test_pictures(browser: Any, mode: str, width: int) -> None:
    """All colours of strips and charts are to be seen, texts can be read, nothing is wider than the screen."""
    policy = CachePolicy(budget=128, keep_recent=32)
    with running(policy, drafting=DraftSettings("ngram")) as server, ThreadPoolExecutor(3) as pool:
        dress(browser, mode, width)
        script = asking(browser)
        browser.get(server.url)
        asked = [pool.submit(server.complete, SOURCE[: 400 * n], 500) for n in (1, 2, 3)]
        server.wait_until(lambda: len(script("document.querySelectorAll('.row canvas')")) == 3)
        server.wait_until(lambda: not script("document.getElementById('evicted').textContent").startswith("0"))
        server.wait_until(lambda: max(script("shown ? shown.history.recent.tokens : [0]")) > 0)
        assert script("document.documentElement.scrollWidth <= innerWidth")
        colours, seen = script(COLOURS), picture(browser, f"rows-{mode}-{width}")
        assert has(seen[-40:, :3], colours["--paper"]) > 100  # the edge of the page
        assert (luminance(colours["--paper"]) < 0.1) == (mode == "dark")
        assert has(seen, colours["--evicted"]) > 100
        for colour, behind in script(CONTRASTS):
            light, dark = sorted((luminance(colour), luminance(behind)), reverse=True)
            assert (light + 0.05) / (dark + 0.05) >= 4.5, (colour, behind)
        how = script("document.querySelector('.row .how').textContent")
        assert how.startswith("policy: budget 128")
        assert "nothing drafted" in how or (" drafted now, " in how and " tokens/pass" in how)
        assert script("document.getElementById('recent-number').textContent").endswith(" at most")
        assert all(each.result() for each in asked)
        quiet(browser)


@pytest.mark.slow
@pytest.mark.parametrize("width", [390, 1280])
def test_the_page(browser: Any, width: int) -> None:
    with running(CachePolicy(budget=128, keep_recent=32)) as server, ThreadPoolExecutor(3) as pool:
        dress(browser, "light", width)
        script = asking(browser)
        browser.get(server.url)
        server.wait_until(lambda: "Idle" in script("document.getElementById('list').textContent"))
        assert script("document.getElementById('state').textContent").startswith("idle, up for ")
        assert script("document.getElementById('rate').textContent").startswith("idle")
        picture(browser, f"idle-{width}")
        asked = [pool.submit(server.complete, SOURCE[: 400 * n], 500) for n in (1, 2, 3)]
        server.wait_until(lambda: len(script("document.querySelectorAll('.row canvas')")) == 3)
        assert script("document.getElementById('state').textContent").startswith("answering 3 requests")
        assert "evicted" in script("document.querySelector('.row .what').textContent")
        colours = """(() => {
            const strip = document.querySelector('.row canvas');
            const data = strip.getContext('2d').getImageData(0, 5, strip.width, 1).data, seen = new Set();
            for (let i = 0; i < data.length; i += 4) if (data[i + 3]) seen.add(data.slice(i, i + 3).join());
            return [...seen];
        })()"""
        server.wait_until(lambda: len(script(colours)) >= 3)  # kept, evicted, dead
        assert "tokens/s" in script("document.getElementById('rate').textContent")
        assert all(each.result() for each in asked)
        server.wait_until(lambda: "Idle" in script("document.getElementById('list').textContent"))
        told = script("[shown.generated_tokens, shown.history.since_start.tokens]")
        assert told[0] == sum(told[1]) == 1500
        quiet(browser)


@pytest.mark.slow
def test_tiles_fill_their_rows(browser: Any, server: Running) -> None:
    """At every width, the last row of tiles ends where the first one does."""
    for width in (340, 390, 600, 700, 820, 1000, 1090, 1100, 1200, 1600):
        dress(browser, "light", width)
        script = asking(browser)
        browser.get(server.url)
        server.wait_until(lambda script=script: script("shown !== null"))  # type: ignore[misc]
        right = script("[...document.querySelectorAll('dl div')].map((tile) => tile.getBoundingClientRect().right)")
        assert abs(right[-1] - max(right)) < 1, width
        assert script("document.documentElement.scrollWidth <= innerWidth"), width
        if width in (390, 820, 1200):
            picture(browser, f"tiles-{width}")
    quiet(browser)


@pytest.mark.slow
def test_axes_agree_with_their_captions(browser: Any, server: Running) -> None:
    """Of a server that has run for so long: the left end of the axis is the start, and the middle half of it."""
    script = asking(browser)
    browser.get(server.url)
    server.wait_until(lambda: script("shown !== null"))
    for seconds, whole, half in (
        (1, "1 s", "0.5 s"),
        (7, "7 s", "3.5 s"),
        (90, "1.5 min", "45 s"),
        (300, "5 min", "2.5 min"),
    ):
        found = browser.execute_script(f"""
            const drawn = [], pen = CanvasRenderingContext2D.prototype, fillText = pen.fillText;
            pen.fillText = function (text, ...rest) {{ drawn.push(text); fillText.call(this, text, ...rest); }};
            const tokens = Array({seconds} === 1 ? 1 : {seconds} + 1).fill(50), all = {{ seconds: 1, tokens }};
            const history = {{ recent: {{ seconds: 1, tokens: tokens.slice(-120) }}, since_start: all }};
            const generated_tokens = {seconds} * 50, tokens_per_second = 70;
            showHistory({{ ...shown, seconds: {seconds}, generated_tokens, tokens_per_second, history }});
            pen.fillText = fillText;
            const captions = ["all-title", "recent-number", "all-number"];
            return [drawn, ...captions.map((id) => document.getElementById(id).textContent)];
        """)
        assert found[0][3:6] == ["2 min ago", "1 min ago", "now"]
        assert found[0][9:12] == [f"{whole} ago", f"{half} ago", "now"]
        assert found[1] == f"since the start, {whole} ago"
        assert found[2] == "70.0 now, 70.0 at most"
        assert found[3] == f"50.0 on average, {seconds * 50:,} tokens"
        assert (float(found[0][2]), float(found[0][8])) == (80, 60)  # the tops of the axes
    quiet(browser)


@pytest.mark.slow
def test_prompts_that_are_read_have_a_bar(browser: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which grows, by what really was read."""
    step = Rows.step

    def slowly(rows: Rows) -> None:
        time.sleep(0.3)
        step(rows)

    with running(CachePolicy()) as server, ThreadPoolExecutor(2) as pool:
        dress(browser, "light", 1200)
        script = asking(browser)
        browser.get(server.url)
        monkeypatch.setattr(Rows, "step", slowly)
        asked = [pool.submit(server.complete, LONG[start:], 2) for start in (0, 1000)]
        seen: set[tuple[float, float]] = set()
        while not all(each.done() for each in asked):
            found = script("[...document.querySelectorAll('progress')].map((bar) => [bar.value, bar.max])")
            if any(0 < value < most for value, most in found) and not any(0 < value < most for value, most in seen):
                picture(browser, "reading")
            seen |= {(value, most) for value, most in found}
            time.sleep(0.05)
        assert any(0 < value < most for value, most in seen), seen
        assert all(value <= most for value, most in seen)
        quiet(browser)


@pytest.mark.slow
def test_the_page_asks_for_a_key(browser: Any) -> None:
    with running(keys=("open-sesame",)) as server:
        dress(browser, "light", 390)
        script = asking(browser)

        def says(key: str) -> None:
            browser.execute_script(f"document.getElementById('key').value = '{key}'")
            browser.execute_script("document.getElementById('ask').requestSubmit()")

        def locked() -> bool:
            return bool(script("!document.getElementById('ask').hidden && document.getElementById('open').hidden"))

        def refused() -> str:
            return str(script("document.getElementById('refused').textContent"))

        browser.get(server.url)
        server.wait_until(locked)
        assert script("document.activeElement.id") == "key"
        assert refused() == ""
        picture(browser, "locked")
        says("sesame")
        server.wait_until(lambda: refused() != "")
        assert locked()
        says("open-sesame")
        server.wait_until(lambda: not locked())
        assert script("document.getElementById('model').textContent") == "reference"
        browser.refresh()  # it is known until the tab is closed
        server.wait_until(lambda: script("document.getElementById('model').textContent") == "reference")
        assert not locked()
        browser.execute_script("sessionStorage.clear()")
        browser.get("about:blank")
