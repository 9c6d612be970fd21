"""What is told of processes that fail or die. None is started: Monarch's part is played by plain coroutines."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("monarch", reason="needs the cpu or gpu extra")

from run.test_controller import Counting

from titan_rl.actors.actor_replica import ActorReplica
from titan_rl.actors.processes.remote_process import RemoteProcess
from titan_rl.actors.processes.supervisor import ProcessFailure
from titan_rl.actors.run_processes import RunProcesses
from titan_rl.config.run import RunConfig
from titan_rl.config.sections import GenerationConfig
from titan_rl.config.tasks import TaskSource
from titan_rl.errors import ActorDiedError, GenerationError
from titan_rl.generation.router.router import GeneratorRouter
from titan_rl.rollout.settings import RolloutConfig
from titan_rl.run.directory import RunDirectory
from titan_rl.training.settings import ModelConfig
from titan_rl.weights.published_weights import PublishedWeights


class Replica(ActorReplica):
    """Of a process that is not there."""

    def __init__(self) -> None:
        self.name, self.remote = "generator-0", RemoteProcess("generator-0")


class Endpoint:
    def __init__(self, answer: Any) -> None:
        self._answer = answer

    async def call_one(self, *args: Any) -> Any:
        return await self._answer(*args)

    async def call(self, *args: Any) -> dict[int, Any]:
        return {}


class Supervisor:
    """Its processes live only on paper, and die when `kill` says so."""

    def __init__(self) -> None:
        self.failures: asyncio.Queue[ProcessFailure] = asyncio.Queue()
        self.started: asyncio.Queue[str] = asyncio.Queue()
        self.spawn = Endpoint(self._spawn)
        self.terminate = Endpoint(self._terminate)
        self.next_failure = Endpoint(self.failures.get)

    async def _spawn(self, process_id: str, *args: Any) -> Any:
        self.started.put_nowait(process_id)
        return Actor()

    async def _terminate(self, *args: Any) -> None: ...

    async def kill_next(self) -> None:
        self.failures.put_nowait(ProcessFailure(await self.started.get(), "was killed by SIGKILL"))


class Actor:
    def __init__(self) -> None:
        self.pid = self.start = Endpoint(None)


def cluster_of(folder: Path, supervisor: Any, told: list[str], **settings: Any) -> RunProcesses:
    config = RunConfig(
        model=ModelConfig(path="unused", max_context=256),
        tasks=[TaskSource(task=Counting())],  # pyright: ignore[reportArgumentType]
        **settings,
    )
    return RunProcesses(
        config,
        RunDirectory(folder),
        PublishedWeights(),
        supervisor,
        None,
        told.append,
        trains=True,
        generates=True,
    )


@pytest.mark.parametrize(
    ("error", "reason"),
    [(TimeoutError(), "TimeoutError"), (GenerationError(), "GenerationError"), (GenerationError("torn"), "torn")],
)
async def test_a_generator_out_of_service_is_told_of_with_a_reason(tmp_path: Path, error: Exception, reason: str):
    told: list[str] = []
    cluster_of(tmp_path, None, told).on_replica_failed(Replica(), error)
    assert told == [f"generator-0 is out of service until it has the current weights: {reason}"]


@pytest.mark.parametrize("limit", [0, 2])
async def test_a_death_past_the_limit_ends_the_run_with_setting_value_and_count(tmp_path: Path, limit: int):
    told: list[str] = []
    supervisor = Supervisor()
    processes = cluster_of(
        tmp_path,
        supervisor,
        told,
        rollout=RolloutConfig(num_workers=1, max_respawns=limit),
        generation=GenerationConfig(num_generators=1),
    )
    await processes._start_worker("rollout-worker-0")  # pyright: ignore[reportPrivateUsage]
    watching = asyncio.ensure_future(processes.watch(GeneratorRouter([Replica()])))
    for _ in range(limit + 1):
        await supervisor.kill_next()
    with pytest.raises(ExceptionGroup) as caught:
        await asyncio.wait_for(watching, 20)
    (error,) = caught.value.exceptions
    assert isinstance(error, ActorDiedError)
    assert f"rollout-worker-0 died: was killed by SIGKILL, and is not replaced: rollout.max_respawns = {limit}" in str(
        error
    )
    assert f"and {limit} were replaced before" in str(error)
    assert str(tmp_path / "logs" / "rollout-worker-0.log") in str(error)
    deaths = [text for text in told if "died" in text]
    assert deaths == [
        f"rollout-worker-0 died: was killed by SIGKILL; starting another ({n} of rollout.max_respawns = {limit})"
        for n in range(1, limit + 1)
    ]
