"""A machine as a host for runs: what `titan-rl worker` does."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

from monarch.actor import start_worker_loop_forever

from titan_rl.actors.hosts.scratch import clean_up_after_dead_runs, scratch_root
from titan_rl.actors.liveness.process_tree import children_of
from titan_rl.actors.liveness.worker_signs import FOLDER, say_leaving
from titan_rl.config.hosts import OPEN, is_loopback, join_address, split_address

LOOK_S = 0.1


def run_worker(listen: str, tell: Callable[[str], object], drain_s: float) -> None:
    """Take runs, one after the other, until a signal. SIGTERM says that this machine is about to go: runs are told, and
    are done with it first.

    Args:
        listen: HOST:PORT of an interface of this machine.
        drain_s: how long runs have for that.

    Raises:
        ValueError: it is no address.
        OSError: this machine has no such address, or the port is taken.
    """
    host, port = split_address(listen)
    address = join_address(host, port)
    clean_up_after_dead_runs(scratch_root())
    if not is_loopback(host):
        tell(f"warning: {address} is open to other machines: {OPEN}")
    terminated = threading.Event()
    before = signal.signal(signal.SIGTERM, lambda *_: terminated.set())
    try:
        with TemporaryDirectory(prefix="titan_rl-worker-") as folder:
            os.environ[FOLDER] = folder
            serving = start_worker_loop_forever(ca="trust_all_connections", address=f"tcp://{address}")
            tell(f"listening on {address}")
            _wait(terminated)
            if children_of(os.getpid()):
                tell(f"SIGTERM: the runs here have {drain_s:g} s to move what they have; one more ends them at once")
                terminated.clear()
                say_leaving(Path(folder), "its worker got SIGTERM")
                _wait(terminated, drain_s, lambda: not children_of(os.getpid()))
            del serving  # it serves as long as somebody has it
    finally:
        os.environ.pop(FOLDER, None)
        signal.signal(signal.SIGTERM, before)


def _wait(event: threading.Event, limit_s: float = float("inf"), until: Callable[[], bool] = lambda: False) -> None:
    """By looks, between which signals are heard of."""
    waited_s = 0.0
    while waited_s < limit_s and not event.wait(LOOK_S) and not until():
        waited_s += LOOK_S
