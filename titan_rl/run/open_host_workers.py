"""Hosts of a command: the workers that a provider starts, and the address on which Monarch listens for them."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import inspect
import logging
from collections.abc import AsyncGenerator, Generator, Iterable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Generic, TypeVar

from titan_rl.cluster.hosts.elastic import ProvidedHosts
from titan_rl.cluster.providers.registry import ProviderKind, find_provider
from titan_rl.cluster.providers.spec import ChangingWorkers, ProviderSpec
from titan_rl.config.hosts import NOT_AN_ADDRESS, OPEN, HostsConfig, join_address, own_address, split_address
from titan_rl.config.run import RunConfig
from titan_rl.config.serve import ServeConfig
from titan_rl.core.calls.parsing import names_this_machine
from titan_rl.core.calls.user_code import reason, where
from titan_rl.core.console import Console, Verbosity
from titan_rl.core.errors import ConfigError, ProviderError, TitanRLError
from titan_rl.run.observability.progress import status
from titan_rl.run.process.environment import process_scratch
from titan_rl.run.process.signals import StopSignals
from titan_rl.run.terminal.standard_streams import StderrConsole

logger = logging.getLogger(__name__)

C = TypeVar("C", RunConfig, ServeConfig)


@dataclass(frozen=True, slots=True)
class StartedWorkers(Generic[C]):
    """Workers of a command.

    Attributes:
        config: Settings with the addresses of the workers instead of a provider.
        provided: Hosts of a provider whose hosts come and go; None if the hosts stay the same.
    """

    config: C
    provided: ProvidedHosts | None = None


@contextlib.asynccontextmanager
async def start_workers(
    config: C, logs: Path, verbosity: Verbosity = Verbosity.NORMAL, signals: StopSignals | None = None
) -> AsyncGenerator[StartedWorkers[C]]:
    """Start the workers of the provider that the settings name, if any. They end with the block.

    Args:
        logs: Folder for the output of workers.
        signals: Signals by which to stop the run once all workers are asked to end, if the provider's workers end with
            their job.

    Raises:
        ConfigError: The provider does not exist, or it gives no valid addresses.
        TitanRLError: The provider failed, or it gives too few workers.
    """
    hosts = config.hosts
    if hosts.provider is None:
        yield StartedWorkers(config)
        return
    kind = find_provider(hosts.provider)
    async with contextlib.AsyncExitStack() as opened:
        with status("starting workers", verbosity):
            started = await _enter_provider(opened, hosts.provider, kind, ProviderSpec(hosts, logs, StderrConsole()))
        addresses = _addresses_of(hosts.provider, started)
        by_address = hosts.model_copy(update={"provider": None, "addresses": addresses})
        if too_few := [*by_address.too_few_of(len(by_address.addresses))]:
            raise ProviderError(f'hosts.provider = "{hosts.provider}": {"; ".join(too_few)}')
        provided = None
        if isinstance(started, ChangingWorkers):
            all_leave = signals.stop if signals is not None and kind.ends_with_workers else None
            provided = ProvidedHosts(by_address.addresses, started.current, all_leave)
        yield StartedWorkers(config.model_copy(update={"hosts": by_address}), provided)


async def _enter_provider(
    opened: contextlib.AsyncExitStack, name: str, kind: ProviderKind, spec: ProviderSpec
) -> Iterable[str]:
    """Start a provider's workers. They end with the stack.

    Raises:
        ConfigError: The provider does not return an async context manager.
        TitanRLError: The provider failed.
    """
    with _of_provider(name):
        workers: Any = kind.workers(spec)
    if not isinstance(workers, contextlib.AbstractAsyncContextManager):
        if inspect.iscoroutine(workers):
            workers.close()
        raise ConfigError(
            f"hosts.provider {name} returns {_a(workers)}, and must return an async context manager of workers: "
            "decorate an `async def` that yields them with contextlib.asynccontextmanager"
        )

    async def end(of: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> bool:
        try:
            return bool(await workers.__aexit__(of, error, trace))
        except Exception as own:
            if own is error:
                return False
            failed = _problem(name, own)
            if error is None:
                raise failed from own
            StderrConsole().warning(str(failed))  # the run's own error is raised
            return False

    with _of_provider(name):
        started = await workers.__aenter__()
    opened.push_async_exit(end)
    return started


@contextlib.contextmanager
def _of_provider(name: str) -> Generator[None]:
    """Convert errors of the block to errors that name the provider, unless they are titan_rl's own."""
    try:
        yield
    except TitanRLError:
        raise
    except Exception as error:
        raise _problem(name, error) from error


