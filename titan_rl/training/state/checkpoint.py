"""Checkpoint folders that are either whole or absent, and the policy of which to keep. Standard library only.

A checkpoint is written to a hidden folder beside its place, flushed to disk, and then renamed. Where several may write
the same one, for a trainer that is cut off does not know that another has taken its place, each does so under a name
of its own, and only who started them puts it in place.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from titan_rl.core.errors import CheckpointError, NoSpaceError, means_no_space

_STEP = re.compile(r"step-(\d+)")


@contextmanager
def atomic_directory(path: Path) -> Iterator[Path]:
    """A folder to write into that appears at `path` when the block ends, and vanishes if the block raises.

    What was at `path` stays valid until then. Remains of an earlier writer that was killed are cleared.

    Raises:
        NoSpaceError: the disk is full.
        CheckpointError: anything else in the block or the move failed; the cause says what. Interrupts pass unchanged.
    """
    temporary = temporary_of(path)
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        yield temporary
        _flush(temporary)
        put_in_place(temporary, path)
    except (NoSpaceError, CheckpointError):
        raise
    except Exception as error:
        raise unwritten(path, error) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def put_in_place(written: Path, path: Path) -> None:
    """Rename a whole folder to `path` beside it. What was there stays valid until then.

    Raises:
        NoSpaceError: the disk is full.
        CheckpointError: it could not be renamed; what was at `path` is there.
    """
    replaced = path.with_name(f".{path.name}.old.tmp")
    try:
        if path.exists():
            shutil.rmtree(replaced, ignore_errors=True)
            path.rename(replaced)
        try:
            written.rename(path)
        except OSError:
            if replaced.exists():
                replaced.rename(path)
            raise
        _flush_entry(path.parent)
    except OSError as error:
        raise unwritten(path, error) from error
    finally:
        if path.exists():
            shutil.rmtree(replaced, ignore_errors=True)


def unwritten(path: Path, error: Exception) -> CheckpointError:
    """What to say of a folder that could not be written because of `error`."""
    if means_no_space(error):
        return NoSpaceError(f"no space left in {path.parent}, where {path.name} was being written")
    return CheckpointError(f"{path} could not be written: {error}")


def temporary_of(path: Path) -> Path:
    """Where a block of `atomic_directory(path)` writes."""
    return path.with_name(f".{path.name}.tmp")


def written_by(writer: str, path: Path) -> Path:
    """Where one of several writers has `path`, until it is put in place."""
    return path.with_name(f".{path.name}.{writer}")


def being_written(root: Path, name: str = "step-") -> list[Path]:
    """Folders that are to be in `root` under names that begin so: somebody writes them, or was killed before."""
    return [*root.glob(f".*{name}*")]


def step_directory(root: Path, step: int) -> Path:
    """`step_directory(Path("checkpoints"), 40)` is `checkpoints/step-000040`."""
    return root / f"step-{step:06d}"


def step_of(checkpoint: Path) -> int:
    """`step_of(Path("checkpoints/step-000040"))` is 40."""
    return int(checkpoint.name.removeprefix("step-"))


def list_checkpoints(root: Path) -> list[Path]:
    """The whole checkpoints under `root`, oldest first."""
    if not root.is_dir():
        return []
    found = [(int(match[1]), path) for path in root.iterdir() if (match := _STEP.fullmatch(path.name))]
    return [path for _, path in sorted(found)]


def latest(root: Path) -> Path | None:
    """The newest whole checkpoint under `root`, or None."""
    checkpoints = list_checkpoints(root)
    return checkpoints[-1] if checkpoints else None


def keep_last(root: Path, count: int) -> None:
    """Delete all but the newest `count` checkpoints. One that cannot be deleted is left.

    Raises:
        ValueError: count is below 1.
    """
    if count < 1:
        raise ValueError(f"count is {count}; at least the newest checkpoint is kept")
    for path in list_checkpoints(root)[:-count]:
        shutil.rmtree(path, ignore_errors=True)


def _flush(folder: Path) -> None:
    for parent, _, files in os.walk(folder):
        for name in files:
            _flush_entry(Path(parent, name))
        _flush_entry(Path(parent))


def _flush_entry(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
