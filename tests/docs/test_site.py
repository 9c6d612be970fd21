"""The docs as a site: builds without warnings, is complete, and loads nothing from a network."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from background import HANG_S

import titan_rl
from titan_rl.cli.main import command_line
from titan_rl.config.run import RunConfig
from titan_rl.config.validation_errors import settings

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
FETCHED = re.compile(
    r"<(?:script|img|source|iframe)[^>]+src=\"(https?:)?//|<link[^>]+href=\"(https?:)?//|@import|url\([\"']?(https?:)?//"
)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("docs")
    options = [
        "--quiet",
        "--fail-on-warning",
        "--keep-going",
        "--conf-dir",
        "docs/site",
        "--doctree-dir",
        folder / "trees",
    ]
    done = subprocess.run(
        [sys.executable, "-m", "sphinx", *options, "docs", folder / "site"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=HANG_S,
    )
    assert done.returncode == 0, done.stderr
    return folder / "site"


def test_site_fetches_nothing_from_a_network(site: Path) -> None:
    assert not [page.name for page in site.rglob("*.html") if FETCHED.search(page.read_text())]
    assert not [sheet.name for sheet in site.rglob("*.css") if FETCHED.search(sheet.read_text())]


def test_every_page_is_in_the_navigation(site: Path) -> None:
    front = (site / "index.html").read_text()
    pages = [page.relative_to(ROOT / "docs").with_suffix(".html") for page in (ROOT / "docs").rglob("*.md")]
    assert not [page for page in pages if page.name != "index.html" and f'href="{page}"' not in front]


def test_reference_covers_every_setting_command_and_public_name(site: Path) -> None:
    text = {name: (site / "reference" / f"{name}.html").read_text() for name in ("settings", "command_line", "api")}
    tables = {name.rpartition(".")[0] for name in settings(RunConfig)}
    names = [name for name in settings(RunConfig) if name not in tables | {"adapters", "tasks", "validation.suites"}]
    assert len(names) > 100
    assert not [name for name in names if f'<span class="pre">{name}</span>' not in text["settings"]]
    commands = re.findall(r"<h2>titan-rl (\w+)<", text["command_line"])
    assert all(f" {command}" in command_line().format_help() for command in commands)
    assert len(commands) >= 9
    described = re.findall(r"<h3>(\w+)<", text["api"])
    assert sorted(described) == sorted(titan_rl.__all__)


def test_api_reference_is_reproducible(site: Path) -> None:
    text = (site / "reference" / "api.html").read_text()
    assert " at 0x" not in text


@pytest.fixture(scope="module")
def page() -> Iterator[Any]:
    """A browser page."""
    playwright = pytest.importorskip("playwright.sync_api")
    chromium = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        pytest.skip("there is no Chromium: apt-get install chromium, or name one in the variable CHROMIUM")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        try:
            yield browser.new_page()
        finally:
            browser.close()


HORIZONTAL_OVERFLOW = "document.documentElement.scrollWidth - document.documentElement.clientWidth"


def test_no_page_scrolls_sideways(site: Path, page: Any) -> None:
    names = ("index.html", "reference/settings.html", "concepts/security.html", "metrics.html")
    found: list[tuple[str, int, int]] = []
    for file in (site / name for name in names):
        page.goto(file.as_uri())
        for width in (390, 1024, 1100, 1280, 1312, 1366, 1440, 1504, 1920):
            page.set_viewport_size({"width": width, "height": 900})
            if beyond := page.evaluate(HORIZONTAL_OVERFLOW):
                found.append((file.name, width, beyond))
    assert not found


@pytest.mark.parametrize("name", ["max_tokens", "sampling.max_tokens", "groups_per_step"])
def test_search_for_a_setting_finds_its_row_first(site: Path, page: Any, name: str) -> None:
    page.goto(f"{(site / 'search.html').as_uri()}?q={name}")
    first = page.locator("ul.search > li a").first
    first.wait_for(timeout=20_000)
    page.wait_for_function("() => document.body.innerText.includes('Search finished')", timeout=20_000)
    link = first.get_attribute("href")
    assert re.search(rf"reference/settings\.html.*#setting-[\w-]*{name.rpartition('.')[2].replace('_', '-')}$", link)
