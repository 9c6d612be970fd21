"""What every actor process does first."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from monarch.actor import Actor, concurrent_endpoint, current_rank


class ProcessFiles(Protocol):
    """Where processes find and leave what outlives them."""

    @property
    def run_id(self) -> str:
        """In the names of what they share."""
        ...

    @property
    def logs(self) -> Path:
        """The folder of a log for each process."""
        ...


class ProcessActor(Actor):
    """The one actor of a process, or of each process of a group.

    Args:
        log_path: where the output of the first process goes; others of its group have their rank in the name.
    """

    def __init__(self, log_path: str) -> None:
        self._rank = current_rank().rank
        enter_actor_process(log_of_rank(log_path, self._rank))

    @concurrent_endpoint
    async def pid(self) -> int:
        return os.getpid()


def enter_actor_process(log_path: str | Path) -> None:
    """Detach this process from the terminal: its output goes to a file, and Ctrl-C reaches the controller alone,
    which then stops it in order. The kernel still ends it when the controller dies."""
    os.setpgid(0, 0)
    _point(1, log_path)
    _point(2, log_path)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")


def log_of_rank(log_path: str | Path, rank: int) -> Path:
    """Where a process of a group writes; that of the first has the group's own name."""
    path = Path(log_path)
    return path if rank == 0 else path.with_stem(f"{path.stem}-rank{rank}")


@contextlib.contextmanager
def stderr_into(log_path: str | Path) -> Iterator[None]:
    """Send what native code writes to standard error to a file instead, for the length of the block."""
    saved = os.dup(2)
    _point(2, log_path)
    try:
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)


def _point(descriptor: int, log_path: str | Path) -> None:
    log = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)  # less the umask
    os.dup2(log, descriptor)
    os.close(log)
