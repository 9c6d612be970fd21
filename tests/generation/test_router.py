"""Requests through the router: routing, failures, and release of load. Virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from titan_rl.core.errors import EngineDeadError, GenerationError, NoReplicaError, RequestError
from titan_rl.generation.router import GeneratorRouter, LeastLoaded, Limits, Replica, RoundRobin
from titan_rl.testing.fake_replica import FakeReplica
from titan_rl.types import Completion, FinishReason, GenerateFn, SamplingParams

pytestmark = pytest.mark.looptime


def ask(
    router: GeneratorRouter, request_id: str, tokens: int = 3, session_id: str | None = None
) -> asyncio.Task[Completion]:
    sampling = SamplingParams(max_tokens=tokens)
    return asyncio.create_task(router.generate([1, 2], request_id=request_id, session_id=session_id, sampling=sampling))


def loads(router: GeneratorRouter) -> dict[str, tuple[int, int]]:
    return {replica.name: (replica.load, replica.num_requests) for replica in router.replicas}


def serving(router: GeneratorRouter) -> list[str]:
    return [replica.name for replica in router.replicas if replica.serving]


@pytest.fixture
async def pair() -> AsyncIterator[tuple[FakeReplica, FakeReplica, GeneratorRouter]]:
    a, b = FakeReplica("a"), FakeReplica("b")
    router = GeneratorRouter([a, b], stall_timeout_s=100.0)
    yield a, b, router
    await router.close()
    assert a.calls[-1] == b.calls[-1] == "close"


Pair = tuple[FakeReplica, FakeReplica, GeneratorRouter]


async def test_router_and_replica_conform_to_their_protocols(pair: Pair) -> None:
    assert isinstance(pair[0], Replica)
    generate: GenerateFn = pair[2].generate
    completion = await generate([1], request_id="r", sampling=SamplingParams(max_tokens=2))
    assert (completion.request_id, completion.finish_reason) == ("r", FinishReason.LENGTH)


async def test_failed_requests_are_not_counted_as_answered() -> None:
    router = GeneratorRouter([], limits=Limits(no_replica_s=1.0))
    with pytest.raises(NoReplicaError):
        await ask(router, "fails")
    assert (router.num_in_flight, router.num_answered, router.take_most_in_flight()) == (0, 0, 1)
    await router.add_replica(FakeReplica("a"))
    await ask(router, "answered")
    assert (router.num_in_flight, router.num_answered, router.take_most_in_flight()) == (0, 1, 1)
    await router.close()


async def test_load_is_prompt_plus_budget_while_in_flight(pair: Pair) -> None:
    a, _, router = pair
    first, second, third = ask(router, "1", tokens=50), ask(router, "2", tokens=3), ask(router, "3", tokens=4)
    await asyncio.sleep(0.5)
    assert loads(router) == {"a": (52, 1), "b": (11, 2)}
    await asyncio.gather(first, second, third)
    assert loads(router) == {"a": (0, 0), "b": (0, 0)}
    assert a.served == ["1"]


async def test_cancelling_a_request_releases_its_load_and_aborts_it(pair: Pair) -> None:
    a, _, router = pair
    request = ask(router, "1", tokens=50)
    await asyncio.sleep(2)
    request.cancel()
    with pytest.raises(asyncio.CancelledError):
        await request
    assert loads(router)["a"] == (0, 0)
    await asyncio.sleep(0.1)
    assert a.aborts == [["1"]]


async def test_bad_request_fails_alone_and_is_not_retried(pair: Pair) -> None:
    a, b, router = pair
    with pytest.raises(RequestError, match="empty prompt"):
        await router.generate([], request_id="bad", sampling=SamplingParams(max_tokens=1))
    assert (a.served, b.served) == ([], [])
    assert serving(router) == ["a", "b"]
    request = ask(router, "1")
    await asyncio.sleep(0)
    with pytest.raises(RequestError, match="in flight already"):
        await ask(router, "1")
    assert len((await request).token_ids) == 3


async def test_failure_moves_the_request_and_quarantines_the_replica() -> None:
    a, b = FakeReplica("a"), FakeReplica("b")
    failed: list[tuple[str, str]] = []
    router = GeneratorRouter([a, b], on_replica_failed=lambda replica, error: failed.append((replica.name, str(error))))
    await router.pull_state_dict(4)
    requests = [ask(router, str(index), tokens=5) for index in range(6)]
    await asyncio.sleep(1.5)
    a.generate_error = GenerationError("lost")
    completions = await asyncio.gather(*requests)
    assert [completion.request_id for completion in completions] == [str(index) for index in range(6)]
    assert all(completion.finish_reason is FinishReason.LENGTH for completion in completions)
    assert failed == [("a", "lost")]  # once, though three requests failed
    a.generate_error = None
    await asyncio.sleep(5)
    assert a.calls == ["pull 4", "pull 4"]  # it came back with the current weights
    assert serving(router) == ["a", "b"]
    await router.close()


async def test_fast_failing_replica_does_not_attract_requests() -> None:
    a, b = FakeReplica("a"), FakeReplica("b")
    a.generate_error = GenerationError("always")
    router = GeneratorRouter([a, b], strategy=LeastLoaded())
    for index in range(300):  # 900 s
        assert (await ask(router, str(index))).finish_reason is FinishReason.LENGTH
    assert len(a.served) < 30
    await router.close()


async def test_request_that_fails_on_every_replica_fails_with_the_cause() -> None:
    replicas = [FakeReplica(name) for name in "abcd"]
    for replica in replicas:
        replica.generate_error = GenerationError("boom")
    router = GeneratorRouter(replicas, max_attempts=3)
    with pytest.raises(GenerationError, match="failed on 3 replicas") as caught:
        await ask(router, "poison")
    assert str(caught.value.__cause__) == "boom"
    assert len(serving(router)) == 1
    assert set(loads(router).values()) == {(0, 0)}
    await router.close()


async def test_request_that_fails_on_the_only_replica_names_one_replica() -> None:
    replica = FakeReplica("a")
    replica.generate_error = GenerationError("boom")
    router = GeneratorRouter([replica], max_attempts=3)
    with pytest.raises(
        GenerationError, match=r"failed on 1 replica in 3 attempts; the last: GenerationError\('boom'\)"
    ):
        await ask(router, "poison")
    await router.close()


async def test_request_on_a_hanging_replica_moves_under_a_new_engine_id() -> None:
    slow, fast = FakeReplica("slow", step_s=1000), FakeReplica("fast")
    router = GeneratorRouter([slow, fast], strategy=RoundRobin(), stall_timeout_s=10)
    completion = await ask(router, "1")
    assert (completion.request_id, completion.finish_reason) == ("1", FinishReason.LENGTH)
    assert (slow.served, slow.aborts, fast.served) == (["1"], [["1"]], ["1~1"])
    await router.close()


async def test_request_id_like_a_retry_id_does_not_collide() -> None:
    slow, fast = FakeReplica("slow", step_s=5), FakeReplica("fast", step_s=5)
    router = GeneratorRouter([slow, fast], strategy=RoundRobin())
    moved = ask(router, "a")
    other = ask(router, "a~1")
    await asyncio.sleep(1)
    router.remove_replica("slow")
    assert (await moved).request_id == "a"
    assert (await other).request_id == "a~1"
    assert fast.served == ["a~1~0", "a~1"]
    await router.close()


async def test_requests_wait_for_a_respawn_when_no_replica_is_left() -> None:
    a = FakeReplica("a")
    router = GeneratorRouter([a])
    await router.pull_state_dict(1)
    a.generate_error = a.pull_error = GenerationError("dead")
    requests = [ask(router, str(index)) for index in range(3)]
    await asyncio.sleep(50)
    router.remove_replica("a")
    respawned = FakeReplica("a")
    assert await router.add_replica(respawned)
    completions = await asyncio.gather(*requests)
    assert [list(completion.token_ids) for completion in completions] == [[0, 1, 2]] * 3
    assert {completion.versions[0] for completion in completions} == {1}
    await router.close()


async def test_wait_for_a_replica_ends_with_the_last_failure() -> None:
    a = FakeReplica("a")
    router = GeneratorRouter([a], limits=Limits(no_replica_s=60))
    await router.pull_state_dict(1)
    a.generate_error = a.pull_error = GenerationError("dead")
    with pytest.raises(NoReplicaError, match=r"60 s.*dead") as caught:
        await ask(router, "1")
    assert str(caught.value.__cause__) == "dead"
    await router.close()


async def test_router_without_replicas_waits_for_the_first() -> None:
    router = GeneratorRouter([])
    request = ask(router, "1")
    await asyncio.sleep(1)
    await router.add_replica(FakeReplica("a"))
    assert len((await request).token_ids) == 3
    await router.close()


async def test_removing_a_replica_moves_its_requests_without_blame(pair: Pair) -> None:
    a, b, router = pair
    request = ask(router, "1", tokens=10)
    await asyncio.sleep(5.5)
    router.remove_replica("a")
    assert len((await request).token_ids) == 10
    assert (a.served, b.served) == (["1"], ["1~1"])
    with pytest.raises(ValueError, match=r"no replica 'a'.*\['b'\]"):
        router.remove_replica("a")
    with pytest.raises(ValueError, match="'b' is taken"):
        await router.add_replica(FakeReplica("b"))
    assert await router.add_replica(a)


async def test_late_failure_does_not_count_against_a_recovered_replica() -> None:
    class FailsLate(FakeReplica):
        async def generate(self, *args, request_id: str, **kwargs) -> Completion:
            if request_id == "slow":
                await asyncio.sleep(20)
            if request_id in ("slow", "hiccup"):
                raise GenerationError(request_id)
            return await super().generate(*args, request_id=request_id, **kwargs)

    failed: list[str] = []
    router = GeneratorRouter(
        [FailsLate("a"), FakeReplica("b")],
        strategy=RoundRobin(),
        on_replica_failed=lambda replica, error: failed.append(str(error)),
    )
    slow = ask(router, "slow")  # to a, like every second request
    await asyncio.sleep(1)
    await ask(router, "b")
    await ask(router, "hiccup")
    assert len((await slow).token_ids) == 3
    assert failed == ["hiccup"]
    await router.close()


async def test_replica_recovered_by_a_drain_can_fail_again() -> None:
    a = FakeReplica("a")
    failed: list[str] = []
    router = GeneratorRouter(
        [a], limits=Limits(quarantine_s=50), on_replica_failed=lambda replica, error: failed.append(str(error))
    )
    first = ask(router, "1", tokens=10)
    await asyncio.sleep(1.5)
    pulling = asyncio.create_task(router.pull_state_dict(1, "drain"))
    await asyncio.sleep(1)
    a.generate_error = GenerationError("broken")  # fails while draining, then at once when back in service
    await pulling
    await asyncio.sleep(0.1)
    assert failed == ["broken", "broken"]
    assert serving(router) == []
    a.generate_error = None
    assert len((await first).token_ids) == 10
    await router.close()


async def test_sessions_stay_on_a_replica_until_finished(pair: Pair) -> None:
    a, b, router = pair
    ask(router, "busy", tokens=30)
    for turn in range(3):
        await ask(router, f"s{turn}", session_id="s", tokens=1)
    assert b.served == ["s0", "s1", "s2"]
    ask(router, "busier", tokens=90)
    router.finish_session("s")
    await asyncio.sleep(0)
    await ask(router, "s3", session_id="s", tokens=1)
    assert "s3" in a.served


async def test_close_resolves_every_pending_call() -> None:
    a = FakeReplica("a")
    a.pull_s = 50
    router = GeneratorRouter([a])
    waiting = ask(router, "1", tokens=90)
    pulling = asyncio.create_task(router.pull_state_dict(1))
    await asyncio.sleep(3)
    await router.close()
    results = await asyncio.gather(waiting, pulling, return_exceptions=True)
    assert all(isinstance(result, EngineDeadError) for result in results)
    with pytest.raises(EngineDeadError, match="closed"):
        await ask(router, "2")
    with pytest.raises(EngineDeadError, match="closed"):
        await router.pause()
    await router.close()
    assert a.calls.count("close") == 1


async def test_close_does_not_wait_for_a_hanging_replica() -> None:
    class Hanging(FakeReplica):
        async def close(self) -> None:
            await asyncio.Event().wait()

    router = GeneratorRouter([Hanging("a")], limits=Limits(call_s=10))
    started = asyncio.get_running_loop().time()
    await router.close()
    assert asyncio.get_running_loop().time() - started == pytest.approx(10, abs=0.1)


@pytest.mark.parametrize(("name", "value"), [("stall_timeout_s", 0.0), ("max_attempts", 0)])
async def test_invalid_setting_is_named(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=name):
        GeneratorRouter([], **{name: value})  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="call_s"):
        Limits(call_s=0)
