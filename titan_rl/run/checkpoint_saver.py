"""Saving of checkpoints, by steps, by time or on request. A checkpoint is copied while training pauses, and written to
disk while it continues."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from titan_rl.config.sections import CheckpointConfig
from titan_rl.core.calls.threads import in_thread
from titan_rl.core.errors import NoSpaceError
from titan_rl.core.tracing.spans import span
from titan_rl.run.checks.requirements import free_bytes, gigabytes, no_space, require_room, size_of
from titan_rl.run.held_out import best_checkpoint
from titan_rl.run.journal.state import FILE
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
    """Return whether the trainer itself has written the state and the checksums of a checkpoint."""
    folder = _folder(root, version)
    return (folder / FILE).is_file() and (folder / CHECKSUMS).is_file()


def complete(root: Path, version: int, run_state: Mapping[str, Any]) -> None:
    """Write the state and the checksums of a checkpoint if they are missing. If a trainer has nothing to save, its
    folder is missing too, and is created.

    Args:
        root: Folder of the checkpoints.
        run_state: Run state that the trainer was given.

    Raises:
        NoSpaceError: The disk is full.
        CheckpointError: The checkpoint could not be written for another reason.
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
    """Folder of a version's checkpoint, whose number may have fewer digits than usual: `step-4` is that of version
    4."""
    found = (path for path in list_checkpoints(root) if step_of(path) == version)
    return next(found, step_directory(root, version))


SHARE = 0.1
"""Largest share of the run's time that writing checkpoints by `checkpoint.interval_s` may take."""

REPORT_EVERY_S = 30.0


@dataclass(frozen=True, slots=True)
class _Copy:
    """Copy of a run that is being written."""

    version: int
    run_state: Mapping[str, Any]
    began_at: float


class SavedRun(Protocol):
    """Run whose checkpoints are saved."""

    @property
    def version(self) -> int:
        """Version of the weights."""
        ...

    @property
    def held_out(self) -> Mapping[int, float]:
        """Held-out rewards by version; higher is better."""
        ...

    async def copy_state(self) -> Mapping[str, Any]:
        """Have the trainer copy its weights and state, so that training may change them afterwards. Return the
        `run_state` that the trainer was given.

        Raises:
            CheckpointError: The state cannot be copied.
        """
        ...

    def forget_before(self, version: int) -> None:
        """Delete records that only checkpoints before a version need."""
        ...


