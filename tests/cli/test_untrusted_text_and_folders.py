"""Untrusted text is escaped before it reaches a terminal, and links in a run's folder are not followed."""

from __future__ import annotations

import ast
import io
import json
import os
import re
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

import titan_rl
from titan_rl.cli.main import main
from titan_rl.config.load import load_config
from titan_rl.config.resume_changes import settings_of
from titan_rl.core.errors import RewardError
from titan_rl.core.plain_data import terminal_text
from titan_rl.run.directory import RunDirectory
from titan_rl.run.journal.state import RunState
from titan_rl.run.observability.progress import Progress
from titan_rl.run.terminal.standard_streams import print_result, print_stderr, write_stderr_unbuffered

HOSTILE = "\x1b]0;owned\x07\x1b[2J\x9b31m\x7f\rover\u202egnp\u2066"
RAW = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def test_all_terminal_writers_escape_control_characters(capfd: pytest.CaptureFixture[str]):
    print_result(f"{HOSTILE}\n")
    print_stderr(HOSTILE)
    write_stderr_unbuffered(HOSTILE)
    with Progress(0, sys.stderr) as progress:
        progress.message(HOSTILE)
        progress.warning(HOSTILE)
    shown = capfd.readouterr()
    assert not RAW.search(shown.out + shown.err)
    assert (shown.out.count("owned"), shown.err.count("owned")) == (1, 4)


def test_escaping_keeps_newlines_tabs_and_json():
    text = "a\tb\r\nschön \U0001f469\u200d\U0001f52c\n"
    assert terminal_text(text) == text
    line = json.dumps({"text": HOSTILE}, ensure_ascii=False)
    assert json.loads(terminal_text(line)) == {"text": HOSTILE}


def test_only_the_listed_modules_write_to_the_terminal():
    """A module that writes to a standard stream directly bypasses the escaping."""
    root = Path(titan_rl.__file__).parent
    allowed = {
        "run/terminal/standard_streams.py",  # escapes text
        "core/console.py",  # writes to the log
        "run/process/guard.py",  # a program without imports; its text is escaped by the caller
        "cluster/processes/sockets.py",  # forwards, escaped, the output of Monarch during its start
        "cli/main.py",  # one fixed line, when a signal ends an import
        "cluster/hosts/monarch_host.py",  # one fixed word to the process that started it
    }
    writers: set[str] = set()
    for path in root.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call):
                continue
            called = ast.unparse(node.func)
            to_stream = called == "os.write" and ast.unparse(node.args[0]) in ("1", "2")
            if (
                called in ("print", "sys.stdout.write", "sys.stderr.write", "sys.__stderr__.write", "Console")
                or to_stream
            ):
                writers.add(path.relative_to(root).as_posix())
    assert writers == allowed


def test_user_exceptions_are_escaped(project: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]):
    def run_training(*_: object, **__: object) -> object:
        try:
            raise KeyError(HOSTILE)
        except KeyError as error:
            raise RewardError(f"reward one failed: {HOSTILE}") from error

    module = ModuleType("titan_rl.run.train")
    module.run_training = run_training  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "titan_rl.run.train", module)
    assert main(["train", "config.toml"]) == 1
    shown = capfd.readouterr().err
    assert "reward one failed" in shown
    assert not RAW.search(shown)


def test_hosts_and_play_output_are_escaped(project: Path, capfd: pytest.CaptureFixture[str]):
    (project / "hosts.json").write_text(
        json.dumps({"hosts": [{"name": "h1", "address": "10.0.0.1:1", "state": "gone", "reason": HOSTILE}]})
    )
    assert main(["hosts", ".", "list"]) == 0
    shown = capfd.readouterr().out
    assert "owned" in shown
    assert not RAW.search(shown)
    before, sys.stdin = sys.stdin, io.StringIO("hello\n")
    try:
        assert main(["play", "config.toml", "--task.words", json.dumps([HOSTILE])]) == 0
    finally:
        sys.stdin = before
    shown = capfd.readouterr().out
    assert "owned" in shown
    assert not RAW.search(shown)


@pytest.fixture
def stopped(project: Path) -> RunDirectory:
    """A run that was stopped before its first checkpoint."""
    config = load_config("config.toml")
    run_dir = RunDirectory.create(config)
    RunState(settings=settings_of(config)).write(run_dir.path)
    return run_dir


@pytest.mark.parametrize("dry_run", [["--dry-run"], []])
@pytest.mark.parametrize(
    "name",
    ["lock", "config.toml", "metrics.jsonl", "logs", "checkpoints/step-1", "journal", "logs/a.log", ".s"],
)
def test_links_in_a_run_folder_are_rejected_and_targets_unchanged(
    stopped: RunDirectory,
    tmp_path: Path,
    name: str,
    dry_run: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
):
    monkeypatch.setattr("titan_rl.run.session.RunSession.run", lambda *_, **__: pytest.fail("started"))
    target, link = tmp_path / "mine", stopped.path / name
    if name in ("logs", "journal", "checkpoints/step-1"):
        target.mkdir()
        kept = target / "kept"
    else:
        kept = target
    kept.write_text("precious" if name != "config.toml" else stopped.config.read_text())
    before = kept.read_bytes()
    if link.is_dir():
        link.rmdir()
    else:
        link.unlink(missing_ok=True)
    link.symlink_to(target)
    assert main(["train", "--resume", str(stopped.path), *dry_run]) == 2
    err = capfd.readouterr().err
    assert f"{link} is a link to {target}, and links in a run's folder are not followed; replace the link" in err
    assert kept.read_bytes() == before
    assert os.listdir(target) == ["kept"] if target.is_dir() else True


def test_lock_file_is_unchanged_and_links_are_not_followed(stopped: RunDirectory, tmp_path: Path):
    lock, target = stopped.path / "lock", tmp_path / "mine"
    lock.write_text("who is here")
    with stopped.locked():
        assert lock.read_text() == "who is here"
    lock.unlink()
    target.write_text("precious")
    lock.symlink_to(target)
    with pytest.raises(titan_rl.TitanRLError, match=r"lock cannot be opened: .*not a link"), stopped.locked():
        pass
    assert target.read_text() == "precious"


def test_hosts_request_does_not_follow_links(
    stopped: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    target = tmp_path / "mine"
    target.write_text("precious")
    (stopped.path / "hosts.jsonl").symlink_to(target)
    monkeypatch.setattr(
        "titan_rl.cluster.hosts.host_files.read_status", lambda folder: SimpleNamespace(state="running")
    )
    assert main(["hosts", str(stopped.path), "drain", "h1"]) == 2
    assert "hosts.jsonl cannot be written" in capfd.readouterr().err
    assert target.read_text() == "precious"


def test_resume_announces_imported_code_before_importing(
    stopped: RunDirectory, project: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(stopped.path.parent)
    (project / "echo_task.py").write_text("raise SystemExit('imported')")
    sys.modules.pop("echo_task", None)
    assert main(["train", "--resume", str(stopped.path), "--dry-run"]) == 2
    err = capfd.readouterr().err
    assert f"titan-rl: {stopped.config} imports echo_task from {project}\n" in err
    assert err.index("imports echo_task") < err.index("importing echo_task failed")
