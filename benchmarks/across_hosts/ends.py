"""Ends of the transport, each in a process on its own host, controlled by this process.

python -m benchmarks.across_hosts.ends ADDRESS PORT KEY NAME INTERFACE     (how such a process is started)
"""

from __future__ import annotations

import os
import secrets
import signal
import sys
import time
import zlib
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.hosts.namespaces import HostProcess, NamespaceHost, namespaces
from titan_rl.weights.transports.tcp import TCPTransport
from titan_rl.weights.types import Manifest


class End:
    """One end, as seen by this process.

    Attributes:
        process: the process of the end.
    """

    def __init__(self, pipe: Connection, process: HostProcess) -> None:
        self._pipe = pipe
        self.process = process

    def open(self, **settings: Any) -> None:
        """Reset the end."""
        self._ask("open", settings)

    def publish(self, version: int, path: Path) -> Manifest:
        """Publish the bytes of a file, as numbers in bfloat16."""
        return self._ask("publish", version, path)

    def tell_to_pull(self, manifest: Manifest) -> None:
        self._pipe.send(("pull", manifest))

    def wait(self) -> Mapping[str, float]:
        """Wait until the end has pulled, and return the transport's measurements and the `crc` of the bytes."""
        return self._pipe.recv()

    def _ask(self, *message: Any) -> Any:
        self._pipe.send(message)
        return self._pipe.recv()


@contextmanager
def ends_on(hosts: Sequence[NamespaceHost], gateway: str) -> Generator[list[End]]:
    """Start an end on each host.

    Args:
        gateway: address at which the hosts reach this process.
    """
    key = secrets.token_bytes(16)
    with Listener((gateway, 0), authkey=key) as listener:
        address, port = listener.address
        options = str(address), str(port), key.hex()
        processes = [host.run([sys.executable, "-m", __name__, *options, host.name, host.address]) for host in hosts]
        pipes: dict[str, Connection] = {}
        for _ in hosts:
            pipe = listener.accept()
            pipes[pipe.recv()] = pipe
        try:
            yield [End(pipes[host.name], process) for host, process in zip(hosts, processes, strict=True)]
        finally:
            for pipe in pipes.values():
                pipe.close()
            for process in processes:
                process.send(signal.SIGCONT)  # it may be stopped
                process.wait()


@contextmanager
def capped_ends(count: int, mbit: int) -> Generator[list[End]]:
    """Start ends on several hosts, each of which sends and receives at most a given number of megabits per second."""
    with namespaces(count) as hosts, ends_on(hosts.hosts, hosts.gateway) as ends:
        for host in hosts:
            host.cap(mbit)
        yield ends


def seconds_of(manifest: Manifest, readers: Sequence[End]) -> tuple[float, list[Mapping[str, float]]]:
    """Seconds until all ends have a version, and the measurements of each."""
    began = time.perf_counter()
    for reader in readers:
        reader.tell_to_pull(manifest)
    figures = [reader.wait() for reader in readers]
    return time.perf_counter() - began, figures


def serve(pipe: Connection, name: str, interface: str) -> None:
    pipe.send(name)
    transport: TCPTransport | None = None
    try:
        while True:
            match pipe.recv():
                case "open", settings:
                    if transport is not None:
                        transport.close()
                    transport = TCPTransport("benchmark", host=name, interface=interface, **settings)
                    pipe.send(None)
                case "publish", version, path:
                    assert transport is not None
                    numbers = torch.from_numpy(np.fromfile(path, np.int16)).view(torch.bfloat16)
                    pipe.send(transport.publish(version, [("weights", numbers)]))
                case "pull", manifest:
                    assert transport is not None
                    ((_, numbers),) = transport.pull(manifest)
                    crc = zlib.crc32(numbers.view(torch.uint8).numpy().data)
                    pipe.send({**transport.pull_figures(), "crc": crc})
    except EOFError:
        pass
    finally:
        if transport is not None:
            transport.close()


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)
    address, port, key, name, interface = sys.argv[1:]
    serve(Client((address, int(port)), authkey=bytes.fromhex(key)), name, interface)
