"""SAVE and WRITE: checkpoints while the run goes on, at its end, and on every other way out."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from titan_rl.core.calls.user_code import reason
from titan_rl.run.checkpoints.saver import CheckpointSaver
from titan_rl.run.observability.progress import Progress
from titan_rl.run.stages.trainer_calls import TrainerCalls

logger = logging.getLogger(__name__)

R = TypeVar("R")


class RunSaving:
    """Has the versions of one run saved, one after the other.

    Args:
        calls: of the trainer, which a copy is one of.
        version: that the trainer said last.
    """

    def __init__(
        self, saver: CheckpointSaver, calls: TrainerCalls, progress: Progress, version: Callable[[], int]
    ) -> None:
        self._saver = saver
        self._calls = calls
        self._progress = progress
        self._version = version
        self._writing: asyncio.Task[None] | None = None  # the newest checkpoint, until it is whole
        self._asked = asyncio.Event()
        self._tried = -1  # the version that was last to be written
        self._wrote = asyncio.Event()

    def is_due(self, step: int) -> bool:
        return self._saver.is_due(step) or self._asked.is_set()

    async def soon(self) -> None:
        """Have what is trained saved where the loop comes by next. Returns once it is, or once the disk had no room for
        it, which the saver tells; at once where it was saved before."""
        version = self._version()
        self._tried = -1  # there may be room by now
        while max(self._saver.saved, self._tried) < version:
            self._wrote.clear()
            self._asked.set()
            await self._wrote.wait()

    async def beside(self, wait: Coroutine[Any, Any, R], save: Callable[[], Awaitable[None]]) -> R:
        """What is waited for while the trainer is at rest. Meanwhile `save` is called, if `soon` asks for that."""
        waiting = asyncio.ensure_future(wait)
        asked = asyncio.ensure_future(self._asked.wait())
        try:
            while not waiting.done():
                await asyncio.wait([waiting, asked], return_when=asyncio.FIRST_COMPLETED)
                if self._asked.is_set() and not waiting.done():
                    await save()
                    asked = asyncio.ensure_future(self._asked.wait())
            return await waiting
        finally:
            waiting.cancel()
            asked.cancel()

    async def begin(self, step: int, background: asyncio.TaskGroup) -> None:
        """SAVE, once the checkpoint before is whole. It begins WRITE where the disk has room.

        Args:
            background: for WRITE, which fails it.

        Raises:
            CheckpointError: it cannot be copied.
        """
        await self.written()
        self._asked.clear()
        if self._saver.saved == step:
            return
        if not await self._calls.finish(self._saver.begin(step)):
            self._note_tried(step)
        else:
            self._writing = background.create_task(self._write(step), name=f"checkpoint-{step}")

    async def written(self) -> None:
        """Returns once nothing is written any more."""
        if self._writing is not None:
            await asyncio.wait([self._writing])

    async def save_last(self) -> None:
        """
        Raises:
            CheckpointError: it cannot be saved.
        """
        try:
            await self._saver.save_last(self._version())
        finally:
            self._note_tried(self._version())

    async def save_what_is_trained(self, before: Callable[[], None]) -> None:
        """On the way out of a run that failed or was stopped. What ended it is not to be hidden by this, so nothing is
        raised. It takes as long as it takes; who does not want to wait cancels once more.

        Args:
            before: called once the trainer is at rest, and its version known.
        """
        try:
            if self._calls.running:
                logger.info(
                    "stopped at version %d, with the trainer at work: waiting for it to finish", self._version()
                )
            await self._calls.wait()
            before()
            if self._version():
                await self.save_last()
        except Exception as error:
            logger.warning("step %d is not saved", self._version(), exc_info=error)
            self._progress.warning(f"step {self._version()} is not saved: {reason(error)}")

    async def _write(self, step: int) -> None:
        """WRITE."""
        with self._progress.working(f"writing the checkpoint of step {step}"):
            try:
                await self._saver.finish()
            finally:
                self._note_tried(step)

    def _note_tried(self, version: int) -> None:
        """A version is saved, or cannot be. Whoever waits for that is told."""
        self._tried = version
        self._wrote.set()
