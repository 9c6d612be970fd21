"""Replica dedicated to a version while the others pull newer ones, in random interleavings. Virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from depth import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from in_process_shards import Connected, InProcessLink, router_of
from virtual_time import in_virtual_time

from titan_rl import EngineLoop, LocalReplica
from titan_rl.core.errors import GenerationError
from titan_rl.generation.request import EngineRequest
from titan_rl.generation.router import GeneratorRouter, Limits
from titan_rl.generation.router.pool import Service
from titan_rl.generation.router.shard import RouterShard
from titan_rl.generation.router.shard_control import (
    EndDedication,
    Ended,
    ForDedicated,
    ReplicaState,
    TellLoad,
    Update,
)
from titan_rl.generation.scripted_engine import ScriptedEngine
from titan_rl.testing.fake_replica import FakeReplica
from titan_rl.types import Completion, SamplingParams

LIMITS = Limits(drain_s=20.0, quarantine_s=0.5)
Move = tuple[str, int, float]  # action, argument, seconds until the next move
MOVES = st.lists(
    st.tuples(
        st.sampled_from(["train", "train", "validate", "pull", "kill", "kill_held", "retire"]),
        st.integers(0, 5),
        st.sampled_from([0.0, 0.3, 1.0, 4.0]),
    ),
    max_size=30,
)


def request(name: str, tokens: int, version: int | None = None) -> EngineRequest:
    return EngineRequest(name, [1], SamplingParams(max_tokens=tokens), version=version)


class Replicas:
    """Router over three replicas, each of which is replaced when it dies.

    Args:
        num_shards: Number of shards, which send the requests. With 0 the router sends them itself.
    """

    def __init__(self, num_shards: int) -> None:
        self.all = [FakeReplica(f"r{index}") for index in range(3)]
        self.router = router_of(self.all, num_shards=num_shards, limits=LIMITS)
        self.num_born = 3

    async def kill(self, replica: FakeReplica) -> None:
        replica.generate_error = replica.pull_error = GenerationError("dead")
        if self.router.has_replica(replica.name):
            self.router.remove_replica(replica.name)
        self.all.remove(replica)
        self.num_born += 1
        self.all.append(FakeReplica(f"r{self.num_born}", version=-1))
        await self.router.add_replica(self.all[-1])


async def play(moves: Sequence[Move], num_shards: int) -> None:
    replicas = Replicas(num_shards)
    router = replicas.router
    await router.pull_state_dict(1)
    assert await router.dedicate_replica(1)
    assert not await router.dedicate_replica(1), "one at a time"
    asking: list[tuple[bool, asyncio.Task[Completion]]] = []
    alone = asyncio.ensure_future(router.wait_dedicated())
    version = 1
    for number, (action, argument, seconds) in enumerate(moves):
        if action == "train":
            asking.append((False, asyncio.ensure_future(router.stream(request(f"t{number}", argument + 1)))))
        elif action == "validate":
            asking.append((True, asyncio.ensure_future(router.stream(request(f"v{number}", argument + 1, 1)))))
        elif action == "pull":
            await alone
            version += 1
            await router.pull_state_dict(version)
        elif action == "kill":
            await replicas.kill(replicas.all[argument % 3])
        elif action == "kill_held":
            held = [replica for replica in replicas.all if replica.version == 1]
            await replicas.kill(held[0] if held else replicas.all[0])
        elif action == "retire" and len(router.replicas) > 3:
            await router.retire_replica(replicas.all[0].name, 5.0)
        await asyncio.sleep(seconds)
    for is_held_out, task in asking:
        completion = await task
        assert len(completion.token_ids) == num_span_tokens(completion)
        if is_held_out:
            assert {span.version for span in completion.version_spans} == {1}
    await alone
    await router.release_replica()
    await router.pull_state_dict(version + 1)
    assert {status.version for status in router.replicas} == {version + 1}
    assert all(status.serving for status in router.replicas)
    assert len(router.replicas) == 3
    after = await router.stream(request("after", 2, None))
    assert {span.version for span in after.version_spans} == {version + 1}
    await router.close()


def num_span_tokens(completion: Completion) -> int:
    return sum(span.num_tokens for span in completion.version_spans)


@pytest.mark.parametrize("num_shards", [0, 2])
@settings(max_examples=examples(40), deadline=None)
@given(moves=MOVES)
def test_requests_for_a_held_version_are_served_from_it(moves, num_shards):
    in_virtual_time(play(moves, num_shards))


async def hold_version_through_deaths_and_joins() -> None:
    held, other = FakeReplica("a"), FakeReplica("b")
    router = router_of([held, other], num_shards=2, limits=LIMITS)
    await router.pull_state_dict(1)
    assert await router.dedicate_replica(1)
    await router.wait_dedicated()
    await router.pull_state_dict(2)
    if held.version == 2:
        held, other = other, held
    await router.links[0].kill()
    joining = InProcessLink("late", router.router, {"limits": LIMITS})
    await router.router.join(joining)
    held.generate_error = GenerationError("broken")
    asking = [asyncio.ensure_future(router.links[1].shard.stream(request("v0", 3, 1)))]
    asking.append(asyncio.ensure_future(joining.shard.stream(request("v1", 3, 1))))
    await asyncio.sleep(0.2)
    held.generate_error = None  # its quarantine ends, at the held version
    for completion in await asyncio.gather(*asking):
        assert {span.version for span in completion.version_spans} == {1}
    assert {span.version for span in (await joining.shard.stream(request("t", 2))).version_spans} == {2}
    await router.release_replica()
    await router.pull_state_dict(3)
    assert {(status.version, status.serving) for status in router.replicas} == {(3, True)}
    await joining.shard.close()
    await router.close()


def test_held_version_survives_shard_failures_and_late_joins():
    in_virtual_time(hold_version_through_deaths_and_joins())


class Connections:
    """A shard, and a record of its connections."""

    def __init__(self) -> None:
        self.made: list[str] = []
        self.shard = RouterShard(self._connect, lambda report: None, origin="@s", limits=LIMITS)
        self._replica = FakeReplica("a")

    def _connect(self, name: str, address: Any) -> Connected:
        self.made.append(f"{address} {name}")
        return Connected(name, self._replica)

    def update(self, address: str) -> Update:
        return Update((ReplicaState("a", 0, 1, Service.SERVING, 1, address),))


async def send_messages_to_an_ended_dedication() -> None:
    connections = Connections()
    shard = connections.shard
    await shard.receive_message(0, connections.update("own"))
    await shard.receive_message(1, EndDedication(0))
    late = shard.receive_message(2, ForDedicated(0, 0, connections.update("late")))
    assert (await late, connections.made) == (Ended(), ["own a"]), "the first message comes after the end"

    await shard.receive_message(2, ForDedicated(1, 0, connections.update("held")))
    early = asyncio.ensure_future(shard.receive_message(2, ForDedicated(1, 2, TellLoad())))
    await asyncio.sleep(0.1)
    assert not early.done(), "it waits for message 1"
    await shard.receive_message(2, EndDedication(1))
    assert await early == Ended(), "message 1 comes after the end"
    for number, message in ((1, connections.update("late")), (3, TellLoad())):
        assert await shard.receive_message(3, ForDedicated(1, number, message)) == Ended()
    assert connections.made == ["own a", "held a"]

    assert len((await shard.stream(request("v", 2, 1))).token_ids) == 2, "the shard's own replica answers"
    await shard.receive_message(3, ForDedicated(3, 0, connections.update("next")))
    ended = shard.receive_message(3, ForDedicated(2, 0, connections.update("late")))
    assert (await ended, connections.made[2:]) == (Ended(), ["next a"]), "a later dedication ends an earlier one"
    await shard.close()


def test_message_to_an_ended_dedication_is_ignored():
    in_virtual_time(send_messages_to_an_ended_dedication())


def test_dedication_is_refused_when_too_few_replicas_would_remain():
    async def run() -> None:
        alone = GeneratorRouter([FakeReplica("a")])
        await alone.pull_state_dict(1)
        assert not await alone.dedicate_replica(1)
        two = GeneratorRouter([FakeReplica("a"), FakeReplica("b")], least_replicas=2)
        await two.pull_state_dict(1)
        assert not await two.dedicate_replica(1)
        assert not await two.dedicate_replica(7), "no replica has the version"

    in_virtual_time(run())


def test_retiring_dedicated_replica_finishes_its_requests_first():
    async def run() -> None:
        router = GeneratorRouter([FakeReplica("a"), FakeReplica("b")], limits=LIMITS)
        await router.pull_state_dict(1)
        assert await router.dedicate_replica(1)
        await router.wait_dedicated()
        (held,) = {status.name for status in router.replicas} - {
            status.name
            for status in router.replicas
            if status.serving and status.name in router._pool  # pyright: ignore
        }
        asked = asyncio.ensure_future(router.stream(request("v", 4, 1)))
        leaving = asyncio.ensure_future(router.retire_replica(held, 60.0))
        await asked
        assert not leaving.done()
        await router.release_replica()
        await leaving
        assert [status.name for status in router.replicas] == [{"a": "b", "b": "a"}[held]]
        await router.close()

    in_virtual_time(run())


class PinningEngine(ScriptedEngine):
    """Engine that can pin versions, and records the calls."""

    pins_versions = True

    def __init__(self) -> None:
        super().__init__()
        self.pinned: list[int | None] = []

    def pin(self, version: int | None, adapter: str = "") -> None:
        self.pinned.append(version)


async def test_pinned_version_serves_requests_that_name_it():
    engine = PinningEngine()
    loop = EngineLoop(lambda: engine)
    await loop.start()
    await loop.pull(1, lambda: [])
    await loop.pull(2, lambda: [], pinned=1)
    pinned, newest = [await loop.stream(request(f"r{version}", 3, version)) for version in (1, None)]
    await loop.close()
    assert engine.pinned == [None, 1]
    assert [span.version for span in pinned.version_spans] == [1]
    assert [span.version for span in newest.version_spans] == [2]


async def test_engine_without_pinning_rejects_requests_that_name_a_version():
    loop = EngineLoop(ScriptedEngine)
    await loop.start()
    with pytest.raises(GenerationError, match="names a version, but the engine pins none"):
        await loop.stream(request("r", 3, 0))
    await loop.close()


async def test_joining_replica_loads_the_pinned_version_before_the_newest():
    engines: dict[str, PinningEngine] = {}

    def replica(name: str) -> LocalReplica:
        def make() -> Any:
            engines[name] = PinningEngine()
            return engines[name]

        return LocalReplica(name, EngineLoop(make), lambda version: [])

    first, second = replica("first"), replica("second")
    await first.loop.start()
    await second.loop.start()
    router = GeneratorRouter([first])
    await router.pull_state_dict(1)
    router.pin(1)
    await router.pull_state_dict(2)
    await router.add_replica(second)
    assert engines["first"].versions == [0, 1, 2]
    assert engines["second"].versions == [0, 1, 2]
    router.pin(None)
    await router.close()
