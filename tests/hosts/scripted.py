"""Scripted generators on hosts, which need no model, and helpers for controllers that send them requests."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import Any

from background import HANG_S
from hosts.namespaces import NamespaceHost

from titan_rl.config.hosts import HostsConfig
from titan_rl.config.run import RunConfig
from titan_rl.config.sections import GenerationConfig
from titan_rl.config.tasks import TaskSource
from titan_rl.core.console import Console
from titan_rl.generation.engine import Engine, EngineSpec
from titan_rl.generation.scripted_engine import CostModel, ScriptedEngine
from titan_rl.run.directory import RunDirectory
from titan_rl.types import SamplingParams
from titan_rl.weights.shard_files import OwnedFolder, shard_folder

TESTS = Path(__file__).parents[1]
GATE = "TITAN_RL_TEST_GATE"
"""Environment variable of a worker that names the folder of `make_at_gate`."""


def make(spec: EngineSpec) -> Engine:
    """Engine that takes a millisecond per step."""
    return ScriptedEngine(cost=CostModel(step=0.001))


def make_with_memory(spec: EngineSpec) -> Engine:
    """Engine that counts down, and whose process owns some of its host's shared memory."""
    _owned.append(shard_folder(f"of-{spec.generator}"))
    return ScriptedEngine(script=lambda context: context[-1] - 1, cost=CostModel(step=0.001))


_owned: list[OwnedFolder] = []


def make_at_gate(spec: EngineSpec) -> Engine:
    """Engine that makes a file with the name of its host, and starts once there is a file `open`."""
    gate = Path(os.environ[GATE])
    (gate / socket.gethostname()).touch()
    while not (gate / "open").exists():
        time.sleep(0.01)
    return make(spec)


def config(addresses: Sequence[str], **sections: Any) -> RunConfig:
    """Settings of a run with scripted generators on the workers at `addresses`."""
    from run.test_controller import Counting

    given: dict[str, Any] = {
        "generation": GenerationConfig(engine="hosts.scripted:make", num_generators=3),
        "hosts": HostsConfig(addresses=tuple(addresses), generate=len(addresses) or None),
    }
    model = {"path": str(TESTS), "max_context": 256}
    task = TaskSource(task=Counting())  # pyright: ignore[reportArgumentType]
    return RunConfig.model_validate({"model": model, "tasks": [task], **given, **sections})


class Printed(Console):
    """Console that prints to the stdout that a test reads."""

    def message(self, text: str) -> None:
        print(text, flush=True)

    def warning(self, text: str) -> None:
        print(text, flush=True)


@contextlib.asynccontextmanager
async def generators(config: RunConfig, folder: Path) -> AsyncGenerator[tuple[Any, Any]]:
    """Start the generators of a config, and yield their processes and a router."""
    from titan_rl.cluster.run_processes import start_processes
    from titan_rl.run.open_host_workers import use_monarch
    from titan_rl.run.process.environment import run_environment
    from titan_rl.weights.types import PublishedWeights

    with run_environment((str(TESTS), *config.pythonpath)):
        use_monarch(config.hosts, Printed())
        async with start_processes(
            config, RunDirectory(folder), PublishedWeights(), Printed(), trains=False
        ) as processes:
            processes.router = processes.make_router()
            yield processes, processes.router


async def ask(router: Any, count: int, tokens: int = 16) -> list[list[int]]:
    """Send `count` prompts concurrently, and return the tokens of the answers."""
    sampling = SamplingParams(max_tokens=tokens, min_tokens=tokens, temperature=1.0)
    async with asyncio.timeout(HANG_S):
        answers = await asyncio.gather(
            *[router.generate([5, 6, n], request_id=f"r{n}", sampling=sampling) for n in range(count)]
        )
    return [list(answer.token_ids) for answer in answers]


def processes_of(host: NamespaceHost) -> list[str]:
    """Command lines of a host's processes that belong to runs."""
    return [line for line in host.processes() if "bootstrap_main" in line or "monarch_host" in line]


def run_controller(program: str, *arguments: str, timeout_s: float = HANG_S) -> str:
    """Run a program in a new process, as Monarch keeps its first socket, and return its output.

    Args:
        program: Python code that can use all names of this module.
    """
    text = f"from hosts.scripted import *\nimport asyncio, sys, os\n{program}"
    environment = {**os.environ, "PYTHONPATH": f"{TESTS}{os.pathsep}{TESTS.parent}"}
    done = subprocess.run(
        [sys.executable, "-c", text, *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        cwd=TESTS.parent,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
