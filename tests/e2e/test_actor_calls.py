"""Calls to actors with answers over a persistent Monarch port: values, errors and memory use."""

import asyncio
import re
import sys
from collections import defaultdict
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import pytest_asyncio

pytest.importorskip("monarch", reason="needs the cpu or gpu extra")

from titan_rl.cluster.processes.actor_calls import ActorHandle, AnsweringActor
from titan_rl.cluster.processes.remote_process import RemoteProcess
from titan_rl.cluster.supervision import Supervisor
from titan_rl.core.errors import ActorDiedError, RequestError, TitanRLError

from monarch.actor import concurrent_endpoint, this_proc  # isort: skip

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # actor processes cannot import a test module

pytestmark = pytest.mark.asyncio(loop_scope="module")

LIMIT_S = 240


class TwoArguments(Exception):
    """An exception that pickles but cannot be unpickled."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first} and {second}")


class Worker(AnsweringActor):
    def __init__(self) -> None:
        super().__init__()
        self._released = defaultdict[str, asyncio.Event](asyncio.Event)

    @concurrent_endpoint
    async def echo(self, value: Any) -> Any:
        return value

    @concurrent_endpoint
    async def fail(self, kind: str) -> None:
        match kind:
            case "refused":
                raise RequestError("too long")
            case "unreadable":
                raise TwoArguments("one", "two")
            case "unpicklable":
                error = RuntimeError("it has a generator")
                error.cause = (each for each in ())  # pyright: ignore[reportAttributeAccessIssue]
                raise error
            case "stop":
                raise StopIteration("the end")

    @concurrent_endpoint
    async def unpicklable(self) -> Any:
        return (each for each in ())

    @concurrent_endpoint
    async def wait(self, name: str) -> str:
        await self._released[name].wait()
        return "released"

    @concurrent_endpoint
    async def release(self, name: str) -> None:
        self._released[name].set()

    @concurrent_endpoint
    async def memory_kb(self) -> int:
        return memory_kb()


def memory_kb() -> int:
    found = re.search(r"RssAnon:\s+(\d+)", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1])


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def worker() -> AsyncIterator[ActorHandle]:
    supervisor = this_proc().spawn("answers_supervisor", Supervisor)
    remote = RemoteProcess("worker")
    yield await remote.call(supervisor.spawn, "worker", Worker, (), timeout_s=LIMIT_S)
    await remote.call(supervisor.terminate, timeout_s=LIMIT_S)


async def test_values_and_errors_are_returned_unchanged(worker: ActorHandle) -> None:
    async with asyncio.timeout(LIMIT_S):
        assert await asyncio.gather(*[worker.echo.call_one(each) for each in range(100)]) == list(range(100))
        with pytest.raises(RequestError, match=r"^too long$"):
            await worker.fail.call_one("refused")
        with pytest.raises(TypeError, match="echo"):
            await worker.echo.call_one()
        with pytest.raises(RuntimeError, match="StopIteration"):
            await worker.fail.call_one("stop")
        assert await worker.echo.call_one("still there") == "still there"


async def test_unpicklable_error_arrives_as_text(worker: ActorHandle) -> None:
    async with asyncio.timeout(LIMIT_S):
        with pytest.raises(TitanRLError, match="TwoArguments: one and two"):
            await worker.fail.call_one("unreadable")
        with pytest.raises(TitanRLError, match="RuntimeError: it has a generator"):
            await worker.fail.call_one("unpicklable")
        with pytest.raises(TitanRLError, match=r"cannot be sent.*generator"):
            await worker.unpicklable.call_one()


async def test_answer_to_a_cancelled_call_is_dropped(worker: ActorHandle) -> None:
    async with asyncio.timeout(LIMIT_S):
        waiting = asyncio.ensure_future(worker.wait.call_one("this"))
        await worker.echo.call_one(1)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        await worker.release.call_one("this")
        assert await worker.wait.call_one("this") == "released"


async def test_calls_in_flight_fail_when_their_process_ends(worker: ActorHandle) -> None:
    async with asyncio.timeout(LIMIT_S):
        remote = RemoteProcess("worker")
        calls = [asyncio.ensure_future(remote.call(worker.wait, name)) for name in ("one", "other")]
        await worker.echo.call_one(1)
        remote.end("process 7 ended")
        for call in calls:
            with pytest.raises(ActorDiedError, match="worker died: process 7 ended"):
                await call


async def test_calls_do_not_leak_memory(worker: ActorHandle) -> None:
    """Plain Monarch calls would leak about 8 MB in this process and 2.7 MB in the actor's. Allocators may grow by a
    megabyte."""

    async def calls(number: int) -> None:
        for _ in range(number // 100):
            await asyncio.gather(*[worker.echo.call_one(1) for _ in range(100)])

    await calls(2_000)
    before = memory_kb(), await worker.memory_kb.call_one()
    await calls(8_000)
    after = memory_kb(), await worker.memory_kb.call_one()
    assert after[0] - before[0] < 4_500
    assert after[1] - before[1] < 1_800
