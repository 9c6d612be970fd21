"""A host that is being taken in by a run."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from titan_rl.cluster.hosts.agent import HostAgent, RunOnHost
from titan_rl.cluster.hosts.clocks import ClockDifference, compare_clocks
from titan_rl.cluster.hosts.facts import HostFacts, Question
from titan_rl.cluster.hosts.host import Host
from titan_rl.cluster.hosts.meeting import Meeting, meet
from titan_rl.cluster.hosts.scratch import ENVIRONMENT
from titan_rl.cluster.hosts.sync import chunks_of, code_files, model_files
from titan_rl.cluster.liveness.host_monitor import GREETING_S, RemoteWatcher
from titan_rl.cluster.processes.remote_process import call
from titan_rl.core.calls.threads import in_thread
from titan_rl.core.errors import ActorDiedError

ATTACH_TIMEOUT_S = 30.0
CLOSE_TIMEOUT_S = 10.0


class Arrival:
    """Is looked at, named, prepared and watched, in this order. All the while its worker is to be heard of.

    Attributes:
        key: by which the supervisor knows it.
        worker: HOST:PORT.
        name: "" until it has one.
        facts: what it has, once it was looked at.
        clocks: how they stand to this machine's, once it was looked at.
        host: once it has a name.

    Args:
        silence_s: for so long its worker may be silent.
    """

    facts: HostFacts
    clocks: ClockDifference
    host: Host

    def __init__(self, supervisor: Any, key: str, worker: str, silence_s: float) -> None:
        self.key = key
        self.worker = worker
        self.name = ""
        self._supervisor = supervisor
        self._silence_s = silence_s
        self._meeting: Meeting | None = None
        self._agent: Any = None

    async def look(self, question: Question) -> None:
        """
        Raises:
            ActorDiedError: no worker answers, or what starts there does not come up.
        """
        meeting = self._meeting = await meet(question.token, self.worker, self._silence_s, question.run_dir.name)
        ask = meeting.link.call
        await ask(self._supervisor.attach, self.key, await meeting.monarch(), timeout_s=ATTACH_TIMEOUT_S)
        order = self.key, HostAgent, (), 0, self.key
        self._agent = await ask(self._supervisor.spawn, *order, timeout_s=ATTACH_TIMEOUT_S)
        await ask(self._agent.enter, timeout_s=ATTACH_TIMEOUT_S)
        self.facts = await ask(self._agent.look, question, timeout_s=ATTACH_TIMEOUT_S)
        self.clocks = await compare_clocks(lambda: ask(self._agent.clocks, timeout_s=ATTACH_TIMEOUT_S))

    def become(self, name: str) -> None:
        """From now on it is a host of that name."""
        assert self._meeting is not None
        self.name = name
        address, gpus = self._meeting.address, self.facts.gpus
        self.host = Host(name, address, self._agent, gpus, self.key, worker=self.worker, clocks=self.clocks)
        self.host.worker_id = self._meeting.id
        self.host.link = self._meeting.link

    async def prepare(self, run_dir: Path) -> None:
        """Make the folders of the run.

        Raises:
            ActorDiedError: the host is gone.
        """
        host = self.host
        order = run_dir if self.facts.sees_run else None, _settings_in(run_dir), host.address
        made: RunOnHost = await host.link.call(self._agent.prepare, *order, timeout_s=ATTACH_TIMEOUT_S)
        if made.run_dir != run_dir:
            host.folders = {run_dir: made.run_dir}
        host.environment = _environment(host, made)

    async def bring(self, question: Question, expected: HostFacts, tell: Callable[[str], object]) -> None:
        """Copy the model and the code there, if it lacks any of them.

        Raises:
            ActorDiedError: the host is gone.
        """
        host, facts = self.host, self.facts
        lacking = [] if facts.model == expected.model else [(question.model, model_files(question.model))]
        if facts.missing.keys() - expected.missing.keys():
            folders = [Path(folder) for folder in question.pythonpath]
            lacking += [(folder, await in_thread(code_files, folder)) for folder in folders if folder.is_dir()]
        for number, (folder, files) in enumerate(lacking):
            size = sum(path.stat().st_size for path in files)
            tell(f"copying {folder}, {size / (1 << 20):.1f} MiB, to {host.name}")
            chunks = chunks_of(folder, files)
            while (chunk := await in_thread(next, chunks, None)) is not None:
                there = await host.link.call(self._agent.receive, number, *chunk, timeout_s=ATTACH_TIMEOUT_S)
                host.folders = {**host.folders, folder: there}
        if python_path := os.environ.get("PYTHONPATH"):
            host.environment = {**host.environment, "PYTHONPATH": host.search_path(python_path)}

    async def watch(self, watcher: RemoteWatcher) -> None:
        """From now on the lookout there is heard of, and no more its worker.

        Raises:
            ActorDiedError: the host is gone.
        """
        host = self.host
        host.watcher = watcher
        begin = self._agent.begin_watch
        host.pulse = await host.link.call(begin, watcher.settings, timeout_s=ATTACH_TIMEOUT_S)
        await host.link.until_end(watcher.heard.wait, GREETING_S)
        self._end_meeting()

    @property
    def was_there(self) -> bool:
        """Its worker has answered."""
        return self._meeting is not None and self._meeting.has_begun

    async def is_lost(self) -> bool:
        """Whether it was there and is gone, which may take a moment to be known."""
        return self._meeting is not None and self.was_there and await self._meeting.is_lost()

    @property
    def lost(self) -> str:
        """Why it is known to be gone; "" while it is not."""
        return (self._meeting and self._meeting.link.reason) or ""

    async def give_back(self) -> None:
        """It is not taken in: end what the run has there, if it can be reached."""
        limits: dict[str, Any] = {"who": f"host at {self.worker}", "timeout_s": CLOSE_TIMEOUT_S}
        try:
            with contextlib.suppress(ActorDiedError):
                if self.lost:
                    await call(self._supervisor.detach, self.key, **limits)
                elif self._agent is not None:
                    await call(self._agent.clean_up, **limits)
                    await call(self._supervisor.terminate, (self.key,), **limits)
        finally:
            self._end_meeting()

    def _end_meeting(self) -> None:
        if self._meeting is not None:
            self._meeting.close()


def _environment(host: Host, made: RunOnHost) -> dict[str, str]:
    variables = {name: os.environ.get(name, value) for name, value in ENVIRONMENT.items()}
    if python_path := os.environ.get("PYTHONPATH"):
        variables["PYTHONPATH"] = host.search_path(python_path)
    if made.interface is not None:  # else Gloo takes the address of the hostname, which may be loopback
        variables |= {"GLOO_SOCKET_IFNAME": made.interface, "NCCL_SOCKET_IFNAME": made.interface}
    return {**variables, "TMPDIR": str(made.scratch)}


def _settings_in(run_dir: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in run_dir.glob("*.toml")}
