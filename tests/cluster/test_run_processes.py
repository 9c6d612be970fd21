"""Handling of processes that fail or die. None is started: plain coroutines stand in for Monarch."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from background import HANG_S, in_background

pytest.importorskip("monarch", reason="needs the cpu or gpu extra")

from run.test_controller import Counting

from titan_rl.cluster.actor_replica import ActorReplica, AdapterReplica
from titan_rl.cluster.hosts.attached_hosts import Hosts
from titan_rl.cluster.hosts.host import Host
from titan_rl.cluster.hosts.lifecycle import HostState
from titan_rl.cluster.hosts.placement import ProcessPlace
from titan_rl.cluster.hosts.preflight import HostNeeds
from titan_rl.cluster.liveness.health_check import ProcessHealth, ProcessorTime
from titan_rl.cluster.processes.process import LOOPBACK, ProcessActor
from titan_rl.cluster.processes.remote_process import RemoteProcess
from titan_rl.cluster.processes.roles import ProcessId, Role
from titan_rl.cluster.run_processes import RunProcesses
from titan_rl.cluster.supervision import ProcessFailure
from titan_rl.config.hosts import HostsConfig
from titan_rl.config.run import RunConfig
from titan_rl.config.sections import GenerationConfig
from titan_rl.config.tasks import TaskSource
from titan_rl.core.console import ConsoleLines
from titan_rl.core.errors import ActorDiedError, GenerationError, NoReplicaError
from titan_rl.generation.router.router import GeneratorRouter
from titan_rl.rollout.settings import RolloutConfig
from titan_rl.run.directory import RunDirectory
from titan_rl.training.settings import ModelConfig, TrainingConfig
from titan_rl.types import Completion, FinishReason, SamplingParams, VersionSpan
from titan_rl.weights.types import Manifest, PublishedWeights

SILENT = "no heartbeat for 3 s"


class Replica(ActorReplica):
    """Replica of a process that does not exist."""

    def __init__(self) -> None:
        self.name, self.remote = "generator-0", RemoteProcess("generator-0")


class Nobody:
    """Watcher that never reports anything."""

    def watch(self, pid: int, observer: Any) -> None: ...

    def kill(self, pid: int) -> None: ...

    def forget(self, pid: int) -> None: ...


class Watched(Nobody):
    """Watcher whose process reports its health when the test wants it to."""

    observer: Any

    def watch(self, pid: int, observer: Any) -> None:
        self.observer = observer


class Endpoint:
    def __init__(self, answer: Any) -> None:
        self._answer = answer

    async def call_one(self, *args: Any) -> Any:
        return await self._answer(*args)


class Supervisor:
    """Supervisor of imaginary processes, which die at `kill_next`."""

    def __init__(self) -> None:
        self.failures: asyncio.Queue[ProcessFailure] = asyncio.Queue()
        self.started: asyncio.Queue[str] = asyncio.Queue()
        self.host_of: dict[str, str] = {}
        self.problems: dict[str, Exception] = {}  # by host, the error of starting a process there
        self.may_terminate = asyncio.Event()
        self.may_terminate.set()
        self.may_start = asyncio.Event()
        self.may_start.set()
        self.spawn = Endpoint(self._spawn)
        self.terminate = Endpoint(self._terminate)
        self.next_failure = Endpoint(self.failures.get)

    async def _spawn(self, process_id: str, actor_class: Any, arguments: Any, rank: int, host: str, *args: Any) -> Any:
        self.started.put_nowait(process_id)
        self.host_of[process_id] = host
        return Actor(self.may_start, self.problems.get(host))

    async def _terminate(self, *args: Any) -> None:
        await self.may_terminate.wait()

    async def kill_next(self) -> None:
        self.failures.put_nowait(ProcessFailure(await self.started.get(), "was killed by SIGKILL"))


class Actor:
    def __init__(self, may_start: asyncio.Event, problem: Exception | None = None) -> None:
        self._may_start = may_start
        self._problem = problem
        self.pid, self.start = Endpoint(self._pid), Endpoint(self._start)

    async def _pid(self) -> int:
        return 0

    async def _start(self) -> None:
        await self._may_start.wait()
        if self._problem is not None:
            raise self._problem


class Agent:
    def __init__(self) -> None:
        self.free_port = Endpoint(self._free_port)

    async def _free_port(self) -> int:
        return 1


def worker(index: int) -> ProcessId:
    return ProcessId(Role.ROLLOUT_WORKER, index)


def host_of(name: str) -> Host:
    return Host(name, LOOPBACK, Agent(), key=name, watcher=Nobody())


def cluster_of(
    folder: Path,
    supervisor: Any,
    console: ConsoleLines,
    *,
    names: Sequence[str] = ("there",),
    generates: bool = True,
    **settings: Any,
) -> RunProcesses:
    settings.setdefault("model", ModelConfig(path="unused", max_context=256))
    addresses = {"addresses": tuple(f"{name}:22222" for name in names)}
    settings["hosts"] = settings.get("hosts", HostsConfig()).model_copy(update=addresses)
    config = RunConfig(
        tasks=[TaskSource(task=Counting())],  # pyright: ignore[reportArgumentType]
        **settings,
    )
    hosts = Hosts(supervisor, config.hosts, HostNeeds(folder, folder), console)
    for name in names:
        hosts.lifecycles.add(host_of(name))
    processes = RunProcesses(
        config,
        RunDirectory(folder),
        PublishedWeights(),
        hosts,
        None,
        trains=True,
        generates=generates,
    )
    processes.place()
    processes.router = GeneratorRouter([Replica()])
    return processes


@pytest.mark.parametrize(
    ("error", "reason"),
    [(TimeoutError(), "TimeoutError"), (GenerationError(), "GenerationError"), (GenerationError("torn"), "torn")],
)
async def test_generator_out_of_service_message_gives_the_reason(tmp_path: Path, error: Exception, reason: str):
    console, listener = ConsoleLines(), SimpleNamespace(pulled=lambda name: None)
    processes = cluster_of(tmp_path, None, console)
    processes.on_replica_failed(Replica(), error)
    processes.on_replica_failed(AdapterReplica(Replica(), "sort", PublishedWeights(), listener), error)
    assert console == [
        f"generator-0 is out of service until it has the current weights: {reason}",
        f"generator-0 is out of service for the adapter sort until it has the current weights: {reason}",
    ]


@pytest.mark.parametrize("limit", [0, 2])
async def test_death_past_max_respawns_ends_the_run(tmp_path: Path, limit: int):
    console = ConsoleLines()
    supervisor = Supervisor()
    processes = cluster_of(
        tmp_path,
        supervisor,
        console,
        rollout=RolloutConfig(num_workers=1),
        hosts=HostsConfig(max_respawns=limit),
        generation=GenerationConfig(num_generators=1),
    )
    await processes._start_worker(worker(0))  # pyright: ignore[reportPrivateUsage]
    watching = asyncio.ensure_future(processes.watch())
    for _ in range(limit + 1):
        await supervisor.kill_next()
    with pytest.raises(ExceptionGroup) as caught:
        await asyncio.wait_for(watching, HANG_S)
    (error,) = caught.value.exceptions
    assert isinstance(error, ActorDiedError)
    assert f"rollout-worker-0 died: was killed by SIGKILL, and is not replaced: hosts.max_respawns = {limit}" in str(
        error
    )
    assert f"and {limit} were replaced before" in str(error)
    assert str(tmp_path / "logs" / "rollout-worker-0.log") in str(error)
    deaths = [text for text in console if "died" in text]
    assert deaths == [
        f"rollout-worker-0 died: was killed by SIGKILL; starting another ({n} of hosts.max_respawns = {limit})"
        for n in range(1, limit + 1)
    ]


@pytest.mark.looptime
async def test_starts_that_fail_at_once_wait_between_them(tmp_path: Path):
    clock, supervisor = asyncio.get_running_loop().time, Supervisor()
    supervisor.problems["there"] = OSError("no such socket")
    processes = cluster_of(
        tmp_path,
        supervisor,
        ConsoleLines(),
        rollout=RolloutConfig(num_workers=1),
        hosts=HostsConfig(max_respawns=4),
        generation=GenerationConfig(num_generators=1),
    )
    began = clock()
    with pytest.raises(ActorDiedError, match="no such socket"):
        await processes._start_worker(worker(0))  # pyright: ignore[reportPrivateUsage]
    with pytest.raises(ExceptionGroup) as caught:
        await processes.watch()
    assert "rollout-worker-0 died: it did not start: OSError: no such socket" in str(caught.value.exceptions[0])
    assert supervisor.started.qsize() == 5
    assert clock() - began == pytest.approx(1 + 2 + 4 + 8, abs=1)


@pytest.mark.looptime
async def test_processes_that_die_after_their_start_are_replaced_without_a_pause(tmp_path: Path):
    clock, supervisor = asyncio.get_running_loop().time, Supervisor()
    processes = cluster_of(
        tmp_path,
        supervisor,
        ConsoleLines(),
        rollout=RolloutConfig(num_workers=1),
        hosts=HostsConfig(max_respawns=4),
        generation=GenerationConfig(num_generators=1),
    )
    await processes._start_worker(worker(0))  # pyright: ignore[reportPrivateUsage]
    async with in_background(processes.watch()):
        process_id = await supervisor.started.get()
        for _ in range(3):
            await asyncio.sleep(5)
            died = clock()
            supervisor.failures.put_nowait(ProcessFailure(process_id, "was killed by SIGKILL"))
            process_id = await supervisor.started.get()
            assert clock() - died < 0.5


async def test_processor_times_include_processes_that_have_ended(tmp_path: Path):
    processes = cluster_of(tmp_path, Supervisor(), ConsoleLines(), rollout=RolloutConfig(num_workers=1))
    for _ in range(2):
        place = ProcessPlace("there")
        watched = Watched()
        processes.hosts["there"].watcher = watched
        earlier = processes.processor_times()
        remote, _ = await processes.spawn(worker(0), ProcessActor, places=[place])
        assert processes.processor_times() == earlier, "it has not answered a ping"
        watched.observer.checked(ProcessHealth(processor_s=3.0, work_s=2.0))
        watched.observer.checked(ProcessHealth(processor_s=4.0, work_s=2.5))
        before = processes.processor_times()
        remote.end("killed")
        assert processes.processor_times() == before
    assert before == {Role.ROLLOUT_WORKER: ProcessorTime(8.0, 5.0)}


async def lose(processes: RunProcesses, name: str) -> None:
    record = processes.hosts.lifecycles.named(name)
    assert record is not None
    processes.hosts.lifecycles.move(record, HostState.LOST, SILENT)


async def worker_hosts(supervisor: Supervisor, count: int) -> list[str]:
    """Hosts of the next `count` processes that start."""
    return sorted([supervisor.host_of[await supervisor.started.get()] for _ in range(count)])


@pytest.mark.looptime
async def test_workers_of_a_lost_host_restart_elsewhere_uncounted(tmp_path: Path):
    console = ConsoleLines()
    supervisor = Supervisor()
    processes = cluster_of(
        tmp_path,
        supervisor,
        console,
        names=["trains", "a", "b", "c"],
        rollout=RolloutConfig(num_workers=6),
        hosts=HostsConfig(max_respawns=0),
        generation=GenerationConfig(num_generators=3),
    )
    for index in range(6):
        await processes._start_worker(worker(index))  # pyright: ignore[reportPrivateUsage]
    assert await worker_hosts(supervisor, 6) == ["a", "a", "b", "b", "c", "c"]
    async with in_background(processes.watch()):
        supervisor.may_terminate.clear()  # the host does not answer
        began = asyncio.get_running_loop().time()
        await lose(processes, "b")
        assert await worker_hosts(supervisor, 2) == ["a", "c"]
        assert asyncio.get_running_loop().time() - began < 0.01
        assert f"rollout-worker-1 is gone: host b is lost: {SILENT}; starting another on a" in console


@pytest.mark.looptime
async def test_rollout_worker_waits_for_a_host_and_reports_it(tmp_path: Path):
    console = ConsoleLines()
    supervisor = Supervisor()
    processes = cluster_of(
        tmp_path,
        supervisor,
        console,
        rollout=RolloutConfig(num_workers=1),
        generation=GenerationConfig(num_generators=1, num_generators_range=(1, 1)),
    )
    await processes._start_worker(worker(0))  # pyright: ignore[reportPrivateUsage]
    await supervisor.started.get()
    async with in_background(processes.watch()):
        await lose(processes, "there")
        await asyncio.sleep(1.0)
        assert console == [f"rollout-worker-0 is gone: host there is lost: {SILENT}; no remaining host has room for it"]
        processes.hosts.lifecycles.add(host_of("other"))
        assert await processes.join("other") == ["rollout-worker-0"]
        assert await worker_hosts(supervisor, 1) == ["other"]
        assert supervisor.started.empty()


@pytest.mark.looptime
async def test_worker_that_dies_before_its_host_is_lost_restarts_elsewhere(tmp_path: Path):
    supervisor = Supervisor()
    processes = cluster_of(
        tmp_path, supervisor, ConsoleLines(), names=["trains", "a", "b"], rollout=RolloutConfig(num_workers=2)
    )
    await processes._start_worker(worker(0))  # pyright: ignore[reportPrivateUsage]
    async with in_background(processes.watch()):
        supervisor.may_terminate.clear()
        await supervisor.kill_next()
        await asyncio.sleep(3.0)
        assert supervisor.started.empty()
        await lose(processes, "a")
        async with asyncio.timeout(1.0):
            assert await worker_hosts(supervisor, 1) == ["b"]


async def start_and_lose(processes: RunProcesses, supervisor: Supervisor, name: str) -> None:
    """Start all processes, and lose a host before anything is up."""
    supervisor.may_start.clear()
    starting = asyncio.ensure_future(processes.start())
    await asyncio.sleep(1.0)
    await lose(processes, name)
    supervisor.may_start.set()
    await starting


@pytest.mark.looptime
async def test_losing_the_only_training_host_at_start_fails_at_once(tmp_path: Path):
    supervisor = Supervisor()
    processes = cluster_of(tmp_path, supervisor, ConsoleLines(), names=["trains", "a"], generates=False)
    began = asyncio.get_running_loop().time()
    with pytest.raises(ExceptionGroup) as caught:
        await start_and_lose(processes, supervisor, "trains")
    assert str(caught.value.exceptions[0]) == f"trainer died: host trains is lost: {SILENT}"
    assert asyncio.get_running_loop().time() - began == pytest.approx(1.0)


@pytest.mark.looptime
async def test_run_starts_without_a_lost_host_when_others_suffice(tmp_path: Path):
    console = ConsoleLines()
    supervisor = Supervisor()
    processes = cluster_of(
        tmp_path,
        supervisor,
        console,
        names=["a", "b", "c"],
        generates=False,
        hosts=HostsConfig(addresses=("a", "b", "c"), train=2, play=3),
        training=TrainingConfig(data_parallel=2),
        rollout=RolloutConfig(num_workers=3),
    )
    await start_and_lose(processes, supervisor, "a")
    assert console == [
        f"the trainer starts without a host that is lost: trainer died: host a is lost: {SILENT}",
        f"the run starts without host a: rollout-worker-0 died: host a is lost: {SILENT}",
    ]
    assert processes.names_by_host()["b"] == ["rollout-worker-1", "trainer"]
    async with in_background(processes.watch()):
        await asyncio.sleep(1.0)
        assert "rollout-worker-0 is running again after 0 s" in console
        names = processes.names_by_host()
        assert sorted(names["b"] + names["c"]) == [
            "rollout-worker-0",
            "rollout-worker-1",
            "rollout-worker-2",
            "trainer",
            "trainer",
        ]


class Answers:
    """A generator on a host that has joined."""

    name = "generator-1"

    async def generate(self, prompt_token_ids: Sequence[int], *, request_id, session_id=None, sampling) -> Completion:
        return Completion(request_id, [1], [0.0], FinishReason.STOP, (VersionSpan(0, 1),))

    async def pull(self, version: int) -> None: ...

    async def pause(self, mode: str) -> None: ...

    async def resume(self) -> None: ...

    async def abort(self, request_ids: Sequence[str]) -> None: ...

    async def close(self) -> None: ...


@pytest.mark.looptime
@pytest.mark.parametrize(("setting", "limit_s"), [(None, 190), (7.0, 7)])
async def test_start_timeout_scales_with_weights_and_error_names_the_setting(
    tmp_path: Path, setting: float | None, limit_s: int
):
    with (tmp_path / "model.safetensors").open("wb") as weights:
        weights.truncate(1_000_000_000)  # sparse: takes no disk space
    supervisor = Supervisor()
    supervisor.may_start.clear()
    model = ModelConfig(path=str(tmp_path), max_context=256)
    generation = GenerationConfig(start_timeout_s=setting)
    processes = cluster_of(tmp_path, supervisor, ConsoleLines(), model=model, generation=generation)
    began = asyncio.get_running_loop().time()
    late = rf"^generator-0 died: it did not start within generation\.start_timeout_s = {limit_s}; increase it"
    with pytest.raises(ActorDiedError, match=late):
        await processes.spawn(ProcessId(Role.GENERATOR, 0), ProcessActor, places=[ProcessPlace("there")])
    assert asyncio.get_running_loop().time() - began == limit_s


@pytest.mark.looptime
async def test_rollouts_wait_up_to_hosts_wait_s_for_generator_hosts(tmp_path: Path):
    processes = cluster_of(
        tmp_path,
        Supervisor(),
        ConsoleLines(),
        names=["trains", "a", "b"],
        generation=GenerationConfig(num_generators=2, start_timeout_s=180),
    )
    router = processes.router = processes.make_router([])
    async with in_background(processes.watch()):
        await lose(processes, "trains")  # without another host, a generator may start on any
        for index, host in enumerate(["a", "b"]):
            generator = ProcessId(Role.GENERATOR, index)
            await processes.spawn(generator, ProcessActor, places=[ProcessPlace(host)])
            assert f"starting, within generation.start_timeout_s = 180: {generator}; " in processes.waits_for()
            await lose(processes, host)
            await asyncio.sleep(10)
        waits_for = (
            "waiting for a host that joins: generator-0, generator-1; rollouts wait for up to hosts.wait_s = 3600"
        )
        assert processes.waits_for() == waits_for
        requests = [
            asyncio.ensure_future(router.generate([1], request_id=f"r{n}", sampling=SamplingParams(max_tokens=1)))
            for n in range(2)
        ]
        await asyncio.sleep(3590)
        assert not any(request.done() for request in requests)
        await router.add_replica(Answers())
        assert [len((await request).token_ids) for request in requests] == [1, 1]
    await router.close()


@pytest.mark.looptime
async def test_unserved_requests_fail_after_hosts_wait_s(tmp_path: Path):
    processes = cluster_of(tmp_path, Supervisor(), ConsoleLines(), hosts=HostsConfig(wait_s=400))
    router = processes.make_router([])
    began = asyncio.get_running_loop().time()
    with pytest.raises(NoReplicaError, match="no replica served within 400 s; there are no generators"):
        await router.generate([1], request_id="r", sampling=SamplingParams(max_tokens=1))
    assert asyncio.get_running_loop().time() - began == pytest.approx(400)
    await router.close()


class Suspecting(GeneratorRouter):
    """`AdaptersRouter` that knows the cause of the deaths once."""

    def __init__(self) -> None:
        super().__init__([Replica()])
        self.at_work: list[frozenset[str]] = []
        self.causes = ["sort"]
        self.reasons: list[str] = []

    def note_death(self, at_work: frozenset[str]) -> None:
        self.at_work.append(at_work)

    def stop_cause(self, why: str) -> str | None:
        self.reasons.append(why)
        return self.causes.pop() if self.causes else None


async def never(*args: Any) -> None:
    await asyncio.Event().wait()


class Pulling(ActorReplica):
    """Replica whose pulls never end."""

    def __init__(self, remote: RemoteProcess) -> None:
        self.name, self.remote, self._actor = remote.name, remote, SimpleNamespace(pull=Endpoint(never))
        self._calls, self._known_layouts = Counter(), {}


async def test_generator_deaths_past_the_limit_stop_the_causing_adapter(
    tmp_path: Path,
) -> None:
    console, router = ConsoleLines(), Suspecting()
    processes = cluster_of(tmp_path, Supervisor(), console, hosts=HostsConfig(max_respawns=1))
    processes.router = router

    async def die(number: int) -> RemoteProcess:
        remote = RemoteProcess(ProcessId(Role.GENERATOR, 0))
        replica, published = Pulling(remote), PublishedWeights()
        published.announce(Manifest(number, ()))
        processes.opened.append(replica)
        pulls = [asyncio.create_task(replica.pull_adapter(number, published, name)) for name in ("sort", "sum")]
        await asyncio.sleep(0)
        pulls.pop().cancel()
        await asyncio.sleep(0)
        remote.end("was killed by SIGKILL")
        assert [type(failed) for failed in await asyncio.gather(*pulls, return_exceptions=True)] == [GenerationError]
        return remote

    count = processes._count_death  # pyright: ignore[reportPrivateUsage]
    for number in range(3):
        count(await die(number))
    assert router.at_work == [{"sort"}] * 3
    assert console == [
        "generator-0 died: was killed by SIGKILL; starting another (1 of hosts.max_respawns = 1)",
        "generator-0 died: was killed by SIGKILL; starting another, without the adapter sort",
        "generator-0 died: was killed by SIGKILL; starting another (1 of hosts.max_respawns = 1)",
    ]
    with pytest.raises(ActorDiedError, match=r"hosts.max_respawns = 1, and 1 was replaced before"):
        count(await die(3))
    assert len(router.reasons) == 2
