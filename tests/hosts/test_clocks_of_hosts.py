"""Hosts with wrong clocks, which the run reports and corrects for in its trace."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

pytest.importorskip("monarch", reason="needs the cpu or gpu extra")

from depth import on_more_hosts
from hosts.namespaces import PROJECT, Namespaces
from hosts.scripted import TESTS, run_controller

from titan_rl.viewer.trace import Traces

WRONG = """
import socket, time
if socket.gethostname() == {name!r}:
    for clock, ahead_s in (("time", 100), ("monotonic", 5000)):
        def ns(right=getattr(time, clock + "_ns"), ahead_s=ahead_s):
            return right() + ahead_s * 10**9
        setattr(time, clock + "_ns", ns)
    time.time = lambda: time.time_ns() / 1e9
"""
"""sitecustomize module that sets the clocks of one host ahead."""

PROGRAM = """
from titan_rl.core.console import LOG
from titan_rl.core.tracing import spans

async def main():
    folder, addresses = Path(sys.argv[1]), sys.argv[3:]
    os.environ["PYTHONPATH"] = sys.argv[2] + os.pathsep + os.environ["PYTHONPATH"]
    (folder / "config.toml").write_text("")
    with spans.recording(folder / "trace", "controller", 1 << 20, LOG):
        settings = config(addresses, generation=GenerationConfig(engine="hosts.scripted:make", num_generators=2))
        async with generators(settings, folder) as (_, router):
            with spans.span("asking", "run", lane="asking"):
                for _ in range(8):  # for longer than the interval at which traces are written
                    await ask(router, 8, 200)

asyncio.run(main())
"""


@on_more_hosts
def test_wrong_clock_is_reported_and_corrected_in_the_trace(hosts: Namespaces, tmp_path: Path) -> None:
    right, wrong = hosts.hosts[:2]
    (wrong_clocks := tmp_path / "clocks").mkdir()
    (wrong_clocks / "sitecustomize.py").write_text(WRONG.format(name=wrong.name))
    path = f"{wrong_clocks}{os.pathsep}{PROJECT}{os.pathsep}{TESTS}"
    workers = [host.start_worker(tmp_path / f"{host.name}.txt", env={"PYTHONPATH": path}) for host in (right, wrong)]
    (folder := tmp_path / "run").mkdir()
    try:
        output = run_controller(PROGRAM, str(folder), str(wrong_clocks), right.worker_address, wrong.worker_address)
    finally:
        for worker in workers:
            worker.send(signal.SIGTERM)
            worker.wait()
    assert f"the clock of host {wrong.name} is 100 s ahead of this machine's, give or take" in output
    assert f"the clock of host {right.name}" not in output
    traces = Traces(folder / "trace").read()
    (asking,) = traces["controller"].lanes["asking"]
    for name in ("generator-0", "generator-1"):
        busy = [span for span in traces[name].lanes["engine"] if span.name == "generating"]
        assert busy
        for span in busy:
            assert asking.start - 0.05 <= span.start <= span.end <= asking.end + 0.05
    assert {traces[name].host for name in ("generator-0", "generator-1")} == {right.name, wrong.name}
