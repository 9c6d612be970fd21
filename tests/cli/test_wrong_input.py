"""Invalid arguments and files: each command prints one sentence and exits with 1 or 2."""

from __future__ import annotations

import io
import json
import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest
from user_project import CONFIG

from titan_rl.cli.main import main
from titan_rl.config.load import load_config
from titan_rl.config.resume_changes import settings_of
from titan_rl.run.directory import RunDirectory
from titan_rl.run.journal.state import RunState
from titan_rl.training.state.checkpoint import step_directory, write_checksums, write_summed

DEEP = "[" * 1200 + "]" * 1200
DIGITS = "9" * 4301


def run(argv: list[str], capfd: pytest.CaptureFixture[str]) -> tuple[object, str]:
    """Exit code and standard error."""
    before, sys.stdin = sys.stdin, io.StringIO("")
    try:
        code: object = main(argv)
    except SystemExit as stopped:
        code = stopped.code
    finally:
        sys.stdin = before
    return code, capfd.readouterr().err


PATHS = {
    "a" * 256: "has a name of 256 bytes, and file systems take 255; shorten it",
    "x/" * 2100: "has 4200 bytes, and file systems take 4095; shorten it",
    "a\0b": "has a NUL character, which no path may have",
    "\ud83d": "has half of a surrogate pair, which no path may have",
}
COMMANDS_WITH_A_PATH = (
    ["train", "{}"],
    ["train", "--resume", "{}"],
    ["sft", "{}"],
    ["sft", "--resume", "{}"],
    ["play", "{}"],
    ["play", "config.toml", "--policy", "{}"],
    ["eval", "config.toml", "{}"],
    ["eval", "--compare", "{}"],
    ["eval", "config.toml", "policy", "--out", "{}"],
    ["serve", "{}", "--dry-run"],
    ["view", "{}"],
    ["view", "policy", "--report", "{}"],
    ["hosts", "{}", "list"],
    ["export", "{}", "out"],
    ["export", "policy", "{}"],
    ["init", "{}"],
    ["launch", "{}"],
    *(["train", "config.toml", "--dry-run", f"--{name}", "{}"] for name in ("model.path", "run_dir")),
    *(["train", "config.toml", "--dry-run", f"--{name}", "{}"] for name in ("hosts.addresses_file",)),
    *(["sft", "config.toml", "--dry-run", f"--sft.{name}", "{}"] for name in ("start", "out", "data")),
)


def files_of(project: Path) -> list[Path]:
    """All files but Python's bytecode, which is not always written."""
    return sorted(path for path in project.rglob("*") if "__pycache__" not in path.parts)


@pytest.mark.parametrize("path", PATHS, ids=["long name", "long path", "NUL", "surrogate"])
def test_impossible_paths_are_rejected_by_every_command(project: Path, path: str, capfd: pytest.CaptureFixture[str]):
    before = files_of(project)
    for words in COMMANDS_WITH_A_PATH:
        code, err = run([path if word == "{}" else word for word in words], capfd)
        assert code == 2, words
        assert PATHS[path] in err, words
        assert "Traceback" not in err
    assert files_of(project) == before


@pytest.mark.parametrize("words", [["train", "config.toml", "--dry-run"], ["view", "--json"], ["export", "a", "b"]])
def test_deleted_current_folder_is_reported(
    tmp_path: Path, words: list[str], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    folder = tmp_path / "deleted"
    folder.mkdir()
    monkeypatch.chdir(folder)
    folder.rmdir()
    problem = "the current folder cannot be used: No such file or directory; change to another folder"
    assert run(words, capfd) == (2, f"titan-rl: {problem}\n")


@pytest.mark.parametrize("command", ["train", "sft", "serve"])
def test_path_of_an_unknown_user_is_rejected(project: Path, command: str, capfd: pytest.CaptureFixture[str]):
    code, err = run([command, "config.toml", "--dry-run", "--model.path=~nobody-of-that-name/model"], capfd)
    assert code in (1, 2) or command == "sft"  # sft would create the folder
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (f"seed = {DIGITS}\n", "not valid TOML: a number has more than 4,300 digits"),
        (f"x = {DEEP}\n", "not valid TOML: nested too deeply"),
        (f"x = {'[' * 101}{']' * 101}\n", "not valid TOML: nested more than 100 levels deep"),
        (f"{'.'.join('a' * 1500)} = 1\n", "not valid TOML: nested more than 100 levels deep"),
        ('pythonpath = ["a\\u0000b"]\n', "pythonpath[0] = 'a\\x00b' has a NUL character, which no path may have"),
    ],
)
@pytest.mark.parametrize("command", ["train", "sft", "serve"])
def test_unreadable_settings_are_reported_in_one_sentence(
    project: Path, command: str, text: str, message: str, capfd: pytest.CaptureFixture[str]
):
    (project / "bad.toml").write_text(text + CONFIG.replace("seed = 7", ""))
    code, err = run([command, "bad.toml", "--dry-run"], capfd)
    assert code == 2
    assert err.startswith("titan-rl: bad.toml: ")
    assert message in err


