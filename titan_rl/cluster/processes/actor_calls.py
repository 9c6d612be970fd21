"""Calls of actors whose answers arrive at one long-lived port of the caller.

Monarch 0.7 keeps some memory for each call that it answers itself, about 1 KB in the caller's process and 0.4 KB in the
actor's, until those processes end. A rollout calls its controller several times, so a long run makes millions of calls.
Messages that need no answer, and messages to a port that stays open, leave nothing behind.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import uuid
from collections.abc import Coroutine, Generator
from contextlib import contextmanager
from itertools import count
from typing import Any

import cloudpickle
from monarch.actor import Actor, Channel, Port, concurrent_endpoint

from titan_rl.core.calls.user_code import summary
from titan_rl.core.errors import ActorDiedError, TitanRLError

logger = logging.getLogger(__name__)

Answer = tuple[int, bytes]  # the number of the call, and the pickled pair (value, error), one of which is None


class AnsweringActor(Actor):
    """Base class of actors that are called through an `ActorHandle`. Their endpoints are Monarch's concurrent ones."""

    def __init__(self) -> None:
        self._answers_to: dict[str, Port[Answer]] = {}  # by caller

    @concurrent_endpoint
    async def register_caller(self, caller: str, port: Port[Answer]) -> None:
        """Send the answers to this caller's calls to its port from now on, however many calls it makes."""
        self._answers_to[caller] = port

    @concurrent_endpoint
    async def stay(self) -> None:
        """Never return. This call fails when the actor stops, even if its process lives on."""
        await asyncio.Event().wait()

    @concurrent_endpoint
    async def answer(self, caller: str, number: int, endpoint: str, args: tuple[Any, ...]) -> None:
        """Run an endpoint, and send the caller its value or its error."""
        value, error = None, None
        try:
            method = inspect.unwrap(getattr(type(self), endpoint)._method)  # Monarch's wrapper answers by itself
            value = await self.perform(method(self, *args))
        except (Exception, asyncio.CancelledError) as raised:
            error = raised
        self._answers_to[caller].send((number, _pickled(value, error)))

    async def perform(self, endpoint: Coroutine[Any, Any, Any]) -> Any:
        """Run an endpoint, and return its value. A subclass may run it in another event loop."""
        return await endpoint


def _pickled(value: Any, error: BaseException | None) -> bytes:
    """Pickle a value or an error. An error that cannot be pickled or unpickled is replaced by its text."""
    try:
        answer = cloudpickle.dumps((value, error))
        if error is not None:
            cloudpickle.loads(answer)
        return answer
    except Exception as problem:
        logger.exception("an answer cannot be sent")
        text = f"its answer cannot be sent: {problem!r}" if error is None else summary(error)
        return cloudpickle.dumps((None, TitanRLError(text)))


