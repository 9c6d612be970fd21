"""Routers of several adapters over fake generators that die."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

pytest.importorskip("monarch", reason="needs the cpu or gpu extra")

from titan_rl import Completion, FinishReason, SamplingParams
from titan_rl.cluster.adapter_routers import AdapterRouters
from titan_rl.cluster.processes.remote_process import RemoteProcess
from titan_rl.core.console import LOG, Console, ConsoleLines
from titan_rl.core.errors import ActorDiedError, GenerationError, StateDictError
from titan_rl.generation.request import EngineRequest, OnChunk
from titan_rl.generation.router.replica import Limits
from titan_rl.generation.router.router import GeneratorRouter
from titan_rl.types import VersionSpan
from titan_rl.weights.types import Manifest, PublishedWeights

SAMPLING = SamplingParams(max_tokens=1)


class Generator:
    """A generator without an engine. Its answer is the loaded version of the request's adapter."""

    gauges = None

    def __init__(self, name: str = "generator-0") -> None:
        self.name = name
        self.loaded: dict[str, int] = {}
        self.failing: set[str] = set()  # adapters that cannot be loaded
        self.may_load = {name: asyncio.Event() for name in ("sort", "sum", "tags")}
        for event in self.may_load.values():
            event.set()
        self.pull_s = 0.0
        self.engine = asyncio.Lock()  # loads one version at a time
        self.remote = RemoteProcess(name)
        self.deadly: set[str] = set()  # adapters whose requests kill it
        self.asked: list[str] = []  # adapters, in the order of their requests
        self.answers = asyncio.Event()
        self.answers.set()

    async def stream(self, request: EngineRequest, on_chunk: OnChunk) -> Completion:
        self.asked.append(request.adapter)
        await asyncio.sleep(0.5)
        if request.adapter in self.deadly:
            self.remote.end("was killed by SIGKILL")
        if self.remote.reason is not None:
            raise GenerationError(f"{self.name} died: {self.remote.reason}")
        await self.answers.wait()
        version = self.loaded[request.adapter]
        return Completion(request.request_id, [version], [0.0], FinishReason.LENGTH, (VersionSpan(version, 1),))

    async def pull_adapter(self, version: int, published: PublishedWeights, adapter: str) -> int:
        await self.may_load[adapter].wait()
        async with self.engine:
            await asyncio.sleep(self.pull_s)
        if adapter in self.failing:
            raise StateDictError("the probes differ")
        self.loaded[adapter] = published.manifest_of(version).version
        return self.loaded[adapter]

    async def abort(self, request_ids: list[str]) -> None: ...


class Processes:
    """`GeneratorProcesses` with a single generator."""

    def __init__(self) -> None:
        self.replicas = [Generator()]

    def make_router(self, replicas: Any) -> GeneratorRouter:
        self.failed: list[Exception] = []
        return GeneratorRouter(
            replicas,
            limits=Limits(quarantine_s=0.01, cancel_s=0.1),
            on_replica_failed=lambda replica, error: self.failed.append(error),
        )


async def open_routers(console: Console = LOG, **versions: int) -> tuple[AdapterRouters, Processes]:
    """Routers over one generator that has loaded a version of each adapter."""
    processes = Processes()
    routers = AdapterRouters(cast(Any, processes), versions, console)
    for name, version in versions.items():
        routers.published[name].announce(Manifest(version, ()))
        await routers.by_adapter[name].pull_state_dict(version)
    return routers, processes


async def ask(routers: AdapterRouters, adapter: str) -> int:
    """Version that answers a request for an adapter."""
    router = routers.by_adapter[adapter]
    return (await router.generate([1], request_id="train-0/0", sampling=SAMPLING)).token_ids[0]


async def test_replacement_generator_serves_each_adapter_at_its_version() -> None:
    routers, _ = await open_routers(sort=3, sum=5)
    routers.remove_replica("generator-0")
    waiting = [asyncio.ensure_future(ask(routers, name)) for name in ("sort", "sum")]
    assert routers.trouble() == "there are no generators"
    replacement = Generator()
    assert await routers.add_replica(cast(Any, replacement))
    assert await asyncio.gather(*waiting) == [3, 5]
    assert replacement.loaded == {"sort": 3, "sum": 5}
    assert routers.trouble() is None
    await routers.close()


async def test_generator_joins_remaining_adapters_when_one_closes() -> None:
    routers, _ = await open_routers(sort=3, sum=5)
    routers.remove_replica("generator-0")
    replacement = Generator()
    replacement.may_load["sort"].clear()
    joining = asyncio.ensure_future(routers.add_replica(cast(Any, replacement)))
    assert await asyncio.wait_for(ask(routers, "sum"), 10) == 5
    await routers.close_router("sort")
    assert await asyncio.wait_for(joining, 10), "it serves the remaining adapters"
    await routers.close()


async def test_generator_that_cannot_load_one_adapter_serves_the_others() -> None:
    routers, processes = await open_routers(sort=3, sum=5)
    (generator,) = processes.replicas
    generator.failing.add("sort")
    routers.published["sort"].announce(Manifest(4, ()))
    with pytest.raises(StateDictError):
        await routers.by_adapter["sort"].pull_state_dict(4)
    assert await ask(routers, "sum") == 5
    generator.failing.clear()
    assert await asyncio.wait_for(ask(routers, "sort"), 10) == 4
    await routers.close()


