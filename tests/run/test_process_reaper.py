"""Process reaper: it cleans up after processes that have ended, and reaps them."""

from __future__ import annotations

import os
import sys
import time

import pytest

from titan_rl.cluster.liveness.local_processes import children_of, unreaped_children_of
from titan_rl.run import host_worker
from titan_rl.run.host_worker import CLEAN_FOR_S, LOOK_CHILDREN_S, REAP_AFTER_S, ProcessReaper
from titan_rl.testing.clock import ManualClock

pytestmark = pytest.mark.skipif(
    not os.path.exists(f"/proc/{os.getpid()}/task/{os.getpid()}/children"), reason="this kernel lists no children"
)


@pytest.fixture
def child() -> int:
    """Start a process that lives until it is killed and that nothing else waits for."""
    return os.posix_spawn(sys.executable, [sys.executable, "-c", "import time; time.sleep(600)"], os.environ)


def kill(child: int) -> None:
    os.kill(child, 9)
    while child not in unreaped_children_of(os.getpid()):
        time.sleep(0.001)


def test_reaper_cleans_up_only_after_a_child_has_ended(child: int, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, cleaned = ManualClock(), list[float]()
    monkeypatch.setattr(host_worker, "clean_up_after_dead_runs", lambda root: cleaned.append(clock.seconds))
    reaper = ProcessReaper(clock)

    def look(times: int) -> None:
        for _ in range(times):
            reaper.look()
            clock.seconds += LOOK_CHILDREN_S

    assert child in children_of(os.getpid())
    look(5)
    assert cleaned == []
    kill(child)
    assert child not in children_of(os.getpid())
    killed = clock.seconds
    look(100)
    assert cleaned[0] == killed
    assert cleaned[-1] == killed + CLEAN_FOR_S
    with pytest.raises(ChildProcessError):
        os.waitpid(child, os.WNOHANG)


def test_reaper_leaves_other_waiters_time_to_reap_a_child(child: int) -> None:
    clock = ManualClock()
    reaper = ProcessReaper(clock)
    kill(child)
    reaper.look()
    clock.seconds += REAP_AFTER_S / 2
    reaper.look()
    assert os.waitpid(child, 0)[0] == child
    clock.seconds += REAP_AFTER_S
    reaper.look()
