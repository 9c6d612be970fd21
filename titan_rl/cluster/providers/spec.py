"""Interface of host providers: input for starting and submitting a run, and workers that come and go."""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, runtime_checkable

from titan_rl.config.hosts import WORKER_DRAIN_S, ProviderSettings
from titan_rl.core.console import LOG, Console


@runtime_checkable
class ChangingWorkers(Protocol):
    """Changing set of workers, which a provider may yield instead of a list of addresses. Iteration gives those at the
    start, `current` those that exist now."""

    def __iter__(self) -> Iterator[str]: ...

    async def current(self) -> Collection[str]:
        """Return the addresses of all current workers. The run asks every few seconds: a new host joins the run, and a
        host that is missing in several successive answers is drained.

        Raises:
            Exception: The workers are unknown at the moment. The run continues with its hosts, and asks again later.
        """
        ...


@dataclass(frozen=True, slots=True)
class ProviderSpec:
    """Input for starting the workers of a run.

    Args:
        settings: Settings of the provider in the table [hosts].
        logs: Existing folder with a file for the output of each worker.
        console: Shows lines to the user.
        wait_s: Longest wait for all workers, in seconds.
    """

    settings: ProviderSettings
    logs: Path
    console: Console = LOG
    wait_s: float = 180.0

    def tell(self, text: str) -> None:
        """Show the user one line."""
        self.console.message(text)


@dataclass(frozen=True, slots=True)
class Submission:
    """Submission of a run to a provider.

    Args:
        name: Name of the run: letters, digits and `-_.+=`.
        config: All settings as TOML, with files resolved.
        tomls: Contents of the given TOML files by name, in their order.
        overrides: Dotted settings and their values, which override the files.
        run_dir: Folder in which the run makes its own folder.
        folder: Current folder.
        time: Time of submission, which distinguishes runs of the same name.
    """

    settings: ProviderSettings
    name: str
    config: str
    tomls: Mapping[str, str]
    overrides: Sequence[tuple[str, str]] = ()
    run_dir: str = "runs"
    folder: Path = field(default_factory=Path.cwd)
    time: str = field(default_factory=lambda: time.strftime("%m%d-%H%M%S"))


def worker_command(settings: ProviderSettings, address: str) -> list[str]:
    """Command that runs a worker; see `command`."""
    drain = settings.worker_drain_s
    options = [] if drain == WORKER_DRAIN_S else ["--drain-s", str(drain)]
    return [*command(settings), "worker", "--listen", address, *options]


def command(settings: ProviderSettings) -> list[str]:
    """Command that runs titan-rl on hosts that have the same files as this one."""
    return shlex.split(settings.command) if settings.command else [sys.executable, "-m", "titan_rl.cli.main"]
