"""The wheel works outside the repository: it contains all files that the package reads, and no tests."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest
from background import HANG_S
from own_venv import asked_for, python_with

from titan_rl.cli.init import example_names

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Wheel built from a copy, so that old builds do not get into it and none is left in the repository."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    source.mkdir()
    for name in ("pyproject.toml", "setup.py", "README.md"):
        shutil.copy(ROOT / name, source)
    for name in ("titan_rl", "examples"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__", "runs"))
    for left in (".env", "runs/20260101-first/rollouts.jsonl"):
        path = source / "examples" / "alphabet_sort" / left
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("mine alone")
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", folder, source]
    built = subprocess.run(command, capture_output=True, text=True, timeout=HANG_S, check=False)
    assert built.returncode == 0, built.stderr
    (wheel,) = folder.glob("titan_rl-*.whl")
    return wheel


def test_wheel_contains_the_package_and_the_examples(wheel: Path):
    names = set(zipfile.ZipFile(wheel).namelist())
    code = {path.relative_to(ROOT).as_posix() for path in (ROOT / "titan_rl").rglob("*") if path.is_file()}
    assert {name for name in code if "__pycache__" not in name} - names == set()
    assert "titan_rl/py.typed" in names
    shipped = {name.split("/")[3] for name in names if name.startswith("titan_rl/cli/shipped_examples/")}
    assert set(example_names()) < shipped
    assert "titan_rl/cli/shipped_examples/alphabet_sort/base/model.safetensors" in names
    assert not any("/runs/" in name or name.endswith(".env") for name in names)
    assert not any(name.startswith(("tests/", "examples/", "scripts/")) or "__pycache__" in name for name in names)
    (entry_points,) = [name for name in names if name.endswith("entry_points.txt")]
    assert "titan-rl = titan_rl.cli.main:program" in zipfile.ZipFile(wheel).read(entry_points).decode()


OUTSIDE = """
import contextlib
import titan_rl
from titan_rl.cli.main import main

print("at", titan_rl.__file__)
assert main(["init", "my_task"]) == 0
assert main(["init", "sorted", "--example", "alphabet_sort"]) == 0
with contextlib.suppress(SystemExit):
    main(["view", "--help"])
print("task of", type(titan_rl.load_config("sorted/cpu.toml").tasks[0].task).__module__)
"""


def run(python: Path | str, *arguments: str, cwd: Path) -> str:
    """Run an interpreter without PYTHONPATH and return its standard output."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [str(python), *arguments], cwd=cwd, env=environment, capture_output=True, text=True, timeout=HANG_S, check=False
    )
    assert "Traceback" not in done.stderr, done.stderr
    return done.stdout


def works_outside(python: Path | str, folder: Path) -> None:
    """Check commands that need neither torch nor an engine, in one process, since each process compiles its imports."""
    output = run(python, "-c", OUTSIDE, cwd=folder)
    (place,) = [line.removeprefix("at ") for line in output.splitlines() if line.startswith("at ")]
    assert not Path(place).is_relative_to(ROOT / "titan_rl")
    assert "my_task/config.toml" in output
    assert "sorted/base/model.safetensors" in output
    assert "usage: titan-rl view" in output
    assert "task of sorted.task" in output


def test_wheel_works_without_the_repository(wheel: Path, tmp_path: Path):
    """The wheel is unpacked in front of the packages of this environment, since an installation takes a minute."""
    venv.create(tmp_path / "own", with_pip=False)
    (packages,) = (tmp_path / "own").glob("lib/python*/site-packages")
    zipfile.ZipFile(wheel).extractall(packages)
    theirs = [path for path in sys.path if path.endswith("site-packages")]
    (packages / "others.pth").write_text("\n".join(theirs))  # only these folders: no editable installs
    work = tmp_path / "work"
    work.mkdir()
    works_outside(tmp_path / "own" / "bin" / "python", work)


@asked_for
def test_wheel_works_when_installed_with_pip(wheel: Path, request: pytest.FixtureRequest, tmp_path: Path):
    name = f"wheel-{wheel.stat().st_mtime_ns:x}"
    python = python_with(request.config.cache, name, f"titan-rl[serve] @ file://{wheel}")
    works_outside(python, tmp_path)
    script = Path(python).with_name("titan-rl")
    assert "python " in run(script, "doctor", cwd=tmp_path)
    assert run(script, "--version", cwd=tmp_path) == "titan-rl 0.1.0\n"
