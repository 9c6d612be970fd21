"""Callers of one generator: the controller and the rollout workers, each with a port for its own answers."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from monarch.actor import Port

from titan_rl.cluster.request_stream import Packed, RequestServer
from titan_rl.core.calls.cancellation import stray_cancellation_fails
from titan_rl.generation.loop.engine_loop import EngineLoop
from titan_rl.generation.request import EngineRequest

CONTROLLER = "controller"
"""Caller name of the controller's own router."""


def caller_of(process_id: str, number: int) -> str:
    """Name of one connection of a process to a generator."""
    return f"{process_id}#{number}"


def caller_process(caller: str) -> str:
    """Name of the process that opened a connection; the inverse of `caller_of`."""
    return caller.partition("#")[0]


class RequestCallers:
    """Runs the requests of all callers in one engine loop. Request ids are unique across callers."""

    def __init__(self, loop: EngineLoop) -> None:
        self._loop = loop
        self._servers: dict[str, RequestServer] = {}  # by caller
        self._requests: dict[asyncio.Task[None], str] = {}  # the caller of each request

    def add(self, caller: str, port: Port[list[Packed]], replaced: Sequence[str] = ()) -> None:
        """Send the answers of a caller's requests to its port.

        Args:
            caller: Name that the generator has never seen before.
            replaced: Callers that this one replaces. Their requests end without an answer.
        """
        self._end(set(replaced))
        self._servers[caller] = RequestServer(port)

    def start(self, caller: str, requests: Sequence[EngineRequest]) -> None:
        """Start requests without waiting for them. Requests of a forgotten caller are dropped, because nobody waits for
        their answers."""
        if (server := self._servers.get(caller)) is None:
            return
        for request in requests:
            task = asyncio.ensure_future(self._run(server, request))
            self._requests[task] = caller
            task.add_done_callback(self._requests.pop)

    def forget(self, process_id: str) -> None:
        """End the requests of a process that has ended, without an answer."""
        self._end({caller for caller in self._servers if caller_process(caller) == process_id})

    def _end(self, callers: set[str]) -> None:
        for caller in callers & self._servers.keys():
            self._servers.pop(caller).close()
        for task, caller in tuple(self._requests.items()):
            if caller in callers:
                task.cancel()  # the engine loop forgets the request

    async def _run(self, server: RequestServer, request: EngineRequest) -> None:
        try:
            with stray_cancellation_fails(f"request {request.request_id!r}"):
                server.send(await self._loop.stream(request, server.send))
        except Exception as error:
            server.fail(request.request_id, error)
