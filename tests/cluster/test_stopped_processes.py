"""SIGSTOP sent to a trainer rank and to a rollout worker: real processes, checked in virtual time."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from background import HANG_S

pytest.importorskip("monarch", reason="needs the cpu or gpu extra")

from group_requests import requests

from titan_rl import Rollout, RolloutGroup, SamplingParams
from titan_rl.cluster.liveness import health_check
from titan_rl.cluster.liveness.health_check import HealthChecks, ProcessObserver
from titan_rl.cluster.liveness.local_processes import CAN_WATCH, TreeUse, WatchedProcess
from titan_rl.cluster.processes.remote_process import RemoteProcess
from titan_rl.cluster.rollout_worker import GroupOrder
from titan_rl.cluster.rollout_worker_pool import WorkerPool
from titan_rl.cluster.trainer_processes import ActorTrainer
from titan_rl.core.errors import ActorDiedError
from titan_rl.testing.clock import ManualClock
from titan_rl.training.settings import ModelConfig, TrainingConfig

MODEL = ModelConfig(path="policy", max_context=16)
HANG_TIMEOUT_S = 10.0
STOPPED = "it has been stopped by a signal for 3 s"

pytestmark = pytest.mark.skipif(not CAN_WATCH, reason="this kernel has no pidfd_open")


@pytest.fixture(autouse=True)
def no_process_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health_check, "use_of", lambda pid: TreeUse({}, False))


class ManualWatcher:
    """A `Watcher` of processes that answer pings; each check advances the clock by a second."""

    def __init__(self, socket: Path) -> None:
        self.socket = socket
        self._watch = HealthChecks(socket, clock=ManualClock(tick_s=1.0))
        self._observers: dict[int, ProcessObserver] = {}
        self._watched: dict[int, WatchedProcess] = {}
        self.run = self._watch.run

    def watch(self, pid: int, observer: ProcessObserver) -> None:
        self._observers[pid] = observer
        self._watched[pid] = WatchedProcess(pid, observer)

    def kill(self, pid: int) -> None:
        self._watched[pid].kill()

    def forget(self, pid: int) -> None:
        self._watched.pop(pid).close()

    async def until(self, condition: Any) -> None:
        async with asyncio.timeout(HANG_S):
            while not condition():
                for pid, signs in self._watch.look().items():
                    self._observers[pid].checked(signs)
                await asyncio.sleep(0.005)  # live processes answer meanwhile


@asynccontextmanager
async def watched(
    folder: Path, name: str, num_processes: int
) -> AsyncGenerator[tuple[ManualWatcher, RemoteProcess, list[Any]]]:
    """A group of processes that answer pings."""
    watcher, remote = ManualWatcher(folder / "s"), RemoteProcess(name, hang_timeout_s=HANG_TIMEOUT_S)
    running = asyncio.ensure_future(watcher.run())
    program = str(Path(__file__).with_name("pulsing.py"))
    processes: list[Any] = []
    try:
        for _ in range(num_processes):
            started = await asyncio.create_subprocess_exec(
                sys.executable, program, str(watcher.socket), stdout=asyncio.subprocess.PIPE
            )
            processes.append(started)
            assert started.stdout is not None
            assert await asyncio.wait_for(started.stdout.readline(), HANG_S) == b"pulsing\n"
        remote.watch([process.pid for process in processes], watcher)
        yield watcher, remote, processes
    finally:
        for process in processes:
            if process.returncode is None:
                process.kill()
            await process.wait()
        running.cancel()


class Endless:
    """An endpoint whose call never ends."""

    def __init__(self) -> None:
        self.called = asyncio.Event()

    async def call_one(self, *args: Any) -> None:
        self.called.set()
        await asyncio.Event().wait()


class Rank:
    def __init__(self) -> None:
        self.finish_save = Endless()


async def test_sigstopped_rank_ends_the_whole_trainer_and_its_calls(tmp_path: Path):
    async with watched(tmp_path, "trainer", 2) as (watcher, remote, processes):
        ranks = [Rank(), Rank()]
        trainer = ActorTrainer(remote, ranks, TrainingConfig(data_parallel=2), MODEL)
        call, ended = asyncio.ensure_future(trainer.finish_save()), asyncio.ensure_future(trainer.ended())
        await ranks[1].finish_save.called.wait()
        os.kill(processes[1].pid, signal.SIGSTOP)
        await watcher.until(ended.done)
        assert await ended == f"trainer died: {STOPPED}"
        with pytest.raises(ActorDiedError, match=STOPPED):
            await call
        for process in processes:
            assert await asyncio.wait_for(process.wait(), HANG_S) == -signal.SIGKILL


class Worker:
    def __init__(self) -> None:
        self.run_group = Endless()


class PromptWorker:
    """Finishes every group immediately."""

    async def call(self, endpoint: Any, order: GroupOrder) -> RolloutGroup:
        group_id = order.group_id
        return RolloutGroup(group_id, None, [Rollout(f"{group_id}/0", group_id, 0, order.sample)])

    run_group = None
    reason = None


async def test_group_of_a_sigstopped_worker_moves_to_another(tmp_path: Path):
    async with watched(tmp_path, "rollout-worker-0", 1) as (watcher, remote, (process,)):
        pool, worker, other = WorkerPool(), Worker(), PromptWorker()
        pool.add(remote, worker)
        sampling = SamplingParams(max_tokens=1)
        playing = asyncio.ensure_future(
            pool.of("sums").run_group(requests(), {}, group_id="g", group_size=1, sampling=sampling)
        )
        await worker.run_group.called.wait()
        pool.add(other, other)  # pyright: ignore
        os.kill(process.pid, signal.SIGSTOP)
        await watcher.until(playing.done)
        assert [rollout.rollout_id for rollout in (await playing).rollouts] == ["g/0"]
        assert remote.reason == STOPPED
        assert await asyncio.wait_for(process.wait(), HANG_S) == -signal.SIGKILL
