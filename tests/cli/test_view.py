"""`titan-rl view`: finding runs, reports, and errors about folders and ports."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
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


def test_report_follows_links(tmp_path: Path) -> None:
    run = str(write_run(tmp_path / "a", steps=2, rollouts=0))
    folder = tmp_path / "pages"
    folder.mkdir()
    (folder / "old.html").write_text("old")
    for name in ("old.html", "new.html"):
        link = tmp_path / name
        link.symlink_to(folder / name)
        assert main(["view", run, "--report", str(link)]) == 0
        assert link.is_symlink()
        assert '"id":"a"' in (folder / name).read_text()
    assert sorted(path.name for path in folder.iterdir()) == ["new.html", "old.html"]


def test_report_writes_to_a_pipe(tmp_path: Path) -> None:
    run = str(write_run(tmp_path / "a", steps=2, rollouts=0))
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    read: list[str] = []
    reader = threading.Thread(target=lambda: read.append(pipe.read_text()), daemon=True)
    reader.start()
    assert main(["view", run, "--report", str(pipe)]) == 0
    assert pipe.is_fifo()
    reader.join(20)
    assert '"id":"a"' in read[0]


def test_report_rejects_what_cannot_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = str(write_run(tmp_path / "a", steps=2, rollouts=0))
    folder, loop = tmp_path / "folder", tmp_path / "loop"
    folder.mkdir()
    loop.symlink_to(loop)
    for path, problem in {folder: "Is a directory", loop: "Too many levels of symbolic links"}.items():
        assert main(["view", run, "--report", str(path)]) == 2
        assert f"--report {path}: {problem}; name a file" in capsys.readouterr().err
    assert loop.is_symlink()


def test_trace_that_cannot_be_made_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken_trace(folder: Path) -> Iterator[bytes]:
        yield b"{"
        raise KeyboardInterrupt

    run = write_run(tmp_path / "a", steps=2, rollouts=0)
    (run / "trace").mkdir(exist_ok=True)
    out = tmp_path / "out" / "trace.json"
    out.parent.mkdir()
    assert main(["view", str(run), "--trace", str(out)]) == 0
    before = out.read_bytes()
    monkeypatch.setattr("titan_rl.cli.view.chrome_trace", broken_trace)
    assert main(["view", str(run), "--trace", str(out)]) == 130
    assert out.read_bytes() == before
    assert [*out.parent.iterdir()] == [out]


def test_report_of_a_folder_without_a_run_exits_with_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty").mkdir()
    out = tmp_path / "page.html"
    assert main(["view", str(tmp_path / "empty"), "--report", str(out)]) == 2
    assert f"there is no run in {tmp_path / 'empty'}; name the folder of a run" in capsys.readouterr().err
    assert not out.exists()


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