class CheckpointSaver:
    """Writer of a run's checkpoints, one at a time, while the run continues and when it ends. A checkpoint that does
    not fit on the disk is skipped with a message, and retried when the next one is due; the last one has to fit.

    Args:
        run: Run to save. Its current version is already saved.
        calls: Calls of the trainer, to which the copies are added.
        root: Folder of the checkpoints.
        estimate: Size to assume while there is no checkpoint, in bytes.
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
        self._saved = run.version
        self._copy: _Copy | None = None  # until it is whole on the disk
        self._wait_s = config.interval_s  # seconds from the end of one checkpoint to the next by time
        self._ended_at: float | None = None
        self._writing: asyncio.Task[None] | None = None  # the newest checkpoint, until it is whole
        self._requested = asyncio.Event()
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
        return by_steps or (by_time and self._copy is None) or self._requested.is_set()

    async def soon(self) -> None:
        """Ask for a checkpoint at the loop's next opportunity, and wait until it is written, or is skipped because the
        disk is full. Return at once if the version is already saved."""
        version = self._run.version
        self._tried = -1  # there may be room by now
        while max(self._saved, self._tried) < version:
            self._wrote.clear()
            self._requested.set()
            await self._wrote.wait()

    async def requested_before(self, waiting: asyncio.Future[Any]) -> bool:
        """Wait until `soon` asks for a checkpoint or `waiting` is done. Return whether the checkpoint came first."""
        requested = asyncio.ensure_future(self._requested.wait())
        try:
            await asyncio.wait([waiting, requested], return_when=asyncio.FIRST_COMPLETED)
        finally:
            requested.cancel()
        return not waiting.done()

    async def begin(self, background: asyncio.TaskGroup) -> None:
        """Copy the run's version once the previous checkpoint is whole, and write it in the background if the disk has
        room.

        Raises:
            CheckpointError: The state cannot be copied.
        """
        await self.written()
        self._requested.clear()
        version = self._run.version
        if self._saved == version:
            return
        try:
            copy = await self._calls.finish(self._copy_run())
        except NoSpaceError as error:
            self._skip(version, error)
        else:
            self._writing = background.create_task(self._write(copy), name=f"checkpoint-{version}")

    async def written(self) -> None:
        """Wait until no checkpoint is being written."""
        if self._writing is not None:
            await asyncio.wait([self._writing])

    async def save_last(self) -> None:
        """Save the run's version if it is not saved yet, however long that takes, and report it.

        Raises:
            CheckpointError: The version cannot be saved.
        """
        version = self._run.version
        try:
            if self._saved != version:
                await self._write_last(version)
        finally:
            self._note_tried(version)

    async def _write_last(self, version: int) -> None:
        path = step_directory(self._root, version)
        size = self._size()
        self._progress.message(f"saving step {version}, {gigabytes(size)}, to {path}")
        writing = asyncio.ensure_future(self._copy_and_finish())
        try:
            while not (await asyncio.wait([writing], timeout=REPORT_EVERY_S))[0]:
                written = sum(map(size_of, being_written(self._root, path.name)))
                self._progress.message(f"saving step {version}: {gigabytes(written)} of {gigabytes(size)} are written")
        finally:
            writing.cancel()
        await writing
        self._progress.message(f"step {version} is saved")

    async def _copy_and_finish(self) -> None:
        copy = self._copy
        if copy is None or copy.version != self._run.version:  # otherwise it was copied before the run was stopped
            copy = await self._copy_run()
        await self._finish(copy)

    async def _write(self, copy: _Copy) -> None:
        """Write a copy. A full disk is reported; any other failure fails the background task group."""
        with (
            self._progress.working(f"writing the checkpoint of step {copy.version}"),
            span("checkpoint", "checkpoint", lane="checkpoint", step=copy.version),
        ):
            try:
                await self._finish(copy)
            except NoSpaceError as error:
                self._copy = None
                self._skip(copy.version, error)
            finally:
                self._note_tried(copy.version)

    async def _copy_run(self) -> _Copy:
        require_room(self._root, self._size())
        began_at, version = asyncio.get_running_loop().time(), self._run.version
        self._copy = _Copy(version, await self._run.copy_state(), began_at)
        return self._copy

    async def _finish(self, copy: _Copy) -> None:
        try:
            await self._calls.trainer.finish_save()
            if not is_complete(self._root, copy.version):
                await in_thread(complete, self._root, copy.version, copy.run_state)
        except NoSpaceError as error:  # another process has used the space meanwhile
            raise NoSpaceError(no_space(self._root, self._size(), free_bytes(self._root))) from error
        finally:
            self._ended_at = asyncio.get_running_loop().time()
        self._wait_s = max(self._config.interval_s, (self._ended_at - copy.began_at) * (1 / SHARE - 1))
        self._saved, self._copy = copy.version, None
        newest, best = self._config.num_newest, None
        if self._config.keep == "best":
            best = best_checkpoint(self._root, self._run.held_out)
        keep_last(self._root, newest, best)
        # The journal after an old checkpoint may be large, and only a run without newer ones would need it.
        self._run.forget_before(min(map(step_of, list_checkpoints(self._root)[-newest:]), default=0))

    def _skip(self, version: int, error: NoSpaceError) -> None:
        self._ended_at = asyncio.get_running_loop().time()
        kept = f"the newest is of step {self._saved}" if self._saved else "there is no checkpoint yet"
        self._progress.warning(f"no checkpoint of step {version}: {error}; {kept}, and training continues")
        self._note_tried(version)

    def _note_tried(self, version: int) -> None:
        """Wake up the tasks that wait for a version, which is now saved or cannot be saved."""
        self._tried = version
        self._wrote.set()

    def _size(self) -> int:
        """Size of a checkpoint in bytes, taken from the newest one."""
        checkpoints = list_checkpoints(self._root)
        return size_of(checkpoints[-1]) if checkpoints else self._estimate
