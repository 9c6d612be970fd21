"""Routers of several adapters over generators that die, on fakes."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

pytest.importorskip("monarch", reason="needs the cpu or gpu extra")

from titan_rl import Completion, FinishReason, SamplingParams
from titan_rl.cluster.adapter_routers import AdapterRouters
from titan_rl.core.errors import StateDictError
from titan_rl.generation.request import EngineRequest, OnChunk
from titan_rl.generation.router.replica import Limits
from titan_rl.generation.router.router import GeneratorRouter
from titan_rl.types import VersionSpan
from titan_rl.weights.types import Manifest, PublishedWeights

SAMPLING = SamplingParams(max_tokens=1)


class Generator:
    """A generator without an engine: answers with the version of the adapter that a request names."""

    gauges = None

    def __init__(self, name: str = "generator-0") -> None:
        self.name = name
        self.loaded: dict[str, int] = {}
        self.failing: set[str] = set()  # adapters that cannot be loaded
        self.held = {"sort": asyncio.Event(), "sum": asyncio.Event()}  # clear while the adapter is being loaded
        for event in self.held.values():
            event.set()
        self.pull_s = 0.0
        self.answers = asyncio.Event()
        self.answers.set()

    async def stream(self, request: EngineRequest, on_chunk: OnChunk) -> Completion:
        await self.answers.wait()
        version = self.loaded[request.adapter]
        return Completion(request.request_id, [version], [0.0], FinishReason.LENGTH, (VersionSpan(version, 1),))

    async def pull_adapter(self, version: int, published: PublishedWeights, adapter: str) -> int:
        await self.held[adapter].wait()
        await asyncio.sleep(self.pull_s)
        if adapter in self.failing:
            raise StateDictError("the probes differ")
        self.loaded[adapter] = published.manifest_of(version).version
        return self.loaded[adapter]

    async def abort(self, request_ids: list[str]) -> None: ...


class Processes:
    """`GeneratorProcesses` of one generator."""

    def __init__(self) -> None:
        self.replicas = [Generator()]

    def make_router(self, replicas: Any) -> GeneratorRouter:
        self.failed: list[Exception] = []
        return GeneratorRouter(
            replicas,
            limits=Limits(quarantine_s=0.01, cancel_s=0.1),
            on_replica_failed=lambda replica, error: self.failed.append(error),
        )


async def open_routers(**versions: int) -> tuple[AdapterRouters, Processes]:
    """Routers over one generator that has loaded a version of each adapter."""
    processes = Processes()
    routers = AdapterRouters(cast(Any, processes), versions)
    for name, version in versions.items():
        routers.published[name].announce(Manifest(version, ()))
        await routers.by_adapter[name].pull_state_dict(version)
    return routers, processes


async def ask(routers: AdapterRouters, adapter: str) -> int:
    """Version that answers a request of an adapter."""
    router = routers.by_adapter[adapter]
    return (await router.generate([1], request_id="train-0/0", sampling=SAMPLING)).token_ids[0]


async def test_a_generator_in_the_place_of_a_dead_one_serves_each_adapter_with_its_version() -> None:
    routers, _ = await open_routers(sort=3, sum=5)
    routers.remove_replica("generator-0")
    waiting = [asyncio.ensure_future(ask(routers, name)) for name in ("sort", "sum")]
    assert routers.trouble() == "there is no generator"
    again = Generator()
    assert await routers.add_replica(cast(Any, again))
    assert await asyncio.gather(*waiting) == [3, 5]
    assert again.loaded == {"sort": 3, "sum": 5}
    assert routers.trouble() is None
    await routers.close()


async def test_a_generator_joins_the_other_adapters_when_one_ends_meanwhile() -> None:
    routers, _ = await open_routers(sort=3, sum=5)
    routers.remove_replica("generator-0")
    again = Generator()
    again.held["sort"].clear()
    joining = asyncio.ensure_future(routers.add_replica(cast(Any, again)))
    assert await asyncio.wait_for(ask(routers, "sum"), 10) == 5
    await routers.close_router("sort")
    assert await asyncio.wait_for(joining, 10), "it serves the adapters that are left"
    await routers.close()


async def test_a_generator_that_cannot_load_one_adapter_serves_the_others() -> None:
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
async def test_a_request_that_waits_while_other_adapters_are_loaded_is_no_sign_of_a_hanging_engine() -> None:
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
