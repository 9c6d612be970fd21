"""Requests on their way to a generator's process, and tokens and answers on their way back. What is said during one
turn of the event loop travels as one message, because a message costs more than what is in it."""

from __future__ import annotations

import asyncio
import logging
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from monarch.actor import Channel, Port

from titan_rl.actors.processes.remote_process import RemoteProcess
from titan_rl.calls.user_code import summary
from titan_rl.errors import ActorDiedError, GenerationError, RequestError, TitanRLError
from titan_rl.generation.request import EngineRequest, OnChunk
from titan_rl.types import Completion, TokenChunk

logger = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Answer:
    """How a request ended."""

    request_id: str
    outcome: Completion | TitanRLError


Said = TokenChunk | Answer
"""By a generator."""


class Batch(Generic[T]):
    """What is added during one turn of the event loop, sent at its end."""

    def __init__(self, send: Callable[[list[T]], None]) -> None:
        self._send = send
        self._items: list[T] = []

    def add(self, item: T) -> None:
        if not self._items:
            asyncio.get_running_loop().call_soon(self._flush)
        self._items.append(item)

    def _flush(self) -> None:
        items, self._items = self._items, []
        self._send(items)


class RequestOutlet:
    """The generator's end."""

    def __init__(self, port: Port[list[Said]]) -> None:
        self._port = port
        self._said = Batch(self._send)

    def tell(self, chunk: TokenChunk) -> None:
        self._said.add(chunk)

    def answer(self, request_id: str, outcome: Completion | Exception) -> None:
        if isinstance(outcome, Exception) and not isinstance(outcome, TitanRLError):  # which pickles
            outcome = GenerationError(summary(outcome))
        self._said.add(Answer(request_id, outcome))

    def _send(self, said: list[Said]) -> None:
        try:
            self._port.send(said)
        except Exception as error:
            if len(said) > 1:  # it may be the fault of one
                for item in said:
                    self._send([item])
                return
            (item,) = said
            logger.exception("what is said of request %r could not be sent", item.request_id)
            # else it would wait for an answer that has been given
            problem = f"its answer could not be sent: {error!r}"
            self._port.send([Answer(item.request_id, GenerationError(problem))])


class RequestInlet:
    """The controller's end. Answers arrive while `run` runs.

    Args:
        remote: whose end fails every request.
        send: passes requests on to the generator.
    """

    def __init__(self, remote: RemoteProcess, send: Callable[[list[EngineRequest]], None]) -> None:
        self.port: Port[list[Said]]
        self._receiver: Any
        self.port, self._receiver = Channel[list[Said]].open()
        self._remote = remote
        self._pass_on = send
        self._requests = Batch(self._send)
        self._waiting: dict[str, tuple[asyncio.Future[Completion], OnChunk | None]] = {}
        self._ended: str | None = None  # why no answer comes any more

    async def ask(self, request: EngineRequest, on_chunk: OnChunk | None = None) -> Completion:
        """The answer. What comes after the caller was cancelled is dropped.

        Raises:
            RequestError: this request can never succeed, or its id is in use.
            GenerationError: the generator failed, its process ended, or `run` has.
        """
        if request.request_id in self._waiting:
            raise RequestError(f"request id {request.request_id!r} is in use; ids must be unique")
        if self._ended is not None:
            raise GenerationError(self._ended)
        future: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        self._waiting[request.request_id] = future, on_chunk
        self._requests.add(request)
        try:
            return await future
        finally:
            del self._waiting[request.request_id]

    async def run(self) -> None:
        """Hand on what the generator says, until it ends or this is cancelled."""
        reason = f"nobody listens to {self._remote.name} any more"
        try:
            while True:
                for said in await self._remote.until_end(self._receiver.recv):
                    self._take(said)
        except ActorDiedError as error:
            reason = str(error)
        except Exception as error:
            logger.exception("what %s says cannot be read", self._remote.name)
            self._remote.end(f"what it says cannot be read: {error!r}")
            reason = f"{self._remote.name} died: {self._remote.reason}"
        finally:
            self._ended = reason
            for request_id in self._waiting:
                self._settle(request_id, GenerationError(reason))

    def _take(self, said: Said) -> None:
        if isinstance(said, Answer):
            self._settle(said.request_id, said.outcome)
        elif (waiting := self._waiting.get(said.request_id)) is not None and (on_chunk := waiting[1]) is not None:
            on_chunk(said)

    def _send(self, requests: list[EngineRequest]) -> None:
        wanted = [request for request in requests if self._is_wanted(request)]
        if not wanted:
            return
        try:
            self._pass_on(wanted)
        except Exception as error:
            if len(wanted) > 1:  # it may be the fault of one
                for request in wanted:
                    self._send([request])
                return
            unsendable = isinstance(error, (TypeError, AttributeError, pickle.PicklingError))
            problem = f"request {wanted[0].request_id!r} could not be sent to {self._remote.name}: {error!r}"
            self._settle(wanted[0].request_id, RequestError(problem) if unsendable else GenerationError(problem))

    def _is_wanted(self, request: EngineRequest) -> bool:
        waiting = self._waiting.get(request.request_id)
        return waiting is not None and not waiting[0].done()

    def _settle(self, request_id: str, outcome: Completion | TitanRLError) -> None:
        future, _ = self._waiting.get(request_id, (None, None))
        if future is None or future.done():
            return
        if isinstance(outcome, Completion):
            future.set_result(outcome)
        else:
            future.set_exception(outcome)
