"""`scripts/shape.py`: structure metrics of a tiny package, and the limit for docstring openings."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from scripts import shape

SETTINGS = '''"""Settings."""

from collections.abc import Callable
from typing import Annotated, ClassVar

from pydantic import BaseModel

from tiny.core import engine


class Section(BaseModel):
    name: str = ""


class Inner(Section):
    """What is inside."""

    lr: float = 1.0
    kind: ClassVar[str] = "inner"


class RunConfig(Section):
    inner: Annotated[Inner, "a table"] = Inner()
    steps: int | None = None
    _hidden: int = 0


def on_step(act: Callable[[], None], *, then: "Callable[[], None] | None" = None) -> None:
    # a comment
    text = """two
lines"""

    act()
'''


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    package = tmp_path / "tiny"
    (package / "core").mkdir(parents=True)
    (package / "config").mkdir()
    (package / "__init__.py").write_text("from tiny.config import settings\n")
    (package / "core" / "engine.py").write_text('"""An engine."""\n')
    (package / "config" / "settings.py").write_text(SETTINGS)
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "glossary.md").write_text("| word | where |\n|---|---|\n| step | `a` |\n| run | `b` |\n")
    return package


def test_measures_a_tiny_package(tiny: Path) -> None:
    found = shape.measure(tiny)
    assert found.files == 3
    assert found.code_lines == 18
    assert found.import_lines == 5
    assert found.callable_parameters == 2
    assert found.docstrings == 3
    assert found.openings == ["config/settings.py:15 What is inside."]
    assert found.settings == 5  # name, inner, inner.name, inner.lr, steps
    assert found.glossary == 2
    assert found.longest_function == (6, "config/settings.py:28 on_step")
    assert found.packages == {"config", "core"}
    assert found.arrows == {("config", "core")}


def test_measures_a_commit_and_the_working_tree(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def git(*words: str) -> None:
        identity = ["-c", "user.name=tiny", "-c", "user.email=tiny@localhost"]
        subprocess.run(["git", *identity, *words], cwd=tiny.parent, check=True, capture_output=True, timeout=60)

    git("init", "--quiet")
    git("add", ".")
    git("commit", "--quiet", "--message", "first")
    (tiny / "core" / "router.py").write_text('"""How requests travel."""\n')
    shape.main([str(tiny), "--against", "HEAD"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "| | HEAD | now |"
    assert "| files | 3 | 4 |" in lines
    assert "| glossary entries | 2 | 2 |" in lines
    assert "| docstrings opening What, Who, How, Where, Of ... | 1 of 3 (33.3%) | 2 of 4 (50.0%) |" in lines


def test_unknown_commit_is_named(tiny: Path) -> None:
    subprocess.run(["git", "init", "--quiet"], cwd=tiny.parent, check=True, timeout=60)
    with pytest.raises(SystemExit, match="tiny of nowhere cannot be read"):
        shape.measure_commit(tiny, "nowhere")


def test_docstrings_open_with_a_noun_or_a_verb() -> None:
    figures = shape.measure(Path(__file__).parents[1] / "titan_rl")
    assert figures.share_of_openings <= 0.01, figures


RELATIVE = re.compile(r"def (test_(?:what|whatever|who|whom|whose|which|how|where|that|those|of|as)_\w*)")


def test_test_names_open_with_their_subject() -> None:
    """A test is named `test_<subject>_<behaviour>`, so that its name can be found by the words of its subject."""
    tests = Path(__file__).parent
    names = [(path.relative_to(tests), RELATIVE.findall(path.read_text())) for path in tests.rglob("*.py")]
    assert not [f"{path}: {name}" for path, found in names for name in found]
