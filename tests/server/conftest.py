"""A server that tests share: each begins and ends with nothing in it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import Any

import pytest
from reasoning_server import claude as claude
from reasoning_server import reasoner as reasoner
from reasoning_server import says as says
from serving import Running, running

from mlx_kv.server.api import Limits


@pytest.fixture(scope="session")
def server() -> Iterator[Running]:
    with running(limits=Limits(body_bytes=50_000, prompt_tokens=1000, queue=16, max_tokens=32)) as one:
        yield one


@pytest.fixture(scope="session")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    program, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if program is None or driver is None:
        pytest.skip("needs Debian's chromium and chromium-driver: apt-get install chromium chromium-driver")
    webdriver = pytest.importorskip("selenium.webdriver", reason="needs selenium: make test-all installs it")
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = program
    switches = ("headless", "no-sandbox", "disable-gpu", "disable-quic", "no-first-run", "disable-sync")
    for switch in (*switches, "disable-background-networking", "disable-component-update"):
        options.add_argument(f"--{switch}")
    options.add_argument(f"--user-data-dir={tmp_path_factory.mktemp('chromium')}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    started = webdriver.Chrome(options=options, service=Service(driver))
    yield started
    started.quit()


@pytest.fixture
def browser(chromium: Any) -> Iterator[Any]:
    """Each test begins with an empty log and leaves no page that asks a server."""
    yield chromium
    chromium.get("about:blank")
    chromium.get_log("browser")