def _problem(name: str, error: Exception) -> ProviderError:
    logger.warning("hosts.provider %s failed", name, exc_info=error)
    location = where(error)
    return ProviderError(f"hosts.provider {name}: {reason(error)}" + (f" ({location})" if location else ""))


def _addresses_of(name: str, started: object) -> tuple[str, ...]:
    """Convert what a provider yields to addresses of workers, in the form of `hosts.addresses`.

    Raises:
        ConfigError: A value is not an address of a worker, an address occurs twice, or there is no address.
    """
    if isinstance(started, str) or not isinstance(started, Iterable):
        raise ConfigError(f"hosts.provider {name} yielded {_a(started)}; have it yield a list of addresses, HOST:PORT")
    addresses: list[str] = []
    with _of_provider(name):
        given = list[Any](started)
    for each in given:
        if not isinstance(each, str):
            raise ConfigError(f"hosts.provider {name} yielded {_a(each)}, which {NOT_AN_ADDRESS}")
        try:
            addresses.append(join_address(*split_address(each)))
        except ValueError as error:
            raise ConfigError(f"hosts.provider {name} yielded {error}") from None
    if not addresses:
        raise ConfigError(
            f"hosts.provider {name} yielded no workers; wait in the function until there are some, or "
            "raise an exception"
        )
    if twice := sorted({address for address in addresses if addresses.count(address) > 1}):
        raise ConfigError(f"hosts.provider {name} yielded {', '.join(twice)} more than once; yield each worker once")
    return tuple(addresses)


def _a(value: object) -> str:
    return f"{value!r:.80}" if isinstance(value, str | int | float | None) else f"a {type(value).__name__}"


_announced = set[str]()
"""Addresses that this process has announced, so that an evaluation of several policies announces each only once."""


def use_monarch(hosts: HostsConfig, console: Console) -> None:
    """Make Monarch listen on an address that the run's hosts can reach.

    Monarch writes to the terminal when it is first used, so call this while no live display is shown.

    Raises:
        ConfigError: This machine lacks the address that `hosts` names.
    """
    from titan_rl.cluster.processes.sockets import listen_below, listen_on

    if not hosts.elsewhere:
        listen_below(process_scratch())
        return
    address = own_address(hosts)
    listen_on(address, process_scratch())
    if not names_this_machine(address) and address not in _announced:
        _announced.add(address)
        console.warning(f"this run listens on {address}: {OPEN}")


@contextlib.asynccontextmanager
async def open_workers(
    config: C,
    logs: Path,
    module: str,
    *,
    verbosity: Verbosity = Verbosity.NORMAL,
    signals: StopSignals | None = None,
    console: Console | None = None,
) -> AsyncGenerator[StartedWorkers[C]]:
    """Start a provider's workers, import the module that starts processes on them, and make Monarch listen for them.

    Args:
        module: Module that starts the processes. Its import takes seconds.
        logs, signals: Arguments of `start_workers`.
        console: Console for a warning if Monarch's address is open to other machines. Defaults to standard error.
    """
    async with start_workers(config, logs, verbosity, signals) as workers:
        with status("importing what runs models", verbosity):
            importlib.import_module(module)
        await asyncio.sleep(0)  # a signal that came during the imports stops the command here
        use_monarch(workers.config.hosts, console or StderrConsole())
        yield workers
