"""The processes of a server: generators alone, whose weights stay."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import AsyncGenerator, Callable
from pathlib import Path

from titan_rl.actors.generator_processes import GeneratorProcesses
from titan_rl.actors.hosts.hosts import Hosts
from titan_rl.actors.hosts.preflight import HostNeeds
from titan_rl.actors.processes.process import ProcessFiles
from titan_rl.actors.supervised import started
from titan_rl.config.functions import named_modules
from titan_rl.config.sections import StateDictConfig
from titan_rl.config.serve import ServeConfig
from titan_rl.weights.published_weights import PublishedWeights

logger = logging.getLogger(__name__)


@contextlib.asynccontextmanager
async def start_generators(
    config: ServeConfig,
    *,
    version: int,
    max_running: int,
    files: ProcessFiles,
    tell: Callable[[str], object] = logger.info,
) -> AsyncGenerator[GeneratorProcesses]:
    """The generators of a server, which end with the block. They keep the weights that they start with.

    Args:
        version: of the policy that is served.
        max_running: most requests one engine advances at a time.
        files: what lies beside `logs` is a run's folder to other hosts.
        tell: shows a person which of them die and are there again.

    Raises:
        ActorDiedError: one did not start in time, or the worker of a host did not answer.
        ConfigError: hosts differ from this machine.
    """

    def make(hosts: Hosts) -> GeneratorProcesses:
        return GeneratorProcesses(
            config.model,
            config.generation,
            config.routing,
            StateDictConfig(),
            seed=config.seed,
            version=version,
            max_running=max_running,
            files=files,
            published=PublishedWeights(),
            hosts=hosts,
            tell=tell,
        )

    needs = HostNeeds(
        files.logs.parent,
        Path(config.model.path),
        tuple(sorted(named_modules(config))),
        generate_gpus=config.generation.tensor_parallel_size,
        trains=False,
    )
    async with started(files, config.hosts.of_generators_alone, needs, tell, make) as processes:
        yield processes
