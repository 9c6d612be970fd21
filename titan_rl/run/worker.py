"""A machine as a host for runs: what `titan-rl worker` does."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import threading
from collections.abc import Callable

from titan_rl.cluster.hosts.folders import (
    FOLDER,
    clean_up_after_dead_runs,
    make_worker_folder,
    say_leaving,
    scratch_root,
)
from titan_rl.cluster.hosts.meeting_point import MeetingPoint
from titan_rl.cluster.liveness.loop_thread import LoopThread
from titan_rl.config.hosts import OPEN, join_address, split_address
from titan_rl.core.calls.loopback import names_this_machine
from titan_rl.run.machine.aftermath import Aftermath

logger = logging.getLogger(__name__)

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
    if not names_this_machine(host):
        tell(f"warning: {address} is open to other machines: {OPEN}")
    terminated = threading.Event()
    before = signal.signal(signal.SIGTERM, lambda *_: terminated.set())
    with contextlib.ExitStack() as given_back:
        given_back.callback(signal.signal, signal.SIGTERM, before)
        given_back.callback(clean_up_after_dead_runs, scratch_root())
        folder = make_worker_folder()
        given_back.callback(folder.remove)
        os.environ[FOLDER] = str(folder.path)
        given_back.callback(os.environ.pop, FOLDER, None)
        point = MeetingPoint(listen_on(host, port), tell)
        aftermath = Aftermath(lambda: clean_up_after_dead_runs(scratch_root()))

        def failed(error: BaseException) -> None:
            logger.error("no run is taken any more", exc_info=error)
            terminated.set()

        with LoopThread("meeting-point", point.serve, failed):
            tell(f"listening on {address}")
            _wait(terminated, aftermath)
            if point.is_in_use:
                tell(f"SIGTERM: runs here have {drain_s:g} s to move what they have; one more ends them at once")
                terminated.clear()
                say_leaving(folder.path, "its worker got SIGTERM")
                _wait(terminated, aftermath, drain_s, lambda: not point.is_in_use)


def listen_on(host: str, port: int) -> socket.socket:
    """
    Raises:
        OSError: this machine has no such address, or the port is taken.
    """
    return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)


def _wait(
    event: threading.Event,
    aftermath: Aftermath,
    limit_s: float = float("inf"),
    until: Callable[[], bool] = lambda: False,
) -> None:
    """By looks, between which signals are heard of."""
    waited_s = 0.0
    while waited_s < limit_s and not event.wait(LOOK_S) and not until():
        waited_s += LOOK_S
        aftermath.look()
