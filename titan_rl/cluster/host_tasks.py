"""What goes on beside a run for its hosts: some come, some go, and it is written down which there are."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Any

from titan_rl.cluster.hosts.lifecycle import HostHistory
from titan_rl.cluster.hosts.provided import ProvidedHosts
from titan_rl.cluster.hosts.requests import HostFiles
from titan_rl.cluster.hosts.roster import Roster
from titan_rl.config.hosts import HostsConfig

if TYPE_CHECKING:
    from titan_rl.cluster.elastic_hosts import HostedProcesses


def hosts_watcher(
    config: HostsConfig,
    files: HostFiles,
    processes: HostedProcesses,
    tell: Callable[[str], object],
    history: HostHistory | None = None,
    provided: ProvidedHosts | None = None,
) -> Callable[[], Coroutine[Any, Any, None]]:
    """What goes on until it is cancelled. What becomes of hosts before is known to it.

    Args:
        files: where others ask, and the run answers.
        tell: shows a person a line.
        history: is told how the hosts stand.
        provided: those of a provider whose hosts come and go.
    """
    from titan_rl.cluster.elastic_hosts import ElasticHosts

    elastic = ElasticHosts(processes, tell, provided and provided.all_leave)
    file = Path(config.addresses_file) if config.addresses_file else None
    roster = Roster(elastic, files, config.addresses, file, tell, history, provided)

    async def watch() -> None:
        with contextlib.closing(elastic):
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(roster.watch())
                if provided is not None:
                    tasks.create_task(provided.watch())

    return watch
