"""Stall warnings for one of several adapters, in virtual time: waiting behind the others is not a stall."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import pytest
from background import in_background

from titan_rl.core.console import ConsoleLines
from titan_rl.generation.router.router import GeneratorRouter
from titan_rl.run.observability.watchers import warn_of_stalls
from titan_rl.run.several_adapters import ExperimentStalls
from titan_rl.scheduling.fair_turns import FairTurns
from titan_rl.testing.fake_replica import FakeReplica
from titan_rl.types import Completion, SamplingParams, TokenChunk

pytestmark = pytest.mark.looptime


@dataclass
class Loop:
    """Training loop of an adapter in which nothing happens."""

    def progress(self) -> object:
        return None

    def waits_for(self) -> str:
        return "0 requests are in flight"


class Queue(FakeReplica):
    """Replica whose engine steps for other requests, and reports it, until `hangs` is set."""

    hangs = False

    async def stream(self, request, on_chunk) -> Completion:
        while not self.hangs:
            await asyncio.sleep(1)
            on_chunk(TokenChunk(request.request_id, [], [], ()))
        await asyncio.sleep(1e9)
        raise AssertionError("no caller waits this long")


async def test_adapter_waiting_for_the_trainer_is_stalled_only_if_the_others_are() -> None:
    turns, console = FairTurns(["sort", "sum", "tags"]), ConsoleLines()
    stalls = ExperimentStalls(Loop(), GeneratorRouter([]), turns, "sort")
    hang = asyncio.Event()

    async def train(name: str, *, hangs: bool) -> None:
        for _ in range(4):
            async with turns.turn(name):
                await asyncio.sleep(25)
        if hangs:
            async with turns.turn(name):
                await hang.wait()

    async def wait_for_a_turn() -> None:
        async with turns.turn("sort"):
            pass

    async with in_background(warn_of_stalls(stalls, console)):
        others = [asyncio.create_task(train(name, hangs=name == "sum")) for name in ("sum", "tags")]
        await asyncio.sleep(1)
        turns._accounts["sort"].virtual_s = 1e6  # it has had more than its share
        mine = asyncio.create_task(wait_for_a_turn())
        await asyncio.sleep(198)
        assert console == []
        await asyncio.sleep(60)
        assert console[0] == (
            "nothing has happened for 30 s: it waits for its turn at the trainer, which is at work for sum; "
            "0 requests are in flight"
        )
        hang.set()
        await asyncio.gather(mine, *others)


async def test_adapter_with_queued_requests_is_stalled_only_if_the_engine_is() -> None:
    replica, console = Queue("generator-0"), ConsoleLines()
    router = GeneratorRouter([replica])
    stalls = ExperimentStalls(Loop(), router, FairTurns(["sort"]), "sort")
    async with in_background(warn_of_stalls(stalls, console)):
        asking = asyncio.create_task(router.generate([1], request_id="1", sampling=SamplingParams(max_tokens=1)))
        await asyncio.sleep(200)
        assert console == []
        replica.hangs = True
        await asyncio.sleep(40)
        assert console == ["nothing has happened for 30 s: 0 requests are in flight"]
        asking.cancel()


async def test_idle_adapter_is_stalled_while_others_train() -> None:
    turns, console = FairTurns(["sort", "sum"]), ConsoleLines()
    stalls = ExperimentStalls(Loop(), GeneratorRouter([]), turns, "sort")
    async with in_background(warn_of_stalls(stalls, console)):
        for _ in range(8):
            async with turns.turn("sum"):
                await asyncio.sleep(5)
    assert console == ["nothing has happened for 30 s: 0 requests are in flight"]
