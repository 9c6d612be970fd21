"""Monarch's own supervision: the death of a process fails only its own calls."""

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from background import HANG_S

pytest.importorskip("monarch", reason="needs the cpu or gpu extra")

from titan_rl.cluster.processes.actor_calls import AnsweringActor
from titan_rl.cluster.processes.process import enter_actor_process
from titan_rl.cluster.processes.remote_process import call
from titan_rl.cluster.supervision import Supervisor
from titan_rl.core.errors import ActorDiedError, RequestError

from monarch.actor import concurrent_endpoint, this_proc  # isort: skip


class Echo(AnsweringActor):
    def __init__(self, log_path: str) -> None:
        super().__init__()
        enter_actor_process(log_path)
        print("hello from the log")

    @concurrent_endpoint
    async def pid(self) -> int:
        return os.getpid()

    @concurrent_endpoint
    async def refuse(self) -> None:
        raise RequestError("too long")

    @concurrent_endpoint
    async def wait_forever(self) -> None:
        await asyncio.Event().wait()


def test_process_death_is_reported_and_contained(tmp_path: Path) -> None:
    """Runs in a separate process, because Monarch reads its polling interval on import."""
    polls = {"HYPERACTOR_MESH_SUPERVISION_POLL_FREQUENCY": "1s"}
    environment = os.environ | polls | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, __file__, str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=HANG_S)
    assert done.returncode == 0, done.stdout + done.stderr


async def observe_a_death(tmp_path: Path) -> None:
    supervisor = this_proc().spawn("supervisor_under_test", Supervisor)
    first, second = [
        await call(supervisor.spawn, name, Echo, (str(tmp_path / name),), who="supervisor")
        for name in ("echo-0", "echo-1")
    ]
    pids = [await call(actor.pid, who="echo") for actor in (first, second)]
    with pytest.raises(RequestError, match="too long"):
        await call(first.refuse, who="echo-0")
    with pytest.raises(ActorDiedError, match=r"echo-0 did not answer within 0\.1 s"):
        await call(first.wait_forever, who="echo-0", timeout_s=0.1)

    os.kill(pids[0], signal.SIGKILL)
    with pytest.raises(ActorDiedError, match="echo-0 died"):
        await call(first.wait_forever, who="echo-0", timeout_s=240)
    failure = await call(supervisor.next_failure, who="supervisor", timeout_s=240)
    assert failure.process_id == "echo-0"
    assert "Killed" in failure.reason
    assert await call(second.pid, who="echo-1") == pids[1]

    await call(supervisor.terminate, who="supervisor", timeout_s=240)
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    assert "hello" in (tmp_path / "echo-0").read_text()


if __name__ == "__main__":
    asyncio.run(observe_a_death(Path(sys.argv[1])))
