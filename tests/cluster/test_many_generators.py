"""A small version of the run that `benchmarks/scale.py` measures."""

from __future__ import annotations

import asyncio

import looptime
import pytest

pytest.importorskip("monarch", reason="needs the cpu or gpu extra")

from benchmarks.scale import ScaledRun


def test_scaled_run_measures_batches_versions_and_a_host_death(caplog: pytest.LogCaptureFixture) -> None:
    run = ScaledRun(2, 64)
    with asyncio.Runner(loop_factory=looptime.new_event_loop) as runner:
        runner.run(run.run())
    assert set(run.figures) >= {"controller_cpu_per_s", "megabytes_per_s", "announce_ms", "death_of_host_ms"}
    assert all(value > 0 for value in run.figures.values())
    assert "generator-0 died: was killed by SIGKILL" in caplog.text
