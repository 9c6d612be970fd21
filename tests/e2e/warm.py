"""Worlds of ranks in processes forked from a server that has already imported torch and torchtitan."""

from __future__ import annotations

import multiprocessing
import os
import socket
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

LIMIT_S = 480.0  # a hang fails before the test timeout ends the process

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["titan_rl.training.trainer", "e2e.sharded_steps", "e2e.sharded_publish"])


def run_world(function: Callable[..., Any], num_ranks: int, **arguments: Any) -> list[Any]:
    """Call `function(**arguments)` on each rank of a world, and return the results in the order of the ranks.

    Each rank is a process with torch.distributed's environment variables.

    Raises:
        AssertionError: A rank raised, with its traceback, or took longer than `LIMIT_S`.
    """
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(listener.getsockname()[1])}
    return _run(
        function,
        arguments,
        [
            address | {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(num_ranks)}
            for rank in range(num_ranks)
        ],
    )


def _run(function: Callable[..., Any], arguments: dict[str, Any], environments: list[dict[str, str]]) -> list[Any]:
    ranks: list[tuple[Any, Connection]] = []
    for environment in environments:
        ours, theirs = _context.Pipe(duplex=False)
        process = _context.Process(target=_run_rank, args=(theirs, environment, function, arguments))
        process.start()
        theirs.close()
        ranks.append((process, ours))
    try:
        return [_outcome(rank, connection) for rank, (_, connection) in enumerate(ranks)]
    finally:
        for process, connection in ranks:
            process.kill()
            process.join()
            connection.close()


def _run_rank(
    connection: Connection, environment: dict[str, str], function: Callable[..., Any], arguments: dict[str, Any]
) -> None:
    os.environ.update(environment)
    try:
        connection.send((function(**arguments), None))
    except BaseException:
        connection.send((None, traceback.format_exc()))


def _outcome(rank: int, connection: Connection) -> Any:
    assert connection.poll(LIMIT_S), f"rank {rank} has not answered within {LIMIT_S:g} s"
    try:
        value, failure = connection.recv()
    except EOFError:
        raise AssertionError(f"the process of rank {rank} ended without an answer") from None
    assert failure is None, f"rank {rank}:\n{failure}"
    return value
