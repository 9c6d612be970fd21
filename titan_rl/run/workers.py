"""The workers of a run, whoever starts them: behind this, hosts are addresses."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator
from pathlib import Path

from titan_rl.config.run import RunConfig
from titan_rl.providers.registry import find_provider
from titan_rl.providers.spec import ProviderSpec
from titan_rl.run.machine.stop_signals import tell_on_stderr
from titan_rl.run.observability.progress import Verbosity, status


@contextlib.asynccontextmanager
async def workers_started(
    config: RunConfig, logs: Path, verbosity: Verbosity = Verbosity.NORMAL
) -> AsyncGenerator[RunConfig]:
    """The same settings with the addresses of the workers that a provider has started, in its place. They end behind
    the block.

    Args:
        logs: a folder for what workers say.

    Raises:
        TitanRLError: the provider has none.
    """
    hosts = config.hosts
    if hosts.provider is None:
        yield config
        return
    workers = find_provider(hosts.provider).workers(ProviderSpec(hosts, logs, tell_on_stderr))
    async with contextlib.AsyncExitStack() as opened:
        with status("starting workers", verbosity):
            addresses = await opened.enter_async_context(workers)
        by_address = hosts.model_copy(update={"provider": None, "addresses": tuple(addresses)})
        yield config.model_copy(update={"hosts": by_address})
