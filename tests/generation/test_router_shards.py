"""Guarantees of a router with several shards, including the death of a shard. Virtual time."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from depth import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from in_process_shards import Addressed, InProcessShards
from virtual_time import in_virtual_time

from titan_rl.cluster.actor_replica import router_options
from titan_rl.config.sections import GenerationConfig, RoutingConfig, StateDictConfig
from titan_rl.core.errors import ActorDiedError, ConfigError, EngineDeadError, GenerationError, UnavailableWeightsError
from titan_rl.generation.router import GeneratorRouter, Limits
from titan_rl.generation.router.shard_control import Ended, ShardLoad, TellLoad, ToShard
from titan_rl.testing.fake_replica import FakeReplica
from titan_rl.types import Completion, FinishReason, SamplingParams

pytestmark = pytest.mark.looptime

NUM_SHARDS = 16


async def sharded(replicas: list[FakeReplica], num_shards: int = NUM_SHARDS, **options: Any) -> InProcessShards:
    options["limits"] = replace(options.get("limits", Limits()), share_s=5)
    router = InProcessShards(replicas, num_shards=num_shards, **options)
    await router.joined()
    return router


def ask(router: InProcessShards, number: int, tokens: int = 10) -> asyncio.Task[Completion]:
    sampling = SamplingParams(max_tokens=tokens)
    return asyncio.create_task(
        router.generate([1], request_id=f"g{number}/0/0", session_id=f"g{number}/0", sampling=sampling)
    )


async def test_pause_returns_after_every_shard_has_stopped_sending() -> None:
    replicas = [FakeReplica(name) for name in "abcd"]
    router = await sharded(replicas)
    running = [ask(router, number) for number in range(64)]
    await asyncio.sleep(3.5)
    await router.pause("keep")
    served = sum(len(replica.served) for replica in replicas)
    assert served == 64
    late = [ask(router, number) for number in range(64, 128)]
    await asyncio.sleep(100)
    assert not any(request.done() for request in [*running, *late])
    assert sum(len(replica.served) for replica in replicas) == served
    await router.resume()
    completions = await asyncio.gather(*running, *late)
    assert {(len(one.token_ids), one.finish_reason) for one in completions} == {(10, FinishReason.LENGTH)}
    await router.close()


async def test_wait_pause_finishes_or_aborts_requests_of_all_shards() -> None:
    router = await sharded([FakeReplica("a"), FakeReplica("b")], limits=Limits(finish_s=50))
    short, long = (
        [ask(router, number) for number in range(20)],
        [ask(router, 100 + number, 1000) for number in range(9)],
    )
    await asyncio.sleep(1)
    report = await router.pause("wait")
    assert {request.result().finish_reason for request in short} == {FinishReason.LENGTH}
    assert sorted(report.aborted) == sorted(f"g{100 + number}/0/0" for number in range(9))
    assert {(await request).finish_reason for request in long} == {FinishReason.ABORT}
    assert report.cancelled == ()
    await router.resume()
    await router.close()


async def test_abort_reaches_the_requests_of_every_shard() -> None:
    router = await sharded([FakeReplica("a"), FakeReplica("b")])
    requests = [ask(router, number, 1000) for number in range(40)]
    await asyncio.sleep(5.5)
    assert await router.abort() == ()
    completions = await asyncio.gather(*requests)
    assert {(len(one.token_ids) >= 5, one.finish_reason) for one in completions} == {(True, FinishReason.ABORT)}
    await router.close()


async def test_completions_have_one_version_when_a_pull_drains_all_shards() -> None:
    replicas = [FakeReplica("a"), FakeReplica("b")]
    router = await sharded(replicas)
    await router.pull_state_dict(1)
    requests = [ask(router, number, 20) for number in range(64)]
    await asyncio.sleep(2)
    pulling = asyncio.create_task(router.pull_state_dict(2, "drain"))
    later = list[asyncio.Task[Completion]]()
    for number in range(64, 128):
        later.append(ask(router, number, 5))
        await asyncio.sleep(0.5)
    report = await pulling
    assert (sorted(report.pulled), report.aborted) == (["a", "b"], ())
    completions = await asyncio.gather(*requests, *later)
    assert all(len({span.version for span in one.version_spans}) == 1 for one in completions)
    await router.close()


async def test_no_shard_sends_to_a_replica_with_old_weights_after_a_pull() -> None:
    a, b = FakeReplica("a"), FakeReplica("b")
    router = await sharded([a, b], limits=Limits(quarantine_s=1000, max_quarantine_s=1000))
    b.pull_error = UnavailableWeightsError("no route")
    report = await router.pull_state_dict(1)
    assert list(report.failed) == ["b"]
    await asyncio.gather(*(ask(router, number) for number in range(64)))
    assert (len(a.served), b.served) == (64, [])
    await router.close()


async def test_replica_that_fails_in_one_shard_is_quarantined_in_all() -> None:
    a, b = FakeReplica("a"), FakeReplica("b")
    router = await sharded([a, b], limits=Limits(quarantine_s=50))
    a.generate_error = GenerationError("broken")
    first = [ask(router, number) for number in range(8)]
    await asyncio.sleep(3)
    a.generate_error, tried = None, len(a.served)
    assert [replica.serving for replica in router.replicas] == [False, True]
    second = [ask(router, number) for number in range(100, 164)]
    await asyncio.gather(*first, *second)
    assert len(a.served) == tried
    await asyncio.sleep(60)
    await asyncio.gather(*(ask(router, number) for number in range(200, 264)))
    assert len(a.served) > tried
    await router.close()


async def test_infrequent_failures_do_not_lengthen_the_quarantine() -> None:
    a, b = FakeReplica("a"), FakeReplica("b")
    router = await sharded([a, b], limits=Limits(quarantine_s=4, max_quarantine_s=60))
    for round_number in range(4):
        a.generate_error = GenerationError("broken")
        asked = [ask(router, 1000 * round_number + number) for number in range(8)]
        await asyncio.sleep(2)
        assert [replica.serving for replica in router.replicas] == [False, True]
        a.generate_error = None
        await asyncio.gather(*asked)
        await asyncio.sleep(10)
        assert [replica.serving for replica in router.replicas] == [True, True], round_number
        await asyncio.gather(*(ask(router, 1000 * round_number + 100 + number) for number in range(64)))
        await asyncio.sleep(100)
    await router.close()


async def test_shard_reports_a_silent_replica() -> None:
    a, failures = FakeReplica("a", step_s=10_000), list[tuple[str, str]]()
    router = await sharded(
        [a],
        stall_timeout_s=30,
        max_attempts=1,
        on_replica_failed=lambda replica, error: failures.append((replica.name, type(error).__name__)),
    )
    with pytest.raises(GenerationError, match="no sign of life from a for 30 s"):
        await ask(router, 0)
    await asyncio.sleep(1)
    assert failures == [("a", "EngineStalledError")]
    await router.close()


async def test_replicas_join_retire_and_are_replaced_in_every_shard() -> None:
    a, b = FakeReplica("a"), FakeReplica("b")
    router = await sharded([a])
    await router.pull_state_dict(1)
    assert await router.add_replica(b)
    requests = [ask(router, number) for number in range(64)]
    await asyncio.sleep(2)
    assert a.served
    assert b.served
    await router.router.retire_replica("a", 100)
    assert (len(a.running), router.router.has_replica("a")) == (0, False)
    router.router.remove_replica("b")
    another = FakeReplica("b")
    assert await router.add_replica(another)
    completions = await asyncio.gather(*requests, *(ask(router, number) for number in range(100, 132)))
    assert {len(one.token_ids) for one in completions} == {10}
    assert len(another.served) >= 32
    await router.close()


async def test_shard_that_joins_during_a_pause_waits_for_the_resume() -> None:
    a = FakeReplica("a")
    router = InProcessShards([a], num_shards=2)
    await router.router.pause("keep")
    request = ask(router, 0)
    await asyncio.sleep(100)
    assert a.served == []
    await router.resume()
    assert len((await request).token_ids) == 10
    await router.close()


async def test_shard_death_fails_only_its_own_requests() -> None:
    replicas = [FakeReplica(name) for name in "ab"]
    router = await sharded(replicas, num_shards=4)
    requests = {number: ask(router, number, 30) for number in range(64)}
    dead = router.link_of("g0/0")
    own = {number for number in requests if router.link_of(f"g{number}/0") is dead}
    await asyncio.sleep(5)
    await dead.kill()
    await router.pause("keep")
    await router.resume()
    await router.pull_state_dict(1)
    for number, request in requests.items():
        if number in own:
            with pytest.raises(EngineDeadError):
                await request
        else:
            assert len((await request).token_ids) == 30
    assert len((await ask(router, 0)).token_ids) == 10  # its session continues in another shard
    await asyncio.sleep(11)  # shards report their load
    assert all((replica.load, replica.num_requests) == (0, 0) for replica in router.replicas)
    await router.close()


async def test_counts_of_a_dead_shard_are_kept() -> None:
    class Counting:
        name = "counting"

        async def call(self, number: int, message: ToShard) -> Ended:
            return Ended(load=ShardLoad(num_moved=3, num_answered=5) if isinstance(message, TellLoad) else None)

        def end(self, reason: str) -> None: ...

    router, counting = await sharded([FakeReplica("a")], num_shards=1, move_below=0.5), Counting()
    await router.router.join(counting)
    await asyncio.sleep(11)
    assert (router.num_moved, router.num_answered) == (3, 5)
    for _ in range(2):
        router.router.leave(counting)
        assert (router.num_moved, router.num_answered) == (3, 5)
    await router.close()


class Blocked:
    """Shard whose event loop is blocked by user code from its second message on."""

    name, reason = "blocked", ""

    def __init__(self) -> None:
        self.died = asyncio.Event()

    async def call(self, number: int, message: ToShard) -> Ended:
        if number:
            await self.died.wait()
            raise ActorDiedError("blocked died")
        return Ended()

    def end(self, reason: str) -> None:
        self.reason = reason
        self.died.set()


@pytest.mark.parametrize("mode", ["keep", "wait", "abort"])
async def test_blocked_shard_delays_a_pause_by_at_most_the_stall_timeout(mode: str) -> None:
    stall_timeout_s = 40.0
    options = router_options(
        GenerationConfig(stall_timeout_s=stall_timeout_s), RoutingConfig(), StateDictConfig(), wait_s=1000
    )
    router, blocked = GeneratorRouter([Addressed(FakeReplica("a"))], **options), Blocked()  # pyright: ignore
    await router.join(blocked)
    report = await router.pause(mode)
    assert report.seconds <= stall_timeout_s + 2 * Limits().share_s
    assert "did not follow the router" in blocked.reason
    await router.resume()
    await router.close()


async def test_pause_continues_when_a_blocked_shard_dies() -> None:
    router, blocked = await sharded([FakeReplica("a")], num_shards=2), Blocked()
    await router.router.join(blocked)
    pausing = asyncio.create_task(router.pause("wait"))
    await asyncio.sleep(4)  # about the time it takes to detect a stopped process
    assert not pausing.done()
    blocked.died.set()
    report = await pausing
    assert report.seconds == pytest.approx(4, abs=0.1)
    await router.resume()
    await router.close()


async def test_unresponsive_shard_is_ended_so_that_a_pause_completes() -> None:
    class Deaf:
        name, reason = "deaf", ""

        async def call(self, number: int, message: ToShard) -> Ended:
            if number:
                await asyncio.Event().wait()
            return Ended()

        def end(self, reason: str) -> None:
            self.reason = reason

    router, deaf = await sharded([FakeReplica("a")], num_shards=2, limits=Limits(shard_s=20)), Deaf()
    await router.router.join(deaf)
    await router.pause("keep")
    assert "did not follow the router" in deaf.reason
    await router.resume()
    await router.close()


async def test_shard_death_while_joining_is_an_error() -> None:
    class Gone:
        name = "gone"

        async def call(self, number: int, message: ToShard) -> Ended:
            raise ActorDiedError("gone died")

        def end(self, reason: str) -> None: ...

    router = await sharded([FakeReplica("a")], num_shards=1)
    with pytest.raises(ActorDiedError, match="gone did not join the router"):
        await router.router.join(Gone())
    await router.close()


async def test_replica_without_an_address_cannot_be_shared() -> None:
    router = GeneratorRouter([FakeReplica("a")])
    (link,) = (await sharded([FakeReplica("b")], num_shards=1)).links
    with pytest.raises(ConfigError, match=r"replica 'a' has no address.*rollout\.num_workers"):
        await router.join(link)
    await router.close()


async def test_shards_balance_requests_across_replicas() -> None:
    replicas = [FakeReplica(f"r{number}", step_s=4.0) for number in range(4)]
    router = InProcessShards(replicas, num_shards=NUM_SHARDS)
    await router.joined()
    requests = set[asyncio.Task[Completion]]()
    for number in range(64 * len(replicas)):
        requests.add(ask(router, number, 5 + number * 7919 % 15))
        await asyncio.sleep(0.04)
    number, ratios = 10_000, list[float]()
    for _ in range(25):
        await asyncio.sleep(1)
        done = {request for request in requests if request.done()}
        requests -= done
        for _ in done:
            number += 1
            requests.add(ask(router, number, 5 + number * 7919 % 15))
        counts = Counter({replica.name: len(replica.running) for replica in replicas})
        ratios.append(max(counts.values()) * len(replicas) / counts.total())
    assert max(ratios[5:]) <= 1.15
    assert sorted(ratios[5:])[len(ratios[5:]) // 2] <= 1.1
    for request in requests:
        request.cancel()
    await asyncio.gather(*requests, return_exceptions=True)
    await router.close()


Event = tuple[str, int]

EVENTS = st.lists(
    st.tuples(st.sampled_from(["ask", "ask", "kill", "keep", "resume", "pull", "drain", "fail"]), st.integers(0, 7)),
    max_size=40,
)


LIMITS = Limits(no_replica_s=500, max_quarantine_s=10)


async def survive(events: list[Event]) -> None:
    replicas = [FakeReplica(name) for name in "ab"]
    router = await sharded(replicas, num_shards=3, limits=LIMITS, max_attempts=20)
    asked: dict[asyncio.Task[Completion], Any] = {}
    controls, version = list[asyncio.Task[Any]](), 0
    for place, (action, number) in enumerate(events):
        living = [link for link in router.links if not link.died.is_set()]
        match action:
            case "ask":
                asked[ask(router, 1000 * number + place, 5 + number)] = router.link_of(f"g{1000 * number + place}/0")
            case "kill" if len(living) > 1:
                await living[number % len(living)].kill()
            case "keep" | "resume":
                calls = {"keep": lambda: router.pause("keep"), "resume": router.resume}
                controls.append(asyncio.create_task(calls[action]()))
            case "pull" | "drain":
                version += 1
                pull = router.pull_state_dict(version, "drain" if action == "drain" else "hot_swap")
                controls.append(asyncio.create_task(pull))
            case "fail":
                replicas[number % 2].generate_error = GenerationError("broken") if number < 4 else None
            case _:
                pass
        await asyncio.sleep(number / 7)
    for replica in replicas:
        replica.generate_error = None
    await asyncio.sleep(30)
    if router.paused is not None:
        await router.resume()
    for request, link in asked.items():
        try:
            completion = await request
            assert completion.finish_reason is FinishReason.LENGTH
        except EngineDeadError:
            assert link.died.is_set()
    await asyncio.gather(*controls, return_exceptions=True)
    await asyncio.sleep(30)  # every quarantine ends
    assert all((replica.serving, replica.load, replica.num_requests) == (True, 0, 0) for replica in router.replicas)
    assert {replica.version for replica in replicas} == {router.version or 0}
    await router.close()


@settings(max_examples=examples(40), deadline=None)
@given(EVENTS)
def test_requests_are_lost_only_with_their_shard(events: list[Event]) -> None:
    in_virtual_time(survive(events))
