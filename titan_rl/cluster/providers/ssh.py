"""ssh provider: a worker on each host for the duration of the run. A worker ends with its ssh connection, and is
started again once the host is reachable."""

from __future__ import annotations

import asyncio
import contextlib
import shlex
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from pathlib import Path

from titan_rl.cluster.providers.addresses import addresses_of
from titan_rl.cluster.providers.cluster_commands import tool_output
from titan_rl.cluster.providers.host_worker_commands import kept_workers, tethered
from titan_rl.cluster.providers.spec import ProviderSpec, Submission, worker_command
from titan_rl.config.hosts import ProviderSettings, join_address
from titan_rl.core.errors import ProviderError

DEFAULTS = (
    *("-o", "BatchMode=yes"),  # a prompt would wait forever
    *("-o", "ConnectTimeout=15"),
    *("-o", "ServerAliveInterval=15"),
    *("-o", "ServerAliveCountMax=4"),
)
"""Default options of ssh. ssh uses the first value of each option, so the user's options are placed before them."""

FIX = 'fix DNS or /etc/hosts, or give the address at which its worker listens: hosts.names = ["HOST=10.0.0.2"]'


@contextlib.asynccontextmanager
async def workers(spec: ProviderSpec) -> AsyncGenerator[Iterable[str]]:
    """Context manager: start a worker on each host of `hosts.names` with ssh, as soon as the host can be reached."""
    addresses = await _addresses(spec.settings.named_hosts, spec.settings.options)
    async with kept_workers(commands(spec.settings, addresses), spec.logs, spec.console, spec.wait_s) as kept:
        yield kept


def commands(settings: ProviderSettings, addresses: dict[str, str]) -> list[tuple[str, list[str]]]:
    """Pair each host with the command that starts its worker, given the address of each host."""
    return [
        (host, ["ssh", *settings.options, *DEFAULTS, host, _remote(settings, address)])
        for host, address in addresses.items()
    ]


def render(submission: Submission) -> str:
    """Render the commands that start the workers, one per line. ADDRESS_OF_HOST stands for an address unknown here."""
    settings = submission.settings
    try:
        addresses = asyncio.run(_addresses(settings.named_hosts, settings.options))
    except ProviderError:
        addresses = {
            host: address or _shown_address(host, settings.options) for host, address in settings.named_hosts.items()
        }
    return "".join(f"{shlex.join(words)}\n" for _, words in commands(settings, addresses))


def _remote(settings: ProviderSettings, address: str) -> str:
    """Remote command for any shell. It runs in the folder that is current here, if the host has that folder."""
    words = worker_command(settings, join_address(address, settings.port))
    return shlex.join(tethered(words, str(Path.cwd())))


def _shown_address(host: str, options: Sequence[str]) -> str:
    try:
        return asyncio.run(_addresses({host: ""}, options))[host]
    except ProviderError:
        return f"ADDRESS_OF_{host}"


async def _addresses(hosts: Mapping[str, str], options: Sequence[str]) -> dict[str, str]:
    """Find the addresses at which the workers of these hosts listen; see `ProviderSettings.named_hosts`."""
    names = {host: await _name(host, options) for host in hosts}
    known = {names[host]: address for host, address in hosts.items() if address}
    by_name = await asyncio.to_thread(addresses_of, list(names.values()), known, fix=FIX)
    return {host: by_name[name] for host, name in names.items()}


async def _name(host: str, options: Sequence[str]) -> str:
    """Hostname that ssh connects to, which `~/.ssh/config` may define."""
    known = await tool_output(["ssh", *options, "-G", host])
    for line in known.splitlines():
        key, _, value = line.partition(" ")
        if key == "hostname" and value:
            return value
    raise ProviderError(f"ssh -G {host} prints no hostname; check {host} in ~/.ssh/config, and the ssh in use")
