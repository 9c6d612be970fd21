"""A host as the controller sees it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from titan_rl.cluster.hosts.clocks import ClockDifference
from titan_rl.cluster.liveness.watcher import KernelWatcher, Watcher
from titan_rl.cluster.processes.remote_process import RemoteProcess


@dataclass(slots=True)
class Host:
    """
    Attributes:
        name: its hostname, unique in the run.
        address: by which the other hosts of the run reach it.
        agent: the handle of its `HostAgent`.
        gpus: by what CUDA_VISIBLE_DEVICES calls them.
        key: by which the `Supervisor` knows it; None is this machine.
        folders: folders of this machine, and what stands for each on the host where that is not the same.
        environment: variables of its processes, beside those of its worker.
        watcher: who tells of its processes.
        worker: HOST:PORT where its worker listens.
        worker_id: which worker that is: one that is started anew has another.
        pulse: the socket there where they answer pings; None where nobody asks.
        clocks: how they stood to this machine's as it was looked at; None where they are this machine's.
        link: calls by it fail at once when the host is lost.
    """

    name: str
    address: str
    agent: Any
    gpus: tuple[str, ...] = ()
    key: str | None = None
    folders: Mapping[Path, Path] = field(default_factory=dict[Path, Path])
    environment: Mapping[str, str] = field(default_factory=dict[str, str])
    watcher: Watcher = field(default_factory=KernelWatcher)
    worker: str = ""
    worker_id: str = ""
    pulse: Path | None = None
    clocks: ClockDifference | None = None
    link: RemoteProcess = field(init=False)

    def __post_init__(self) -> None:
        self.link = RemoteProcess(f"host {self.name}")

    @property
    def is_here(self) -> bool:
        """It is this machine, whose processes this one starts itself."""
        return self.key is None

    def path(self, path: str | Path) -> Path:
        """Where a file of this machine is found there."""
        path = Path(path)
        for here, there in self.folders.items():
            if path.is_relative_to(here):
                return there / path.relative_to(here)
        return path

    def search_path(self, folders: str) -> str:
        """As `path`, of each of the folders of a PYTHONPATH."""
        return os.pathsep.join(str(self.path(folder)) for folder in folders.split(os.pathsep))