@pytest.mark.looptime
async def test_loading_other_adapters_does_not_count_as_engine_silence() -> None:
    routers, processes = await open_routers(sort=3, sum=5)
    (generator,) = processes.replicas
    generator.pull_s = 110
    generator.answers.clear()
    waiting = asyncio.ensure_future(ask(routers, "sort"))
    for version in range(6, 10):
        routers.published["sum"].announce(Manifest(version, ()))
        await routers.by_adapter["sum"].pull_state_dict(version)
    assert processes.failed == []
    await asyncio.sleep(310)
    assert [str(error) for error in processes.failed] == ["no sign of life from generator-0 for 300 s"]
    generator.answers.set()
    assert await waiting == 3
    await routers.close()


@pytest.mark.looptime
async def test_pull_time_limit_restarts_when_an_earlier_pull_ends() -> None:
    routers, processes = await open_routers(sort=3, sum=5, tags=7)
    (generator,) = processes.replicas
    generator.pull_s = 100  # the limit is 120
    for published in routers.published.values():
        published.announce(Manifest(8, ()))
    await asyncio.gather(*(router.pull_state_dict(8) for router in routers.by_adapter.values()))
    assert generator.loaded == {"sort": 8, "sum": 8, "tags": 8}
    assert processes.failed == []

    generator.pull_s = 130
    routers.published["sum"].announce(Manifest(9, ()))
    with pytest.raises(StateDictError, match="the pull of version 9 took longer than 120 s"):
        await routers.by_adapter["sum"].pull_state_dict(9)
    await routers.close()


async def stopping(routers: AdapterRouters, *adapters: str) -> dict[str, asyncio.Task[None]]:
    """Tasks that wait until these adapters are stopped."""
    tasks = {name: asyncio.create_task(routers.stopped(name)) for name in adapters}
    await asyncio.sleep(0)
    return tasks


async def test_only_the_adapter_active_at_every_death_is_stopped() -> None:
    routers, _ = await open_routers(sort=3, sum=5)
    stops = await stopping(routers, "sort", "sum")
    for at_work in ({"sort", "sum"}, {"sort"}, {"sort", "sum"}):
        routers.note_death(frozenset(at_work))
    assert routers.stop_cause("generator-0 died: was killed by SIGKILL") == "sort"
    with pytest.raises(ActorDiedError, match="SIGKILL; 3 generators died while they worked for this adapter"):
        await stops["sort"]
    assert not stops["sum"].done()
    assert not routers.by_adapter["sort"].replicas, "its requests no longer reach a generator"
    assert await routers.add_replica(cast(Any, Generator("generator-1")))
    assert not routers.by_adapter["sort"].replicas
    assert await ask(routers, "sum") == 5
    stops["sum"].cancel()
    await routers.close()


@pytest.mark.parametrize("deaths", [[{"sort", "sum"}, {"sort", "sum"}], [{"sort"}, {"sum"}], [{"sort"}, set()], []])
async def test_ambiguous_deaths_stop_no_adapter(deaths: list[set[str]]) -> None:
    routers, _ = await open_routers(sort=3, sum=5)
    stops = await stopping(routers, "sort", "sum")
    for at_work in deaths:
        routers.note_death(frozenset(at_work))
    assert routers.stop_cause("generator-0 died") is None
    for stop in stops.values():
        stop.cancel()
    await routers.close()


@pytest.mark.looptime
async def test_new_generator_serves_suspect_adapters_one_at_a_time() -> None:
    console = ConsoleLines()
    routers, _ = await open_routers(console, sort=3, sum=5, tags=7)
    stops = await stopping(routers, "sort", "sum", "tags")
    routers.note_death(frozenset({"sort", "sum", "tags"}))
    routers.note_death(frozenset({"sort", "sum"}))
    routers.remove_replica("generator-0")
    asking = {name: asyncio.create_task(ask(routers, name)) for name in stops}
    replacement = Generator()
    replacement.deadly.add("sum")
    assert not await routers.add_replica(cast(Any, replacement))
    assert replacement.asked[:2] == ["tags", "sort"]
    assert replacement.asked[-1] == "sum"
    assert (await asking["tags"], await asking["sort"]) == (7, 3)
    assert console == [
        "2 generator deaths may be caused by one of the adapters sort, sum; generator-0 first serves them one at a time"
    ]
    routers.note_death(frozenset({"sum"}))
    assert routers.stop_cause("generator-0 died") == "sum"
    for task in (tasks := [asking["sum"], *stops.values()]):
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await routers.close()


@pytest.mark.looptime
async def test_cleared_suspects_are_served_together_again() -> None:
    routers, _ = await open_routers(sort=3, sum=5)
    stops = await stopping(routers, "sort", "sum")
    for _ in range(2):
        routers.note_death(frozenset({"sort", "sum"}))
    routers.remove_replica("generator-0")
    asking = [asyncio.create_task(ask(routers, name)) for name in stops]
    assert await routers.add_replica(cast(Any, Generator()))
    assert await asyncio.gather(*asking) == [3, 5]
    assert await asyncio.gather(*(ask(routers, name) for name in stops)) == [3, 5]
    for stop in stops.values():
        stop.cancel()
    await routers.close()
