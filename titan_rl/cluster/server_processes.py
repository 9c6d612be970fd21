"""The processes of a server: generators alone, and the transport by which they get other weights."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import AsyncGenerator, Callable, Generator
from pathlib import Path

from titan_rl.cluster.generator_processes import GeneratorProcesses
from titan_rl.cluster.hosts.hosts import Hosts
from titan_rl.cluster.hosts.preflight import HostNeeds
from titan_rl.cluster.processes.process import LOOPBACK, ProcessFiles, ProcessSpec
from titan_rl.cluster.supervised import started
from titan_rl.cluster.weight_transport import transport_of
from titan_rl.config.functions import named_modules
from titan_rl.config.hosts import HostsConfig, own_address
from titan_rl.config.sections import StateDictConfig
from titan_rl.config.serve import ServeConfig
from titan_rl.weights.published_weights import PublishedWeights
from titan_rl.weights.types import StateDictTransport

logger = logging.getLogger(__name__)

STATEDICT = StateDictConfig()
"""How weights travel to the generators of a server: it has no settings for that."""


@contextlib.asynccontextmanager
async def start_generators(
    config: ServeConfig,
    *,
    version: int,
    max_running: int,
    files: ProcessFiles,
    tell: Callable[[str], object] = logger.info,
    published: PublishedWeights | None = None,
) -> AsyncGenerator[GeneratorProcesses]:
    """The generators of a server, which end with the block.

    Args:
        version: of the policy that is served.
        max_running: most requests one engine advances at a time.
        files: what lies beside `logs` is a run's folder to other hosts.
        tell: shows a person which of them die and are there again.
        published: where they find the manifests of what `open_transport` publishes; by default they keep the weights
            that they start with.

    Raises:
        ActorDiedError: one did not start in time, or the worker of a host did not answer.
        ConfigError: hosts differ from this machine.
    """

    def make(hosts: Hosts) -> GeneratorProcesses:
        return GeneratorProcesses(
            config.model,
            config.generation,
            config.routing,
            STATEDICT,
            seed=config.seed,
            version=version,
            max_running=max_running,
            files=files,
            published=published or PublishedWeights(),
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


@contextlib.contextmanager
def open_transport(config: HostsConfig, run_id: str) -> Generator[StateDictTransport]:
    """The end of a server's transport that publishes, which is closed behind the block.

    Args:
        run_id: as of the files with which the generators are started.
    """
    address = own_address(config) if config.elsewhere else LOOPBACK
    # No host has such a name: what is on this one may not share its memory.
    process = ProcessSpec("server", "titan-rl serve", address, Path())
    transport = transport_of(process, run_id, STATEDICT)
    try:
        yield transport
    finally:
        transport.close()
