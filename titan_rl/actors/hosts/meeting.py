"""How the controller meets several hosts at once."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Coroutine, Sequence
from itertools import count
from typing import Any, TypeVar

from titan_rl.errors import ActorDiedError

REACH_TIMEOUT_S = 5.0

T = TypeVar("T")


def free_names(hostnames: Sequence[str], taken: Sequence[str]) -> list[str]:
    """A name for each of these hosts: its hostname, with a number behind it where another has that.

    Example: `free_names(["a", "b", "a"], ["b"])` is `["a", "b-2", "a-2"]`.
    """
    names: list[str] = []
    for hostname in hostnames:
        tries = (hostname if number == 1 else f"{hostname}-{number}" for number in count(1))
        names.append(next(name for name in tries if name not in (*taken, *names)))
    return names


def resolve(host: str) -> str:
    """The address of a host; where it has several kinds, its IPv4 one.

    Raises:
        OSError: it has none.
    """
    found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    *_, address = min(found, key=lambda each: each[0] != socket.AF_INET)
    return str(address[0])


async def reach(address: str, port: int) -> None:
    """
    Raises:
        ActorDiedError: nobody listens there. Monarch would wait for long to say so.
    """
    try:
        async with asyncio.timeout(REACH_TIMEOUT_S):
            _, writer = await asyncio.open_connection(address, port)
    except (OSError, TimeoutError) as error:
        raise ActorDiedError(f"it cannot be reached: {getattr(error, 'strerror', None) or 'no answer'}") from None
    writer.close()


async def all_of(coroutines: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Their results. The first that fails cancels the others, and what it raised is raised."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(coroutine) for coroutine in coroutines]
    except BaseExceptionGroup as failed:
        raise failed.exceptions[0] from None
    return [task.result() for task in tasks]
