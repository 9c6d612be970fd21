"""The command with only the core dependencies installed, without any extra."""

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


def modules_outside_core() -> set[str]:
    """Top-level modules of installed packages that the core does not depend on."""
    project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
    allowed: set[str] = {"titan-rl"}
    pending = [Requirement(each) for each in project["dependencies"]]
    while pending:
        requirement = pending.pop()
        name = canonicalize_name(requirement.name)
        if name in allowed or (requirement.marker and not requirement.marker.evaluate({"extra": ""})):
            continue
        allowed.add(name)
        pending += [Requirement(each) for each in requires(name) or ()]
    return {
        module
        for module, packages in packages_distributions().items()
        if not allowed & {canonicalize_name(package) for package in packages}
    }


@pytest.fixture(scope="module")
def hidden_packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with a `sitecustomize` that hides packages outside the core."""
    folder = tmp_path_factory.mktemp("hidden_packages")
    hidden = sorted(modules_outside_core() - {"tests", "examples", "benchmarks", "titan_rl"})
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


def command(hidden_packages: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": f"{hidden_packages}{os.pathsep}{Path.cwd()}"}
    command = [sys.executable, "-m", "titan_rl.cli.main", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)


def test_core_install_shows_help_and_names_missing_extras(hidden_packages: Path) -> None:
    help_run = command(hidden_packages, "--help")
    assert help_run.returncode == 0, help_run.stderr
    doctor_run = command(hidden_packages, "doctor")
    assert "Traceback" not in doctor_run.stderr
    assert "[cpu]" in doctor_run.stdout + doctor_run.stderr


def test_command_names_the_extra_it_needs(hidden_packages: Path, tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("")
    view_run = command(hidden_packages, "view", str(tmp_path))
    assert view_run.returncode != 0
    assert "Traceback" not in view_run.stderr
    assert "[serve]" in view_run.stderr
