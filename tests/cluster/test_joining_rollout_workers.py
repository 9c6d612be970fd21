"""Rollout workers of hosts that join and leave a run. No process is started; see `test_run_processes`."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from background import in_background

pytest.importorskip("monarch", reason="needs the cpu or gpu extra")

from group_requests import requests
from test_run_processes import Supervisor, cluster_of, host_of, lose, worker, worker_hosts

from titan_rl import SamplingParams
from titan_rl.cluster.hosts.lifecycle import HostState
from titan_rl.cluster.processes.remote_process import RemoteProcess
from titan_rl.cluster.rollout_worker_pool import WorkerPool
from titan_rl.cluster.run_processes import RunProcesses
from titan_rl.cluster.supervision import ProcessFailure
from titan_rl.config.hosts import HostsConfig
from titan_rl.config.sections import GenerationConfig
from titan_rl.core.console import ConsoleLines
from titan_rl.core.errors import ActorDiedError, ConfigError
from titan_rl.rollout.settings import RolloutConfig

ADDRESSES = ("10.0.0.1", "10.0.0.2", "10.0.0.3")

pytestmark = pytest.mark.looptime


class Cluster:
    """A run on `trains`, `a` and `b`, which may not start more generators."""

    def __init__(self, folder: Path, hosts: HostsConfig, num_workers: int) -> None:
        self.supervisor = Supervisor()
        self.console = ConsoleLines()
        self.processes: RunProcesses = cluster_of(
            folder,
            self.supervisor,
            self.console,
            names=["trains", "a", "b"],
            hosts=hosts,
            rollout=RolloutConfig(num_workers=num_workers),
            generation=GenerationConfig(num_generators=1, num_generators_range=(1, 1)),
        )

    async def join(self, name: str) -> list[str]:
        """Add a host, and return the names of the workers that start there."""
        self.processes.hosts.lifecycles.add(host_of(name))
        return await self.processes.join(name)

    async def drain(self, name: str) -> None:
        lifecycles = self.processes.hosts.lifecycles
        record = lifecycles.named(name)
        assert record is not None
        lifecycles.move(record, HostState.DRAINING, "it was asked to")
        await self.processes.leave(name, "it was asked to")
        await self.processes.hosts.detach(name)


@asynccontextmanager
async def running(folder: Path, hosts: HostsConfig | None = None, num_workers: int = 4) -> AsyncGenerator[Cluster]:
    cluster = Cluster(folder, hosts or HostsConfig(), num_workers)
    for index in range(num_workers):
        await cluster.processes._start_worker(worker(index))  # pyright: ignore[reportPrivateUsage]
    await worker_hosts(cluster.supervisor, num_workers)
    async with in_background(cluster.processes.watch()):
        yield cluster


@pytest.mark.parametrize(
    ("hosts", "num_workers", "expected"),
    [
        ({}, 4, ["rollout-worker-4", "rollout-worker-5"]),  # as a and b have two each
        ({}, 1, ["rollout-worker-1"]),
        ({}, 0, []),
        ({"generate": 1, "play": 2}, 4, ["rollout-worker-4", "rollout-worker-5"]),
        ({"generate": 2, "play": 1}, 4, []),  # not all generator hosts play
    ],
)
async def test_joining_host_gets_workers_only_if_generator_hosts_play(
    tmp_path: Path, hosts: dict[str, Any], num_workers: int, expected: Sequence[str]
) -> None:
    async with running(tmp_path, HostsConfig(addresses=ADDRESSES, **hosts), num_workers) as cluster:
        assert await cluster.join("c") == expected
        assert await worker_hosts(cluster.supervisor, len(expected)) == ["c"] * len(expected)


async def test_joining_host_replaces_lost_rollout_hosts(tmp_path: Path) -> None:
    async with running(tmp_path, HostsConfig(addresses=ADDRESSES, generate=2, play=1), num_workers=2) as cluster:
        await lose(cluster.processes, "b")
        assert await worker_hosts(cluster.supervisor, 2) == ["a", "a"], "they restart at once"
        assert await cluster.join("c") == [], "one host plays already"
        for name in ("a", "c", "trains"):
            await lose(cluster.processes, name)
            await asyncio.sleep(1)
        while not cluster.supervisor.started.empty():
            cluster.supervisor.started.get_nowait()
        assert await cluster.join("d") == ["rollout-worker-0", "rollout-worker-1"]


@pytest.mark.parametrize("end", ["drained", "lost"])
async def test_workers_of_a_joined_host_leave_with_it_and_return(tmp_path: Path, end: str) -> None:
    async with running(tmp_path) as cluster:
        brought = await cluster.join("c")
        await worker_hosts(cluster.supervisor, 2)
        await (cluster.drain("c") if end == "drained" else lose(cluster.processes, "c"))
        await asyncio.sleep(1)
        assert cluster.supervisor.started.empty()
        assert any(f"{brought[0]} is gone: host c is {end}: " in line for line in cluster.console)
        assert await cluster.join("d") == brought
        assert await worker_hosts(cluster.supervisor, 2) == ["d", "d"]


NO_START = [ConfigError("the task cannot be imported"), OSError("no room")]


@pytest.mark.parametrize("problem", NO_START)
async def test_joining_host_that_starts_no_worker_does_not_end_the_run(tmp_path: Path, problem: Exception) -> None:
    async with running(tmp_path) as cluster:
        cluster.supervisor.problems["c"] = problem
        assert await cluster.join("c") == []
        await asyncio.sleep(60)
        assert [text.partition(": ")[0] for text in cluster.console] == [
            "rollout-worker-4 does not start on host c",
            "rollout-worker-5 does not start on host c",
        ]
        assert str(problem) in cluster.console[0]
        assert await cluster.join("d") == ["rollout-worker-4", "rollout-worker-5"]


@pytest.mark.parametrize("problem", NO_START)
async def test_failed_restarts_of_a_worker_end_the_run_at_max_respawns(tmp_path: Path, problem: Exception) -> None:
    with pytest.raises(ExceptionGroup) as caught:  # noqa: PT012  the error ends the block
        async with running(tmp_path, num_workers=1) as cluster:
            cluster.supervisor.problems["a"] = problem
            await cluster.processes.hosts.supervisor.failures.put(
                ProcessFailure(next(iter(cluster.supervisor.host_of)), "was killed by SIGKILL")
            )
            await asyncio.Event().wait()
    (error,) = caught.value.exceptions
    most = HostsConfig().max_respawns
    expected = rf"rollout-worker-0 died: it did not start: .*{problem}, and is not replaced: .* and {most} were"
    assert re.match(expected, str(error)), error


async def test_num_workers_is_kept_when_hosts_leave(tmp_path: Path) -> None:
    async with running(tmp_path) as cluster:
        await cluster.join("c")
        await worker_hosts(cluster.supervisor, 2)
        await cluster.drain("a")
        await asyncio.sleep(1)
        assert cluster.supervisor.started.empty(), "two on b and two on c are four"
        await cluster.drain("b")
        assert len(await worker_hosts(cluster.supervisor, 2)) == 2


async def play_in_workers_that_die(pool: WorkerPool, excused: Sequence[bool]) -> None:
    """Play a group in workers that all die during it.

    Args:
        excused: For each death, whether its host is lost. The last death must end the group.
    """
    ends = list(excused)

    class Dies:
        def __init__(self) -> None:
            self.remote = RemoteProcess("rollout-worker-0", self)

        def process_ended(self, remote: RemoteProcess) -> None:
            begin()

        @property
        def run_group(self) -> Any:
            return self

        async def call_one(self, *args: Any) -> None:
            self.remote.end("gone", excused=ends.pop(0))
            raise ActorDiedError("rollout-worker-0 died: gone")

    def begin() -> None:
        dies = Dies()
        pool.add(dies.remote, dies)

    begin()
    play = {"group_id": "g", "group_size": 1, "sampling": SamplingParams(max_tokens=1)}
    with pytest.raises(ActorDiedError, match="rollout-worker-0 died: gone"):
        await pool.of("sums").run_group(requests(), {}, **play)
    assert ends == []


async def test_lost_hosts_do_not_count_against_a_groups_attempts() -> None:
    """The group is not to blame for a worker whose host is lost."""
    await play_in_workers_that_die(WorkerPool(max_attempts=2), [True, True, True, False, False])


async def test_group_attempts_follow_max_respawns(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, HostsConfig(max_respawns=5), num_workers=1)
    await play_in_workers_that_die(cluster.processes.workers, [False] * 6)
