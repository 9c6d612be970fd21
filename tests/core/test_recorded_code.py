"""`loaded_code` and `import_recorded`: a process imports the code with which a run began."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from titan_rl.core.calls.recorded_code import loaded_code

BEGINS = """
import pickle, sys
sys.path.insert(0, "project")
import rewards, games.chess
from titan_rl.core.calls.recorded_code import loaded_code
pickle.dump(loaded_code(), open("code", "wb"))
"""

REPLACES = """
import pickle, sys
sys.path.insert(0, "project")
from titan_rl.core.calls.recorded_code import import_recorded
import_recorded(pickle.load(open("code", "rb")))
import rewards, games.chess, games.go
print(rewards.VALUE, games.chess.VALUE, games.chess.NEAR, games.go.VALUE)
"""


def run(program: str, folder: Path) -> str:
    done = subprocess.run([sys.executable, "-c", program], cwd=folder, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


def write(folder: Path, value: int) -> None:
    games = folder / "project" / "games"
    games.mkdir(parents=True, exist_ok=True)
    (games / "__init__.py").write_text("")
    (games / "rules.py").write_text(f"NEAR = {value}\n")
    (games / "chess.py").write_text(f"from games.rules import NEAR\nVALUE = {value}\n")
    (games / "go.py").write_text(f"VALUE = {value}\n")
    (folder / "project" / "rewards.py").write_text(f"VALUE = {value}\n")


def test_later_process_imports_the_code_with_which_the_first_began(tmp_path: Path) -> None:
    write(tmp_path, 1)
    run(BEGINS, tmp_path)
    write(tmp_path, 2)
    run("import sys; sys.path.insert(0, 'project'); import rewards", tmp_path)  # leaves bytecode of the edited file
    assert run(REPLACES, tmp_path).split() == ["1", "1", "1", "2"]  # go.py was not imported when the run began


def test_installed_packages_are_recorded_only_if_settings_name_them(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "my_reward_module.py").write_text("VALUE = 1\n")
    import my_reward_module  # noqa: F401  # pyright: ignore

    code = loaded_code()
    assert code["my_reward_module"] == b"VALUE = 1\n"
    assert not {"pytest", "json", "pydantic", "titan_rl", "titan_rl.core.errors"} & code.keys()
    assert "pytest" in loaded_code(["pytest"])
    monkeypatch.delitem(sys.modules, "my_reward_module")


def test_module_that_is_gone_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "my_short_module.py").write_text("VALUE = 1\n")
    import my_short_module  # noqa: F401  # pyright: ignore

    (tmp_path / "my_short_module.py").unlink()
    assert "my_short_module" not in loaded_code()
    monkeypatch.delitem(sys.modules, "my_short_module")
