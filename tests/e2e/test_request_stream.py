"""Request streams to a generator process over real Monarch, with a parrot in place of an engine."""

import asyncio
import os
import signal
import sys
import threading
from collections.abc import AsyncIterator
from dataclasses import replace
from itertools import count
from typing import Any

import cloudpickle
import pytest
import pytest_asyncio

pytest.importorskip("monarch", reason="needs the cpu or gpu extra")

from titan_rl.cluster.actor_replica import ActorReplica
from titan_rl.cluster.liveness.health_check import LocalHealthChecks
from titan_rl.cluster.processes.process import LOOPBACK, ProcessActor, ProcessSpec
from titan_rl.cluster.processes.remote_process import RemoteProcess, call
from titan_rl.cluster.request_stream import GeneratorStreams, RequestServer, caller_of
from titan_rl.cluster.supervision import Supervisor
from titan_rl.core.errors import GenerationError, RequestError
from titan_rl.generation.request import EngineRequest
from titan_rl.generation.router.shard import ReplicaConnection, ShardReplica
from titan_rl.types import Completion, FinishReason, SamplingParams, TokenChunk, VersionSpan
from titan_rl.weights.types import PublishedWeights

from monarch.actor import concurrent_endpoint, this_proc  # isort: skip

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # actor processes cannot import a test module

pytestmark = pytest.mark.asyncio(loop_scope="module")

LIMIT_S = 240
SAMPLING = SamplingParams(max_tokens=8)


def completion(request: EngineRequest, tokens: list[int]) -> Completion:
    spans = [VersionSpan(0, len(tokens))]
    return Completion(request.request_id, tokens, [0.0] * len(tokens), FinishReason.STOP, spans)


def chunk(request: EngineRequest, tokens: list[int]) -> TokenChunk:
    return TokenChunk(request.request_id, tokens, [0.0] * len(tokens), [VersionSpan(0, len(tokens))])


class Unpicklable(str):
    """A session id that cannot be pickled."""

    def __reduce__(self) -> Any:
        raise TypeError("it does not pickle")


