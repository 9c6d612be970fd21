"""The folder that holds one writer's segments, and how the folders of dead writers are found.

A writer holds an exclusive `flock` on its folder. The kernel drops the lock with the process, however it ends, so
whoever gets the lock knows that the owner is gone. Unlike a process id it is never reused, and it means the same in
every container that shares /dev/shm.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from pathlib import Path

PREFIX = "titan_rl-weights-"


def segment_root() -> Path:
    """Where segments live: /dev/shm, or the temporary folder where a system has none."""
    shm = Path("/dev/shm")
    return shm if os.access(shm, os.W_OK) else Path(tempfile.gettempdir())


class OwnedFolder:
    """A new folder `titan_rl-weights-<run_id>-<pid>-<random>` that lives as long as its owner.

    Args:
        run_id: part of the name, for people who look.
        root: where to make it; by default `segment_root()`.

    Raises:
        OSError: it cannot be made.
    """

    def __init__(self, run_id: str, root: Path | None = None) -> None:
        while True:
            self.path = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{run_id}-{os.getpid()}-", dir=root or segment_root()))
            self._lock = os.open(self.path, os.O_RDONLY)
            fcntl.flock(self._lock, fcntl.LOCK_EX)
            if self.path.exists():
                return
            os.close(self._lock)  # another process cleaned up between the two calls; take another folder

    def remove(self) -> None:
        """Delete the folder with all it holds, then let the lock go."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def clean_dead_segments(root: Path | None = None) -> list[Path]:
    """Remove the folders whose owners are dead, and return them.

    Readers that still have a segment of theirs mapped keep reading. Folders of living owners, and of other users,
    are left alone.
    """
    removed: list[Path] = []
    for path in (root or segment_root()).glob(f"{PREFIX}*-*"):
        try:
            lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        except OSError:  # gone meanwhile, another user's, or no folder
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path, ignore_errors=True)
            removed.append(path)
        except BlockingIOError:
            pass  # its owner lives
        finally:
            os.close(lock)
    return removed
