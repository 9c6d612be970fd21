"""`titan-rl view`: finding runs, reports, and errors about folders and ports."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from benchmarks.synthetic_run import write_run
from titan_rl.cli.main import main


def test_json_prints_one_line_per_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("20260101-000000-a", "20260102-000000-b"):
        write_run(tmp_path / "runs" / name, steps=2, rollouts=0)
    monkeypatch.chdir(tmp_path)
    assert main(["view", "--json"]) == 0
    listed = [json.loads(text) for text in capsys.readouterr().out.splitlines()]
    assert [(run["name"], run["steps"]) for run in listed] == [("20260102-000000-b", 2), ("20260101-000000-a", 2)]


def test_missing_folder_exits_with_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["view"]) == 2
    assert "titan-rl view RUN" in capsys.readouterr().err
    assert main(["view", "nowhere"]) == 2
    assert "nowhere" in capsys.readouterr().err


def test_port_errors_name_the_port(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["view", str(tmp_path), "--port", str(port)]) == 2
    assert f"--port {port}: Address already in use" in capsys.readouterr().err
    assert main(["view", str(tmp_path), "--port", "70000"]) == 2
    assert "--port 70000" in capsys.readouterr().err


def test_report_contains_the_given_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folders = [str(write_run(tmp_path / name, steps=2, rollouts=8)) for name in ("a", "b")]
    out = tmp_path / "both.html"
    assert main(["view", *folders, "--report", str(out)]) == 0
    assert capsys.readouterr().out == f"{out}\n"
    assert '"id":"a"' in out.read_text()
    assert out.stat().st_mode & 0o777 == 0o600, "private, like the run's own files"
    assert main(["view", *folders, "--report", str(tmp_path / "no" / "folder.html")]) == 2
    assert "--report" in capsys.readouterr().err


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_signal_ends_the_viewer_while_a_page_listens(tmp_path: Path, signum: signal.Signals) -> None:
    command = [sys.executable, "-m", "titan_rl.cli.main", "view", str(tmp_path), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        url, key = re.findall(r"(http://\S+)/\?key=(\S+)", process.stdout.readline())[0]
        cookie = f"titan_rl_view_{url.rpartition(':')[2]}={key}"
        request = urllib.request.Request(f"{url}/api/events", headers={"cookie": cookie})
        try:
            with urllib.request.urlopen(request, timeout=120) as events:
                assert json.loads(events.readline().removeprefix(b"data: ")) == {"run": "", "changed": []}
                os.kill(process.pid, signum)
                assert process.wait(120) == 128 + signum
                assert "Traceback" not in process.communicate()[1]
        finally:
            process.kill()
