"""`titan-rl hosts RUN`."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from titan_rl.cli import EXIT_INTERRUPTED
from titan_rl.cli.main import main
from titan_rl.cluster.hosts.host_files import HostFiles
from titan_rl.core.run_files import RunStatus


def test_add_says_what_it_waits_for_and_ctrl_c_keeps_the_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.toml").write_text("")
    status = RunStatus("running", began=0.0)
    monkeypatch.setattr("titan_rl.cluster.hosts.host_files.read_status", lambda folder: status)
    host_files = HostFiles(tmp_path)

    def press_ctrl_c(seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(time, "sleep", press_ctrl_c)
    monkeypatch.setattr("titan_rl.cluster.hosts.host_files.PROMISE_S", 0.0)
    assert main(["hosts", str(tmp_path), "add", "10.0.0.4:22222"]) == EXIT_INTERRUPTED
    err = capfd.readouterr().err
    assert "the run is asked to add 10.0.0.4:22222; this waits until its processes are up" in err
    assert "titan-rl: stopped waiting; the run carries out the request" in err
    assert [request.what for request in host_files.new_requests()] == ["10.0.0.4:22222"]
