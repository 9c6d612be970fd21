"""Generators in virtual time: the controller's part is real, their own processes are simulated.

Requests, chunks, completions and manifests are pickled as Monarch does, and counted. Work that generators would do in
their own processes is metered separately from that of the controller.
"""

from __future__ import annotations

import asyncio
import pickle
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

from titan_rl.cluster import request_stream
from titan_rl.cluster.actor_replica import ActorReplica
from titan_rl.cluster.generator_processes import GeneratorProcesses
from titan_rl.cluster.processes.remote_process import RemoteProcess
from titan_rl.cluster.processes.roles import ProcessId
from titan_rl.cluster.request_stream import FromGenerator, pack
from titan_rl.generation.request import EngineRequest
from titan_rl.types import Completion, FinishReason, TokenChunk, VersionSpan

STEP_S = 0.04  # step of an engine
LOAD_S = 1.0  # load of a version
CHUNK = 32  # steps between two messages of tokens, as `generation.stream_interval`
TOKENS = [7 * place % 150_000 for place in range(1024)]
LOGPROBS = [-0.5 - 1e-4 * place for place in range(1024)]


def now() -> float:
    """Processor time, so that other work on the machine does not count."""
    return time.thread_time()


@dataclass(slots=True)
class Traffic:
    """Messages and bytes between the controller and all generators."""

    num_messages: int = 0
    num_bytes: int = 0
    generators_s: float = 0.0  # processor time of the generators' own part
    told_at: float = 0.0  # time of the last message with a version to a generator
    awaited: set[str] = field(default_factory=set[str])  # requests that are to be sent
    sent_at: float = 0.0  # when the last of these was, by the controller's processor time
    all_sent: asyncio.Event = field(default_factory=asyncio.Event)

    def count(self, payload: bytes) -> None:
        self.num_messages += 1
        self.num_bytes += len(payload)

    def sent(self, requests: Sequence[EngineRequest]) -> None:
        if self.awaited:
            self.awaited.difference_update(request.request_id.partition("~")[0] for request in requests)
            if not self.awaited:
                self.sent_at = now() - self.generators_s
                self.all_sent.set()

    def metered(self, function: Callable[..., None]) -> Callable[..., None]:
        """`function`, metered as work of a generator's process."""

        def run(*args: Any) -> None:
            began = now()
            function(*args)
            self.generators_s += now() - began

        return run


class Pipe:
    """Both ends of a `Channel`, in place of Monarch's."""

    def __init__(self) -> None:
        self._payloads: asyncio.Queue[bytes] = asyncio.Queue()

    def __class_getitem__(cls, item: object) -> type[Pipe]:
        return cls

    @classmethod
    def open(cls) -> tuple[Pipe, Pipe]:
        pipe = cls()
        return pipe, pipe

    def put(self, payload: bytes) -> None:
        self._payloads.put_nowait(payload)

    async def recv(self) -> list[Any]:
        return pickle.loads(await self._payloads.get())


class Endpoint:
    def __init__(self, answer: Callable[..., Awaitable[Any]]) -> None:
        self.call_one = answer


async def nothing(*args: Any) -> None: ...


@dataclass(slots=True)
class Running:
    length: int
    began: float
    version: int
    streamed: int = 0


