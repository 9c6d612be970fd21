"""Streams of a rollout worker to a generator whose actor is unreachable at first, and again later. No process is
started."""

from __future__ import annotations

import asyncio
from itertools import count
from typing import Any

import pytest

pytest.importorskip("monarch", reason="needs the cpu or gpu extra")

from titan_rl.cluster.request_stream import GeneratorStreams, pack
from titan_rl.core.errors import GenerationError, RequestError
from titan_rl.generation.request import EngineRequest
from titan_rl.generation.router.shard import ReplicaConnection, Retries, ShardReplica
from titan_rl.types import Completion, FinishReason, SamplingParams

LIMIT_S = 60
SAMPLING = SamplingParams(max_tokens=3)


class Endpoint:
    def __init__(self, call: Any) -> None:
        self.call_one = self.broadcast = call


class Generator:
    """Actor of a generator that answers each request immediately, and its handles.

    Attributes:
        problems: Errors of the next calls of `reply_to`.
        send_problem: Error raised when requests are sent.
        callers: Each caller with the earlier callers that it replaces.
    """

    def __init__(self) -> None:
        self.problems: list[Exception] = []
        self.send_problem: Exception | None = None
        self.callers: list[tuple[str, tuple[str, ...]]] = []
        self.num_handles = 0

    def renewed(self) -> Generator:
        self.num_handles += 1
        return self

    @property
    def reply_to(self) -> Endpoint:
        return Endpoint(self._reply_to)

    @property
    def generate(self) -> Endpoint:
        return Endpoint(self._generate)

    async def _reply_to(self, caller: str, port: Any, replaced: tuple[str, ...]) -> None:
        self.callers.append((caller, replaced))
        if self.problems:
            raise self.problems.pop(0)
        self._port = port

    def _generate(self, caller: str, requests: list[EngineRequest]) -> None:
        assert caller == self.callers[-1][0]
        if self.send_problem is not None:
            raise self.send_problem
        self._port.send(
            [pack(Completion(each.request_id, [], [], FinishReason.STOP, ())) for each in requests if each.request_id]
        )


class Listener:
    def __init__(self) -> None:
        self.opened = asyncio.Event()

    def connection_changed(self, replica: ShardReplica) -> None:
        if replica.is_open:
            self.opened.set()
        else:
            self.opened.clear()

    def connection_unreachable(self, replica: ShardReplica, error: GenerationError) -> None:
        raise AssertionError


async def test_reopened_stream_uses_a_new_handle_and_replaces_earlier_callers() -> None:
    generator, listener, numbers = Generator(), Listener(), count()
    generator.problems = [ConnectionError("refused"), ConnectionError("refused")]
    streams = GeneratorStreams("generator-0", generator, lambda: f"worker.0#{next(numbers)}")
    connection = ReplicaConnection("generator-0", streams, Retries(first_s=0.01, longest_s=0.01))
    connection.begin(listener)

    async def ask(name: str) -> Completion:
        async with asyncio.timeout(LIMIT_S):
            await listener.opened.wait()
            return await connection.stream(EngineRequest(name, [1], SAMPLING), lambda _: None)

    assert (await ask("a")).request_id == "a"
    generator.send_problem = TypeError("it does not pickle")
    with pytest.raises(RequestError, match="'b' could not be sent"):
        await ask("b")
    assert connection.is_open, "the request was at fault, not the connection"
    generator.send_problem = ConnectionError("reset")
    with pytest.raises(GenerationError, match="reset"):
        await ask("c")
    assert not connection.is_open
    generator.send_problem = None
    assert (await ask("d")).request_id == "d"
    names = [caller for caller, _ in generator.callers]
    assert len(set(names)) == generator.num_handles == 4
    assert [replaced for _, replaced in generator.callers] == [(), (names[0],), (*names[:2],), (names[2],)]
    await connection.close()
