"""The docs as a site: built without a warning, whole, and nothing in it comes from a network."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import titan_rl
from titan_rl.cli.main import command_line
from titan_rl.config.explain import settings
from titan_rl.config.run import RunConfig

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
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return folder / "site"


def test_nothing_is_fetched_from_a_network(site: Path) -> None:
    assert not [page.name for page in site.rglob("*.html") if FETCHED.search(page.read_text())]
    assert not [sheet.name for sheet in site.rglob("*.css") if FETCHED.search(sheet.read_text())]


def test_every_page_is_in_the_navigation(site: Path) -> None:
    front = (site / "index.html").read_text()
    pages = [page.relative_to(ROOT / "docs").with_suffix(".html") for page in (ROOT / "docs").rglob("*.md")]
    assert not [page for page in pages if page.name != "index.html" and f'href="{page}"' not in front]


def test_the_reference_has_every_setting_command_and_public_name(site: Path) -> None:
    text = {name: (site / "reference" / f"{name}.html").read_text() for name in ("settings", "command_line", "api")}
    tables = {name.rpartition(".")[0] for name in settings(RunConfig)}
    names = [name for name in settings(RunConfig) if name not in tables | {"tasks", "validation.suites"}]
    assert len(names) > 100
    assert not [name for name in names if f'<span class="pre">{name}</span>' not in text["settings"]]
    commands = re.findall(r"<h2>titan-rl (\w+)<", text["command_line"])
    assert all(f" {command}" in command_line().format_help() for command in commands)
    assert len(commands) >= 9
    described = re.findall(r"<h3>(\w+)<", text["api"])
    assert sorted(described) == sorted(titan_rl.__all__)


def test_the_reference_is_the_same_each_time_it_is_made(site: Path) -> None:
    text = (site / "reference" / "api.html").read_text()
    assert " at 0x" not in text
