"""How the controller meets the workers of hosts."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Coroutine, Sequence
from itertools import count
from typing import Any, TypeVar

from titan_rl.cluster.liveness.contact import Contact
from titan_rl.cluster.liveness.lookout import BEAT_S
from titan_rl.cluster.liveness.reports import LONGEST_LINE, receive, send
from titan_rl.cluster.processes.remote_process import RemoteProcess
from titan_rl.config.hosts import split_address
from titan_rl.core.calls.threads import in_thread
from titan_rl.core.errors import ActorDiedError, ConfigError

REACH_TIMEOUT_S = 5.0
MONARCH_TIMEOUT_S = 30.0

T = TypeVar("T")


class Meeting:
    """With a worker, from when it is reached until something else watches its host.

    Attributes:
        worker: HOST:PORT as it was named.
        address: of the host.
        has_begun: the worker has answered.
        id: of the worker, once it has answered; one that is started anew has another.
        link: calls by it fail at once when the worker has ended, or nothing is heard of it for `silence_s`.
    """

    def __init__(
        self,
        run: str,
        worker: str,
        address: str,
        streams: tuple[asyncio.StreamReader, asyncio.StreamWriter],
        silence_s: float,
        name: str,
    ) -> None:
        self.worker = worker
        self.address = address
        self.has_begun = False
        self.id = ""
        self._is_busy = False
        self.link = RemoteProcess(f"host at {worker}", lambda remote: self._ended.set())
        self._ended = asyncio.Event()
        self._reader, self._writer = streams
        send(self._writer, {"run": run, "name": name, "worker": worker})
        self._silence_s = silence_s
        self._contact = Contact(silence_s, 2 * BEAT_S, asyncio.get_running_loop().time())
        self._monarch: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._parts = [asyncio.ensure_future(part) for part in (self._listen(), self._look())]

    async def monarch(self) -> str:
        """Where Monarch listens there for this run alone.

        Raises:
            ActorDiedError: the worker ended, does not say so in time, or has another run all the while.
            ConfigError: the run has this worker already, by another address.
        """
        try:
            return await self.link.until_end(lambda: self._monarch, MONARCH_TIMEOUT_S)
        except ActorDiedError:
            if self._is_busy and self.link.reason is None:
                raise ActorDiedError(
                    f"the worker at {self.worker} has another run, and takes one after the other: end that one first, "
                    "or name other workers"
                ) from None
            if self.has_begun:
                raise
            raise ActorDiedError(
                f"what listens at {self.worker} does not answer as a worker of this titan_rl does; "
                f"see what it is, and start `titan-rl worker --listen {self.worker}` there"
            ) from None

    async def is_lost(self) -> bool:
        """Whether the host is gone, which may take a moment to be known."""
        try:
            async with asyncio.timeout(self._silence_s + REACH_TIMEOUT_S):
                await self._ended.wait()
        except TimeoutError:
            return False
        return True

    def close(self) -> None:
        for part in self._parts:
            part.cancel()
        self._writer.close()

    async def _listen(self) -> None:
        try:
            while True:
                said = await receive(self._reader)
                self._contact.heard()
                self.has_begun = True
                self.id = str(said.get("id", ""))
                self._is_busy = bool(said.get("busy"))
                if (known := said.get("known")) and not self._monarch.done():
                    problem = f"{known} and {self.worker} are one worker, and this run has it; name each worker once"
                    self._monarch.set_exception(ConfigError(problem))
                    self._monarch.exception()  # whoever waits hears of it; nobody need
                if said.get("monarch") and not self._monarch.done():
                    self._monarch.set_result(str(said["monarch"]))
        except ConnectionError:
            self.link.end("its worker has ended")

    async def _look(self) -> None:
        clock = asyncio.get_running_loop().time
        while True:
            await asyncio.sleep(BEAT_S)
            if self._contact.look(clock()):
                break
        self.link.end(f"nothing has been heard of it for {self._silence_s:g} s")


async def meet(run: str, worker: str, silence_s: float, name: str = "") -> Meeting:
    """
    Args:
        run: unlike any other.
        worker: HOST:PORT.
        silence_s: for so long it may be silent.
        name: what people call the run.

    Raises:
        ActorDiedError: nobody listens there.
    """
    address, streams = await _reach(worker)
    return Meeting(run, worker, address, streams, silence_s, name)


async def id_of(worker: str) -> str:
    """Which worker listens at HOST:PORT now; what `Meeting.id` is, of no run.

    Raises:
        ActorDiedError: none does.
    """
    _, (reader, writer) = await _reach(worker)
    try:
        send(writer, {})
        async with asyncio.timeout(REACH_TIMEOUT_S):
            return str((await receive(reader)).get("id", ""))
    except (OSError, TimeoutError):
        raise ActorDiedError(f"what listens at {worker} does not answer as a worker does") from None
    finally:
        writer.close()


async def _reach(worker: str) -> tuple[str, tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """The address of a worker's host, and a connection with the worker.

    Raises:
        ActorDiedError: nobody listens there.
    """
    host, port = split_address(worker)
    try:
        address = await in_thread(resolve, host)
        async with asyncio.timeout(REACH_TIMEOUT_S):
            return address, await asyncio.open_connection(address, port, limit=LONGEST_LINE)
    except (OSError, TimeoutError) as error:
        raise ActorDiedError(
            f"no worker at {worker}: it cannot be reached: {_why(error)}; "
            f"start `titan-rl worker --listen {worker}` there"
        ) from None


def _why(error: OSError) -> str:
    if isinstance(error, socket.gaierror):
        return str(error.strerror)
    return "no answer" if error.errno is None else os.strerror(error.errno)


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


async def all_of(coroutines: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Their results. The first that fails cancels the others, and what it raised is raised."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(coroutine) for coroutine in coroutines]
    except BaseExceptionGroup as failed:
        first = failed.exceptions[0]
        raise first from first.__cause__
    return [task.result() for task in tasks]
