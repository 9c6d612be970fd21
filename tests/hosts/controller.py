"""Controller of scripted generators on real hosts, in its own process, which obeys commands of a test."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from background import HANG_S
from hosts.namespaces import PROJECT, Namespaces
from hosts.scripted import TESTS

PROGRAM = """
import asyncio, fcntl, json, sys
from pathlib import Path
from hosts.scripted import *
from titan_rl.config.hosts import HostsConfig
from titan_rl.core.errors import TitanRLError
from titan_rl.cluster.hosts.host_files import HostFiles
from titan_rl.run.components import watcher
from titan_rl.run.status import status_kept

def say(text):
    print(text, flush=True)

async def main():
    folder, sections, addresses = Path(sys.argv[1]), json.loads(sys.argv[2]), sys.argv[3:]
    usual = {"addresses": addresses, "generate": 3, "drain_s": 20, "hang_timeout_s": 8}
    hosts = HostsConfig(**{**usual, **sections.pop("hosts", {})})
    settings = config(addresses, hosts=hosts, **sections)
    (folder / "config.toml").write_text("")
    lock = (folder / "lock").open("w")
    fcntl.flock(lock, fcntl.LOCK_EX)
    async with generators(settings, folder) as (processes, router):
        status = status_kept(folder, begins=True)
        status.__enter__()
        watching = asyncio.ensure_future(watcher(settings, HostFiles(folder), processes)())
        say("ready")
        asking = None
        while words := (await asyncio.to_thread(sys.stdin.readline)).split():
            match words:
                case ["ask", count, tokens]:
                    asking = asyncio.ensure_future(ask(router, int(count), int(tokens)))
                    while sum(len(so_far.token_ids) for so_far in router.tokens_so_far().values()) < int(count):
                        await asyncio.sleep(0.01)
                    say("asked")
                case ["answers"]:
                    say("answers " + json.dumps(await asking))
                case ["pids"]:
                    remotes = {replica.name: replica.remote.pids for replica in processes.opened}
                    say("pids " + json.dumps({name: list(remotes[name]) for name in sorted(remotes)}))
                case ["serving"]:
                    say("serving " + " ".join(sorted(replica.name for replica in router.replicas if replica.serving)))
        watching.cancel()
try:
    asyncio.run(main())
except* TitanRLError as failed:
    while isinstance(failed, ExceptionGroup):
        failed = failed.exceptions[0]
    say(f"failed: {failed}")
"""


class Run:
    """Controller process that reads commands and prints events, one a line.

    Args:
        namespaces: Hosts of its generators.
        sections: Settings in addition to the usual ones.
    """

    def __init__(self, folder: Path, namespaces: Namespaces, **sections: Any) -> None:
        folder.mkdir(exist_ok=True)
        self.folder = folder
        self.lines: list[str] = []
        self._said = queue.SimpleQueue[str]()
        addresses = [host.worker_address for host in namespaces]
        self.process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(folder), json.dumps(sections), *addresses],
            env={**os.environ, "PYTHONPATH": f"{TESTS}{os.pathsep}{PROJECT}"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=PROJECT,
        )
        threading.Thread(target=self._read, daemon=True).start()

    def send(self, text: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{text}\n")
        self.process.stdin.flush()

    def wait_for(self, *texts: str) -> str:
        """Wait for a line that contains all of `texts`, and return it."""
        deadline = time.monotonic() + HANG_S
        while (left_s := deadline - time.monotonic()) > 0 and (line := self._next(left_s)):
            self.lines.append(line.strip())
            if all(text in line for text in texts):
                return line.strip()
        raise AssertionError(f"the controller did not print {texts}:\n" + "\n".join(self.lines))

    def wait_for_all(self, *texts: str) -> None:
        """Wait until each of `texts` was in a line, in any order."""
        wanted = {*texts}
        while wanted:
            line = self.wait_for("")
            wanted = {text for text in wanted if text not in line}
            assert line, f"the controller did not print {wanted}"

    def _next(self, limit_s: float) -> str:
        with contextlib.suppress(queue.Empty):
            return self._said.get(timeout=limit_s)
        return ""

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._said.put(line)
        self._said.put("")

    def end(self, limit_s: float) -> int:
        """End the controller, and return its exit status."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        return self.process.wait(limit_s)

    def ask(self, text: str) -> str:
        """Send a command, and return the answer."""
        self.send(text)
        return self.wait_for(f"{text} ").removeprefix(f"{text} ")
