"""Fixtures that open the page in a browser: one Chromium and one server for all tests of a pytest worker.

A test is a coroutine marked `pytest.mark.asyncio(loop_scope="session")` that uses `open_page`:

    page = await open_page("#tab=curves&runs=20260101-000000-first", width=390)

`runs_folder` has the runs that are served. A test fails if its page writes to the console, or sends a request to
another server.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
import pytest_asyncio
from viewer.page_helpers import OpenPage, serving, until, write_first_and_second

CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-proxy-server",
]


@pytest.fixture(scope="session")
def runs_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with the runs `FIRST` and `SECOND`. Runs added by tests are served, too."""
    folder = tmp_path_factory.mktemp("viewed") / "runs"
    write_first_and_second(folder)
    return folder


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def viewer_url(runs_folder: Path) -> AsyncGenerator[str]:
    async with serving(runs_folder) as url:
        yield url


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def browser() -> AsyncGenerator[Any]:
    if CHROMIUM is None:
        pytest.skip("Chromium is not installed: apt-get install chromium, or set the variable CHROMIUM to its path")
    playwright = pytest.importorskip(
        "playwright.async_api", reason="playwright is not installed: pip install 'titan-rl[dev]'"
    )
    async with playwright.async_playwright() as driver:
        found = await driver.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield found
        await found.close()


@pytest_asyncio.fixture(loop_scope="session")
async def open_page(browser: Any, viewer_url: str, runs_folder: Path) -> AsyncGenerator[OpenPage]:
    """Open the page at a hash, or a file: `await open_page("#tab=curves", width=390, color_scheme="dark")`."""
    contexts: list[Any] = []
    said: list[str] = []
    asked: list[str] = []

    def note(message: Any) -> None:
        path = unquote(urlsplit(message.location.get("url", "")).path)
        run = path.split("/")[3] if path.startswith("/api/runs/") else ""
        if "404" in message.text and run and not (runs_folder / run).exists():
            return  # a request in flight when the test removed the run
        said.append(f"{message.type}: {message.text} {path}")

    async def open_it(hash_or_url: str = "", *, width: int = 1280, height: int = 800, **options: Any) -> Any:
        context = await browser.new_context(viewport={"width": width, "height": height}, **options)
        contexts.append(context)
        context.set_default_timeout(10_000)
        page = await context.new_page()
        page.on("console", note)
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on("request", lambda request: asked.append(request.url))
        is_hash = hash_or_url.startswith("#") or not hash_or_url
        await page.goto(viewer_url + hash_or_url if is_hash else hash_or_url)
        await until(page, "window.viewer?.settled")
        return page

    yield open_it
    for context in contexts:
        await context.close()
    assert not said
    assert not [url for url in asked if not url.startswith((viewer_url, "data:", "file:", "blob:"))]
