"""References in the docs resolve: paths of files, imports of examples, links to pages and headings."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from titan_rl.viewer.signs import SIGNS

ROOT = Path(__file__).parents[1]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
CODE = [str(path.relative_to(ROOT)) for path in ROOT.glob("[!.]*/**/*.py")]  # without .venv
HEAVY = ("titan_rl.training.trainer", "titan_rl.generation.vllm_engine")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_named_on_a_page_exist(page: Path) -> None:
    named = re.findall(r"`([\w./-]+\.py)`", page.read_text())
    missing = [path for path in named if not any(other == path or other.endswith(f"/{path}") for other in CODE)]
    assert not missing


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_imports_on_a_page_exist(page: Path) -> None:
    for module, names in re.findall(r"^\s*from (titan_rl[\w.]*) import ([\w, ]+)$", page.read_text(), re.M):
        assert importlib.util.find_spec(module) is not None, module
        if module not in HEAVY:
            imported = importlib.import_module(module)
            for name in map(str.strip, names.split(",")):
                assert hasattr(imported, name) or importlib.util.find_spec(f"{module}.{name}"), (module, name)


LINK = re.compile(r"\]\((?!https?:|mailto:)([^)#\s]*)(?:#([^)\s]+))?\)")


def links(page: Path) -> Iterator[tuple[Path, str]]:
    """Link targets of a page: file and anchor."""
    for path, anchor in LINK.findall(page.read_text()):
        yield (page.parent / path).resolve() if path else page, anchor


def anchors(page: Path) -> set[str]:
    """Anchors of a page's headings, as on GitHub and on the site."""
    without_code = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.+)$", without_code, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_on_a_page_resolve(page: Path) -> None:
    for target, anchor in links(page):
        assert target.exists(), target
        assert not anchor or anchor in anchors(target), f"{target.name}#{anchor}"


@pytest.mark.parametrize(
    ("question", "answer"),
    [
        ("how do I train my own task", "tutorial.md#training"),
        ("which kinds of task are there", "how_to/tasks.md#one-prompt-and-one-answer"),
        ("why does my run not learn", "how_to/not_learning.md#by-symptom"),
        ("what does this metric mean", "metrics.md#reward"),
        ("what happens when a generator dies", "concepts/deaths.md#when-a-generator-dies"),
        ("how do I use several machines", "hosts.md#ssh"),
        ("who can run programs on my workers", "hosts.md#who-can-reach-a-worker"),
        ("what does this setting do", "reference/settings.md#settings"),
        ("how do I run several seeds", "how_to/questions.md#several-seeds-and-sweeps"),
        ("how do I continue with another rate", "how_to/questions.md#continue-from-a-runs-weights-with-other-settings"),
        ("how do I keep the best checkpoint", "how_to/questions.md#keep-the-best-checkpoint"),
        ("how do I stop early", "how_to/questions.md#stop-early"),
        ("which model does an agent start from", "how_to/agents.md#the-model-to-start-from"),
        ("word or byte tokens", "how_to/questions.md#word-or-byte-tokens"),
        ("which code made a run", "how_to/questions.md#which-code-made-a-run"),
        ("which GPUs train", "how_to/questions.md#which-of-eight-gpus-train"),
    ],
)
def test_answers_are_within_two_clicks_of_the_readme(question: str, answer: str) -> None:
    path, _, anchor = answer.partition("#")
    page = ROOT / "docs" / path
    first = {target for target, _ in links(ROOT / "README.md") if target.suffix == ".md"}
    second = {target for one in first for target, _ in links(one)}
    assert page in first | second, question
    assert anchor in anchors(page)


def test_every_run_warning_is_explained() -> None:
    page = (ROOT / "docs" / "how_to" / "not_learning.md").read_text()
    for sign in [sign for sign in SIGNS if sign.warning]:
        begins = re.split(r"[.:](?: |$)", sign.warning)[0]
        assert f"| {begins} | `{sign.metric}` | {sign.least:g} |" in page


def test_files_in_the_architecture_table_exist() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    _, _, section = page.partition("\n## Which file to open\n")
    rows = re.findall(r"^\| ([^|]+) \| (`[^|]+`) \| ([^|]*) ?\|$", section.partition("\n## ")[0], re.MULTILINE)
    assert len(rows) > 60
    for topic, first, notes in rows:
        assert re.fullmatch(r"`[\w/.]+`", first), f"{topic}: name one file"
        paths = [first.strip("`"), *re.findall(r"`([a-z_]+/[\w/]+(?:\.\w+)?)`", notes)]
        missing = [path for path in paths if not (ROOT / "titan_rl" / path).exists() and not (ROOT / path).exists()]
        assert not missing, f"{topic}: {missing}"
