"""Stray cancellations: calls of a replica are cancelled, although nobody requested it. Virtual time."""

from __future__ import annotations

import asyncio
import logging

import pytest

from titan_rl.core.errors import EngineDeadError, GenerationError, StrayCancellationError
from titan_rl.generation.router import GeneratorRouter, LeastLoaded, Limits, RoundRobin
from titan_rl.generation.router.replica import BackgroundTasks, OpenCalls
from titan_rl.testing.fake_replica import FakeReplica
from titan_rl.types import Completion, FinishReason, SamplingParams

pytestmark = pytest.mark.looptime


class Troubled(FakeReplica):
    """Replica whose calls begin with `_interfere`, which subclasses define."""

    async def generate(self, *args, **kwargs) -> Completion:
        await self._interfere("generate")
        return await super().generate(*args, **kwargs)

    async def pull(self, version: int) -> None:
        await self._interfere("pull")
        await super().pull(version)

    async def pause(self, mode: str) -> None:
        await self._interfere("pause")
        await super().pause(mode)

    async def resume(self) -> None:
        await self._interfere("resume")
        await super().resume()

    async def abort(self, request_ids) -> None:
        await self._interfere("abort")
        await super().abort(request_ids)

    async def close(self) -> None:
        await self._interfere("close")
        await super().close()

    async def _interfere(self, call: str) -> None:
        raise NotImplementedError


class Stray(Troubled):
    """Replica whose calls named in `cancels` await a cancelled future."""

    def __init__(self, name: str, *cancels: str) -> None:
        super().__init__(name)
        self.cancels = set(cancels)

    async def generate(self, *args, request_id: str, **kwargs) -> Completion:
        if "generate" in self.cancels:
            self.served.append(request_id)
        return await super().generate(*args, request_id=request_id, **kwargs)

    async def _interfere(self, call: str) -> None:
        if call in self.cancels:
            gone = asyncio.get_running_loop().create_future()
            gone.cancel()
            await gone


def ask(router: GeneratorRouter, request_id: str, tokens: int = 3) -> asyncio.Task[Completion]:
    return asyncio.create_task(router.generate([1], request_id=request_id, sampling=SamplingParams(max_tokens=tokens)))


def serving(router: GeneratorRouter) -> list[str]:
    return [replica.name for replica in router.replicas if replica.serving]


async def test_stray_cancellation_of_a_request_quarantines_the_replica() -> None:
    failed: list[Exception] = []
    a, b = Stray("a", "generate"), FakeReplica("b")
    router = GeneratorRouter([a, b], LeastLoaded(), on_replica_failed=lambda replica, error: failed.append(error))
    completion = await ask(router, "1")
    assert (completion.finish_reason, len(completion.token_ids)) == (FinishReason.LENGTH, 3)
    assert (a.served, b.served) == (["1"], ["1~1"])
    assert [type(error) for error in failed] == [StrayCancellationError]
    assert "request '1' on replica a was cancelled" in str(failed[0])
    for index in range(300):  # 900 s
        await ask(router, f"later {index}")
    assert len(a.served) < 30
    await router.close()


@pytest.mark.parametrize("mode", ["hot_swap", "drain"])
async def test_stray_cancellation_of_a_pull_fails_that_replica(mode: str) -> None:
    a, b = Stray("a", "pull"), FakeReplica("b")
    router = GeneratorRouter([a, b])
    report = await router.pull_state_dict(1, mode)  # pyright: ignore[reportArgumentType]
    assert report.pulled == ("b",)
    assert isinstance(report.failed["a"], StrayCancellationError)
    await asyncio.sleep(100)
    assert serving(router) == ["b"]  # its recovery failed in the same way
    a.cancels.clear()
    await asyncio.sleep(100)
    assert serving(router) == ["a", "b"]
    assert a.version == 1
    await router.close()


async def test_stray_cancellation_of_a_pause_fails_that_replica() -> None:
    a, b = Stray("a", "pause"), FakeReplica("b")
    router = GeneratorRouter([a, b])
    report = await router.pause("keep")
    assert isinstance(report.failed["a"], StrayCancellationError)
    assert serving(router) == ["b"]
    await router.close()


async def test_stray_cancellation_of_a_resume_quarantines_that_replica() -> None:
    a, b = Stray("a", "resume"), FakeReplica("b")
    router = GeneratorRouter([a, b])
    await router.pause("keep")
    await router.resume()
    assert serving(router) == ["b"]
    a.cancels.clear()
    await asyncio.sleep(10)
    assert serving(router) == ["a", "b"]
    await router.close()


async def test_stray_cancellation_while_joining_is_retried() -> None:
    router = GeneratorRouter([FakeReplica("a")])
    await router.pull_state_dict(1)
    joining = Stray("b", "pull")
    assert not await router.add_replica(joining)
    joining.cancels.clear()
    await asyncio.sleep(10)
    assert serving(router) == ["a", "b"]
    await router.close()


