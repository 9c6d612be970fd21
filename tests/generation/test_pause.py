"""Pause, abort and resume through the router. Virtual time."""

from __future__ import annotations

import asyncio

import pytest

from titan_rl.core.errors import GenerationError
from titan_rl.generation.router import GeneratorRouter, Limits
from titan_rl.testing.fake_replica import FakeReplica
from titan_rl.types import Completion, FinishReason, SamplingParams

pytestmark = pytest.mark.looptime


def ask(router: GeneratorRouter, request_id: str, tokens: int = 10) -> asyncio.Task[Completion]:
    return asyncio.create_task(router.generate([1], request_id=request_id, sampling=SamplingParams(max_tokens=tokens)))


def now() -> float:
    return asyncio.get_running_loop().time()


async def test_keep_freezes_requests_and_their_time_limits() -> None:
    a, b = FakeReplica("a"), FakeReplica("b")
    router = GeneratorRouter([a, b], stall_timeout_s=20)
    running = [ask(router, "1"), ask(router, "2")]
    await asyncio.sleep(3.5)
    report = await router.pause("keep")
    assert (report.mode, report.aborted, dict(report.failed)) == ("keep", (), {})
    assert router.paused == "keep"
    late = ask(router, "3")
    await asyncio.sleep(1000)
    assert not any(request.done() for request in [*running, late])
    assert a.served + b.served == ["1", "2"]
    resumed = now()
    await router.resume()
    for request in [*running, late]:
        assert (await request).finish_reason is FinishReason.LENGTH
    assert now() - resumed < 12  # frozen requests continued from the fourth token
    assert a.served + b.served != ["1", "2"]
    assert [replica.serving for replica in router.replicas] == [True, True]
    await router.close()


async def test_time_limit_continues_with_its_remainder_after_a_pause() -> None:
    a = FakeReplica("a", step_s=1000)
    router = GeneratorRouter([a], stall_timeout_s=20, max_attempts=1)
    request = ask(router, "1")
    await asyncio.sleep(15)
    await router.pause("keep")
    await asyncio.sleep(500)
    await router.resume()
    resumed = now()
    with pytest.raises(GenerationError, match="no sign of life from a for 20 s"):
        await request
    assert now() - resumed == pytest.approx(5, abs=0.1)
    await router.close()


async def test_wait_lets_requests_finish_and_holds_new_ones() -> None:
    a = FakeReplica("a")
    router = GeneratorRouter([a])
    running = ask(router, "1")
    await asyncio.sleep(0)
    pausing = asyncio.create_task(router.pause("wait"))
    await asyncio.sleep(2)
    late = ask(router, "2")
    report = await pausing
    assert running.done()
    assert report.seconds == pytest.approx(10, abs=0.1)
    assert a.calls == ["pause wait"]
    await asyncio.sleep(100)
    assert not late.done()
    await router.resume()
    assert len((await late).token_ids) == 10
    await router.close()


async def test_wait_aborts_and_reports_requests_that_exceed_the_limit() -> None:
    a = FakeReplica("a")
    router = GeneratorRouter([a], limits=Limits(finish_s=5))
    running = ask(router, "1", tokens=100)
    await asyncio.sleep(0)
    report = await router.pause("wait")
    assert (report.aborted, report.cancelled) == (("1",), ())
    assert (await running).finish_reason is FinishReason.ABORT
    assert len((await running).token_ids) >= 4
    await router.close()


async def test_abort_returns_partial_completions() -> None:
    a, b = FakeReplica("a"), FakeReplica("b")
    router = GeneratorRouter([a, b])
    running = [ask(router, str(index), tokens=100) for index in range(4)]
    await asyncio.sleep(3.5)
    pausing = asyncio.create_task(router.pause("abort"))
    await asyncio.sleep(0)
    arriving = await ask(router, "late")
    assert (arriving.finish_reason, len(arriving.token_ids)) == (FinishReason.ABORT, 0)
    report = await pausing
    assert sorted(report.aborted) == ["0", "1", "2", "3"]
    for request in running:
        assert ((await request).finish_reason, list((await request).token_ids)) == (FinishReason.ABORT, [0, 1, 2])
    assert "late" not in a.served + b.served
    assert a.calls == b.calls == ["abort", "pause abort"]
    await router.resume()
    assert (await ask(router, "4")).finish_reason is FinishReason.LENGTH
    await router.close()


async def test_response_after_an_abort_is_marked_aborted() -> None:
    a = FakeReplica("a")
    a.ignores_aborts = True  # so that the request finishes by itself
    router = GeneratorRouter([a])
    running = ask(router, "1", tokens=5)
    await asyncio.sleep(3.5)
    report = await router.pause("abort")
    assert report.cancelled == ()
    assert ((await running).finish_reason, len((await running).token_ids)) == (FinishReason.ABORT, 5)
    assert (await running).ended is FinishReason.LENGTH
    await router.close()


async def test_abort_is_repeated_for_a_request_in_transit() -> None:
    a = FakeReplica("a")
    a.deaf_s = 5  # past the gate, not yet in the engine
    router = GeneratorRouter([a], limits=Limits(reabort_interval_s=2))
    running = ask(router, "1", tokens=100)
    await asyncio.sleep(1)
    report = await router.pause("abort")
    assert report.cancelled == ()
    assert report.seconds < 7
    assert a.aborts == [["1"]] * 3
    assert (await running).finish_reason is FinishReason.ABORT
    await router.close()