class ActorHandle:
    """Handle of an `AnsweringActor`, with the endpoints of its class: `await handle.pull.call_one(4)`.

    It keeps one call to the actor open that Monarch answers. When the actor ends, that call fails, and with it all
    calls in flight and all later ones.

    Args:
        actor: Monarch's handle of the actor.
    """

    def __init__(self, actor: Any) -> None:
        self._actor = actor
        self._answers: _Answers | None = None
        self._registered: asyncio.Future[None] | None = None
        self._staying: asyncio.Future[None] | None = None
        self._pending: set[asyncio.Future[Any]] = set()

    def __getattr__(self, name: str) -> ActorEndpoint:
        if name.startswith("_"):  # pickle and copy look up such names
            raise AttributeError(name)
        return ActorEndpoint(self, name)

    def __reduce__(self) -> tuple[type[ActorHandle], tuple[Any]]:
        return ActorHandle, (self._actor,)

    def renewed(self) -> ActorHandle:
        """Return a new handle of the same actor, which registers separately: a failure of this handle does not affect
        it."""
        return ActorHandle(self._actor)

    async def _call(self, endpoint: str, args: tuple[Any, ...]) -> Any:
        answers = _Answers.of_running_loop()
        if self._registered is None or self._answers is not answers:
            self._answers = answers
            self._registered = asyncio.ensure_future(self._register(answers))
        await asyncio.shield(self._registered)
        with answers.expected() as (number, answer):
            self._pending.add(answer)
            try:
                self._actor.answer.broadcast(answers.caller, number, endpoint, args)
                return await answer
            finally:
                self._pending.discard(answer)

    async def _register(self, answers: _Answers) -> None:
        """Tell the actor where to send its answers."""
        await self._actor.register_caller.call_one(answers.caller, answers.port)
        staying = self._staying = asyncio.ensure_future(self._actor.stay.call_one())
        staying.add_done_callback(self._stopped)

    def _stopped(self, staying: asyncio.Future[None]) -> None:
        if staying.cancelled():  # the event loop ends, and cancels the waiting calls, too
            return
        error = staying.exception() or ActorDiedError("the actor has stopped")
        self._registered = asyncio.get_running_loop().create_future()
        self._registered.set_exception(error)  # for later calls
        self._registered.exception()  # marks it as retrieved, because there may be no later calls
        for answer in self._pending:
            if not answer.done():
                answer.set_exception(error)


class ActorEndpoint:
    """One endpoint of an `ActorHandle`."""

    def __init__(self, handle: ActorHandle, name: str) -> None:
        self._handle = handle
        self._name = name

    async def call_one(self, *args: Any) -> Any:
        """Return what the actor returns.

        Raises:
            Exception: The actor's exception, or Monarch's error if the actor has stopped.
        """
        return await self._handle._call(self._name, args)

    def broadcast(self, *args: Any) -> None:
        """Send a message that needs no answer."""
        getattr(self._handle._actor, self._name).broadcast(*args)


class _Answers:
    """Receiver of the answers to all calls that are made from one event loop."""

    def __init__(self) -> None:
        self.caller = uuid.uuid4().hex
        self.port: Port[Answer]
        self._receiver: Any
        self.port, self._receiver = Channel[Answer].open()
        self._numbers = count()
        self._expected: dict[int, asyncio.Future[Any]] = {}
        self._receiving = asyncio.ensure_future(self._receive())

    @classmethod
    def of_running_loop(cls) -> _Answers:
        """Return the receiver of the running event loop. It ends with the loop."""
        loop = asyncio.get_running_loop()
        for closed in [each for each in _receivers if each.is_closed()]:
            del _receivers[closed]
        if loop not in _receivers or _receivers[loop]._receiving.done():
            _receivers[loop] = cls()
        return _receivers[loop]

    @contextmanager
    def expected(self) -> Generator[tuple[int, asyncio.Future[Any]]]:
        """Context manager that yields the number of a new call and its answer. Answers after the block are dropped."""
        number, answer = next(self._numbers), asyncio.get_running_loop().create_future()
        self._expected[number] = answer
        try:
            yield number, answer
        finally:
            del self._expected[number]

    async def _receive(self) -> None:
        reason = "the event loop that called it has ended"
        try:
            while True:
                self._take(await self._receiver.recv())
        except Exception as error:
            logger.exception("answers of actors cannot be received any more")
            reason = f"answers cannot be received any more: {error!r}"
        finally:
            for answer in self._expected.values():
                if not answer.done():
                    answer.set_exception(ActorDiedError(reason))

    def _take(self, message: Answer) -> None:
        number, pickled = message
        answer = self._expected.get(number)
        if answer is None or answer.done():
            return
        try:
            value, error = cloudpickle.loads(pickled)
        except Exception as problem:  # for example, a class that cannot be imported here
            value, error = None, TitanRLError(f"an actor's answer cannot be read: {problem!r}")
        if error is None:
            answer.set_result(value)
        else:
            answer.set_exception(error)


_receivers: dict[asyncio.AbstractEventLoop, _Answers] = {}
