"""A real run whose fork servers are killed together with its trainer and generators."""

import os
import signal
from pathlib import Path

import pytest

pytest.importorskip("monarch", reason="needs the cpu or gpu extra")
pytest.importorskip("vllm", reason="needs the cpu or gpu extra")

from depth import in_depth
from e2e.runs import Run, run_training


def fork_server(run: Run) -> int:
    """Process id of the fork server from which the other one was forked."""
    children = Path(f"/proc/{run.process.pid}/task/{run.process.pid}/children").read_text().split()
    commands = {int(pid): Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0") for pid in children}
    (server,) = [pid for pid, words in commands.items() if any(word.startswith(b"generator=") for word in words)]
    return server


@in_depth
def test_run_restarts_processes_after_fork_server_is_killed(tmp_path: Path):
    with run_training(tmp_path, training__steps=12, generation__num_generators=2) as run:
        run.wait_for_step(2)
        os.kill(fork_server(run), signal.SIGKILL)
        assert run.wait() == 0, run.output
        for name in ("trainer", "generator-0", "generator-1"):
            assert f"{name} died" in run.output
        steps = [record["step"] for record in run.metrics() if "train/loss" in record]
        assert steps == list(range(1, 13))
        assert "a fork server ended before the run" in (run.folder / "logs" / "controller.log").read_text()
        assert run.leftovers() == []