async def test_request_that_ignores_aborts_is_cancelled_and_reported() -> None:
    a = FakeReplica("a")
    a.ignores_aborts = True
    router = GeneratorRouter([a], limits=Limits(abort_s=30, cancel_s=5))
    running = ask(router, "1", tokens=10_000)
    await asyncio.sleep(1)
    report = await router.pause("abort")
    assert report.cancelled == ("1",)
    assert 30 <= report.seconds <= 36
    assert ((await running).finish_reason, len((await running).token_ids)) == (FinishReason.ABORT, 0)
    assert router.replicas[0].num_requests == 0
    await router.close()


async def test_pause_does_not_wait_for_a_hanging_replica() -> None:
    a, b = FakeReplica("a"), FakeReplica("b")
    a.pause_hangs = True
    router = GeneratorRouter([a, b], limits=Limits(call_s=10))
    report = await router.pause("keep")
    assert report.seconds == pytest.approx(10, abs=0.1)
    assert isinstance(report.failed["a"], TimeoutError)
    assert str(report.failed["a"]) == 'the pause in mode "keep" took longer than 10 s'
    assert [replica.serving for replica in router.replicas] == [False, True]
    a.pause_hangs = False
    await asyncio.sleep(5)
    assert [replica.serving for replica in router.replicas] == [True, True]
    assert a.calls == ["pause keep", "resume", "pause keep"]  # it is paused now, even if the lost call had no effect
    await router.close()


async def test_replica_that_joins_while_paused_is_paused() -> None:
    router = GeneratorRouter([FakeReplica("a")])
    await router.pull_state_dict(3)
    await router.pause("keep")
    joining = FakeReplica("b")
    assert await router.add_replica(joining)
    assert joining.calls == ["pull 3", "pause keep"]
    await router.resume()
    assert joining.calls[-1] == "resume"
    await router.close()


async def test_pausing_twice_and_resuming_unpaused_are_errors() -> None:
    router = GeneratorRouter([FakeReplica("a")])
    with pytest.raises(RuntimeError, match="not paused"):
        await router.resume()
    await router.pause("wait")
    with pytest.raises(RuntimeError, match="paused already, in mode 'wait'"):
        await router.pause("abort")
    await router.resume()
    with pytest.raises(RuntimeError, match="not paused"):
        await router.resume()
    with pytest.raises(ValueError, match=r"'stop'.*keep, abort, wait"):
        await router.pause("stop")  # pyright: ignore[reportArgumentType]
    await router.close()


async def test_resume_waits_for_a_pause_in_progress() -> None:
    a = FakeReplica("a")
    router = GeneratorRouter([a])
    running = ask(router, "1")
    await asyncio.sleep(0)
    pausing = asyncio.create_task(router.pause("wait"))
    await asyncio.sleep(1)
    await router.resume()
    assert pausing.done()
    assert running.done()
    assert a.calls == ["pause wait", "resume"]
    assert len((await ask(router, "2")).token_ids) == 10
    await router.close()


async def test_waiting_for_a_resume_has_a_limit() -> None:
    router = GeneratorRouter([FakeReplica("a")], limits=Limits(paused_s=60))
    await router.wait_resumed()
    await router.pause("keep")
    for waiting in (ask(router, "1"), asyncio.create_task(router.wait_resumed())):
        with pytest.raises(GenerationError, match="not resumed within 60 s"):
            await waiting
    await router.close()


async def test_frozen_request_times_out_without_blaming_its_replica() -> None:
    a = FakeReplica("a")
    router = GeneratorRouter([a], limits=Limits(paused_s=60))
    running = ask(router, "1")
    await asyncio.sleep(2.5)
    await router.pause("keep")
    with pytest.raises(GenerationError, match="frozen"):
        await running
    assert a.aborts == [] or a.aborts == [["1"]]
    assert router.replicas[0].serving
    await router.close()


async def test_abort_ends_the_named_requests_only() -> None:
    a = FakeReplica("a")
    router = GeneratorRouter([a])
    first, second = ask(router, "1"), ask(router, "2")
    await asyncio.sleep(2.5)
    assert await router.abort(["1", "unknown"]) == ()
    assert ((await first).finish_reason, len((await first).token_ids)) == (FinishReason.ABORT, 2)
    assert await router.abort(["1"]) == ()
    assert (await second).finish_reason is FinishReason.LENGTH
    third, fourth = ask(router, "3"), ask(router, "4")
    await asyncio.sleep(0)
    await router.abort()
    assert {(await third).finish_reason, (await fourth).finish_reason} == {FinishReason.ABORT}
    assert (await ask(router, "5")).finish_reason is FinishReason.LENGTH
    await router.close()


async def test_abort_reaches_requests_that_wait_for_a_replica_or_a_resume() -> None:
    router = GeneratorRouter([])
    no_replica = ask(router, "1")
    await asyncio.sleep(1)
    await router.abort()
    assert (await no_replica).finish_reason is FinishReason.ABORT
    await router.pause("keep")
    held = ask(router, "2")
    await asyncio.sleep(1)
    await router.abort(["2"])
    assert (await held).finish_reason is FinishReason.ABORT
    await router.close()


async def test_pause_time_is_reported_as_interrupted_s() -> None:
    router = GeneratorRouter([FakeReplica("a")])
    running = asyncio.create_task(router.generate([1], request_id="1", sampling=SamplingParams(max_tokens=10)))
    await asyncio.sleep(3.5)
    await router.pause("keep")
    late = asyncio.create_task(router.generate([1], request_id="2", sampling=SamplingParams(max_tokens=10)))
    await asyncio.sleep(50)
    await router.resume()
    assert (await running).metrics["interrupted_s"] == pytest.approx(50)
    assert (await late).metrics["interrupted_s"] == pytest.approx(50)
    await router.close()
