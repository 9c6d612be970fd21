"""What every actor process does first, and how a call to one fails."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from monarch._rust_bindings.monarch_hyperactor.supervision import SupervisionError
from monarch.actor import ActorError

from titan_rl.errors import ActorDiedError


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
    log = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(log, descriptor)
    os.close(log)


async def call(endpoint: Any, *args: Any, who: str, timeout_s: float | None = None) -> Any:
    """Call an actor's endpoint and raise what the actor raised, rather than Monarch's wrapping of it.

    Raises:
        ActorDiedError: the actor's process is gone, or did not answer within `timeout_s` seconds.
    """

    return await _answered(endpoint.call_one, *args, who=who, timeout_s=timeout_s)


async def call_all(endpoint: Any, *args: Any, who: str, timeout_s: float | None = None) -> None:
    """Call an endpoint of every rank at once, and return when all have answered.

    Raises:
        ActorDiedError: as `call`, of any of them.
    """
    await _answered(endpoint.call, *args, who=who, timeout_s=timeout_s)


async def _answered(send: Any, *args: Any, who: str, timeout_s: float | None) -> Any:
    async def answer() -> Any:
        return await send(*args)

    try:
        return await asyncio.wait_for(answer(), timeout_s)
    except ActorError as error:
        raise error.exception from None
    except SupervisionError as error:
        raise ActorDiedError(f"{who} died: {last_line(str(error))}") from None
    except TimeoutError:
        raise ActorDiedError(f"{who} did not answer within {timeout_s:g} s") from None


def last_line(report: str) -> str:
    """The line of a Monarch failure report that says what happened."""
    return next((line.strip() for line in reversed(report.splitlines()) if line.strip()), "no reason given")
