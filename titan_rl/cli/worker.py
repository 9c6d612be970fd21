"""`titan-rl worker [--listen HOST:PORT]`."""

from __future__ import annotations

import argparse
import importlib.util
import math
import socket

from titan_rl.cli import EXIT_INTERRUPTED, EXIT_TERMINATED
from titan_rl.cli.options import Parser
from titan_rl.config.hosts import ONE_ADDRESS, WORKER_DRAIN_S, WORKER_PORT, join_address, split_address
from titan_rl.core.errors import ConfigError, MissingExtraError
from titan_rl.run.terminal.standard_streams import StderrConsole, print_stderr


def set_up(parser: Parser) -> None:
    parser.add_argument(
        "--listen",
        metavar="HOST:PORT",
        default=f"127.0.0.1:{WORKER_PORT}",
        help="address at which other machines reach this one; anyone who can reach it can run programs here "
        f"(default: 127.0.0.1:{WORKER_PORT}, which no other machine can reach)",
    )
    parser.add_argument(
        "--drain-s",
        type=_seconds,
        default=float(WORKER_DRAIN_S),
        help="seconds that runs have after SIGTERM to finish or move their work here, such as when the machine is "
        f"about to be reclaimed (default: {WORKER_DRAIN_S})",
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    address = _free(arguments.listen)
    if importlib.util.find_spec("monarch") is None:
        raise MissingExtraError("monarch", "cpu")
    from titan_rl.run.host_worker import run_worker

    try:
        run_worker(address, StderrConsole(), arguments.drain_s)
    except KeyboardInterrupt:
        print_stderr("titan-rl: stopped at once, with the work of runs on this host; SIGTERM lets them move it first")
        return EXIT_INTERRUPTED
    return EXIT_TERMINATED


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0 <= seconds < math.inf:  # rejects nan, too
        raise argparse.ArgumentTypeError(f"{text} must be a number of seconds, 0 or more")
    return seconds


_seconds.__name__ = "number of seconds"  # argparse uses it in the error for text that is not a number


def _free(listen: str) -> str:
    """Return the address to listen on, with a free port in place of port 0.

    Raises:
        ConfigError: This machine does not have the address, or the port is taken. Monarch's own errors would not help a
            user.
    """
    try:
        host, port = split_address(listen, least_port=0)
        with socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
            port = probe.getsockname()[1]
    except ValueError as error:
        raise ConfigError(f"--listen {error}") from None
    except OSError as error:
        problem = str(error.strerror).partition(" (while")[0]  # create_server repeats the address
        raise ConfigError(f"--listen {listen}: {problem}; name a free port of an address of this machine") from None
    if _is_broadcast(host, port):
        raise ConfigError(f"--listen {listen} stands for several machines; {ONE_ADDRESS}")
    return join_address(host, port)


def _is_broadcast(host: str, port: int) -> bool:
    """Whether an address is the broadcast address of a network of this machine. Nothing is sent."""
    if ":" in host:  # IPv6 has no broadcast addresses
        return False
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, port))
        except PermissionError:
            return True
        except OSError:
            return False
    return False
