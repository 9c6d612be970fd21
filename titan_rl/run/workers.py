"""The workers of a run, whoever starts them: behind this, hosts are addresses."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from titan_rl.config.run import RunConfig
from titan_rl.config.serve import ServeConfig
from titan_rl.errors import ProviderError
from titan_rl.providers.changing import ChangingWorkers
from titan_rl.providers.registry import find_provider
from titan_rl.providers.spec import ProviderSpec
from titan_rl.run.hosts.provided import ProvidedHosts
from titan_rl.run.machine.stop_signals import tell_on_stderr
from titan_rl.run.observability.progress import Verbosity, status

C = TypeVar("C", RunConfig, ServeConfig)


@dataclass(frozen=True, slots=True)
class StartedWorkers(Generic[C]):
    """
    Attributes:
        config: the settings of the run, with addresses in the place of a provider.
        provided: those that the provider has from now on; None where they stay the same.
    """

    config: C
    provided: ProvidedHosts | None = None


@contextlib.asynccontextmanager
async def workers_started(
    config: C, logs: Path, verbosity: Verbosity = Verbosity.NORMAL, stop: Callable[[], object] | None = None
) -> AsyncGenerator[StartedWorkers[C]]:
    """The workers that a provider has started. They end behind the block.

    Args:
        logs: a folder for what workers say.
        stop: called where all workers are told to end, and the provider is one with which that means the run.

    Raises:
        TitanRLError: the provider has none.
    """
    hosts = config.hosts
    if hosts.provider is None:
        yield StartedWorkers(config)
        return
    kind = find_provider(hosts.provider)
    workers = kind.workers(ProviderSpec(hosts, logs, tell_on_stderr))
    async with contextlib.AsyncExitStack() as opened:
        with status("starting workers", verbosity):
            started = await opened.enter_async_context(workers)
        by_address = hosts.model_copy(update={"provider": None, "addresses": tuple(started)})
        if too_few := [*by_address.too_few_of(len(by_address.addresses))]:
            raise ProviderError(f'hosts.provider = "{hosts.provider}": {"; ".join(too_few)}')
        provided = None
        if isinstance(started, ChangingWorkers):
            all_leave = stop if kind.ends_with_workers else None
            provided = ProvidedHosts(by_address.addresses, started.current, all_leave)
        yield StartedWorkers(config.model_copy(update={"hosts": by_address}), provided)
