"""Checkpoints of a run: copied while training stands, written to disk while it continues.

`CheckpointSaver` writes one checkpoint after the other. `RunSaving` decides when: while the run continues, at its end,
and on every other way out.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any, TypeVar

from titan_rl.config.sections import CheckpointConfig
from titan_rl.core.calls.threads import in_thread
from titan_rl.core.calls.user_code import reason
from titan_rl.core.console import Console
from titan_rl.core.errors import NoSpaceError
from titan_rl.core.tracing.spans import span
from titan_rl.run.journal.state import FILE
from titan_rl.run.machine.requirements import free_bytes, gigabytes, no_space, require_room, size_of
from titan_rl.run.observability.progress import Progress
from titan_rl.run.stages.training import TrainerCalls
from titan_rl.training.protocol import Trainer
from titan_rl.training.state.checkpoint import (
    CHECKSUMS,
    being_written,
    keep_last,
    list_checkpoints,
    step_directory,
    step_of,
    unwritten,
    write_checksums_of,
)


def is_complete(root: Path, version: int) -> bool:
    """Return whether the trainer has written state and checksums itself."""
    folder = _folder(root, version)
    return (folder / FILE).is_file() and (folder / CHECKSUMS).is_file()


def complete(root: Path, version: int, run_state: Mapping[str, Any]) -> None:
    """Write the missing state and checksums of a checkpoint. A trainer that has nothing to save has written no folder
    either.

    Args:
        root: the folder of checkpoints.
        run_state: as the trainer was given it.

    Raises:
        NoSpaceError: the disk is full.
        CheckpointError: it could not be written for another reason.
    """
    folder = _folder(root, version)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not (folder / FILE).is_file():
            (folder / FILE).write_text(json.dumps(run_state))
        if not (folder / CHECKSUMS).is_file():
            write_checksums_of(folder)
    except OSError as error:
        raise unwritten(folder, error) from error


def _folder(root: Path, version: int) -> Path:
    """`step-4` is the checkpoint of version 4, too."""
    found = (path for path in list_checkpoints(root) if step_of(path) == version)
    return next(found, step_directory(root, version))


SHARE = 0.1
"""Largest share of the time in which checkpoints by `checkpoint.interval_s` are being written."""

TELL_EVERY_S = 30.0


class CheckpointSaver:
    """Writer of a run's checkpoints, one at a time. A checkpoint that does not fit on the disk is skipped with a
    message, and retried when the next one is due; the last one has to fit.

    Args:
        root: the folder of checkpoints.
        trainer: writes what was copied.
        estimate: bytes of a checkpoint, where there is none to look at.
        copy: fix the state of a version, which training may change after. Gives the `run_state` that the trainer was
            given.
        forget_before: told of the oldest version that is kept.
        console: shows the user a message.
        version: that is saved already.
    """

    def __init__(
        self,
        config: CheckpointConfig,
        root: Path,
        trainer: Trainer,
        *,
        estimate: int,
        copy: Callable[[int], Awaitable[Mapping[str, Any]]],
        forget_before: Callable[[int], None],
        console: Console,
        version: int,
    ) -> None:
        self._config = config
        self._root = root
        self._estimate = estimate
        self._copy = copy
        self._trainer = trainer
        self._forget_before = forget_before
        self._console = console
        self._begun = self._whole = version
        self._run_state: Mapping[str, Any] = {}  # of the version begun last
        self._wait_s = config.interval_s  # from the end of one checkpoint to the next by time
        self._began_at: float | None = None
        self._ended_at: float | None = None

    @property
    def saved(self) -> int:
        """Version of the newest whole checkpoint, or of the checkpoint that the run began with."""
        return self._whole

    def is_due(self, step: int) -> bool:
        """Return whether a checkpoint is due, by steps or by time. Time counts from the first call."""
        now = asyncio.get_running_loop().time()
        if self._ended_at is None:
            self._ended_at = now
        by_steps = self._config.interval > 0 and step % self._config.interval == 0
        by_time = self._config.interval_s > 0 and now - self._ended_at >= self._wait_s
        return by_steps or (by_time and self._begun == self._whole)

    async def begin(self, version: int) -> bool:
        """Copy a version for `finish` to write. Returns False, after a message, if the disk has no room for it.

        Raises:
            CheckpointError: it cannot be copied.
        """
        try:
            await self._begin(version)
        except NoSpaceError as error:
            self._leave_out(version, error)
            return False
        return True

    async def finish(self) -> None:
        """Wait until the version begun last is whole, or is skipped because the disk is full, which is reported.

        Raises:
            CheckpointError: it cannot be written for another reason.
        """
        try:
            with span("checkpoint", "checkpoint", lane="checkpoint", step=self._begun):
                await self._finish()
        except NoSpaceError as error:
            self._leave_out(self._begun, error)
            self._begun = self._whole

    async def save_last(self, version: int) -> None:
        """Save a version that is not saved yet, however long that takes, and report it.

        Raises:
            CheckpointError: it cannot be saved.
        """
        if self._whole == version:
            return
        path = step_directory(self._root, version)
        size = self._size()
        self._console.message(f"saving step {version}, {gigabytes(size)}, to {path}")
        writing = asyncio.ensure_future(self._begin_and_finish(version))
        try:
            while not (await asyncio.wait([writing], timeout=TELL_EVERY_S))[0]:
                written = sum(map(size_of, being_written(self._root, path.name)))
                self._console.message(f"saving step {version}: {gigabytes(written)} of {gigabytes(size)} are written")
        finally:
            writing.cancel()
        await writing
        self._console.message(f"step {version} is saved")

    async def _begin(self, version: int) -> None:
        require_room(self._root, self._size())
        self._began_at = asyncio.get_running_loop().time()
        self._run_state = await self._copy(version)
        self._begun = version

    async def _begin_and_finish(self, version: int) -> None:
        if self._begun != version:  # else the copy was made before the run was stopped
            await self._begin(version)
        await self._finish()

    async def _finish(self) -> None:
        try:
            await self._trainer.finish_save()
            if not is_complete(self._root, self._begun):
                await in_thread(complete, self._root, self._begun, self._run_state)
        except NoSpaceError as error:  # another process took the room meanwhile
            raise NoSpaceError(no_space(self._root, self._size(), free_bytes(self._root))) from error
        finally:
            self._ended_at = asyncio.get_running_loop().time()
        assert self._began_at is not None
        self._wait_s = max(self._config.interval_s, (self._ended_at - self._began_at) * (1 / SHARE - 1))
        self._whole = self._begun
        keep_last(self._root, self._config.keep)
        self._forget_before(min(map(step_of, list_checkpoints(self._root)), default=0))

    def _leave_out(self, version: int, error: NoSpaceError) -> None:
        self._ended_at = asyncio.get_running_loop().time()
        kept = f"the last is that of step {self._whole}" if self._whole else "there is none yet"
        self._console.warning(f"no checkpoint of step {version}: {error}; {kept}, and training goes on")

    def _size(self) -> int:
        """Size of a checkpoint in bytes, taken from the newest one."""
        checkpoints = list_checkpoints(self._root)
        return size_of(checkpoints[-1]) if checkpoints else self._estimate


logger = logging.getLogger(__name__)

R = TypeVar("R")


class RunSaving:
    """Schedule of a run's checkpoints: one after the other, while it runs and when it ends.

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
        """Ask for a checkpoint at the loop's next opportunity, and wait until it is written, or skipped because the
        disk is full. Returns at once if the version was saved before."""
        version = self._version()
        self._tried = -1  # there may be room by now
        while max(self._saver.saved, self._tried) < version:
            self._wrote.clear()
            self._asked.set()
            await self._wrote.wait()

    async def save_while_waiting(self, wait: Coroutine[Any, Any, R], save: Callable[[], Awaitable[None]]) -> R:
        """Await `wait` while the trainer is idle, and call `save` meanwhile if `soon` asks for a checkpoint."""
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
        """Begin SAVE once the previous checkpoint is whole, and WRITE if the disk has room.

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
        """Wait until no checkpoint is being written."""
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
        """Save the trained version of a run that failed or was stopped. Raises nothing, so that the error that ended
        the run stays visible. The save takes as long as it needs; a second cancellation ends the wait.

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
        """Wake up the tasks that wait for a version, which is saved or cannot be saved."""
        self._tried = version
        self._wrote.set()
