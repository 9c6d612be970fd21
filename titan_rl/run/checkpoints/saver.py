"""Checkpoints of a run: copied while training stands, written to disk while it continues."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from titan_rl.config.sections import CheckpointConfig
from titan_rl.core.calls.threads import in_thread
from titan_rl.core.errors import NoSpaceError
from titan_rl.core.tracing.spans import span
from titan_rl.run.journal.state import FILE
from titan_rl.run.machine.requirements import free_bytes, gigabytes, no_space, require_room, size_of
from titan_rl.run.observability.progress import Progress
from titan_rl.run.stages.training import TrainerCalls
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


class SavedRun(Protocol):
    """Run whose state is saved."""

    @property
    def version(self) -> int:
        """Version of the weights, as reported by the trainer."""
        ...

    async def copy_state(self) -> Mapping[str, Any]:
        """Have the trainer copy its version for a checkpoint, which training may change afterwards, and return the
        `run_state` that the trainer was given.

        Raises:
            CheckpointError: it cannot be copied.
        """
        ...

    def forget_before(self, version: int) -> None:
        """Delete records that only checkpoints before this version need."""
        ...


class CheckpointSaver:
    """Writer of a run's checkpoints, one at a time: while the run continues, and when it ends. A checkpoint that does
    not fit on the disk is skipped with a message, and retried when the next one is due; the last one has to fit.

    Args:
        run: Its version is saved already.
        calls: Calls of the trainer, which a copy is one of.
        root: Folder of the checkpoints.
        estimate: Size of a checkpoint in bytes before there is one.
    """

    def __init__(
        self,
        run: SavedRun,
        calls: TrainerCalls,
        config: CheckpointConfig,
        root: Path,
        *,
        estimate: int,
        progress: Progress,
    ) -> None:
        self._run = run
        self._calls = calls
        self._config = config
        self._root = root
        self._estimate = estimate
        self._progress = progress
        self._begun = self._whole = run.version
        self._run_state: Mapping[str, Any] = {}  # of the version begun last
        self._wait_s = config.interval_s  # from the end of one checkpoint to the next by time
        self._began_at: float | None = None
        self._ended_at: float | None = None
        self._writing: asyncio.Task[None] | None = None  # the newest checkpoint, until it is whole
        self._asked = asyncio.Event()
        self._tried = -1  # version of the last attempt
        self._wrote = asyncio.Event()

    def is_due(self, step: int) -> bool:
        """Return whether a checkpoint is due, by steps, by time, or because `soon` asks for one. Time counts from the
        first call."""
        now = asyncio.get_running_loop().time()
        if self._ended_at is None:
            self._ended_at = now
        by_steps = self._config.interval > 0 and step % self._config.interval == 0
        by_time = self._config.interval_s > 0 and now - self._ended_at >= self._wait_s
        return by_steps or (by_time and self._begun == self._whole) or self._asked.is_set()

    async def soon(self) -> None:
        """Ask for a checkpoint at the loop's next opportunity, and wait until it is written, or skipped because the
        disk is full. Returns at once if the version was saved before."""
        version = self._run.version
        self._tried = -1  # there may be room by now
        while max(self._whole, self._tried) < version:
            self._wrote.clear()
            self._asked.set()
            await self._wrote.wait()

    async def asked_before(self, waiting: asyncio.Future[Any]) -> bool:
        """Wait until `soon` asks for a checkpoint, or `waiting` is done, and return whether a checkpoint was asked for
        first."""
        asked = asyncio.ensure_future(self._asked.wait())
        try:
            await asyncio.wait([waiting, asked], return_when=asyncio.FIRST_COMPLETED)
        finally:
            asked.cancel()
        return not waiting.done()

    async def begin(self, background: asyncio.TaskGroup) -> None:
        """Copy the run's version once the previous checkpoint is whole, and write it in the background if the disk has
        room.

        Raises:
            CheckpointError: it cannot be copied.
        """
        await self.written()
        self._asked.clear()
        version = self._run.version
        if self._whole == version:
            return
        try:
            await self._calls.finish(self._copy())
        except NoSpaceError as error:
            self._skip(version, error)
        else:
            self._writing = background.create_task(self._write(version), name=f"checkpoint-{version}")

    async def written(self) -> None:
        """Wait until no checkpoint is being written."""
        if self._writing is not None:
            await asyncio.wait([self._writing])

    async def save_last(self) -> None:
        """Save the run's version if it is not saved yet, however long that takes, and report it.

        Raises:
            CheckpointError: it cannot be saved.
        """
        version = self._run.version
        try:
            if self._whole != version:
                await self._write_last(version)
        finally:
            self._note_tried(version)

    async def _write_last(self, version: int) -> None:
        path = step_directory(self._root, version)
        size = self._size()
        self._progress.message(f"saving step {version}, {gigabytes(size)}, to {path}")
        writing = asyncio.ensure_future(self._copy_and_finish())
        try:
            while not (await asyncio.wait([writing], timeout=TELL_EVERY_S))[0]:
                written = sum(map(size_of, being_written(self._root, path.name)))
                self._progress.message(f"saving step {version}: {gigabytes(written)} of {gigabytes(size)} are written")
        finally:
            writing.cancel()
        await writing
        self._progress.message(f"step {version} is saved")

    async def _copy_and_finish(self) -> None:
        if self._begun != self._run.version:  # else the copy was made before the run was stopped
            await self._copy()
        await self._finish()

    async def _write(self, version: int) -> None:
        """Write the version that was copied. A full disk is reported; another failure fails the background."""
        with (
            self._progress.working(f"writing the checkpoint of step {version}"),
            span("checkpoint", "checkpoint", lane="checkpoint", step=version),
        ):
            try:
                await self._finish()
            except NoSpaceError as error:
                self._begun = self._whole
                self._skip(version, error)
            finally:
                self._note_tried(version)

    async def _copy(self) -> None:
        require_room(self._root, self._size())
        self._began_at = asyncio.get_running_loop().time()
        version = self._run.version
        self._run_state = await self._run.copy_state()
        self._begun = version

    async def _finish(self) -> None:
        try:
            await self._calls.trainer.finish_save()
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
        self._run.forget_before(min(map(step_of, list_checkpoints(self._root)), default=0))

    def _skip(self, version: int, error: NoSpaceError) -> None:
        self._ended_at = asyncio.get_running_loop().time()
        kept = f"the last is that of step {self._whole}" if self._whole else "there is none yet"
        self._progress.warning(f"no checkpoint of step {version}: {error}; {kept}, and training goes on")
        self._note_tried(version)

    def _note_tried(self, version: int) -> None:
        """Wake up the tasks that wait for a version, which is saved or cannot be saved."""
        self._tried = version
        self._wrote.set()

    def _size(self) -> int:
        """Size of a checkpoint in bytes, taken from the newest one."""
        checkpoints = list_checkpoints(self._root)
        return size_of(checkpoints[-1]) if checkpoints else self._estimate
