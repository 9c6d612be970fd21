"""Status of a run in its folder and in its report: whether it is running, and how it ended."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import signal
import threading
import time
from pathlib import Path

import pytest
from background import HANG_S

from titan_rl.core.errors import TrainingError
from titan_rl.core.run_files import DAMAGED, ENDED_AT_ONCE, LOST, SILENT_S, read_status, record_immediate_end
from titan_rl.run.status import report_written, status_kept
from titan_rl.viewer.runs import is_run


def test_status_is_running_and_then_finished(tmp_path: Path) -> None:
    with (tmp_path / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with status_kept(tmp_path, begins=True):
            began = read_status(tmp_path)
            assert (began.state, began.resumed, began.ended) == ("running", [], None)
    ended = read_status(tmp_path)
    assert (ended.state, ended.reason, ended.began) == ("finished", "", began.began)
    assert ended.ended is not None


def test_stopped_and_failed_status_last_until_the_run_resumes(tmp_path: Path) -> None:
    with status_kept(tmp_path, begins=True) as status:
        status.state = "stopped"
    first = read_status(tmp_path)
    assert first.state == "stopped"
    failure = TrainingError("the loss is nan")
    failure.add_note("continue with: titan-rl train --resume x")
    with pytest.raises(TrainingError), status_kept(tmp_path, begins=False):
        raise failure
    second = read_status(tmp_path)
    assert (second.state, second.began, len(second.resumed)) == ("failed", first.began, 1)
    assert second.reason == "the loss is nan\ncontinue with: titan-rl train --resume x"
    with status_kept(tmp_path, begins=False):
        pass
    third = read_status(tmp_path)
    assert (third.state, third.reason, len(third.resumed)) == ("finished", "", 2)


def test_immediate_stop_is_recorded_in_the_folders_of_running_adapters(tmp_path: Path) -> None:
    names = ("running", "finished", "not_begun")
    running, finished, not_begun = (tmp_path / "adapters" / name for name in names)
    for folder in (running, finished, not_begun):
        folder.mkdir(parents=True)
    with status_kept(finished, begins=True):
        pass
    with (running / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with status_kept(tmp_path, begins=True), status_kept(running, begins=True):
            record_immediate_end(tmp_path)
            for folder in (tmp_path, running):
                assert (read_status(folder).state, read_status(folder).reason) == ("stopped", ENDED_AT_ONCE)
    assert read_status(finished).state == "finished"
    assert not [*not_begun.iterdir()]


@pytest.mark.parametrize("text", [None, "{"])
def test_run_without_a_readable_status_is_failed_unless_it_is_running(tmp_path: Path, text: str | None) -> None:
    (tmp_path / "export").mkdir()
    (tmp_path / "config.toml").touch()
    (tmp_path / "metrics.jsonl").touch()
    if text is not None:
        (tmp_path / "status.json").write_text(text)
    lost = read_status(tmp_path)
    assert (lost.state, lost.reason) == ("failed", LOST if text is None else DAMAGED)
    assert lost.ended is not None
    with (tmp_path / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        running = read_status(tmp_path)
    assert (running.state, running.reason, running.ended) == ("running", "", None)


@pytest.mark.parametrize(("is_complete", "state"), [(True, "finished"), (False, "stopped")])
def test_status_of_an_evaluation_follows_from_its_results(tmp_path: Path, is_complete: bool, state: str) -> None:
    (tmp_path / "rollouts.jsonl").touch()
    assert read_status(tmp_path).state == "stopped", "its results are written at its end"
    (tmp_path / "results.json").write_text(json.dumps({"is_complete": is_complete}))
    assert read_status(tmp_path).state == state


def test_report_of_a_failed_run_has_the_reason(tmp_path: Path) -> None:
    out = tmp_path / "report.html"
    with pytest.raises(TrainingError), report_written(tmp_path, out), status_kept(tmp_path, begins=True):
        raise TrainingError("no generator is left")
    assert "no generator is left" in out.read_text()


def test_report_of_a_run_without_steps_has_the_failure_reason(tmp_path: Path) -> None:
    """The run's folder is locked while the report is written, and contains nothing else."""
    out = tmp_path / "report.html"
    with (tmp_path / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with (
            pytest.raises(ValueError, match="no host"),
            report_written(tmp_path, out),
            status_kept(tmp_path, begins=True),
        ):
            raise ValueError("no host")
        assert '"state":"failed","reason":"ValueError: no host"' in out.read_text()
        with status_kept(tmp_path, begins=False):
            assert read_status(tmp_path).state == "running"
    assert is_run(tmp_path), "the viewer lists it"


def test_ctrl_c_while_writing_the_report_keeps_the_status(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "report.html"
    monkeypatch.setattr("titan_rl.viewer.report.report_page", lambda *_: signal.raise_signal(signal.SIGINT))
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a loop of other tests may have set its own
    try:
        with report_written(tmp_path, out), status_kept(tmp_path, begins=True):
            pass
    finally:
        signal.signal(signal.SIGINT, before)
    assert read_status(tmp_path).state == "finished"
    assert f"the run has ended; its report was not written: titan-rl view {tmp_path}" in capfd.readouterr().err
    assert not [*tmp_path.glob("*report.html*")]


def test_failed_report_write_does_not_fail_the_run(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    gone = tmp_path / "gone"
    with report_written(gone, gone / "report.html"), status_kept(gone, begins=True):
        pass
    assert "writing report.html failed" in capfd.readouterr().err


def test_run_whose_lock_is_not_visible_is_running(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On another machine or in a container, which lists other locks."""
    lock = tmp_path / "lock"
    lock.touch()
    with status_kept(tmp_path, begins=True):
        assert read_status(tmp_path).state == "failed", "here the lock says that it was killed"
        monkeypatch.setattr("titan_rl.core.run_files.seen_from", lambda: "elsewhere")
        assert read_status(tmp_path).state == "running"
        long_ago = time.time() - SILENT_S - 1
        os.utime(lock, (long_ago, long_ago))
        lost = read_status(tmp_path)
        assert (lost.state, lost.reason) == ("failed", LOST)
    assert read_status(tmp_path).state == "finished"


def test_running_run_sends_heartbeats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("titan_rl.run.status.BEAT_S", 0.001)
    lock = tmp_path / "lock"
    lock.touch()
    with status_kept(tmp_path, begins=True):
        os.utime(lock, (0, 0))
        until = time.monotonic() + HANG_S
        while lock.stat().st_mtime == 0 and time.monotonic() < until:
            pass
        assert lock.stat().st_mtime > 0
    os.utime(lock, (0, 0))
    assert not [thread for thread in threading.enumerate() if thread.name == "heartbeat"]


@pytest.mark.parametrize("reason", ["the loss is nan", "x" * 100_000])
def test_final_status_is_written_on_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reason: str) -> None:
    def refuse(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(TrainingError), status_kept(tmp_path, begins=True):  # noqa: PT012
        monkeypatch.setattr(Path, "write_bytes", refuse)
        raise TrainingError(reason)
    ended = read_status(tmp_path)
    assert (ended.state, ended.reason) == ("failed", reason[: len(ended.reason)])
    assert ended.reason
    assert (tmp_path / "status.json").stat().st_size <= 4096
    assert [path.name for path in tmp_path.iterdir()] == ["status.json"]