def test_settings_can_begin_with_a_byte_order_mark(project: Path, capfd: pytest.CaptureFixture[str]):
    (project / "marked.toml").write_text(f"\ufeff{CONFIG}", encoding="utf-8")
    assert run(["train", "marked.toml", "--dry-run"], capfd)[0] == 0


@pytest.mark.parametrize("option", [f"--seed={DIGITS}", f"--task.words={DEEP}", f"--{'.'.join('a' * 1500)}=1"])
def test_unparsable_option_values_exit_with_2(project: Path, option: str, capfd: pytest.CaptureFixture[str]):
    code, err = run(["train", "config.toml", "--dry-run", option], capfd)
    assert code == 2
    assert "Traceback" not in err


@pytest.fixture
def stopped(project: Path) -> RunDirectory:
    """A run that was stopped in step 4, with checkpoints of steps 2 and 3."""
    config = load_config("config.toml")
    run_dir = RunDirectory.create(config)
    RunState(settings=settings_of(config)).write(run_dir.path)
    for step in (2, 3):
        folder = step_directory(run_dir.checkpoints, step)
        folder.mkdir()
        state = RunState(step, 100, 0.5, 4 * step, (), settings_of(config))
        written = write_summed(folder / "run_state.json", json.dumps(asdict(state)))
        write_checksums(folder, {"run_state.json": written})
    for step in range(1, 5):
        run_dir.write_metrics(step, {"train/loss": 1.0})
        run_dir.write_rollout({"step": step, "phase": "train", "messages": []})
    run_dir.close()
    return run_dir


def as_folder(path: Path) -> None:
    path.mkdir(parents=True)


def as_file(path: Path) -> None:
    path.write_bytes(b"x")


@pytest.mark.parametrize(
    ("name", "make", "message"),
    [
        ("lock", as_folder, "lock must be a file; remove it, or give it another name"),
        ("lock", os.mkfifo, "lock must be a file; remove it, or give it another name"),
        ("logs", as_file, "logs must be a folder; remove it, or give it another name"),
        ("checkpoints", as_file, "checkpoints must be a folder"),
        ("metrics.jsonl", as_folder, "metrics.jsonl must be a file"),
        ("checkpoints/step-000003/run_state.json", os.mkfifo, "is neither a file nor a folder; remove it"),
    ],
)
def test_run_file_of_the_wrong_kind_is_named(
    stopped: RunDirectory,
    name: str,
    make: Callable[[Path], None],
    message: str,
    capfd: pytest.CaptureFixture[str],
):
    path = stopped.path / name
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
    make(path)
    for command in ("train", "sft"):
        code, err = run([command, "--resume", str(stopped.path), "--dry-run"], capfd)
        assert code == 2
        assert f"titan-rl: {path}" in err
        assert message in err


@pytest.mark.parametrize("text", [DEEP, '{"a":' * 1200 + "1" + "}" * 1200, f'{{"step": {DIGITS}}}'])
@pytest.mark.parametrize("name", ["run_state.json", "hosts.json", "status.json", "metrics.jsonl", "results.json"])
def test_unparsable_json_causes_no_traceback(
    stopped: RunDirectory, name: str, text: str, capfd: pytest.CaptureFixture[str]
):
    shutil.rmtree(stopped.checkpoints)
    (stopped.path / name).write_text(text)
    for argv in (
        ["train", "--resume", str(stopped.path), "--dry-run"],
        ["hosts", str(stopped.path), "list"],
        ["view", str(stopped.path), "--json"],
        ["eval", "--compare", str(stopped.path)],
    ):
        code, err = run(argv, capfd)
        assert code in (0, 1, 2), argv
        assert "Traceback" not in err


def test_dry_run_of_a_resume_reports_damage_and_changes_nothing(
    stopped: RunDirectory, capfd: pytest.CaptureFixture[str]
):
    damaged = step_directory(stopped.checkpoints, 3)
    (damaged / "run_state.json").write_text("{}")
    kept = [line for line in stopped.metrics.read_text().splitlines(keepends=True) if '"step": 1' not in line]
    stopped.metrics.write_text("".join(kept))
    code, err = run(["train", "--resume", str(stopped.path), "--dry-run"], capfd)
    assert code == 0
    assert f"{damaged / 'run_state.json'} is damaged" in err
    assert f"the run continues from {step_directory(stopped.checkpoints, 2)}, which is older" in err
    assert f"{stopped.metrics} has no lines of steps 1: they are lost" in err
    assert damaged.is_dir(), "a dry run does not move damaged checkpoints"