async def test_stray_cancellation_of_an_abort_is_ignored() -> None:
    a = Stray("a", "abort")
    router = GeneratorRouter([a])
    running = ask(router, "1", tokens=5)
    await asyncio.sleep(1.5)
    assert await router.abort() == ()
    assert (await running).finish_reason is FinishReason.ABORT  # it finished by itself during the abort
    assert serving(router) == ["a"]
    await router.close()


async def test_stray_cancellation_of_a_close_does_not_skip_other_replicas() -> None:
    a, b = Stray("a", "close"), FakeReplica("b")
    await GeneratorRouter([a, b]).close()
    assert b.calls == ["close"]


async def test_cancelled_background_task_fails_the_router() -> None:
    calls = OpenCalls()
    tasks = BackgroundTasks(calls)
    gone = asyncio.get_running_loop().create_future()
    gone.cancel()

    async def wait_for(future: asyncio.Future[None]) -> None:
        await future

    tasks.start(wait_for(gone), "recovery of a")
    tasks.start(wait_for(asyncio.get_running_loop().create_future()), "recovery of b")
    await asyncio.sleep(1)
    await tasks.close(5)
    with pytest.raises(EngineDeadError, match="the router failed") as failure:
        async with calls.one():
            raise AssertionError("a call of a router that has failed")
    assert str(failure.value.__cause__) == "'recovery of a' was cancelled, although nobody requested it"


async def test_failed_aborts_are_logged_once_per_replica(caplog: pytest.LogCaptureFixture) -> None:
    a = Stray("a", "abort")
    router = GeneratorRouter([a])

    async def cancel_requests(count: int) -> None:
        requests = [ask(router, f"{len(a.served)}/{index}", tokens=50) for index in range(count)]
        await asyncio.sleep(1)
        for request in requests:
            request.cancel()
        await asyncio.gather(*requests, return_exceptions=True)
        await asyncio.sleep(1)

    with caplog.at_level(logging.WARNING):
        await cancel_requests(8)
        await cancel_requests(8)
    assert [record.getMessage() for record in caplog.records if "abort" in record.getMessage()] == [
        "replica a did not accept an abort of 8 requests: StrayCancellationError("
        "'an abort on replica a was cancelled, although nobody requested it')"
    ]
    a.cancels.clear()
    await cancel_requests(8)
    assert len(a.aborts) == 1
    assert len(a.aborts[0]) == 24  # including those that it did not accept before
    await router.close()


class Panic(BaseException):
    """Like a panic of native code."""


class SlowCleanup(Troubled):
    """Replica whose call named `slow` hangs, and takes ten minutes to clean up after its cancellation."""

    def __init__(self, name: str, slow: str) -> None:
        super().__init__(name)
        self._slow = slow

    async def _interfere(self, call: str) -> None:
        if call == self._slow:
            try:
                await asyncio.Event().wait()
            finally:
                await asyncio.sleep(600)


@pytest.mark.parametrize("slow", ["generate", "pull", "pause", "resume", "abort", "close"])
async def test_limits_apply_to_a_replica_with_slow_cleanup(slow: str) -> None:
    limits = Limits(pull_s=20, call_s=5, cancel_s=2, abort_s=5)
    router = GeneratorRouter(
        [SlowCleanup("a", slow), FakeReplica("b")], RoundRobin(), limits=limits, stall_timeout_s=30
    )
    async with asyncio.timeout(40):
        await asyncio.gather(ask(router, "1"), ask(router, "2"))
    async with asyncio.timeout(25):
        await router.pull_state_dict(1)
    running = asyncio.gather(ask(router, "3", tokens=9), ask(router, "4", tokens=9))
    await asyncio.sleep(0.5)
    async with asyncio.timeout(10):
        await router.abort()
        await running
    async with asyncio.timeout(10):
        await router.pause("keep")
    async with asyncio.timeout(10):
        await router.resume()
    async with asyncio.timeout(15):
        await router.close()


@pytest.mark.parametrize("panics", [True, False])
async def test_pause_that_panics_or_cancels_its_own_task_fails(panics: bool) -> None:
    class Unwell(FakeReplica):
        async def pause(self, mode: str) -> None:
            if panics:
                raise Panic("native code")
            task = asyncio.current_task()
            assert task is not None
            task.cancel()
            await asyncio.sleep(0)

    router = GeneratorRouter([Unwell("a"), FakeReplica("b")])
    report = await router.pause("keep")
    expected = GenerationError if panics else StrayCancellationError
    assert [(name, type(error)) for name, error in report.failed.items()] == [("a", expected)]
    assert serving(router) == ["b"]
    await router.close()
