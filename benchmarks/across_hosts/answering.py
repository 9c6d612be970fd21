"""A run without a trainer, whose generators on several hosts answer one request after the other, with a log of events.

    python -m benchmarks.across_hosts.answering FOLDER IN_FLIGHT TOKENS table.setting=value ...

It prints events to standard output, one JSON object per line, until standard input ends:

    {"at": 12.5, "what": "sent", "request": "r0", "replica": "generator-1", "process": "generator-1-4"}

`at` is the machine's monotonic clock in seconds, which all its processes share. `what` is one of

- `message`: a message for the user, `text`;
- `serving`: the first event; from now on requests are sent;
- `starts`: a process of this `replica` is about to be started;
- `sent`, `heard`, `answered`, `failed`: a request was sent to a process, its first tokens arrived, all tokens arrived,
  or it failed there and may be sent to another process.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import sys
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any
from unittest.mock import patch

from benchmarks.across_hosts.kept_versions import EXAMPLE
from titan_rl.cluster.actor_replica import ActorReplica
from titan_rl.cluster.generator_processes import GeneratorProcesses
from titan_rl.cluster.hosts.host_files import HostFiles
from titan_rl.cluster.processes.roles import ProcessId
from titan_rl.cluster.run_processes import start_processes
from titan_rl.config.load import dump_config, load_config
from titan_rl.config.run import RunConfig
from titan_rl.core.console import Console
from titan_rl.generation.engine import Engine, EngineSpec
from titan_rl.generation.request import EngineRequest, OnChunk
from titan_rl.generation.router.router import GeneratorRouter
from titan_rl.generation.scripted_engine import CostModel, ScriptedEngine
from titan_rl.run.components import watcher
from titan_rl.run.directory import RunDirectory
from titan_rl.run.open_host_workers import use_monarch
from titan_rl.run.process.environment import run_environment
from titan_rl.run.status import status_kept
from titan_rl.types import Completion, SamplingParams, TokenChunk
from titan_rl.weights.types import PublishedWeights

PROMPT = [5, 6, 7]


def scripted(spec: EngineSpec) -> Engine:
    """Make an engine whose steps take a millisecond."""
    return ScriptedEngine(cost=CostModel(step=0.001))


def log_event(what: str, **figures: str) -> None:
    print(json.dumps({"at": time.monotonic(), "what": what, **figures}), flush=True)


class EventConsole(Console):
    """Console that prints lines as events."""

    def message(self, text: str) -> None:
        log_event("message", text=text)

    def warning(self, text: str) -> None:
        log_event("message", text=text)


async def logged_stream(replica: ActorReplica, request: EngineRequest, on_chunk: OnChunk) -> Completion:
    """Wrapper of `ActorReplica.stream` that logs events."""
    labels = {"request": request.request_id.partition("~")[0], "replica": replica.name, "process": replica.remote.id}
    has_tokens = False

    def on_first_chunk(chunk: TokenChunk) -> None:
        nonlocal has_tokens
        if not has_tokens:
            has_tokens = True
            log_event("heard", **labels)
        on_chunk(chunk)

    log_event("sent", **labels)
    try:
        completion = await _stream(replica, request, on_first_chunk)
    except BaseException:
        log_event("failed", **labels)
        raise
    log_event("answered", **labels)
    return completion


async def logged_spawn(processes: GeneratorProcesses, process: ProcessId, *arguments: Any, **options: Any) -> Any:
    """Spawn a generator and record that it starts; see `GeneratorProcesses.spawn`."""
    log_event("starts", replica=str(process))
    return await _spawn(processes, process, *arguments, **options)


_stream, _spawn = ActorReplica.stream, GeneratorProcesses.spawn


async def ask(router: GeneratorRouter, place: int, in_flight: int, tokens: int) -> None:
    """Send one request after the other."""
    sampling = SamplingParams(max_tokens=tokens, min_tokens=tokens, temperature=1.0)
    for number in count(place, in_flight):
        await router.generate([*PROMPT, place], request_id=f"r{number}", sampling=sampling)


async def answer(config: RunConfig, folder: Path, in_flight: int, tokens: int) -> None:
    """Send requests until standard input ends."""
    generating = start_processes(config, RunDirectory(folder), PublishedWeights(), EventConsole(), trains=False)
    async with contextlib.AsyncExitStack() as opened:
        processes = await opened.enter_async_context(generating)
        router = processes.router = processes.make_router()
        opened.push_async_callback(router.close)
        opened.enter_context(status_kept(folder, begins=True))
        log_event("serving")
        watch = watcher(config, HostFiles(folder), processes)
        async with asyncio.TaskGroup() as tasks:
            background = [tasks.create_task(watch())]
            background += [tasks.create_task(ask(router, place, in_flight, tokens)) for place in range(in_flight)]
            await asyncio.to_thread(sys.stdin.read)
            for task in background:
                task.cancel()


def patched(*changes: tuple[type, str, Callable[..., Any]]) -> contextlib.ExitStack:
    with contextlib.ExitStack() as opened:
        for owner, name, function in changes:
            opened.enter_context(patch.object(owner, name, function))
        return opened.pop_all()


def main() -> None:
    folder, in_flight, tokens, *settings = sys.argv[1:]
    config = load_config(EXAMPLE, [(name, value) for name, _, value in (text.partition("=") for text in settings)])
    (run := Path(folder)).joinpath("config.toml").write_text(dump_config(config))
    with (
        run.joinpath("lock").open("w") as lock,
        run_environment(config.pythonpath),
        patched((ActorReplica, "stream", logged_stream), (GeneratorProcesses, "spawn", logged_spawn)),
    ):
        fcntl.flock(lock, fcntl.LOCK_EX)  # shows other processes that the run is still running
        use_monarch(config.hosts, EventConsole())
        asyncio.run(answer(config, run, int(in_flight), int(tokens)))


if __name__ == "__main__":
    main()
