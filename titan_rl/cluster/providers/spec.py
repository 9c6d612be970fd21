"""Interface of host providers: their input at the start and the submission of a run, and workers that come and go."""

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
    """Changing list of workers that a provider may give instead of a list of addresses: iteration gives those at the
    start, `current` those that exist now."""

    def __iter__(self) -> Iterator[str]: ...

    async def current(self) -> Collection[str]:
        """The addresses of all workers that are there now. A run asks every few seconds: a host that comes joins it,
        and one that is missing several times in a row is drained.

        Raises:
            Exception: It is not known now. The run goes on with the hosts that it has, and asks again.
        """
        ...


@dataclass(frozen=True, slots=True)
class ProviderSpec:
    """Arguments for starting the workers of a run.

    Args:
        settings: What [hosts] says of it.
        logs: A folder that is there; what a worker says goes into a file of its own there.
        console: Shows lines to the user.
        wait_s: Longest wait for all workers.
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
    """A run that a provider is to begin.

    Args:
        name: Of the run, letters, digits and `-_.+=`.
        config: All settings as TOML, files found.
        tomls: The files as they were given, by name, in their order.
        overrides: Dotted settings and their values, which replace what the files say.
        run_dir: In which the run makes its folder.
        folder: The current one.
        time: Tells it from another of its name.
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
