"""The command where only the packages of `dependencies` are installed: no extra."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import tomllib
from importlib.metadata import packages_distributions, requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

pytestmark = pytest.mark.slow


def others() -> set[str]:
    """Top-level modules of packages that the core does not depend on."""
    project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
    allowed: set[str] = {"titan-rl"}
    waiting = [Requirement(each) for each in project["dependencies"]]
    while waiting:
        requirement = waiting.pop()
        name = canonicalize_name(requirement.name)
        if name in allowed or (requirement.marker and not requirement.marker.evaluate({"extra": ""})):
            continue
        allowed.add(name)
        waiting += [Requirement(each) for each in requires(name) or ()]
    return {
        module
        for module, packages in packages_distributions().items()
        if not allowed & {canonicalize_name(package) for package in packages}
    }


@pytest.fixture(scope="module")
def light(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder whose `sitecustomize` hides all other packages."""
    folder = tmp_path_factory.mktemp("light")
    hidden = sorted(others() - {"tests", "examples", "benchmarks", "titan_rl"})
    (folder / "sitecustomize.py").write_text(
        textwrap.dedent(f"""
            import sys
            from importlib.machinery import PathFinder

            class Light(PathFinder):
                @classmethod
                def find_spec(cls, name, path=None, target=None):
                    hidden = name.partition(".")[0] in {set(hidden)!r}
                    return None if hidden else PathFinder.find_spec(name, path, target)

            sys.meta_path[sys.meta_path.index(PathFinder)] = Light
        """)
    )
    return folder


def command(light: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": f"{light}{os.pathsep}{Path.cwd()}"}
    command = [sys.executable, "-m", "titan_rl.cli.main", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)


def test_the_core_alone_shows_help_and_says_what_is_missing(light: Path) -> None:
    helped = command(light, "--help")
    assert helped.returncode == 0, helped.stderr
    examined = command(light, "doctor")
    assert "Traceback" not in examined.stderr
    assert "[cpu]" in examined.stdout + examined.stderr


def test_a_command_that_needs_an_extra_names_it(light: Path, tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("")
    viewed = command(light, "view", str(tmp_path))
    assert viewed.returncode != 0
    assert "Traceback" not in viewed.stderr
    assert "[serve]" in viewed.stderr
