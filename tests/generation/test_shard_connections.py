"""Connections of a router's shards to replicas: they are reopened, failures are reported, and no request is lost.
Virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from depth import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from in_process_shards import LATENCY_S, InProcessShards, InProcessStream, Network
from virtual_time import in_virtual_time

from titan_rl.core.errors import GenerationError
from titan_rl.generation.request import EngineRequest
from titan_rl.generation.router import Limits
from titan_rl.generation.router.shard import (
    ReplicaConnection,
    Retries,
    ShardReplica,
)
from titan_rl.testing.fake_replica import FakeReplica
from titan_rl.types import Completion, FinishReason, SamplingParams

pytestmark = pytest.mark.looptime

SAMPLING = SamplingParams(max_tokens=5)


class Opener:
    """Opens streams to a replica, with prepared outcomes: "open", "fail" or "hang"."""

    def __init__(self, *outcomes: str) -> None:
        self.outcomes = list(outcomes)
        self.times: list[float] = []
        self.streams: list[InProcessStream] = []
        self.replica = FakeReplica("a")

    async def open(self) -> InProcessStream:
        self.times.append(asyncio.get_running_loop().time())
        match self.outcomes.pop(0) if self.outcomes else "open":
            case "hang":
                await asyncio.Event().wait()
            case "fail":
                raise ConnectionError("refused")
            case _:
                pass
        stream = InProcessStream(self.replica)
        self.streams.append(stream)
        return stream


class Listener:
    def __init__(self) -> None:
        self.events: list[str] = []

    def connection_changed(self, replica: ShardReplica) -> None:
        self.events.append("opened" if replica.is_open else "lost")

    def connection_unreachable(self, replica: ShardReplica, error: GenerationError) -> None:
        self.events.append(f"unreachable: {error}")


def connected(*outcomes: str, retries: Retries | None = None) -> tuple[ReplicaConnection, Opener, Listener]:
    opener, listener = Opener(*outcomes), Listener()
    connection = ReplicaConnection("a", opener, retries)
    connection.begin(listener)
    return connection, opener, listener


def ask(connection: ReplicaConnection, name: str = "r") -> asyncio.Task[Completion]:
    return asyncio.ensure_future(connection.stream(EngineRequest(name, [1], SAMPLING), lambda chunk: None))


async def test_failed_connection_is_retried_with_backoff() -> None:
    connection, opener, listener = connected("fail", "fail", "fail")
    await asyncio.sleep(0)
    assert not connection.is_open
    with pytest.raises(GenerationError, match="there is no connection to a: ConnectionError: refused"):
        await ask(connection)
    await asyncio.sleep(60)
    assert [after - before for before, after in pairwise(opener.times)] == pytest.approx([0.25, 0.5, 1.0])
    assert listener.events == ["opened"]
    assert len((await ask(connection)).token_ids) == 5
    await connection.close()


async def test_unanswered_connection_attempt_times_out() -> None:
    connection, opener, _ = connected("hang", "hang", retries=Retries(open_s=7))
    await asyncio.sleep(7.1)
    with pytest.raises(GenerationError, match="no answer within 7 s"):
        await ask(connection)
    await asyncio.sleep(60)
    assert opener.times == pytest.approx([0, 7.25, 14.75])
    assert connection.is_open
    await connection.close()


async def test_unreachable_replica_is_reported_once_and_retried() -> None:
    connection, opener, listener = connected(*["fail"] * 40, "open", *["fail"] * 40)
    await asyncio.sleep(5)
    assert listener.events == [
        "unreachable: a cannot be reached: 5 attempts in a row failed; the last: ConnectionError: refused"
    ]
    assert not connection.is_open
    await asyncio.sleep(300)
    assert connection.is_open
    assert max(after - before for before, after in pairwise(opener.times)) == pytest.approx(5)
    assert await ask(connection)
    opener.streams[0].break_off("cut")
    await asyncio.sleep(300)
    assert [each.partition(":")[0] for each in listener.events] == [
        "unreachable",
        "opened",
        "lost",
        "unreachable",
        "opened",
    ]
    await connection.close()


async def test_broken_stream_is_reported_before_its_requests_fail() -> None:
    connection, opener, listener = connected()
    await asyncio.sleep(0)
    requests = [ask(connection, f"r{number}") for number in range(3)]
    for request in requests:
        request.add_done_callback(lambda _: listener.events.append("request"))
    await asyncio.sleep(2)
    opener.streams[0].break_off("a message cannot be read")
    for request in requests:
        with pytest.raises(GenerationError, match="a message cannot be read"):
            await request
    assert not connection.is_open
    await asyncio.sleep(1)
    assert listener.events == ["opened", "lost", "request", "request", "request", "opened"]
    await connection.close()


async def test_streams_that_break_before_an_answer_count_as_unreachable() -> None:
    connection, opener, listener = connected()
    for _ in range(5):
        await asyncio.sleep(5)  # it is opened again
        request = ask(connection)
        await asyncio.sleep(1)
        opener.streams[-1].break_off("a message cannot be read")
        await asyncio.wait([request])
    assert [each.partition(":")[0] for each in listener.events] == [*["opened", "lost"] * 5, "unreachable"]
    await connection.close()


@pytest.mark.parametrize("outcome", ["open", "fail", "hang"])
async def test_closed_connection_makes_no_further_attempts(outcome: str) -> None:
    connection, opener, listener = connected(outcome)
    await asyncio.sleep(0.1)
    tried, events = len(opener.times), list(listener.events)
    await connection.close()
    assert not connection.is_open
    await asyncio.sleep(100)
    assert (len(opener.times), listener.events) == (tried, events)
    assert all(stream.broken == "closed" for stream in opener.streams)
    with pytest.raises(GenerationError, match="it is closed"):
        await ask(connection)


async def sharded(
    replicas: Sequence[FakeReplica], network: Network, num_shards: int = 2, **options: Any
) -> InProcessShards:
    options["limits"] = replace(options.get("limits", Limits()), share_s=5)
    router = InProcessShards(replicas, num_shards=num_shards, network=network, **options)
    await router.joined()
    await asyncio.sleep(2 * LATENCY_S)  # connections open
    return router


def send(router: InProcessShards, number: int, tokens: int = 10) -> asyncio.Task[Completion]:
    sampling = SamplingParams(max_tokens=tokens)
    return asyncio.ensure_future(
        router.generate([1], request_id=f"g{number}/0/0", session_id=f"g{number}/0", sampling=sampling)
    )


async def test_broken_stream_is_not_blamed_on_the_replica() -> None:
    replicas, network, failed = [FakeReplica("a"), FakeReplica("b")], Network(), list[str]()
    router = await sharded(replicas, network, on_replica_failed=lambda replica, error: failed.append(replica.name))
    requests = [send(router, number) for number in range(32)]
    await asyncio.sleep(4)
    network.cut("a")
    completions = await asyncio.gather(*requests)
    assert {(len(one.token_ids), one.finish_reason) for one in completions} == {(10, FinishReason.LENGTH)}
    assert failed == []
    assert set(network.num_opened.values()) == {1, 2}
    served = len(replicas[0].served)
    await asyncio.gather(*(send(router, number) for number in range(100, 132)))
    assert len(replicas[0].served) > served
    assert not any(replica.running for replica in replicas)
    await router.close()


async def test_shard_with_one_replica_waits_for_reconnection() -> None:
    replica, network = FakeReplica("a"), Network()
    router = await sharded([replica], network)
    requests = [send(router, number) for number in range(8)]
    await asyncio.sleep(4)
    network.refused = {("shard0", "a"), ("shard1", "a")}
    network.cut("a")
    await asyncio.sleep(2)
    assert not any(request.done() for request in requests)
    network.refused.clear()
    assert {len(one.token_ids) for one in await asyncio.gather(*requests)} == {10}
    assert replica.running == {}
    await router.close()


async def test_shard_reports_an_unreachable_replica_once_and_avoids_it() -> None:
    replicas, network, failed = [FakeReplica("a"), FakeReplica("b")], Network(), list[str]()
    network.refused = {("shard0", "a")}
    router = await sharded(
        replicas, network, on_replica_failed=lambda replica, error: failed.append(f"{replica.name}: {error}")
    )
    requests = list[asyncio.Task[Completion]]()
    for number in range(32):
        requests.append(send(router, number))
        await asyncio.sleep(1)  # the shards place new requests on other replicas from time to time
    assert {len(one.token_ids) for one in await asyncio.gather(*requests)} == {10}
    assert replicas[0].served
    assert not any("@shard0" in request_id for request_id in replicas[0].served)
    await asyncio.sleep(120)
    assert failed == ["a: a cannot be reached: 5 attempts in a row failed; the last: ConnectionError: refused"]
    assert [replica.serving for replica in router.replicas] == [True, True], "the router can reach it"
    network.refused.clear()
    await asyncio.sleep(10)
    for number in range(100, 132):
        requests.append(send(router, number))
        await asyncio.sleep(1)
    await asyncio.gather(*requests)
    assert any("@shard0" in request_id for request_id in replicas[0].served)
    await router.close()


async def test_unconnected_replica_counts_toward_least_replicas() -> None:
    replicas, network = [FakeReplica("a"), FakeReplica("b")], Network()
    network.refused = {("shard0", "a"), ("shard1", "a")}
    router = await sharded(replicas, network, least_replicas=2)
    assert len((await send(router, 0)).token_ids) == 10
    await router.close()


async def test_connection_opened_after_a_pull_serves_the_pulled_version() -> None:
    replicas, network = [FakeReplica("a"), FakeReplica("b")], Network()
    network.refused = {("shard0", "a"), ("shard1", "a")}
    router = await sharded(replicas, network, move_below=0.5)
    requests = [send(router, number, 200) for number in range(16)]
    await asyncio.sleep(3)
    await router.pull_state_dict(1)
    network.refused.clear()
    completions = await asyncio.gather(*requests)
    assert {len(one.token_ids) for one in completions} == {200}
    assert any(completion.version_spans[-1].version == 1 for completion in completions)
    assert replicas[0].served, "requests move to it"
    await router.close()


Event = tuple[str, int, float]

EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["ask", "ask", "ask", "refuse", "refuse", "allow", "cut", "keep", "resume", "pull", "drain"]),
        st.integers(0, 11),
        st.sampled_from([0.0, 0.0, 0.3, 1.0, 4.0, 20.0]),
    ),
    max_size=50,
)


async def survive(events: list[Event]) -> None:
    replicas, network = [FakeReplica(name) for name in "abc"], Network()
    router = await sharded(
        replicas, network, num_shards=3, limits=Limits(no_replica_s=2000, max_quarantine_s=10), max_attempts=100
    )
    asked, answered, controls, version = list[asyncio.Task[Completion]](), list[str](), list[asyncio.Task[Any]](), 0
    for place, (action, number, seconds) in enumerate(events):
        shard, name = f"shard{number % 3}", "abc"[number // 3 % 3]
        match action:
            case "ask":
                request = send(router, place, 1 + number)
                request.add_done_callback(lambda done: answered.append(done.result().request_id))
                asked.append(request)
            case "refuse":
                network.refused.add((shard, name))
                network.cut(name, shard)
            case "allow":
                network.refused.discard((shard, name))
            case "cut":
                network.cut(name, shard if number % 2 else None)
            case "keep":
                controls.append(asyncio.create_task(router.pause("keep")))
            case "resume":
                controls.append(asyncio.create_task(router.resume()))
            case _:
                version += 1
                pull = router.pull_state_dict(version, "drain" if action == "drain" else "hot_swap")
                controls.append(asyncio.create_task(pull))
        await asyncio.sleep(seconds)
    network.refused.clear()
    await asyncio.sleep(30)
    if router.paused is not None:
        await router.resume()
    completions = await asyncio.gather(*asked)
    await asyncio.gather(*controls, return_exceptions=True)
    assert all(one.finish_reason is FinishReason.LENGTH for one in completions)
    assert sorted(answered) == sorted(one.request_id for one in completions)
    assert len(set(answered)) == len(asked)
    await asyncio.sleep(60)  # every quarantine ends, and shards report their load
    assert all((replica.serving, replica.load, replica.num_requests) == (True, 0, 0) for replica in router.replicas)
    assert not any(replica.running for replica in replicas)
    assert len({(await send(router, 1000 + number)).request_id for number in range(12)}) == 12
    await router.close()


@settings(max_examples=examples(60), deadline=None)
@given(EVENTS)
def test_each_request_is_answered_once_despite_connection_faults(events: list[Event]) -> None:
    in_virtual_time(survive(events))
