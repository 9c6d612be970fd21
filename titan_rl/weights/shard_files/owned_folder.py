"""Folders that live as long as their owner, and how those of dead owners are found. Standard library only.

An owner holds an exclusive `flock` on its folder. The kernel drops the lock with the process, however it ends, so
whoever gets the lock knows that the owner is gone. Unlike a process id it is never reused, and it means the same in
every container that shares the file system.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from pathlib import Path


class OwnedFolder:
    """A new folder `<prefix><random>` in `root`.

    Raises:
        OSError: it cannot be made.
    """

    def __init__(self, prefix: str, root: Path) -> None:
        while True:
            self.path = Path(tempfile.mkdtemp(prefix=prefix, dir=root))
            try:
                self._lock = os.open(self.path, os.O_RDONLY)
            except FileNotFoundError:
                continue  # another process cleaned up before it was locked; take another folder
            fcntl.flock(self._lock, fcntl.LOCK_EX)
            if self.path.exists():
                return
            os.close(self._lock)

    def remove(self) -> None:
        """Delete the folder with all it holds, then let the lock go."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def clean_dead_folders(prefix: str, root: Path) -> list[Path]:
    """Remove the folders `<prefix>*` in `root` whose owners are dead, and return them.

    Files that a living process has open or mapped stay readable to it. Folders of living owners, and of other users,
    are left alone.
    """
    removed: list[Path] = []
    for path in root.glob(f"{prefix}*"):
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
