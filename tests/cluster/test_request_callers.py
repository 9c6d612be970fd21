"""Several callers of one engine, each with its own port. No process is started."""

import asyncio
from typing import Any

import pytest

pytest.importorskip("monarch", reason="needs the cpu or gpu extra")

from titan_rl import Completion, EngineLoop, FinishReason, SamplingParams
from titan_rl.cluster.request_stream import FromGenerator, RequestCallers, caller_of, unpack
from titan_rl.generation.request import EngineRequest
from titan_rl.generation.scripted_engine import ScriptedEngine

LIMIT_S = 30


class Mailbox:
    """Port of a caller."""

    def __init__(self) -> None:
        self.messages: list[FromGenerator] = []
        self.came = asyncio.Event()

    def send(self, messages: list[Any]) -> None:
        self.messages += map(unpack, messages)
        self.came.set()

    @property
    def answers(self) -> dict[str, Completion]:
        return {message.request_id: message for message in self.messages if isinstance(message, Completion)}


def request(name: str, tokens: int = 4) -> EngineRequest:
    return EngineRequest(name, [1], SamplingParams(max_tokens=tokens))


async def test_forgotten_callers_requests_end_and_others_get_their_answers() -> None:
    loop = EngineLoop(ScriptedEngine)
    await loop.start()
    callers, boxes = RequestCallers(loop), {name: Mailbox() for name in ("controller", "worker.0#0", "worker.0#1")}
    for name, box in boxes.items():
        callers.add(name, box)  # pyright: ignore
    await loop.pause("keep")
    callers.start("worker.0#0", [request("a@worker.0", 1 << 20)])
    callers.start(caller_of("worker.0", 1), [request("v@worker.0.1", 1 << 20)])
    callers.start("controller", [request("b")])
    await asyncio.sleep(0)
    callers.forget("worker.0")
    callers.start("worker.0#0", [request("late@worker.0")])
    await loop.resume()
    async with asyncio.timeout(LIMIT_S):
        await boxes["controller"].came.wait()
        while "b" not in boxes["controller"].answers:
            boxes["controller"].came.clear()
            await boxes["controller"].came.wait()
    assert boxes["controller"].answers["b"].finish_reason is FinishReason.LENGTH
    assert list(boxes["controller"].answers) == ["b"]
    callers.add("worker.1#0", boxes["worker.0#0"])  # pyright: ignore
    callers.start("worker.1#0", [request("a@worker.1")])
    async with asyncio.timeout(LIMIT_S):
        await boxes["worker.0#0"].came.wait()
    assert {message.request_id for box in boxes.values() for message in box.messages} <= {"b", "a@worker.1"}
    await loop.close()


async def test_replaced_caller_gets_nothing_and_its_requests_end() -> None:
    loop = EngineLoop(ScriptedEngine)
    await loop.start()
    callers, before, after = RequestCallers(loop), Mailbox(), Mailbox()
    callers.add("worker.0#0", before)  # pyright: ignore
    callers.start("worker.0#0", [request("a", 1 << 20)])
    callers.add("worker.0#1", after, ["worker.0#0", "worker.0#unknown"])  # pyright: ignore
    callers.start("worker.0#0", [request("late")])
    callers.start("worker.0#1", [request("b")])
    async with asyncio.timeout(LIMIT_S):
        while "b" not in after.answers:
            after.came.clear()
            await after.came.wait()
    assert list(after.answers) == ["b"]
    assert before.answers == {}
    callers.start("worker.0#1", [request("a")])  # its id is free again
    async with asyncio.timeout(LIMIT_S):
        while "a" not in after.answers:
            after.came.clear()
            await after.came.wait()
    assert len(after.answers["a"].token_ids) == 4
    await loop.close()