class Parrot(ProcessActor):
    """Echoes prompts, followed by the number of requests in the same message. The prompt [0] is rejected, [1] fails,
    [2] streams a token and is never answered, the answer to [3] cannot be sent, and that to [6] cannot be read. The
    prompt [8, 8] is answered with the number of callers that the current one has replaced."""

    @concurrent_endpoint
    async def reply_to(self, caller: str, port: Any, replaced: tuple[str, ...] = ()) -> None:
        self._port, self._server, self._replaced = port, RequestServer(port), replaced

    @concurrent_endpoint
    async def generate(self, caller: str, requests: list[EngineRequest]) -> None:
        for request in requests:
            match tuple(request.prompt_token_ids):
                case (0,):
                    self._server.fail(request.request_id, RequestError("too long"))
                case (1,):
                    self._server.fail(request.request_id, KeyError("wires crossed"))
                case (2,):
                    self._server.send(chunk(request, [len(requests)]))
                case (3,):
                    lock: Any = threading.Lock()
                    self._server.send(replace(completion(request, [3]), routed_experts=[lock]))
                case (6,):
                    self._port.send([("a", "tuple", "of", "five", "values")])
                case (8, 8):
                    self._server.send(completion(request, [len(self._replaced)]))
                case prompt:
                    self._server.send(chunk(request, list(prompt)))
                    self._server.send(completion(request, [*prompt, len(requests)]))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def process(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[tuple[RemoteProcess, Any]]:
    """A process with a parrot, and the parrot's handle. The last test kills it."""
    supervisor = this_proc().spawn("supervisor_of_a_parrot", Supervisor)
    spec = ProcessSpec("parrot", "here", LOOPBACK, tmp_path_factory.mktemp("parrot"))
    actor = await call(supervisor.spawn, "parrot", Parrot, (spec,), who="supervisor")
    remote = RemoteProcess("parrot")
    remote.watch([await remote.call(actor.pid, timeout_s=LIMIT_S)], LocalHealthChecks())
    yield remote, actor
    remote.close()
    await call(supervisor.terminate, who="supervisor", timeout_s=LIMIT_S)


@pytest_asyncio.fixture(loop_scope="module")
async def replica(process: tuple[RemoteProcess, Any]) -> AsyncIterator[ActorReplica]:
    """A new connection to the parrot."""
    remote, actor = process
    replica = ActorReplica(remote, actor, PublishedWeights())
    await replica.connect()
    replica.pid = await remote.call(actor.pid)  # pyright: ignore[reportAttributeAccessIssue]
    yield replica
    replica.disconnect()


async def ask(replica: ActorReplica, name: str, *prompt: int) -> Completion:
    async with asyncio.timeout(LIMIT_S):
        return await replica.stream(EngineRequest(name, prompt, SAMPLING), lambda _: None)


async def test_concurrent_requests_are_sent_in_one_message(replica) -> None:
    answers = await asyncio.gather(*(ask(replica, f"r{n}", 7, n) for n in range(20)))
    assert [list(answer.token_ids) for answer in answers] == [[7, n, 20] for n in range(20)]
    assert list((await ask(replica, "r0", 9)).token_ids) == [9, 1]


async def test_tokens_are_streamed_before_the_answer(replica) -> None:
    chunks: list[TokenChunk] = []
    async with asyncio.timeout(LIMIT_S):
        answer = await replica.stream(EngineRequest("a", [5, 6], SAMPLING), chunks.append)
    assert [list(part.token_ids) for part in chunks] == [[5, 6]]
    assert list(answer.token_ids) == [5, 6, 1]


async def test_failures_do_not_affect_other_requests(replica) -> None:
    outcomes = await asyncio.gather(
        ask(replica, "a", 0), ask(replica, "b", 1), ask(replica, "c", 4), return_exceptions=True
    )
    assert isinstance(outcomes[0], RequestError)
    assert str(outcomes[0]) == "too long"
    assert isinstance(outcomes[1], GenerationError)
    assert "KeyError: 'wires crossed'" in str(outcomes[1])
    assert isinstance(outcomes[2], Completion)


async def test_request_id_is_in_use_until_its_answer(replica) -> None:
    first = asyncio.ensure_future(ask(replica, "a", 4))
    await asyncio.sleep(0)
    with pytest.raises(RequestError, match="'a' is in use"):
        await ask(replica, "a", 4)
    await first
    await ask(replica, "a", 4)


async def test_request_cancelled_at_once_is_not_sent(replica) -> None:
    requests = [asyncio.ensure_future(ask(replica, f"r{n}", 7)) for n in range(2)]
    asyncio.get_running_loop().call_soon(requests[0].cancel)
    assert list((await requests[1]).token_ids) == [7, 1]
    assert requests[0].cancelled()


async def test_unsendable_answer_fails_its_request_only(replica) -> None:
    bad, good = await asyncio.gather(ask(replica, "a", 3), ask(replica, "c", 4), return_exceptions=True)
    assert isinstance(bad, GenerationError)
    assert "its answer could not be sent" in str(bad)
    assert isinstance(good, Completion)  # sent in the same message
    assert list((await ask(replica, "b", 4)).token_ids) == [4, 1]


async def test_disconnect_fails_pending_and_later_requests(replica) -> None:
    streamed = asyncio.Event()
    request = asyncio.ensure_future(replica.stream(EngineRequest("a", [2], SAMPLING), lambda _: streamed.set()))
    await asyncio.wait_for(streamed.wait(), LIMIT_S)
    replica.disconnect()
    for unanswered in (request, ask(replica, "late", 4)):
        with pytest.raises(GenerationError, match="the connection to parrot is closed"):
            await asyncio.wait_for(unanswered, LIMIT_S)


async def test_unsendable_request_fails_alone(replica) -> None:
    bad = replica.stream(EngineRequest("bad", [0], SAMPLING, Unpicklable("s")), lambda _: None)
    refused, answer = await asyncio.gather(bad, ask(replica, "good", 4), return_exceptions=True)
    assert isinstance(refused, RequestError)
    assert "request 'bad' could not be sent to parrot: TypeError" in str(refused)
    assert isinstance(answer, Completion)


async def test_worker_reconnects_after_an_unreadable_message(replica) -> None:
    class Listener:
        def __init__(self) -> None:
            self.events: list[str] = []
            self.opened = asyncio.Event()

        def connection_changed(self, replica: ShardReplica) -> None:
            self.events.append("opened" if replica.is_open else "lost")
            if replica.is_open:
                self.opened.set()
            else:
                self.opened.clear()

        def connection_unreachable(self, replica: ShardReplica, error: GenerationError) -> None:
            raise AssertionError

    listener, numbers = Listener(), count()
    opener = GeneratorStreams("parrot", replica.address, lambda: caller_of("worker.0", next(numbers)))
    connection = ReplicaConnection("parrot", opener)

    async def say(name: str, *prompt: int) -> list[int]:
        async with asyncio.timeout(LIMIT_S):
            await listener.opened.wait()
            return list((await connection.stream(EngineRequest(name, prompt, SAMPLING), lambda _: None)).token_ids)

    connection.begin(listener)
    assert await say("a", 8, 8) == [0]
    for unanswered in await asyncio.gather(say("b", 2), say("c", 6), return_exceptions=True):
        assert isinstance(unanswered, GenerationError)
        assert "cannot be read" in str(unanswered)
    assert await say("d", 8, 8) == [1], "the previous stream is replaced"
    assert listener.events == ["opened", "lost", "opened"]
    await connection.close()


async def test_process_death_fails_all_requests_at_once(replica) -> None:
    streamed = asyncio.Event()

    async def unanswered(name: str) -> Completion:
        async with asyncio.timeout(LIMIT_S):
            return await replica.stream(EngineRequest(name, [2], SAMPLING), lambda _: streamed.set())

    requests = [asyncio.ensure_future(unanswered(f"r{n}")) for n in range(3)]
    await asyncio.wait_for(streamed.wait(), LIMIT_S)
    os.kill(replica.pid, signal.SIGKILL)
    for request in requests:
        with pytest.raises(GenerationError, match="parrot died"):
            await request
    with pytest.raises(GenerationError, match="parrot died"):
        await ask(replica, "late", 4)
