"""Messages of a rollout worker to the controller's journal: answers, and the ends of rollouts."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from titan_rl.cluster.processes.remote_process import call
from titan_rl.core.calls.backoff import Backoff
from titan_rl.core.calls.user_code import summary
from titan_rl.core.errors import ActorDiedError
from titan_rl.generation.recording import RecordedAnswer
from titan_rl.rollout.copies import portable
from titan_rl.rollout.types import Rollout

logger = logging.getLogger(__name__)

SEND_EVERY_S = 0.1
"""Minimum time between two messages with answers, in seconds. Answers recorded in between are lost if the process
dies."""

ROOM_S = 20.0
"""Longest time that the controller waits for its disk before it answers a message, in seconds."""

MOST_UNSENT = 1 << 20
"""Maximum number of tokens that wait for the controller's disk. While there are more, no request is made."""

RETRY_S = 0.25
LONGEST_RETRY_S = 4.0
"""First and longest pause before a message is sent again, in seconds."""

GIVE_UP_S = 30.0
"""Time after which repeated failures to send a message are final, in seconds."""

ANSWER_S = ROOM_S + 10.0
"""Longest wait for the answer to a message, in seconds. A controller that waits for its disk says so after `ROOM_S`,
and the message is then sent again until the disk has caught up."""


class ProgressSender:
    """Sends answers and the ends of rollouts to the controller's journal, one message at a time. They are collected
    because a message costs more than its content.

    A message that fails is sent again under the same number, so the controller recognizes a message that it has already
    received. After `GIVE_UP_S` of failures the sender has failed permanently, and so has the worker: its process is
    replaced, and its groups run again elsewhere.

    Args:
        service: The controller's `GroupService`.
        worker: Unique name of this process for the service.
    """

    def __init__(self, service: Any, worker: str) -> None:
        self._service = service
        self._worker = worker
        self._number = 0  # of the last message
        self._answers: list[tuple[str, RecordedAnswer]] = []
        self._finished: list[tuple[str, Rollout]] = []
        self._num_tokens = 0
        self._sent = asyncio.Event()  # set unless too many tokens wait
        self._sent.set()
        self._sending: asyncio.Task[None] | None = None
        self._turn = asyncio.Lock()  # messages are sent one after another
        self._failure: ActorDiedError | None = None

    def add_answer(self, key: str, answer: RecordedAnswer) -> None:
        """Send an answer of a group soon.

        Args:
            key: Key of the group.
        """
        self._answers.append((key, answer))
        self._num_tokens += len(answer.completion.token_ids)
        if self._num_tokens > MOST_UNSENT and self._failure is None:
            self._sent.clear()
        self._send_soon()

    def add_finished(self, key: str, rollout: Rollout) -> None:
        """Send the end of a group's rollout soon, without its tokens."""
        self._finished.append((key, replace(portable(rollout), turns=[], messages=[])))
        self._send_soon()

    def drop(self, key: str) -> None:
        """Drop the unsent answers of a group that has finished, because the finished group contains them."""
        dropped = [entry for entry in self._answers if entry[0] == key]
        self._answers = [entry for entry in self._answers if entry[0] != key]
        self._finished = [entry for entry in self._finished if entry[0] != key]
        self._make_room(dropped)

    def check(self) -> None:
        """Check that the sender works.

        Raises:
            ActorDiedError: The sender has failed permanently, so this process must be replaced.
        """
        if self._failure is not None:
            raise self._failure

    async def room(self) -> None:
        """Wait until the controller keeps up.

        Raises:
            ActorDiedError: See `check`.
        """
        await self._sent.wait()
        self.check()

    async def flush(self) -> None:
        """Wait until the controller has all answers so far. Takes at most two messages, even if more answers come.

        Raises:
            ActorDiedError: See `check`.
        """
        await asyncio.shield(self._send_all())
        self.check()

    def _send_soon(self) -> None:
        if self._sending is None and self._failure is None:
            self._sending = asyncio.ensure_future(self._keep_sending())

    async def _keep_sending(self) -> None:
        try:
            while (self._answers or self._finished) and self._failure is None:
                await self._send_all()
                if self._answers or self._finished:
                    await asyncio.sleep(SEND_EVERY_S)
        finally:
            self._sending = None

    async def _send_all(self) -> None:
        """Send everything that is unsent, after a message that is in flight."""
        async with self._turn:
            answers, self._answers = self._answers, []
            finished, self._finished = self._finished, []
            if not (answers or finished) or self._failure is not None:
                return
            self._number += 1
            await self._send(self._number, answers, finished)
            self._make_room(answers)

    async def _send(
        self, number: int, answers: list[tuple[str, RecordedAnswer]], finished: list[tuple[str, Rollout]]
    ) -> None:
        backoff = Backoff(RETRY_S, LONGEST_RETRY_S, limit_s=GIVE_UP_S)
        message = (self._worker, number, answers, finished)
        while True:
            try:
                if await call(self._service.note, *message, who="controller", timeout_s=ANSWER_S):
                    return
                backoff = Backoff(RETRY_S, LONGEST_RETRY_S, limit_s=GIVE_UP_S)  # it has arrived
                continue
            except Exception as error:
                if backoff.is_over:
                    logger.exception("message %d cannot be sent to the journal", number)
                    self._fail(error)
                    return
                logger.warning("message %d to the journal is sent again: %r", number, error)
            await backoff.pause()

    def _fail(self, error: Exception) -> None:
        """Fail everything that waits for the controller, because the process is useless from now on."""
        self._failure = ActorDiedError(
            f"its answers could not be sent to the controller's journal for {GIVE_UP_S:g} s: {summary(error)}"
        )
        self._failure.__cause__ = error
        self._sent.set()

    def _make_room(self, answers: Sequence[tuple[str, RecordedAnswer]]) -> None:
        """Note that these answers no longer wait."""
        self._num_tokens -= sum(len(answer.completion.token_ids) for _, answer in answers)
        if self._num_tokens <= MOST_UNSENT:
            self._sent.set()
