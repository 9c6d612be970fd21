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
from titan_rl.config.hosts import HostsConfig
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
        tell: shows a person which of them die and are there again.

    Raises:
        ActorDiedError: one did not start in time.
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

    needs = HostNeeds(files.logs, Path(config.model.path))
    async with started(files, HostsConfig(), needs, tell, make) as processes:
        yield processes