class SimulatedGenerator:
    """Handle with the interface of a `GeneratorActor`. Each of its requests gets a token per step, for any number of
    requests.
    """

    def __init__(self, traffic: Traffic, length_of: Callable[[EngineRequest], int], phase_s: float) -> None:
        self.generate, self.pull, self.reply_to = self, Endpoint(self._pull), Endpoint(self._reply_to)
        self.abort = self.close = Endpoint(nothing)
        self._traffic = traffic
        self._length_of = length_of
        self._phase_s = phase_s  # until its first message of tokens
        self._running: dict[str, Running] = {}
        self._version = 0
        self._pipe: Pipe

    def broadcast(self, caller: str, requests: list[EngineRequest]) -> None:
        payload = pickle.dumps(requests)
        self._traffic.count(payload)
        self._traffic.sent(requests)
        asyncio.get_running_loop().call_soon(self._traffic.metered(self._take), payload)

    def _take(self, payload: bytes) -> None:
        loop = asyncio.get_running_loop()
        if not self._running:
            loop.call_later(self._phase_s, self._traffic.metered(self._stream))
        for request in pickle.loads(payload):
            length = self._length_of(request)
            self._running[request.request_id] = Running(length, loop.time(), self._version)
            loop.call_later(length * STEP_S, self._traffic.metered(self._finish), request.request_id)

    def _finish(self, request_id: str) -> None:
        running = self._running.pop(request_id)
        length, spans = running.length, (VersionSpan(running.version, running.length),)
        metrics = {"queue_s": 0.0, "time_to_first_token_s": STEP_S, "inter_token_s": STEP_S}
        tokens, logprobs = TOKENS[:length], LOGPROBS[:length]
        self._send([Completion(request_id, tokens, logprobs, FinishReason.STOP, spans, None, metrics)])

    def _stream(self) -> None:
        loop = asyncio.get_running_loop()
        chunks: list[FromGenerator] = []
        for request_id, running in self._running.items():
            start, end = running.streamed, min(running.length - 1, int((loop.time() - running.began) / STEP_S))
            if end > start:
                running.streamed = end
                spans = (VersionSpan(running.version, end - start),)
                chunks.append(TokenChunk(request_id, TOKENS[start:end], LOGPROBS[start:end], spans))
        if chunks:
            self._send(chunks)
        if self._running:
            loop.call_later(CHUNK * STEP_S, self._traffic.metered(self._stream))

    def _send(self, messages: Sequence[FromGenerator]) -> None:
        payload = pickle.dumps([pack(message) for message in messages])
        self._traffic.count(payload)
        self._pipe.put(payload)

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        """Travel to shards by name, as short as the handle of an actor."""
        return str, ("generator",)

    @property
    def request_ids(self) -> list[str]:
        """Ids of the running requests, as the router knows them."""
        return [request_id.partition("~")[0] for request_id in self._running]

    async def _reply_to(self, caller: str, pipe: Pipe, replaced: tuple[str, ...]) -> None:
        self._pipe = pipe

    async def _pull(self, packed: Any, adapter: str) -> tuple[int, dict[str, float], None]:
        payload = pickle.dumps(packed)
        self._traffic.count(payload)
        self._traffic.told_at = now()
        await asyncio.sleep(LOAD_S)
        self._version = packed.manifest.version
        return self._version, {"load_s": LOAD_S, "verify_s": 0.1, "stall_s": 0.1, "probe_diff": 0.0}, None


class SimulatedSupervisor:
    """Supervisor of processes that end on request."""

    def __init__(self) -> None:
        never: asyncio.Queue[Any] = asyncio.Queue()
        self.next_failure, self.terminate = Endpoint(never.get), Endpoint(nothing)


class SimulatedProcesses(GeneratorProcesses):
    """`GeneratorProcesses` whose processes are simulated and start at once."""

    traffic: Traffic
    length_of: Callable[[EngineRequest], int]
    generators: dict[str, SimulatedGenerator]

    def place(self) -> None:
        """Do nothing: simulated processes need no placement."""

    def _host_of(self, process: ProcessId) -> str:
        return self.hosts.names[0]

    async def _start_generator(self, process: ProcessId) -> ActorReplica:
        phase_s = (process.index % CHUNK + 1) * STEP_S
        remote = RemoteProcess(process, self)
        self._remotes[remote.id] = remote
        generator = self.generators[str(process)] = SimulatedGenerator(self.traffic, self.length_of, phase_s)
        with patch.object(request_stream, "Channel", Pipe):
            replica = ActorReplica(remote, generator, self._published)
        self.opened.append(replica)
        await replica.connect()
        return replica
