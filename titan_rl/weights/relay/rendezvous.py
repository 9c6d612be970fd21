"""Which process of a host reads for the others, and how they find it. Standard library only.

It owns a folder of the run by a lock that dies with it, so that another one takes its place at once. What it writes
there says how it is asked; only processes of the same user can read that.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from titan_rl.weights.shard_files.shard_folder import PREFIX, shard_root


@dataclass(frozen=True, slots=True)
class Leader:
    """The process that reads for the others, and what it wants to hear from them."""

    address: str
    token: str


class Rendezvous:
    """Args:
    run_id, root: as of `ShardStore`.
    """

    def __init__(self, run_id: str, root: Path | None = None) -> None:
        self._folder = (root or shard_root()) / f"{PREFIX}{run_id}-reader"
        self._lock: int | None = None

    def lead(self) -> bool:
        """Whether this process is the one from here on.

        Raises:
            OSError: the folder cannot be made.
        """
        self._folder.mkdir(mode=0o700, exist_ok=True)
        try:
            lock = os.open(self._folder, os.O_RDONLY)
        except FileNotFoundError:
            return False  # it is being removed
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(lock), os.stat(self._folder)):
                (self._folder / "leader").unlink(missing_ok=True)  # of the process before
                self._lock = lock
                return True
        except (BlockingIOError, FileNotFoundError):
            pass
        os.close(lock)
        return False

    def announce(self, leader: Leader) -> None:
        """Tell the others how this process is asked."""
        hidden = self._folder / ".leader"
        hidden.write_text(json.dumps({"address": leader.address, "token": leader.token}))
        hidden.rename(self._folder / "leader")

    def leader(self) -> Leader | None:
        """The process that reads for the others, if it has said so."""
        try:
            return Leader(**json.loads((self._folder / "leader").read_text()))
        except (OSError, ValueError, TypeError):
            return None

    def leave(self) -> None:
        """Another one may take the place. Does nothing in a process that has it not."""
        if self._lock is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            os.close(self._lock)
            self._lock = None
