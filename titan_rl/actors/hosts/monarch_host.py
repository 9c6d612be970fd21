"""Monarch as one run uses it on another machine, in a process of its own: `python -m ... tcp://ADDRESS:PORT`.

It says `READY` once it listens, and ends with its standard input, that is with the worker that started it; what was
spawned by it ends then, too."""

from __future__ import annotations

import os
import signal
import sys

from monarch.actor import start_worker_loop_forever

READY = "ready"


def main(address: str) -> None:
    signal.signal(signal.SIGTERM, lambda *_: None)  # as the run's other processes there
    serving = start_worker_loop_forever(ca="trust_all_connections", address=address)
    print(READY, flush=True)
    os.dup2(2, 1)
    os.read(0, 1)  # nothing is ever written there
    del serving
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1])
