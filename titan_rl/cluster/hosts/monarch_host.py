"""Monarch process of one run on another machine: `python -m ... tcp://ADDRESS:PORT`.

It prints `READY` once it listens, and ends when its standard input closes, that is with the worker that started it.
Processes that it spawned end with it."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import tempfile
import time
from pathlib import Path

READY = "ready"
SETTLE_S = 0.2
LOOK_S = 0.01


def main(address: str) -> None:
    signal.signal(signal.SIGTERM, lambda *_: None)  # like the run's other processes on the host
    before = os.umask(0o077)  # Monarch starts its log, which only this user may read
    from monarch.actor import start_worker_loop_forever

    from titan_rl.cluster.processes.sockets import bind_below, without_log_notice

    os.umask(before)
    bind_below(Path(tempfile.gettempdir()))
    with without_log_notice():
        serving = start_worker_loop_forever(ca="trust_all_connections", address=address)
        _wait_until_listening(address)
    print(READY, flush=True)
    os.dup2(2, 1)
    os.read(0, 1)  # returns at the end of standard input, because nothing is ever written
    del serving
    os._exit(0)


def _wait_until_listening(address: str) -> None:
    """Wait until Monarch listens. It listens in a thread, and knows its own agent a moment later. A message in between
    cannot be delivered, which ends its sender."""
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    while True:
        with contextlib.suppress(ConnectionError), socket.create_connection((host.strip("[]"), int(port))):
            break
        time.sleep(LOOK_S)
    time.sleep(SETTLE_S)


if __name__ == "__main__":
    main(sys.argv[1])
